# SPDX-License-Identifier: Apache-2.0
"""Prompts and answers: templates, the file that grows, the target's own answers, and those of a server."""

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from dspark_hf import prepare
from dspark_hf.data import encode_row
from dspark_hf.prepare import (
    DataFile,
    PrepareSettings,
    PromptRow,
    encode_messages,
    is_conversation,
    self_prompt_header,
    template_hash,
    write_answers,
    write_answers_from_server,
    write_self_prompts,
)
from dspark_hf.row_generation import SamplingSettings
from tests.helpers import tiny_target
from tests.integration.support import captured_log
from tests.training_support import ASSISTANT, EOS, NO_THINKING, USER, word_tokenizer, words


BOS = 1
GREEDY = SamplingSettings(max_new_tokens=6, temperature=0)
SETTINGS = PrepareSettings("tiny", GREEDY)


def turn(*ids, role="user"):
    return {"role": role, "content": words(*ids)}


def prompt(*ids) -> PromptRow:
    return PromptRow((turn(*ids),), "test")


PROMPTS = [prompt(*range(10 + i, 12 + 2 * i)) for i in range(7)]


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer()


@pytest.fixture(scope="module")
def target():
    return tiny_target(context_scale=0.2)


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# Prompts and templates


def test_key_is_that_of_the_conversation():
    assert prompt(7, 8).key == PromptRow((turn(7, 8),), "elsewhere").key
    assert len({prompt(7, 8).key, prompt(8, 7).key, PromptRow((turn(7, 8, role="system"),)).key}) == 3
    reordered = PromptRow(({"content": words(7, 8), "role": "user"},))
    assert reordered.key == prompt(7, 8).key
    # SHA-256 of [{"content": "w7 w8", "role": "user"}]: a file of another version can be continued.
    assert prompt(7, 8).key == "586307e3ed91440e"


def test_template_hash():
    """SHA-256 of the empty text and of "x"."""
    assert template_hash(word_tokenizer(template=None)).startswith("e3b0c44298fc1c14")
    assert template_hash(word_tokenizer(template="x")).startswith("2d711642b726b044")


def test_prompt_ends_where_the_answer_begins(tokenizer):
    assert encode_messages(tokenizer, [turn(7, 8)]) == (BOS, USER, 7, 8, EOS, BOS, ASSISTANT)
    assert encode_messages(tokenizer, [turn(7)], enable_thinking=False)[-2:] == (ASSISTANT, NO_THINKING)
    assert encode_messages(tokenizer, [turn(7)], enable_thinking=True)[-1] == ASSISTANT


def test_template_is_needed():
    bare = word_tokenizer(template=None)
    with pytest.raises(ValueError, match=r"has no chat template.+Set `tokenizer\.chat_template`"):
        encode_messages(bare, [turn(7)])
    with pytest.raises(ValueError, match="Without a chat template the target cannot write prompts. Pass prompts"):
        self_prompt_header(bare)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}<bos> {{ m['content'] }} <eos> {% endfor %}",
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}{% endif %}",
    ],
)
def test_template_without_a_generation_prompt(template):
    with pytest.raises(ValueError, match="ignores `add_generation_prompt`: .+ Use a template with a generation"):
        encode_messages(word_tokenizer(template=template), [turn(7)])


def test_header_is_all_before_the_users_text(tokenizer):
    assert self_prompt_header(tokenizer) == "<bos> user "
    with_system = word_tokenizer(template="<bos> system w9 <eos> " + tokenizer.chat_template)
    assert self_prompt_header(with_system) == "<bos> system w9 <eos> <bos> user "


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([turn(7)], True),
        ([], True),
        ([turn(7), turn(8, role="assistant")], True),
        (None, False),
        ("text", False),
        (["text"], False),
        ([{"role": "user"}], False),
        ([{"role": "user", "content": None}], False),
        ([{"role": "user", "content": [{"type": "image"}]}], False),
        ([{"content": "w7"}], False),
    ],
)
def test_conversations(messages, expected):
    assert is_conversation(messages) is expected


# The file


def test_rows_are_there_again(tmp_path):
    path = tmp_path / "new" / "rows.jsonl"
    file = DataFile(path, SETTINGS)
    assert file.keys == set()
    file.append({"key": "a", "text": "ä\n"})
    file.append({"key": "b"})
    assert path.read_bytes() == '{"key": "a", "text": "ä\\n"}\n{"key": "b"}\n'.encode()
    assert DataFile(path, SETTINGS).keys == file.keys == {"a", "b"}


def test_settings_stand_beside_it(tmp_path):
    DataFile(tmp_path / "rows.jsonl", SETTINGS)
    recorded = json.loads((tmp_path / "rows.settings.json").read_text())
    assert recorded["settings"]["target"] == "tiny"
    assert recorded["settings"]["sampling"]["max_new_tokens"] == 6
    assert set(recorded["versions"]) == {"dspark_hf", "transformers"}


@pytest.mark.parametrize("half", [b'{"key": "b", "te', b'{"key": "b"}', b"\xc3", b"{"])
def test_half_a_line_is_removed(tmp_path, half):
    path = tmp_path / "rows.jsonl"
    DataFile(path, SETTINGS).append({"key": "a"})
    with path.open("ab") as file:
        file.write(half)
    again = DataFile(path, SETTINGS)
    assert again.keys == {"a"}
    again.append({"key": "c"})
    assert [row["key"] for row in read(path)] == ["a", "c"]


def test_other_settings_are_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    DataFile(path, SETTINGS).append({"key": "a"})
    content = path.read_bytes()
    warm = PrepareSettings("tiny", SamplingSettings(max_new_tokens=6, temperature=0.5), enable_thinking=False)
    with pytest.raises(ValueError, match=r"made with other settings \(enable_thinking, sampling\): .+another output"):
        DataFile(path, warm)
    with pytest.raises(ValueError, match=r"\(target\): {'target': 'tiny'}, got {'target': 'large'}"):
        DataFile(path, PrepareSettings("large", GREEDY))
    assert path.read_bytes() == content


def test_other_settings_are_right_before_there_are_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    DataFile(path, SETTINGS)
    DataFile(path, PrepareSettings("large", GREEDY)).append({"key": "a"})
    with pytest.raises(ValueError, match="made with other settings"):
        DataFile(path, SETTINGS)


def test_a_file_of_something_else_is_not_touched(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("my notes")
    with pytest.raises(ValueError, match=r"rows\.settings\.json beside it does not.+Choose another output"):
        DataFile(path, SETTINGS)
    assert path.read_text() == "my notes"


# Answers written here


def test_answers_are_the_targets_own(tmp_path, target, tokenizer):
    path, seen = tmp_path / "answers.jsonl", []
    assert write_answers(target, tokenizer, PROMPTS, path, SETTINGS, num_rows=3, on_row=seen.append) == 7
    rows = {row["key"]: row for row in read(path)}
    assert seen == list(rows.values())
    for asked in PROMPTS:
        row = rows[asked.key]
        ids = encode_messages(tokenizer, asked.messages)
        output = target.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=6, eos_token_id=EOS)
        assert row["prompt_ids"] == list(ids)
        assert row["answer_ids"] == output[0, len(ids) :].tolist()
        assert row["messages"][:-1] == list(asked.messages)
        assert row["messages"][-1]["role"] == "assistant"
        assert row["finish_reason"] == ("stop" if row["answer_ids"][-1] == EOS else "length")
        assert row["source"] == "test"
        sequence = encode_row("f:1", row, tokenizer)
        assert sequence.input_ids == (*ids, *row["answer_ids"])


def test_same_prompt_is_answered_once(tmp_path, target, tokenizer):
    path = tmp_path / "answers.jsonl"
    assert write_answers(target, tokenizer, [*PROMPTS[:2], *PROMPTS[:3]], path, SETTINGS, 2) == 3
    assert write_answers(target, tokenizer, PROMPTS[:3], path, SETTINGS, 2) == 0
    assert len(read(path)) == 3


@pytest.mark.parametrize("half_a_line", [b"", b'{"key": "0123", "mess'])
@pytest.mark.parametrize("killed_after", [1, 3, 6])
def test_killed_run_repeats_and_loses_nothing(tmp_path, target, tokenizer, killed_after, half_a_line):
    path, written = tmp_path / "answers.jsonl", []

    def kill(row):
        written.append(row)
        if len(written) == killed_after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_answers(target, tokenizer, PROMPTS, path, SETTINGS, 3, on_row=kill)
    assert read(path) == written
    with path.open("ab") as file:
        file.write(half_a_line)
    assert write_answers(target, tokenizer, PROMPTS, path, SETTINGS, 3) == 7 - killed_after
    rows = read(path)
    assert rows[:killed_after] == written
    assert sorted(row["key"] for row in rows) == sorted(asked.key for asked in PROMPTS)
    whole = tmp_path / "whole.jsonl"
    write_answers(target, tokenizer, PROMPTS, whole, SETTINGS, 3)
    by_key = {row["key"]: row for row in read(whole)}
    assert all(by_key[row["key"]] == row for row in rows)  # greedy: whatever shared the batch


def test_long_prompts_are_left_out_with_a_warning(tmp_path, target, tokenizer):
    path = tmp_path / "answers.jsonl"
    with captured_log() as messages:
        assert write_answers(target, tokenizer, PROMPTS, path, SETTINGS, 3, max_prompt_tokens=9) == 3
    assert messages == ["4 prompts of more than 9 tokens were left out."]
    assert {row["key"] for row in read(path)} == {asked.key for asked in PROMPTS[:3]}  # 7, 8 and 9 tokens


def test_end_tokens_of_target_and_tokenizer_count(tmp_path, tokenizer):
    target = tiny_target(context_scale=0.2)
    plain = tmp_path / "plain.jsonl"
    write_answers(target, tokenizer, PROMPTS[:1], plain, SETTINGS, 1)
    third = read(plain)[0]["answer_ids"][2]
    target.generation_config.eos_token_id = [third, 95]
    ended = tmp_path / "ended.jsonl"
    write_answers(target, tokenizer, PROMPTS[:1], ended, SETTINGS, 1)
    assert read(ended)[0]["answer_ids"][-1] == third
    assert len(read(ended)[0]["answer_ids"]) <= 3
    assert read(ended)[0]["finish_reason"] == "stop"


# Prompts of the target's own


@pytest.fixture
def talkative():
    """Ends a turn at one token in eight or so."""
    target = tiny_target(context_scale=0.2)
    target.generation_config.eos_token_id = list(range(80, 92))
    return target


SELF = PrepareSettings("tiny", SamplingSettings(24, 1.0, 50, 0.95))


def test_target_writes_prompts(tmp_path, talkative, tokenizer):
    path, seen = tmp_path / "prompts.jsonl", []
    assert write_self_prompts(talkative, tokenizer, 12, path, SELF, num_rows=4, on_row=seen.append) == 12
    rows = read(path)
    assert seen == rows
    assert len({row["key"] for row in rows}) == 12
    for row in rows:
        (message,) = row["messages"]
        assert message["role"] == "user"
        assert len(message["content"].split()) >= 3
        assert message["content"] == message["content"].strip()
        assert "<" not in message["content"]  # neither the header nor the end token
        assert row["key"] == PromptRow((message,)).key
        assert row["source"] == "self"


def test_own_prompts_are_continued(tmp_path, talkative, tokenizer):
    path = tmp_path / "prompts.jsonl"
    write_self_prompts(talkative, tokenizer, 5, path, SELF, num_rows=4)
    first = read(path)
    assert write_self_prompts(talkative, tokenizer, 9, path, SELF, num_rows=4) == 4
    assert read(path)[:5] == first
    assert len({row["key"] for row in read(path)}) == 9
    assert write_self_prompts(talkative, tokenizer, 9, path, SELF, num_rows=4) == 0


def test_own_prompts_begin_as_asked(tmp_path, talkative, tokenizer):
    path = tmp_path / "prompts.jsonl"
    starts = (words(30, 31) + " ", words(40) + " ")
    write_self_prompts(talkative, tokenizer, 8, path, SELF, starts, num_rows=2)
    begins = [row["messages"][0]["content"].split()[0] for row in read(path)]
    assert set(begins) == {"w30", "w40"}


def test_target_that_repeats_itself_ends(tmp_path, talkative, tokenizer):
    """Greedy turns from one start are all alike: one prompt, or none where it is too short."""
    settings = PrepareSettings("tiny", SamplingSettings(24, 0.0))
    added = write_self_prompts(talkative, tokenizer, 5, tmp_path / "p.jsonl", settings, (words(30) + " ",), 2)
    assert added <= 1


def test_turns_without_an_end_are_no_prompts(tmp_path, target, tokenizer):
    settings = PrepareSettings("tiny", SamplingSettings(2, 1.0, 5))
    assert write_self_prompts(target, tokenizer, 3, tmp_path / "p.jsonl", settings, num_rows=2) == 0


# Answers of a server


class Server:
    """An OpenAI-compatible stub: `reply(number, body)` gives a status and a body, `seen` holds what was asked."""

    def __init__(self, reply):
        self.reply, self.seen, self.headers = reply, [], []
        self.lock, self.in_flight, self.most_in_flight = threading.Lock(), 0, 0


def good(number, body, text=None, finish_reason="stop"):
    content = f"answer to {body['messages'][-1]['content']}" if text is None else text
    return 200, {"choices": [{"message": {"content": content}, "finish_reason": finish_reason}]}


@contextmanager
def serving(reply):
    server = Server(reply)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with server.lock:
                server.seen.append((self.path, body))
                server.headers.append(dict(self.headers))
                server.in_flight += 1
                server.most_in_flight = max(server.most_in_flight, server.in_flight)
                number = len(server.seen)
            status, content = server.reply(number, body)
            payload = content.encode() if isinstance(content, str) else json.dumps(content).encode()
            with server.lock:
                server.in_flight -= 1
            self.send_response(status)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, *_):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    server.url = f"http://127.0.0.1:{http.server_port}/v1"
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


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

    monkeypatch.setattr(prepare.time, "sleep", sleep)
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


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
def test_failures_that_stay_are_not(tmp_path, pauses, status):
    path = tmp_path / "answers.jsonl"
    with (
        serving(lambda *_: (status, "no")) as server,
        pytest.raises(
            RuntimeError, match=rf"did not answer after 1 tries \(HTTP Error {status}.+Rows so far are kept"
        ),
    ):
        ask(server, path, PROMPTS[:1])
    assert len(server.seen) == 1
    assert pauses == []


def test_server_that_is_down(tmp_path, pauses):
    with serving(good) as server:
        pass
    with pytest.raises(RuntimeError, match=r"did not answer after 3 tries .+run the same command again once it is up"):
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
        return (400, "") if body["messages"] == list(PROMPTS[4].messages) else good(number, body)

    with serving(reply) as server, pytest.raises(RuntimeError):
        ask(server, path, concurrency=1)
    assert [row["key"] for row in read(path)] == [asked.key for asked in PROMPTS[:4]]
    with serving(good) as server:
        assert ask(server, path, concurrency=2) == 3
        assert sorted(body["messages"][0]["content"] for _, body in server.seen) == sorted(
            asked.messages[0]["content"] for asked in PROMPTS[4:]
        )
    assert [row["key"] for row in read(path)] == [asked.key for asked in PROMPTS]


def test_server_that_is_down_is_not_asked_for_every_prompt(tmp_path, pauses):
    many = [prompt(10 + i, 11 + i) for i in range(60)]
    with serving(lambda *_: (400, "")) as server, pytest.raises(RuntimeError):
        ask(server, tmp_path / "answers.jsonl", many, concurrency=2)
    assert len(server.seen) <= 8


def test_negative_retries(tmp_path):
    with serving(good) as server, pytest.raises(ValueError, match="`retries` must be >= 0, got -1"):
        ask(server, tmp_path / "answers.jsonl", PROMPTS[:1], retries=-1)
