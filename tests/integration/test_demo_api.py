# SPDX-License-Identifier: Apache-2.0
"""The demo's endpoints, over HTTP: what they return, what they refuse, and many clients at a time."""

import runpy
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gradio as gr
import pytest
from gradio_client import Client
from gradio_client.exceptions import AppError
from typer.testing import CliRunner

from dspark_hf.cli import app as command_line
from dspark_hf.demo.app import build_demo, serve
from dspark_hf.demo.settings import Limits
from tests.support.models import oracle_draft, tiny_target
from tests.support.scripted import letter_tokenizer


ROOT = Path(__file__).parents[2]
PROMPT = "Whatisthis?"
NUM_CLIENTS = 16


class Server:
    """The app with a tiny pair, and how long a pass of its target takes."""

    def __init__(self, **limits):
        self.pass_s = 0.0
        self.target = tiny_target()
        self.draft = oracle_draft(self.target)
        self.draft.generation_config.num_assistant_tokens_schedule = "constant"
        self.target.register_forward_pre_hook(lambda *_: time.sleep(self.pass_s))
        self.tokenizer = letter_tokenizer()
        self.demo = build_demo(self.target, self.draft, self.tokenizer, Limits(**limits))
        self.url = serve(self.demo, wait=False)

    def client(self):
        return Client(self.url, verbose=False, httpx_kwargs={"timeout": 120})  # a busy machine is no lost client


@pytest.fixture(scope="module")
def server():
    server = Server(max_new_tokens=300)
    yield server
    server.demo.close(verbose=False)


@pytest.fixture(scope="module")
def client(server):
    return server.client()


def test_only_this_machine_is_served(server):
    assert server.url.startswith("http://127.0.0.1:")
    assert server.demo.server_name == "127.0.0.1"


def test_endpoints_have_names_and_the_page_has_none(client):
    endpoints = client.view_api(return_format="dict", print_info=False)
    assert sorted(endpoints["named_endpoints"]) == ["/compare", "/pair"]
    assert endpoints["unnamed_endpoints"] == {}


def test_pair_tells_the_bounds(client):
    told = client.predict(api_name="/pair")
    assert told["num_draft_slots"] == 4
    assert told["dtype"] == "float32"
    assert told["limits"]["max_new_tokens"] == 300


def test_pair_tells_no_path(server, client, tmp_path, monkeypatch):
    (tmp_path / "my-target").mkdir()
    monkeypatch.setattr(server.target.config, "_name_or_path", str(tmp_path / "my-target"))
    monkeypatch.setattr(server.draft.config, "_name_or_path", "org/my-draft")
    told = client.predict(api_name="/pair")
    assert (told["target"], told["draft"]) == ("my-target", "org/my-draft")


def test_an_answer_is_short_where_no_length_is_named(client):
    assert client.predict(PROMPT, api_name="/compare")["plain"]["num_tokens"] == 64
    small = Server(max_new_tokens=7)
    assert small.client().predict(PROMPT, api_name="/compare")["plain"]["num_tokens"] == 7
    small.demo.close(verbose=False)


@pytest.mark.parametrize(("saved", "expected"), [(None, 4), (2, 2), (20, 4)])
def test_the_page_begins_with_the_drafts_own_number(saved, expected, server, monkeypatch):
    monkeypatch.setattr(server.draft.generation_config, "num_assistant_tokens", saved)
    page = build_demo(server.target, server.draft, server.tokenizer)
    (slider,) = [part for part in page.blocks.values() if getattr(part, "label", "") == "Most drafts per round"]
    assert (slider.value, slider.maximum) == (expected, 4)


def test_compare_has_the_text_of_generate(server, client):
    inputs = server.tokenizer(PROMPT, return_tensors="pt")
    ids = server.target.generate(inputs["input_ids"], do_sample=False, max_new_tokens=20)
    result = client.predict(PROMPT, max_new_tokens=20, api_name="/compare")
    assert result["phase"] == "done"
    assert result["plain"]["text"] == server.tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :])
    assert result["identical"]
    dspark = result["dspark"]
    assert dspark["num_tokens"] == len(dspark["origins"]) == 20
    assert dspark["accepted_length"] == pytest.approx(19 / dspark["num_rounds"])
    assert dspark["num_verified"] == dspark["num_drafted"] + dspark["num_rounds"]
    assert dspark["origins"].count("accepted") == dspark["num_accepted"] > 0
    assert result["speedup"] == pytest.approx(dspark["tokens_per_s"] / result["plain"]["tokens_per_s"])


def test_compare_is_streamed_one_side_after_the_other(server, client):
    server.pass_s = 0.03
    job = client.submit(PROMPT, max_new_tokens=30, api_name="/compare")
    phases = [snapshot["phase"] for snapshot in job]
    server.pass_s = 0.0
    assert phases == sorted(phases, key=["plain", "dspark", "done"].index)
    assert phases.count("plain") >= 3
    assert phases.count("dspark") >= 2
    assert phases.count("done") >= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": "x" * 5000}, "too long for the demo: 5,000 characters, and at most 4,000"),
        ({"prompt": "x" * 600, "max_new_tokens": 20}, "600 tokens, and at most 492"),
        ({"prompt": ""}, "Write a prompt first"),
        ({"prompt": PROMPT, "max_new_tokens": 301}, "from 1 to 300 tokens, got 301"),
        ({"prompt": PROMPT, "max_new_tokens": "many"}, "got 'many'"),
        ({"prompt": PROMPT, "schedule": "nightly"}, "got 'nightly'"),
    ],
)
def test_refusals_are_sentences(client, arguments, message):
    with pytest.raises(AppError, match=message):
        client.predict(api_name="/compare", **arguments)


def test_an_unexpected_error_is_told_without_its_traceback(server, client, caplog):
    def fail(*_):
        raise RuntimeError("secret path")

    handle = server.target.register_forward_pre_hook(fail)
    with pytest.raises(AppError, match="fault of the demo") as raised:
        client.predict(PROMPT, max_new_tokens=5, api_name="/compare")
    handle.remove()
    assert "secret path" not in str(raised.value)
    assert "secret path" in caplog.text
    assert client.predict(PROMPT, max_new_tokens=5, api_name="/compare")["phase"] == "done"


def test_a_cancelled_job_frees_the_models(server, client):
    server.pass_s = 0.05
    job = client.submit(PROMPT, max_new_tokens=300, api_name="/compare")
    while not job.outputs():
        time.sleep(0.05)
    job.cancel()
    begun = time.monotonic()
    result = client.predict(PROMPT, max_new_tokens=2, api_name="/compare")
    server.pass_s = 0.0
    assert result["phase"] == "done"
    assert time.monotonic() - begun < 8  # the rest of the job would take 15 seconds and more


def test_no_client_is_lost_and_no_two_run_at_once(server):
    running, most = set(), []

    def watch(*_):
        running.add(threading.get_ident())
        most.append(len(running))

    handles = [
        server.target.register_forward_pre_hook(watch),
        server.target.register_forward_hook(lambda *_: running.discard(threading.get_ident())),
    ]

    def visit(number):
        return server.client().predict(PROMPT, max_new_tokens=3, seed=number, api_name="/compare")["phase"]

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        phases = list(pool.map(visit, range(NUM_CLIENTS)))
    for handle in handles:
        handle.remove()
    assert phases == ["done"] * NUM_CLIENTS
    assert max(most) == 1


def test_a_full_queue_refuses_in_words():
    server = Server(max_new_tokens=100, max_queue=1)
    server.pass_s = 0.05
    client = server.client()
    running = client.submit(PROMPT, max_new_tokens=100, api_name="/compare")
    while not running.outputs():
        time.sleep(0.05)
    waiting = client.submit(PROMPT, max_new_tokens=1, api_name="/compare")
    deadline = time.monotonic() + 10
    while len(server.demo._queue) < 1:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    with pytest.raises(Exception, match="[Qq]ueue is full"):
        server.client().predict(PROMPT, max_new_tokens=1, api_name="/compare")
    running.cancel()
    assert waiting.result(timeout=30)["phase"] == "done"
    server.demo.close(verbose=False)


def test_half_a_pair_is_refused(server):
    with pytest.raises(ValueError, match="got only part of it"):
        build_demo(target=server.target)


def test_two_apps_share_nothing(server):
    other = build_demo(server.target, server.draft, server.tokenizer, Limits(max_new_tokens=7))
    assert isinstance(other, gr.Blocks)
    assert other is not server.demo
    assert server.client().predict(api_name="/pair")["limits"]["max_new_tokens"] == 300


def run_app_file(monkeypatch, *arguments):
    path = str(ROOT / "demo" / "app.py")
    monkeypatch.setattr(sys, "argv", [path, *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(path, run_name="__main__")
    return ended.value.code


def test_the_app_file_is_the_command(monkeypatch, capsys):
    assert run_app_file(monkeypatch, "--target", "somewhere") == 2
    assert "`--target` needs `--draft`" in capsys.readouterr().err


def test_a_missing_extra_is_told_by_its_name(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "dspark_hf.demo.app")
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert run_app_file(monkeypatch) == 2
    assert 'pip install "dspark-hf[demo]"' in capsys.readouterr().err


def test_the_command_refuses_in_words():
    result = CliRunner().invoke(command_line, ["demo", "--target", "somewhere"])
    assert result.exit_code == 2
    assert "`--target` needs `--draft`" in result.stderr
