# SPDX-License-Identifier: Apache-2.0
"""Turns and tools of rows: what is kept of them, and what is refused."""

import pytest

from dspark_hf.common.conversations import check_prompt, read_messages, read_tools
from tests.support.chat import CALL, TOOL, assistant, tool_result, user


def test_turns_keep_what_templates_read():
    turns = [
        user() | {"id": 7, "name": "Ann", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "so", "loss": 0.5},
        tool_result() | {"tool_call_id": "1", "name": "weather"},
        assistant(reasoning_content="", tool_calls=[]),
    ]
    assert read_messages(turns) == [
        user() | {"name": "Ann"},
        {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "so"},
        tool_result() | {"tool_call_id": "1", "name": "weather"},
        assistant(),
    ]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_one_name(name):
    assert read_messages([user(), assistant(**{name: "so"})])[1] == assistant(reasoning_content="so")


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (None, "`messages` must be a list of at least one turn, got 'null'"),
        ("text", "`messages` must be a list"),
        ([], "`messages` must be a list of at least one turn"),
        ({"role": "user", "content": "a"}, "`messages` must be a list"),
        (["text"], "Turn 1 must be an object with a `role`, got 'text'"),
        ([user(), None], "Turn 2 must be an object"),
        ([{"content": "a"}], "Turn 1 must be an object with a `role`"),
        ([{"role": 7, "content": "a"}], "Turn 1 must be an object with a `role`"),
        ([{"role": "user"}], "`content` of turn 1 must be a text, got null"),
        ([user(), {"role": "assistant", "content": None}], "`content` of turn 2 must be a text, got null"),
        ([{"role": "user", "content": [{"type": "image"}]}], "`content` of turn 1 must be a text, got a list"),
        ([{"role": "user", "content": 3}], "`content` of turn 1 must be a text, got a number"),
        ([user(" \n")], "`content` of turn 1 must not be blank"),
        ([user("") | {"name": "Ann"}], "`content` of turn 1 must not be blank"),
        ([user(), assistant("")], "`content` of turn 2 must not be blank"),
        ([user(), assistant(reasoning=["so"])], "`reasoning_content` of turn 2 must be a text, got a list"),
        ([user(), assistant(tool_calls="f")], "`tool_calls` of turn 2 must be a list of JSON objects"),
        ([user(), assistant(tool_calls=["f"])], "`tool_calls` of turn 2 must be a list of JSON objects"),
    ],
    ids=str,
)
def test_what_is_no_conversation(messages, reason):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is looked at
        read_messages(messages)
    assert str(caught.value).startswith(reason)


def test_result_of_a_tool_and_a_system_turn_may_be_empty():
    turns = [{"role": "system", "content": ""}, user(), tool_result("")]
    assert read_messages(turns) == turns


@pytest.mark.parametrize(
    "turns",
    [[user()], [user(), assistant(), user()], [user(), assistant("", tool_calls=[CALL]), tool_result()]],
    ids=str,
)
def test_prompts(turns):
    check_prompt(turns)


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([], "must have one of the user, got none"),
        ([{"role": "system", "content": "a"}], "must have one of the user, got none"),
        ([assistant()], "must have one of the user"),
        ([{"role": "human", "content": "a"}], "must have one of the user"),
        ([user(), {"role": "system", "content": "a"}], "got the role 'system'"),
        ([user(), assistant()], "must be the user's or the result of a tool, got the role 'assistant'"),
    ],
    ids=str,
)
def test_what_is_no_prompt(turns, reason):
    with pytest.raises(ValueError, match=reason):
        check_prompt(turns)


def test_tools():
    assert read_tools(None) == read_tools([]) == ()
    assert read_tools([TOOL]) == (TOOL,)
    for tools in ("f", ["f"], TOOL, 7):
        with pytest.raises(ValueError, match="`tools` must be a list of JSON objects, got"):
            read_tools(tools)
