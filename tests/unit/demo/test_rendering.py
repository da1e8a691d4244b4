# SPDX-License-Identifier: Apache-2.0
"""Records as HTML: escaped, marked by origin, and with the figures of the statistics."""

import re
from html import unescape
from html.parser import HTMLParser

import pytest

from dspark_hf import AcceptanceStats, RoundRecord
from dspark_hf.demo import rendering
from dspark_hf.demo.records import Progress, Side, Token, tokens_of_round
from dspark_hf.demo.settings import RunSettings


GREEDY = RunSettings("Hello")
SAMPLED = RunSettings("Hello", temperature=0.7)
ROUNDS = (
    RoundRecord(1, (5, 6, 7), (0.954, 0.5, 0.3), num_accepted=1, bonus_token=8, num_committed=2),
    RoundRecord(8, (5, 6), (0.9, 0.1), num_accepted=2, bonus_token=9, num_committed=3),
    RoundRecord(9, (), (), num_accepted=0, bonus_token=4, num_committed=1, drafted=False),
)
TEXTS = {5: " five", 6: "<b>", 7: "seven", 8: "&\n", 9: '"nine"', 4: "four", 3: "three"}


def dspark_side(finished=True):
    tokens = (Token(3, TEXTS[3]),)
    for index, record in enumerate(ROUNDS):
        ids = (*record.token_ids[: record.num_accepted], record.bonus_token)
        tokens += tokens_of_round(ids, tuple(TEXTS[i] for i in ids), record, index)
    return Side(tokens, 2.0, ROUNDS, finished)


def plain_side(side, seconds=3.5, finished=True):
    return Side(tuple(Token(t.token_id, t.text) for t in side.tokens), seconds, finished=finished)


def done(settings=GREEDY):
    return Progress(settings, plain_side(dspark_side()), dspark_side())


class Elements(HTMLParser):
    """(class, attributes, text) of every element, and whether the tags are balanced."""

    def __init__(self, html):
        super().__init__()
        self.found, self.open = [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.open.append([tag, attributes, ""])

    def handle_endtag(self, tag):
        opened, attributes, text = self.open.pop()
        assert opened == tag
        self.found.append((attributes.get("class", ""), attributes, text))
        if self.open:
            self.open[-1][2] += text

    def handle_data(self, data):
        if self.open:
            self.open[-1][2] += data


def elements(html, css_class):
    parser = Elements(html)
    assert parser.open == []
    return [element for element in parser.found if css_class in element[0].split()]


def test_tokens_are_marked_by_origin_and_carry_their_text():
    tokens = elements(rendering.side_text(done(), True), "ds-tok")
    assert [re.search("ds-(?!tok)(\\w+)", css_class)[1] for css_class, _, _ in tokens] == [
        "plain", "accepted", "correction", "accepted", "accepted", "bonus", "plain",
    ]  # fmt: skip
    assert [text for _, _, text in tokens] == ["three", " five", "&\n", " five", "<b>", '"nine"', "four"]


def test_what_models_write_is_escaped():
    html = (
        rendering.side_text(done(), True) + rendering.side_text(done(), False) + rendering.rounds_table(done(), TEXTS)
    )
    assert "<b>" not in html
    assert "&lt;b&gt;" in html
    assert "<script>" not in rendering.error_line("<script>") + rendering.header("<script>", ["<script>"])


def test_tips_name_origin_round_slot_and_confidence():
    tips = [attributes["data-tip"] for _, attributes, _ in elements(rendering.side_text(done(), True), "ds-tok")]
    assert tips == [
        "target alone · from reading the prompt",
        "accepted draft · round 1 · slot 0 · confidence 95 %",
        "target's correction · round 1 · slot 1 · confidence of the rejected draft 50 %",
        "accepted draft · round 2 · slot 0 · confidence 90 %",
        "accepted draft · round 2 · slot 1 · confidence 10 %",
        "target's bonus · round 2",
        "target alone · round 3",
    ]


def test_the_plain_text_has_no_marks():
    tokens = elements(rendering.side_text(done(), False), "ds-tok")
    assert {css_class for css_class, _, _ in tokens} == {"ds-tok ds-unmarked"}
    assert not any("data-tip" in attributes for _, attributes, _ in tokens)


def test_figures_are_those_of_the_statistics():
    stats = AcceptanceStats(list(ROUNDS))
    cards = {attributes["data-figure"]: text for _, attributes, text in elements(rendering.figures(done()), "ds-card")}
    assert cards == {
        "speedup": "Speed-up1.75×3.5 s without, 2.0 s with",
        "tokens-per-s": "Tokens per second3.52.0 without DSpark",
        "accepted-length": f"Accepted length{stats.accepted_length:.2f}tokens per round, 3 rounds",
        "verified": f"Verified tokens{stats.num_verified}{stats.verified_per_token:.2f} per token written",
        "acceptance-rate": "Drafts accepted60 %3 of 5 drafts sent",
        "copied": "Copied tokens0accepted, of 0 copied from the text",
    }
    assert (stats.accepted_length, stats.num_verified) == (2.0, 8)


def test_figures_of_an_unfinished_run_say_so():
    running = Progress(GREEDY, plain_side(dspark_side()), dspark_side(finished=False))
    assert "Speed-up so far" in rendering.figures(running)
    assert "–" in rendering.figures(None)


@pytest.mark.parametrize(
    ("progress", "phase", "words"),
    [
        (None, "idle", "Ready"),
        (Progress(GREEDY), "waiting", "one request at a time"),
        (Progress(GREEDY, Side()), "plain", "1 of 2 Writing without DSpark"),
        (Progress(GREEDY, plain_side(dspark_side()), Side()), "dspark", "2 of 2 Writing with DSpark"),
        (done(), "done", "identical, token by token (7 tokens)"),
        (done(SAMPLED), "done", "happen to be the same"),
        (Progress(GREEDY, stopped=True), "stopped", "before both sides had written"),
        (Progress(GREEDY, Side(dspark_side().tokens[:3]), dspark_side(), True), "stopped", "first 3 tokens of both"),
    ],
)
def test_status_says_which_side_runs_and_how_it_ended(progress, phase, words):
    ((_, attributes, text),) = elements(rendering.status_line(progress, "bfloat16"), "ds-status")
    assert (attributes["data-phase"], attributes["role"]) == (phase, "status")
    assert words in text


def different(settings):
    plain = plain_side(dspark_side())
    tokens = (*plain.tokens[:2], Token(50, "other"), *plain.tokens[3:])
    return Progress(settings, Side(tokens, 3.5, finished=True), dspark_side())


@pytest.mark.parametrize(
    ("settings", "dtype", "tone", "words"),
    [
        (GREEDY, "bfloat16", "differs", "part at token 3, outlined in both. In bfloat16"),
        (GREEDY, "float32", "error", "please report"),
        (SAMPLED, "bfloat16", "sampled", "both follow the target's distribution"),
    ],
)
def test_different_texts_are_explained(settings, dtype, tone, words):
    ((_, attributes, text),) = elements(rendering.status_line(different(settings), dtype), "ds-status")
    assert attributes["data-tone"] == tone
    assert words in text


def test_the_first_difference_is_outlined_on_both_sides():
    for with_draft, text in ((False, "other"), (True, "&\n")):
        outlined = elements(rendering.side_text(different(GREEDY), with_draft), "ds-differs")
        assert [found for _, _, found in outlined] == [text]
    assert elements(rendering.side_text(done(), True), "ds-differs") == []


@pytest.mark.parametrize(
    ("progress", "states"),
    [
        (None, ["idle", "idle"]),
        (Progress(GREEDY), ["waiting", "waiting"]),
        (Progress(GREEDY, Side()), ["running", "waiting"]),
        (Progress(GREEDY, plain_side(dspark_side()), Side()), ["finished", "running"]),
        (done(), ["finished", "finished"]),
        (Progress(GREEDY, Side(), stopped=True), ["stopped", "not run"]),
        (Progress(GREEDY, plain_side(dspark_side()), Side(), stopped=True), ["finished", "stopped"]),
    ],
)
def test_headings_say_what_each_side_is_doing(progress, states):
    heads = [elements(rendering.side_title(progress, with_draft), "ds-head")[0] for with_draft in (False, True)]
    assert [attributes["data-state"] for _, attributes, _ in heads] == states


def test_the_table_of_rounds_shows_the_fate_of_every_draft():
    html = rendering.rounds_table(done(), TEXTS)
    fates = [attributes["data-fate"] for _, attributes, _ in elements(html, "ds-draft")]
    assert fates == ["accepted", "rejected", "not reached", "accepted", "accepted"]
    assert unescape(html).count("␣five") == 2
    assert "not drafted" in html
    assert "&amp;↵" in html


def test_the_legend_explains_every_mark():
    assert [text for _, _, text in elements(rendering.legend(), "ds-tok")] == [
        "accepted draft", "accepted copy", "target's correction", "target's bonus", "target alone",
    ]  # fmt: skip
