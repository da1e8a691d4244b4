# SPDX-License-Identifier: Apache-2.0
"""Answers of a server: what it is asked, what it says, and when a run ends."""

import threading
import time

import pytest

from dspark_hf.training import answer_server
from dspark_hf.training.answers import PrepareSettings, PromptRow, write_answers_from_server
from dspark_hf.training.dataset import encode_row
from dspark_hf.training.sampling import SamplingSettings
from tests.support.chat import CALL, THINKING, TOOL, TOOLS, assistant, byte_tokenizer, tool_result, user
from tests.support.commands import read
from tests.support.scripted import captured_log
from tests.support.server import good, serving
from tests.support.training import words


SETTINGS = PrepareSettings("tiny", SamplingSettings(max_new_tokens=6, temperature=0))


def prompt(*ids) -> PromptRow:
    return PromptRow(({"role": "user", "content": words(*ids)},), "test")


PROMPTS = [prompt(*range(10 + i, 12 + 2 * i)) for i in range(7)]


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def pauses(monkeypatch):
    """Pauses between tries, not waited for."""
    waited, right = [], time.sleep

    def sleep(seconds):
        if seconds >= 1:
            waited.append(seconds)
        else:
            right(seconds)

    monkeypatch.setattr(answer_server.time, "sleep", sleep)
    return waited


def ask(server, path, prompts=PROMPTS, settings=SETTINGS, **kwargs):
    return write_answers_from_server(server.url, "served", prompts, path, settings, **kwargs)


def test_answers_of_a_server(tmp_path):
    path, seen = tmp_path / "answers.jsonl", []
    with serving(good) as server:
        assert ask(server, path, concurrency=2, on_row=seen.append) == 7
    rows = read(path)
    assert rows == seen
    assert [row["key"] for row in rows] == [asked.key for asked in PROMPTS]
    for row, asked in zip(rows, PROMPTS, strict=True):
        question = asked.messages[0]
        answer = {"role": "assistant", "content": f"answer to {question['content']}"}
        assert row["messages"] == [question, answer]
        assert row["finish_reason"] == "stop"
        assert "answer_ids" not in row


def test_a_server_is_asked_once_and_told_of_the_rest(tmp_path):
    """Two of four prompts have an answer already, one comes twice."""
    path, skipped = tmp_path / "answers.jsonl", []
    with serving(good) as server:
        assert ask(server, path, PROMPTS[:2]) == 2
        again = [*PROMPTS[:4], PROMPTS[3]]
        assert ask(server, path, again, concurrency=2, on_skip=lambda: skipped.append(1)) == 2
    assert len(server.seen) == 4
    assert [row["key"] for row in read(path)] == [asked.key for asked in PROMPTS[:4]]
    assert len(skipped) == 3


def test_what_a_server_is_asked(tmp_path):
    sampling = SamplingSettings(33, 0.7, 20, 0.8, seed=5)
    with serving(good) as server:
        ask(server, tmp_path / "a.jsonl", PROMPTS[:1], PrepareSettings("x", sampling), api_key="secret")
        ask(server, tmp_path / "b.jsonl", PROMPTS[:1], PrepareSettings("x", sampling, enable_thinking=False))
    (path, body), (_, second) = server.seen
    assert path == "/v1/chat/completions"
    assert body == {
        "model": "served",
        "messages": list(PROMPTS[0].messages),
        "max_tokens": 33,
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 20,
        "seed": 5,
    }
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert "Authorization" not in server.headers[1]
    assert second["chat_template_kwargs"] == {"enable_thinking": False}


def test_cut_and_empty_answers(tmp_path):
    path = tmp_path / "answers.jsonl"
    replies = [("cut", "length"), (None, None)]

    def reply(number, body):
        text, reason = replies[number - 1]
        return 200, {"choices": [{"message": {"content": text}, "finish_reason": reason}]}

    with serving(reply) as server:
        ask(server, path, PROMPTS[:2], concurrency=1)
    assert [(row["messages"][-1]["content"], row["finish_reason"]) for row in read(path)] == [
        ("cut", "length"),
        ("", "stop"),
    ]


@pytest.mark.parametrize(
    "failure",
    [(500, "busy"), (503, ""), (429, "slow down"), (200, "no JSON"), (200, {"error": 1}), (200, {"choices": []})],
    ids=str,
)
def test_failures_that_pass_are_tried_again(tmp_path, pauses, failure):
    path = tmp_path / "answers.jsonl"
    with serving(lambda number, body: failure if number <= 3 else good(number, body)) as server:
        assert ask(server, path, PROMPTS[:1]) == 1
    assert len(server.seen) == 4
    assert pauses == [1, 2, 4]


@pytest.mark.parametrize(
    ("status", "remedy"), [(401, "with `--api-key`"), (403, "with `--api-key`"), (404, "Check `--server`")]
)
def test_failures_that_stay_end_the_run_with_the_servers_words(tmp_path, pauses, status, remedy):
    """Some rows are answered before; they are kept."""
    path = tmp_path / "answers.jsonl"
    said = status, {"error": {"message": "no such thing"}}
    with (
        serving(lambda number, body: said if number > 2 else good(number, body)) as server,
        pytest.raises(RuntimeError, match=rf"said {status} \(no such thing\)\. .*{remedy}.+Rows so far are kept"),
    ):
        ask(server, path, concurrency=1)
    assert len(server.seen) < len(PROMPTS)
    assert pauses == []
    assert len(read(path)) == 2
    assert not (tmp_path / "answers.refused.jsonl").exists()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"error": {"message": "too long", "type": "bad"}}, "too long"),
        ({"object": "error", "message": "too  long\n"}, "too long"),
        ({"error": "too long"}, "too long"),
        ({"detail": "too long"}, "too long"),
        ({"detail": [{"loc": ["body"], "msg": "too long"}]}, "too long"),
        ({"code": 7}, '{"code": 7}'),
        ("too long", "too long"),
        ("", "Bad Request"),
        ("x" * 1000, "x" * 397 + "..."),
    ],
    ids=str,
)
def test_words_of_a_server(tmp_path, content, sentence):
    path = tmp_path / "answers.jsonl"
    with serving(lambda number, body: (400, content) if number == 2 else good(number, body)) as server:
        assert ask(server, path, PROMPTS[:3], concurrency=1) == 2
    (refused,) = read(tmp_path / "answers.refused.jsonl")
    assert refused == {
        "key": PROMPTS[1].key,
        "messages": list(PROMPTS[1].messages),
        "source": "test",
        "status": 400,
        "reason": sentence,
    }


def test_server_that_is_down(tmp_path, pauses):
    with serving(good) as server:
        pass
    with pytest.raises(RuntimeError, match=r"did not answer after 3 tries .+Run the same command again once it is up"):
        ask(server, tmp_path / "answers.jsonl", PROMPTS[:1], retries=2)
    assert pauses == [1, 2]


def test_pauses_stop_growing(tmp_path, pauses):
    with serving(lambda *_: (500, "")) as server, pytest.raises(RuntimeError, match="after 8 tries"):
        ask(server, tmp_path / "answers.jsonl", PROMPTS[:1], retries=7)
    assert pauses == [1, 2, 4, 8, 16, 30, 30]


@pytest.mark.parametrize("concurrency", [1, 3])
def test_no_more_requests_in_flight_than_asked_for(tmp_path, concurrency):
    together = threading.Barrier(concurrency)

    def reply(number, body):
        if number <= concurrency:
            together.wait(timeout=20)  # as many as asked for are here at once
        time.sleep(0.02)
        return good(number, body)

    with serving(reply) as server:
        ask(server, tmp_path / "answers.jsonl", concurrency=concurrency)
    assert server.most_in_flight == concurrency


def test_server_that_fails_half_way_is_gone_on_with(tmp_path, pauses):
    path = tmp_path / "answers.jsonl"

    def reply(number, body):
        return (500, "out of memory") if body["messages"] == list(PROMPTS[4].messages) else good(number, body)

    with serving(reply) as server, pytest.raises(RuntimeError, match=r"after 3 tries \(500: out of memory\)"):
        ask(server, path, concurrency=1, retries=2)
    assert [row["key"] for row in read(path)] == [asked.key for asked in PROMPTS[:4]]
    with serving(good) as server:
        assert ask(server, path, concurrency=2) == 3
        assert sorted(asked_of(server)) == sorted(asked.messages[0]["content"] for asked in PROMPTS[4:])
    assert [row["key"] for row in read(path)] == [asked.key for asked in PROMPTS]


# Prompts that a server refuses


def asked_of(server):
    return [body["messages"][0]["content"] for _, body in server.seen]


def too_long(*numbers):
    """A server that refuses some of the prompts."""
    texts = {PROMPTS[number].messages[0]["content"] for number in numbers}

    def reply(number, body):
        refused = body["messages"][0]["content"] in texts
        return (400, {"error": {"message": "4096 tokens at most"}}) if refused else good(number, body)

    return reply


@pytest.mark.parametrize("refused", [(0,), (3,), (6,), (0, 1, 5)])
@pytest.mark.parametrize("concurrency", [1, 4])
def test_refused_prompts_are_left_out_and_not_asked_again(tmp_path, refused, concurrency):
    path, skipped = tmp_path / "answers.jsonl", []
    answered = [asked.key for number, asked in enumerate(PROMPTS) if number not in refused]
    with serving(too_long(*refused)) as server, captured_log() as messages:
        added = ask(server, path, concurrency=concurrency, on_skip=lambda: skipped.append(1))
        assert added + len(skipped) == len(PROMPTS)
    assert [row["key"] for row in read(path)] == answered
    told = [message for message in messages if "The server said 400 (4096 tokens at most)" in message]
    assert len(told) == len(refused)
    assert messages[-1] == f"{len(refused)} of 7 rows were left out."
    content = path.read_bytes()
    with serving(good) as server, captured_log() as messages:
        assert ask(server, path) == 0
    assert server.seen == []
    assert path.read_bytes() == content
    assert [row["key"] for row in read(tmp_path / "answers.refused.jsonl")] == [PROMPTS[i].key for i in refused]
    (message,) = messages
    assert message.endswith(f"refused.jsonl has {len(refused)} refused prompts: `--ask-refused` asks them again.")
    with serving(good) as server:
        assert ask(server, path, ask_refused=True) == len(refused)
    assert sorted(asked_of(server)) == sorted(PROMPTS[number].messages[0]["content"] for number in refused)
    assert not (tmp_path / "answers.refused.jsonl").exists()


def test_prompts_that_are_refused_again_are_recorded_again(tmp_path):
    path = tmp_path / "answers.jsonl"
    for ask_refused in (False, True):
        with serving(too_long(2)) as server:
            ask(server, path, ask_refused=ask_refused)
        assert len(read(tmp_path / "answers.refused.jsonl")) == 1


def test_server_that_refuses_every_prompt_but_not_a_short_one(tmp_path):
    path = tmp_path / "answers.jsonl"
    with (
        serving(too_long(*range(7))) as server,
        pytest.raises(ValueError, match=r"None of 7 rows can be used. .+said 400 \(4096 tokens at most\)"),
    ):
        ask(server, path)
    with serving(good) as server:
        assert ask(server, path) == 7  # nothing was answered, so nothing is known


@pytest.mark.parametrize("status", [400, 422])
def test_argument_that_a_server_does_not_know_ends_the_run(tmp_path, status):
    """At the first refusal, and without a record: the prompts are good."""
    path = tmp_path / "answers.jsonl"
    many = [prompt(10 + i, 11 + i) for i in range(60)]

    def reply(number, body):
        return (status, {"detail": "unknown argument: top_k"}) if "top_k" in body else good(number, body)

    with (
        serving(reply) as server,
        pytest.raises(
            RuntimeError,
            match=rf"said {status} \(unknown argument: top_k\) even to a short prompt.+Leave out .+`--top-k`",
        ),
    ):
        ask(server, path, many, concurrency=2)
    assert len(server.seen) <= 9  # a chunk and the short prompt
    assert not path.exists()
    assert not (tmp_path / "answers.refused.jsonl").exists()
    left_to_the_server = PrepareSettings("x", SamplingSettings(6, None, None, None, None))
    with serving(reply) as server:
        assert ask(server, path, many, left_to_the_server) == 60
    assert {frozenset(body) for _, body in server.seen} == {frozenset({"model", "messages", "max_tokens"})}


def test_argument_refused_by_a_server_that_goes_on_with_a_file(tmp_path):
    """Another server behind the same address: its refusal is no property of the prompts either."""
    path = tmp_path / "answers.jsonl"
    with serving(good) as server:
        ask(server, path, PROMPTS[:2])
    with (
        serving(lambda *_: (400, "no seed")) as server,
        pytest.raises(RuntimeError, match=r"said 400 \(no seed\) even"),
    ):
        ask(server, path)
    assert not (tmp_path / "answers.refused.jsonl").exists()
    assert len(read(path)) == 2


# Tools and reasoning


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_of_a_server_is_trained_on(tmp_path, name):
    path, tokenizer = tmp_path / "answers.jsonl", byte_tokenizer(THINKING)
    replies = [({"content": "4", name: "2 and 2"}, "stop"), ({"content": None, name: "so"}, "length")]

    def reply(number, body):
        message, reason = replies[number - 1]
        return 200, {"choices": [{"message": message, "finish_reason": reason}]}

    with serving(reply) as server:
        assert ask(server, path, PROMPTS[:2], concurrency=1) == 2
    whole, cut = read(path)
    assert whole["messages"][-1] == {"role": "assistant", "content": "4", "reasoning_content": "2 and 2"}
    assert cut["messages"][-1] == {"role": "assistant", "content": "", "reasoning_content": "so"}
    texts = []
    for row in (whole, cut):
        sequence = encode_row("a", row, tokenizer)
        texts.append(tokenizer.decode(sequence.input_ids[sequence.num_prompt_tokens :]))
    assert texts == ["<think>\n2 and 2\n</think>\n\n4<|end|>", "<think>\nso"]


def test_tools_and_calls_go_to_a_server_and_come_back(tmp_path):
    path, tokenizer = tmp_path / "answers.jsonl", byte_tokenizer(TOOLS)
    called = (user(), assistant("", tool_calls=[CALL]), tool_result())
    prompts = [PromptRow((user("weather?"),), tools=(TOOL,)), PromptRow(called)]
    as_text = CALL | {"function": {"name": "weather", "arguments": '{"town": "Rome"}'}}

    def reply(number, body):
        if "tools" not in body:
            return good(number, body)
        message = {"content": None, "tool_calls": [as_text | {"id": "1"}]}
        return 200, {"choices": [{"message": message, "finish_reason": "tool_calls"}]}

    with serving(reply) as server:
        assert ask(server, path, prompts, concurrency=1) == 2
    (_, first), (_, second) = server.seen
    assert first["tools"] == [TOOL]
    assert second["messages"] == [user(), assistant("", tool_calls=[as_text]), tool_result()]
    call, text = read(path)
    assert call["tools"] == [TOOL]
    assert call["messages"][-1] == assistant("", tool_calls=[as_text | {"id": "1"}])
    assert call["finish_reason"] == "tool_calls"
    assert text["messages"][:-1] == list(called)
    sequence = encode_row("a", call, tokenizer)
    answer = tokenizer.decode(sequence.input_ids[sequence.num_prompt_tokens :])
    assert answer == '<|call|>weather{"town": "Rome"}<|end|>'
    assert tokenizer.decode(sequence.input_ids).startswith("<|head|>tools\n[{")


@pytest.mark.parametrize(
    "message",
    [None, "text", {"content": 7}, {"content": ["a"]}, {"content": "a", "tool_calls": "f"}, {"reasoning": {"a": 1}}],
    ids=str,
)
def test_replies_that_hold_no_answer(tmp_path, pauses, message):
    reply = 200, {"choices": [{"message": message}]}
    with serving(lambda *_: reply) as server, pytest.raises(RuntimeError, match="did not answer after 2 tries"):
        ask(server, tmp_path / "answers.jsonl", PROMPTS[:1], retries=1)


@pytest.mark.parametrize("url", ["localhost:8000/v1", "", "file:///etc"])
def test_address_of_something_else(tmp_path, url):
    with pytest.raises(ValueError, match="must begin with http:// or https://, got"):
        write_answers_from_server(url, "served", PROMPTS, tmp_path / "answers.jsonl", SETTINGS)
    assert list(tmp_path.iterdir()) == []


def test_negative_retries(tmp_path):
    with serving(good) as server, pytest.raises(ValueError, match="`retries` must be >= 0, got -1"):
        ask(server, tmp_path / "answers.jsonl", PROMPTS[:1], retries=-1)
