# SPDX-License-Identifier: Apache-2.0
"""The demo in a real browser (Debian's chromium): what a visitor sees is what the records say."""

import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import expect, sync_playwright

from dspark_hf.default_pair import ensure_default_target
from dspark_hf.demo.plots import acceptance_by_slot, tokens_per_round
from dspark_hf.demo.session import Pair, Session
from dspark_hf.demo.settings import RunSettings
from tests.integration.test_demo_api import Server
from tests.support.models import spread_confidence


ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.browser

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PROMPT = "Whatisthis?<b>&amp;"
NUM_NEW = 40
# What the page goes through during a run: phase, and the tokens on both sides.
RECORD = """() => {
    window.seen = [];
    const count = side => document.querySelectorAll(`#side-${side} .ds-tok`).length;
    const look = () => window.seen.push(
        [document.querySelector("#status [data-phase]")?.dataset.phase, count("plain"), count("dspark")]
    );
    new MutationObserver(look).observe(document.body, {subtree: true, childList: true, attributes: true});
}"""
TOKENS = """side => Array.from(
    document.querySelectorAll(`#side-${side} .ds-tok`), e => [e.className, e.textContent]
)"""
# Contrast of every kind of token with what lies behind it (WCAG 2).
CONTRASTS = """() => {
    const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
    const paint = colours => {
        canvas.clearRect(0, 0, 1, 1);
        for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
        const light = v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
        const [r, g, b] = Array.from(canvas.getImageData(0, 0, 1, 1).data, v => light(v / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const behind = e => e ? [...behind(e.parentElement), getComputedStyle(e).backgroundColor] : ["white"];
    const contrast = e => {
        const back = behind(e);
        const pair = [paint(back), paint([...back, getComputedStyle(e).color])].sort((a, b) => b - a);
        return (pair[0] + 0.05) / (pair[1] + 0.05);
    };
    const parts = ".ds-text .ds-tok, .ds-status, .ds-card div, .ds-head h3, .ds-head span, .ds-legend li, li";
    return Array.from(document.querySelectorAll(parts), e => [e.className || e.tagName, contrast(e)]);
}"""


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        bundled = playwright.chromium.executable_path
        path = next(filter(None, map(shutil.which, BROWSERS)), bundled if Path(bundled).exists() else None)
        if path is None:
            pytest.fail(
                f"The demo is tested in a browser, and none of {', '.join(BROWSERS)} is on PATH. Run `apt-get install "
                "chromium`, or `python -m playwright install chromium`."
            )
        # The sandbox does not start for root, and these pages are our own.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server():
    server = Server(max_new_tokens=300, max_queue=1)
    spread_confidence(server.draft)
    yield server
    server.demo.close(verbose=False)


@contextmanager
def visit(browser, url, width=1280, color_scheme="light"):
    """The page, and what went wrong on it."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=color_scheme)
    page.set_default_timeout(60_000)
    expect.set_options(timeout=60_000)
    page.problems = []
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("console", lambda message: page.problems.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: page.problems.append(request.url) if is_elsewhere(request.url) else None)
    page.goto(url)
    page.wait_for_selector("#run")
    yield page
    page.close()


def is_elsewhere(url):
    return not re.match(r"(http://127\.0\.0\.1:|data:|blob:)", url)


@pytest.fixture
def page(browser, server):
    server.pass_s = 0.0
    with visit(browser, server.url) as page:
        yield page


@pytest.fixture(scope="module")
def finished(browser, server):
    """A page after a run, to be looked at only, and what the session itself says of the same request."""
    with visit(browser, server.url) as page:
        ask(page)
        wait_for(page, "done")
        yield page, expected(server)


def ask(page, prompt=PROMPT, num_new=NUM_NEW):
    page.fill("#prompt textarea", prompt)
    answer = page.get_by_label("number input for Longest answer, in tokens")
    answer.fill(str(num_new))
    answer.press("Tab")
    page.click("#run")


def wait_for(page, phase):
    page.wait_for_selector(f'#status [data-phase="{phase}"]')


def wait_for_free_models():
    deadline = time.monotonic() + 15
    while any(thread.name == "dspark-demo" for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "the models are still running"
        time.sleep(0.02)


def expected(server):
    """The result for `PROMPT`; greedy, in float32, with a fixed schedule."""
    session = Session(Pair(server.target, server.draft, server.tokenizer))
    *_, last = session.compare(RunSettings(PROMPT, max_new_tokens=NUM_NEW, num_assistant_tokens=4))
    return last


def test_page_loads_from_this_machine_alone(page):
    assert page.title() == "DSpark demo"
    expect(page.locator("#status")).to_contain_text("Choose an example or write a prompt")
    expect(page.locator("#stop")).to_be_disabled()
    assert page.problems == []


def test_an_example_fills_the_prompt(page):
    page.get_by_text("chat: Explain to a ten-year-old").click()
    expect(page.locator("#prompt textarea")).to_have_value("Explain to a ten-year-old why the sky is blue.")


def test_a_run_is_streamed_side_by_side(page, server):
    server.pass_s = 0.03
    page.evaluate(RECORD)
    ask(page)
    wait_for(page, "done")
    seen = page.evaluate("window.seen")
    order = ["idle", "waiting", "plain", "dspark", "done"]
    phases = [phase for phase, _, _ in seen]
    assert phases == sorted(phases, key=order.index)
    plain = [counts for phase, *counts in seen if phase == "plain"]
    dspark = [counts for phase, *counts in seen if phase == "dspark"]
    assert len({left for left, _ in plain}) >= 4
    assert {right for _, right in plain} == {0}
    assert len({right for _, right in dspark}) >= 3
    assert {left for left, _ in dspark} <= {max(left for left, _ in plain), NUM_NEW}
    assert page.problems == []


def test_colours_figures_and_plots_agree_with_the_records(finished):
    page, result = finished
    stats = result.dspark.stats
    origins = [token.origin for token in result.dspark.tokens]
    assert {"accepted", "correction", "bonus"} <= set(origins)
    assert page.evaluate(TOKENS, "dspark") == [
        [f"ds-tok ds-{token.origin}", token.text] for token in result.dspark.tokens
    ]
    assert page.evaluate(TOKENS, "plain") == [["ds-tok ds-unmarked", token.text] for token in result.plain.tokens]
    expect(page.locator("#status")).to_contain_text(f"identical, token by token ({NUM_NEW} tokens)")

    def figure(name, part):
        return page.inner_text(f'[data-figure="{name}"] .ds-card-{part}')

    assert figure("accepted-length", "value") == f"{stats.accepted_length:.2f}"
    assert figure("accepted-length", "note") == f"tokens per round, {stats.num_rounds} rounds"
    assert figure("verified", "value") == str(stats.num_verified)
    assert figure("verified", "note") == f"{stats.verified_per_token:.2f} per token written"
    assert figure("acceptance-rate", "note") == f"{origins.count('accepted')} of {stats.num_drafted} drafts sent"
    with_draft = float(figure("tokens-per-s", "value"))
    without = float(figure("tokens-per-s", "note").split()[0])
    assert float(figure("speedup", "value")[:-1]) == pytest.approx(with_draft / without, rel=0.02, abs=0.01)

    page.wait_for_selector("#plot-slots svg path[aria-label]")
    bars = "id => Array.from(document.querySelectorAll(`#${id} svg path[aria-label]`), e => e.ariaLabel)"
    assert page.evaluate(bars, "plot-rounds") == [
        f"round: {row.round}; tokens: {row.tokens}; origin: {row.origin}"
        for row in tokens_per_round(result.dspark.rounds).itertuples()
    ]
    drawn = [re.findall(r"slot \d|[\d.]+(?=; rounds)|\d+$", bar) for bar in page.evaluate(bars, "plot-slots")]
    table = acceptance_by_slot(result.dspark.rounds)
    assert [(slot, round(float(rate), 2), int(count)) for slot, rate, count in drawn] == [
        (row.slot, round(row.accepted, 2), row.rounds) for row in table.itertuples()
    ]
    assert page.locator("#plot-confidence svg path[aria-label]").count() == 10


def test_confidence_is_shown_under_the_mouse(finished):
    page, result = finished
    token = next(token for token in result.dspark.tokens if token.origin == "accepted")
    marked = page.locator("#side-dspark .ds-accepted").first
    tip = "e => getComputedStyle(e, '::after').content"
    assert marked.evaluate(tip) == "none"
    marked.hover()
    place = f"round {token.round_index + 1} · slot {token.slot}"
    confidence = f"confidence {100 * token.confidence:.0f} %"
    assert marked.evaluate(tip).strip('"') == f"accepted draft · {place} · {confidence}"
    # The line stands inside the panel, at its foot.
    assert marked.evaluate("e => getComputedStyle(e, '::after').position") == "absolute"
    assert marked.evaluate("e => e.offsetParent.id") == "side-dspark"


def test_rounds_are_listed(finished):
    page, result = finished
    page.get_by_text("Round by round").click()
    expect(page.locator("#rounds tbody tr")).to_have_count(result.dspark.stats.num_rounds)


@pytest.mark.parametrize("phase", ["plain", "dspark"])
def test_stop_ends_the_run_and_frees_the_models(page, server, phase):
    server.pass_s = 0.05
    ask(page, num_new=300 if phase == "plain" else 100)
    page.wait_for_function(f"document.querySelectorAll('#side-{phase} .ds-tok').length >= 3")
    page.click("#stop")
    wait_for(page, "stopped")
    wait_for_free_models()
    states = [page.locator(f"#side-{side} .ds-head").get_attribute("data-state") for side in ("plain", "dspark")]
    assert states == (["stopped", "not run"] if phase == "plain" else ["finished", "stopped"])
    expect(page.locator("#stop")).to_be_disabled()
    # Nothing arrives late, and the next run works.
    page.wait_for_timeout(400)
    assert page.locator("#status .ds-status").get_attribute("data-phase") == "stopped"
    server.pass_s = 0.0
    ask(page, num_new=5)
    wait_for(page, "done")


def test_a_closed_page_frees_the_models(browser, server):
    server.pass_s = 0.1
    with visit(browser, server.url) as page:
        ask(page, num_new=300)
        page.wait_for_function("document.querySelectorAll('#side-plain .ds-tok').length >= 3")
    wait_for_free_models()  # half a minute earlier than the run would have ended
    server.pass_s = 0.0


def test_an_error_of_the_models_is_told_on_the_page(page, server):
    def fail(*_):
        raise RuntimeError("secret path")

    handle = server.draft.register_forward_pre_hook(fail)
    ask(page)
    expect(page.get_by_role("alert").filter(has_text="fault of the demo")).to_be_visible()
    handle.remove()
    assert "secret path" not in page.content()
    assert page.locator("#side-plain .ds-tok").count() == NUM_NEW
    expect(page.locator("#side-dspark .ds-head")).to_have_attribute("data-state", "stopped")
    ask(page, num_new=3)
    wait_for(page, "done")


def test_stop_in_the_line_leaves_it(page, server):
    server.pass_s = 0.05
    running = server.client().submit("abc", max_new_tokens=300, api_name="/compare")
    while not running.outputs():
        time.sleep(0.05)
    ask(page)
    wait_for(page, "waiting")
    page.click("#stop")
    wait_for(page, "stopped")
    running.cancel()
    server.pass_s = 0.0
    ask(page, num_new=3)
    wait_for(page, "done")
    expect(page.locator("#status")).to_contain_text("(3 tokens)")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [("x" * 5000, "too long for the demo: 5,000 characters"), ("x" * 500, "500 tokens, and at most"), ("", "Write a")],
)
def test_bad_prompts_are_refused_on_the_page(page, prompt, message):
    ask(page, prompt)
    error = page.get_by_role("alert").filter(has_text=message)
    expect(error).to_be_visible()
    expect(page.locator("#run")).to_be_enabled()
    assert page.locator("#side-plain .ds-tok").count() == 0
    ask(page, num_new=3)
    wait_for(page, "done")


def test_a_full_line_is_told_on_the_page(page, server):
    server.pass_s = 0.05
    running = server.client().submit("abc", max_new_tokens=300, api_name="/compare")
    while not running.outputs():
        time.sleep(0.05)
    waiting = server.client().submit("abc", max_new_tokens=1, api_name="/compare")
    while len(server.demo._queue) < 1:
        time.sleep(0.02)
    ask(page)
    expect(page.get_by_role("alert").filter(has_text="The line is full")).to_be_visible()
    running.cancel()
    server.pass_s = 0.0
    waiting.result(timeout=30)
    ask(page, num_new=3)
    wait_for(page, "done")


def test_sampled_texts_are_not_called_wrong(page):
    page.get_by_label("Sampling").check()
    page.get_by_label("number input for Temperature").fill("2")
    page.get_by_label("number input for Temperature").press("Tab")
    ask(page)
    wait_for(page, "done")
    expect(page.locator("#status")).to_contain_text("both follow the target's distribution")


def test_a_phone_shows_everything_without_scrolling_sideways(browser, server):
    server.pass_s = 0.0
    with visit(browser, server.url, width=390) as page:
        ask(page)
        wait_for(page, "done")
        page.wait_for_selector("#plot-slots svg path[aria-label]")
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        boxes = [page.locator(f"#{name}").bounding_box() for name in ("run", "stop", "side-plain", "side-dspark")]
        assert all(box["x"] >= 0 and box["x"] + box["width"] <= 390 for box in boxes)
        assert boxes[3]["y"] > boxes[2]["y"] + boxes[2]["height"]  # below, not beside


@pytest.mark.parametrize("color_scheme", ["light", "dark"])
def test_texts_are_readable(browser, server, color_scheme):
    server.pass_s = 0.0
    with visit(browser, server.url, color_scheme=color_scheme) as page:
        ask(page)
        wait_for(page, "done")
        contrasts = page.evaluate(CONTRASTS)
        kinds = {kind for kind, _ in contrasts}
        assert {"ds-tok ds-accepted", "ds-tok ds-correction", "ds-tok ds-bonus", "ds-card-note"} <= kinds
        assert {kind: round(ratio, 2) for kind, ratio in contrasts if ratio < 4.5} == {}
        # Not by colour alone: the lines under the tokens differ too.
        style = "kind => getComputedStyle(document.querySelector(`#side-dspark .ds-${kind}`)).borderBottomStyle"
        lines = [page.evaluate(style, kind) for kind in ("accepted", "correction", "bonus", "plain")]
        assert lines == ["solid", "dashed", "double", "dotted"]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def served_by_the_app_file():
    ensure_default_target()
    port = free_port()
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "demo" / "app.py"), "--port", str(port)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            assert process.poll() is None, process.stdout.read()
            try:
                urllib.request.urlopen(url, timeout=5).close()
                break
            except OSError:
                time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.communicate(timeout=30)


def test_the_app_file_serves_the_default_pair(browser):
    with served_by_the_app_file() as url, visit(browser, url) as page:
        page.set_default_timeout(120_000)
        expect(page.locator(".ds-facts")).to_contain_text("smollm2-135m-instruct")
        ask(page, "What is 7 times 8? Answer in one sentence.", num_new=20)
        wait_for(page, "done")
        status = page.locator("#status")
        expect(status).to_contain_text(re.compile("identical, token by token|In bfloat16 a pass over one token"))
        assert [page.locator(f"#side-{side} .ds-tok").count() > 5 for side in ("plain", "dspark")] == [True, True]
        assert page.locator("#side-dspark .ds-accepted").count() > 0
        assert float(page.inner_text('[data-figure="accepted-length"] .ds-card-value')) > 1
        assert page.problems == []
