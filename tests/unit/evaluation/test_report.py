# SPDX-License-Identifier: Apache-2.0
"""What an evaluation writes: every figure in JSON and CSV, and a page that needs nothing else and runs nothing."""

import csv
import io
import json
import re
import sys
from html.parser import HTMLParser

import pytest

from dspark_hf.evaluation.drafters import ALL_SLOTS, Drafter, LoadedDrafter
from dspark_hf.evaluation.evaluate import Settings
from dspark_hf.evaluation.intervals import Interval
from dspark_hf.evaluation.report import as_html, check_can_report, write_report, write_tensorboard
from dspark_hf.evaluation.summary import interval_text, summarize_runs, verdict
from dspark_hf.evaluation.tasks import Question, TaskData
from tests.unit.evaluation.test_statistics import draft_run, plain_run, record


HOSTILE = '<script>alert("x")</script> & $\\frac{'
SETTINGS = Settings(
    target="a/target",
    weights={},
    tasks={},
    drafters=[],
    temperatures=[0.0, 1.0],
    top_p=1.0,
    max_new_tokens=16,
    seed=0,
    raw=False,
    enable_thinking=None,
    template_sha256="",
    dtype="bfloat16",
    device="cpu",
    num_threads=1,
    versions={"torch": "2"},
)
NUM_QUESTIONS = 12


def make_evaluation(
    prompt="What?", name="draft", sends_every_slot=True, refused=False, settings=SETTINGS, path="a/draft"
):
    """Two tasks of twelve questions, greedy and sampled; the last greedy answer differs at token 2."""
    runs, questions = [], {"math": [], "code": []}
    for task, found in questions.items():
        for index in range(NUM_QUESTIONS):
            found.append(Question(task, index, (f"{prompt} {task} {index}",)))
            for decoding in ("greedy", "temperature 1"):
                accepted = 1 + (index + len(task)) % 2
                rounds = [record(2, accepted, confidence=(0.9, 0.3)), record(2, 0, confidence=(0.4, 0.8))]
                ours = draft_run(index, rounds, [1.0, 2.0, 3.0], seconds=2.0 + index % 3, task=task, decoding=decoding)
                tokens = list(ours.token_ids)
                if (task, index, decoding) == ("code", NUM_QUESTIONS - 1, "greedy"):
                    tokens[2] += 50
                plain = plain_run(index, len(tokens), task=task, decoding=decoding, tokens=tokens)
                runs += [plain, ours.__class__(**(vars(ours) | {"drafter": name}))]
    drafters = [
        LoadedDrafter(Drafter("plain", "plain")),
        LoadedDrafter(Drafter(name, "draft", path, ALL_SLOTS), num_slots=2, sends_every_slot=sends_every_slot),
    ]
    if refused:
        drafters.append(LoadedDrafter(Drafter("mtp", "mtp"), refusal="This target has <none>."))
    tasks = [TaskData(task, tuple(found), 40) for task, found in questions.items()]
    return summarize_runs(runs, settings, tasks, drafters)


@pytest.fixture(scope="module")
def evaluation():
    return make_evaluation()


class Page(HTMLParser):
    """Elements with their attributes, and the texts between them."""

    def __init__(self, html):
        super().__init__()
        self.elements, self.texts = [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.texts.append(data)

    def named(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def rows_of(path):
    return list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"))))


def test_there_is_a_figure_for_each_decoding_task_and_drafter(evaluation):
    cells = [(entry.decoding, entry.task, entry.drafter) for entry in evaluation.figures]
    assert len(cells) == len(set(cells)) == 2 * 3 * 2
    assert ("temperature 1", "all", "draft") in cells
    pooled = next(e for e in evaluation.figures if (e.decoding, e.task, e.drafter) == ("greedy", "all", "draft"))
    assert (pooled.num_questions, pooled.num_different) == (24, 1)
    assert pooled.accepted_length.low < pooled.accepted_length.value < pooled.accepted_length.high
    assert {entry.drafter for entry in evaluation.worst} == {"draft"}
    assert len(evaluation.worst[0].questions) == 3  # a tenth of 24, rounded up
    assert len(evaluation.questions) == 2 * 2 * 24


def test_files_hold_the_figures(evaluation, tmp_path):
    files = write_report(evaluation, tmp_path)
    assert [path.name for path in files] == ["report.json", "summary.csv", "prompts.csv", "report.html"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in files)
    text = (tmp_path / "report.json").read_text()
    assert "NaN" not in text
    found = json.loads(text)
    assert found["settings"]["target"] == "a/target"
    entry = evaluation.figures[1]
    assert found["figures"][1]["accepted_length"]["value"] == entry.accepted_length.value
    assert found["figures"][0]["acceptance_rate"]["value"] is None  # plain generation drafts nothing
    rows = rows_of(tmp_path / "summary.csv")
    assert len(rows) == len(evaluation.figures)
    assert float(rows[1]["speedup"]) == entry.speedup.value
    assert float(rows[1]["accepted_length_low"]) == entry.accepted_length.low
    assert rows[0]["acceptance_rate"] == ""
    prompts = rows_of(tmp_path / "prompts.csv")
    assert len(prompts) == len(evaluation.questions)
    assert [row["first_difference"] for row in prompts if row["first_difference"]] == ["2"]
    assert prompts[0]["prompt"] == "What? math 0"


def test_the_page_needs_nothing_else(evaluation):
    html = as_html(evaluation)
    page = Page(html)
    assert len(page.named("img")) == 4 + 2  # and a reliability diagram for each decoding
    assert all(image["src"].startswith("data:image/svg+xml;base64,") for image in page.named("img"))
    assert all(image["alt"] for image in page.named("img"))
    assert not page.named("link")
    assert not page.named("script")
    assert "http" not in re.sub(r'"data:[^"]*"', "", html)
    texts = " ".join(page.texts)
    for part in ("the target's own token included", "whole answers", "bfloat16", "code 11", "Threshold sweep"):
        assert part in texts
    assert "may part where two tokens" in texts
    assert {
        "Evaluation of a/target",
        "a/draft",
        "num_assistant_tokens_schedule=constant prompt_lookup_num_tokens=0 ",
    } <= set(page.texts)
    assert "None" not in " ".join(page.texts[: page.texts.index("Figures")])  # knobs that are unset


@pytest.fixture(scope="module")
def hostile_folder(tmp_path_factory):
    """The report of an evaluation in float32 whose prompts and names are made to break it."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "my-model").mkdir()
    path = str(folder / "my-model")
    exact = Settings(**(vars(SETTINGS) | {"dtype": "float32", "target": path}))
    evaluation = make_evaluation("=1+1" + HOSTILE, HOSTILE, False, refused=True, settings=exact, path=path)
    write_report(evaluation, folder)
    return folder


def test_texts_of_others_stay_texts(hostile_folder):
    page = Page((hostile_folder / "report.html").read_text(encoding="utf-8"))
    assert not page.named("script")
    assert not page.named("none")
    assert any(HOSTILE in text for text in page.texts)
    assert any("does not apply: This target has <none>." in text for text in page.texts)


def test_the_page_shows_no_path_of_this_machine(hostile_folder):
    html = (hostile_folder / "report.html").read_text(encoding="utf-8")
    assert str(hostile_folder) not in html
    assert html.count("Evaluation of my-model") == 2
    assert '<td class="text">my-model</td>' in html
    found = json.loads((hostile_folder / "report.json").read_text())
    assert found["settings"]["target"] == str(hostile_folder / "my-model")  # what it was made with


def test_cells_are_no_formulas(hostile_folder):
    assert {row["prompt"][:6] for row in rows_of(hostile_folder / "prompts.csv")} == {"'=1+1<"}


def test_float32_promises_more(hostile_folder):
    html = (hostile_folder / "report.html").read_text(encoding="utf-8")
    assert "In float32 the texts should be the same" in html
    assert "may part" not in html


def test_confidences_are_judged_where_every_slot_was_sent(evaluation):
    assert [(entry.decoding, entry.num_rounds) for entry in evaluation.confidence] == [
        ("greedy", 48),
        ("temperature 1", 48),
    ]
    assert make_evaluation(sends_every_slot=False).confidence == ()


def test_without_confidences_the_page_says_how_to_get_them(hostile_folder):
    html = (hostile_folder / "report.html").read_text(encoding="utf-8")
    assert "<code>num_assistant_tokens_schedule=constant</code>" in html
    assert "Threshold sweep" not in html


def test_sentences_say_what_the_intervals_allow(evaluation):
    sentences = evaluation.sentences()
    assert len(sentences) == 2  # one for each decoding
    speedup = r"1\.\d\d \[1\.\d\d, \d\.\d\d\]"
    assert re.fullmatch(
        rf"draft, greedy, speed-up: whole answers {speedup}, faster than plain generation\.", sentences[0]
    )
    assert verdict(Interval(1.2, 1.1, 1.3)) == "faster than plain generation"
    assert verdict(Interval(0.8, 0.7, 0.9)) == "slower than plain generation"
    assert verdict(Interval(1.2, 0.9, 1.5)) == "no difference shown"
    assert verdict(Interval(1.2)) == "too few questions to say"
    assert interval_text(Interval(1.234, 1.1, 1.3)) == "1.23 [1.10, 1.30]"
    assert interval_text(Interval(1.234)) == "1.23"
    assert interval_text(Interval(float("nan"))) == "-"


def test_tensorboard_gets_the_figures(evaluation, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_tensorboard(evaluation, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft", "plain"]
    events = EventAccumulator(str(tmp_path / "draft"))
    events.Reload()
    entry = next(e for e in evaluation.figures if (e.decoding, e.task, e.drafter) == ("greedy", "code", "draft"))
    (scalar,) = events.Scalars("accepted_length/code/greedy")
    assert scalar.value == pytest.approx(entry.accepted_length.value)


def test_missing_libraries_are_named_before_the_work(monkeypatch, tmp_path):
    check_can_report(tmp_path)
    for library, extra in (("matplotlib", "eval"), ("jinja2", "eval"), ("tensorboard", "train")):
        with monkeypatch.context() as without:
            without.setitem(sys.modules, library, None)
            with pytest.raises(RuntimeError, match=rf'needs {library}.*pip install "dspark-hf\[{extra}\]"'):
                check_can_report(tmp_path)
