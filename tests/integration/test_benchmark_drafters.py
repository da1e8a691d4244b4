# SPDX-License-Identifier: Apache-2.0
"""benchmarks/drafters.py on a tiny target: its figures by hand, a whole run, and that run once more."""

import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest

from dspark_hf.training.run import DraftArguments
from tests.integration.test_training_resume import target_without_mask
from tests.support.training import greedy_sequences, word_tokenizer, words


SCRIPT = Path(__file__).parents[2] / "benchmarks" / "drafters.py"
TRAINING = ["--block_size", 3, "--num_taps", 2, "--markov_rank", 8, "--num_anchors", 6, "--held_out", 0.2]
TRAINING += ["--use_cpu", "--disable_tqdm", "true", "--learning_rate", 3e-3]


@pytest.fixture(scope="module")
def drafters():
    spec = importlib.util.spec_from_file_location("benchmark_drafters", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


# One prompt of two rounds, one of a single round: (drafts sent, accepted, committed).
SHORT = ((3, 3, 4), (3, 0, 1))
LONG = ((3, 1, 2),)


def test_figures_by_hand(drafters):
    """7 tokens in 3 rounds; slot 0 accepted in 2 of 3, slot 1 in 1 of 2, slot 2 in 1 of 1."""
    found = drafters.figures(drafters.Measurement((SHORT, LONG)))
    assert (found["num_prompts"], found["num_rounds"]) == (2, 3)
    assert found["accepted_length"] == pytest.approx(7 / 3)
    assert found["conditional_acceptance"] == pytest.approx([2 / 3, 1 / 2, 1])
    assert found["num_reached"] == [3, 2, 1]
    # 5 tokens where 2 rounds promise 14 / 3, 2 where one promises 7 / 3: off by 1/3 each.
    assert found["standard_error"] == pytest.approx(math.sqrt(2 / 1 * (1 / 9 + 1 / 9)) / 3)


def test_pool_is_over_rounds(drafters):
    both = drafters.pooled([drafters.Measurement((SHORT,)), drafters.Measurement((LONG,))])
    assert both == drafters.Measurement((SHORT, LONG))


def test_one_prompt_has_no_error_and_no_round_no_length(drafters):
    assert drafters.figures(drafters.Measurement((SHORT,)))["standard_error"] is None
    assert drafters.figures(drafters.Measurement(((), ())))["accepted_length"] is None


def test_configurations(drafters):
    base = DraftArguments(block_size=5, target_layer_start=True)
    dflash, rnn = (drafters.draft_arguments_of(name, base) for name in ("dflash-4", "rnn-1"))
    assert (dflash.markov_rank, dflash.confidence_head, dflash.draft_num_layers) == (0, False, 4)
    assert (rnn.markov_rank, rnn.markov_head_type, rnn.draft_num_layers) == (256, "rnn", 1)
    assert {(draft.block_size, draft.target_layer_start) for draft in (dflash, rnn)} == {(5, True)}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A target, its answers, and prompts of two domains."""
    folder = tmp_path_factory.mktemp("inputs")
    target = target_without_mask()
    target.save_pretrained(folder / "target")
    word_tokenizer().save_pretrained(folder / "target")
    rows = [{"prompt_ids": q.input_ids[:5], "answer_ids": q.input_ids[5:]} for q in greedy_sequences(target, 6)]
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for domain, first in (("math", 10), ("chat", 40)):
        prompts = [{"turns": [words(first + i)]} for i in range(3)]
        (folder / f"{domain}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    return folder


def run(drafters, inputs, output, steps=2, max_new_tokens=8):
    prompts = [f"{domain}={inputs / domain}.jsonl" for domain in ("math", "chat")]
    arguments = ["--target", inputs / "target", "--dtype", "float32", "--data", inputs / "answers.jsonl"]
    arguments += ["--prompts", *prompts, "--num-prompts", 2, "--max-new-tokens", max_new_tokens, "--steps", steps]
    arguments += ["--configs", "dflash-1", "markov-1", "--output", output, *TRAINING]
    drafters.main([str(argument) for argument in arguments])
    return json.loads((output / "results.json").read_text())


@pytest.fixture(scope="module")
def first(drafters, inputs, tmp_path_factory):
    output = tmp_path_factory.mktemp("drafters")
    return output, run(drafters, inputs, output)


def test_every_cell_is_measured(first):
    _, results = first
    assert list(results["drafts"]) == ["dflash-1", "markov-1"]
    for draft in results["drafts"].values():
        assert draft["held_out"]["eval_accepted_length"] >= 1
        for cells in draft["acceptance"].values():
            assert list(cells) == ["math", "chat", "all"]
            for cell in cells.values():
                assert 1 <= cell["accepted_length"] <= 4
                assert len(cell["conditional_acceptance"]) == 3
            assert cells["all"]["num_rounds"] == cells["math"]["num_rounds"] + cells["chat"]["num_rounds"]
            assert [cell["num_prompts"] for cell in cells.values()] == [2, 2, 4]
    sizes = [draft["num_parameters"] for draft in results["drafts"].values()]
    assert sizes[1] - sizes[0] == 2 * 97 * 8 + 32 + 8 + 1  # the Markov head's two matrices, and the confidence head


def test_tables_and_plot(first):
    output, results = first
    text = (output / "results.md").read_text()
    assert (
        "| draft | million parameters | held out | greedy: math | greedy: chat | greedy: all | T = 1: math |" in text
    )
    cell = results["drafts"]["markov-1"]["acceptance"]["1"]["all"]
    assert f"| {cell['accepted_length']:.2f} ± {cell['standard_error']:.2f} |\n" in text
    rates = " | ".join(f"{rate:.2f}" if rate is not None else "-" for rate in cell["conditional_acceptance"])
    assert f"| markov-1 | T = 1 | {rates} |" in text
    plot = (output / "suffix_decay.svg").read_text()
    assert "<svg" in plot
    assert not list(output.rglob("*.tmp"))


def test_same_command_does_nothing_twice(drafters, inputs, first):
    output, results = first
    kept = [*output.glob("*/model.safetensors"), *output.glob("*/measured.json")]
    assert len(kept) == 4
    times = [path.stat().st_mtime_ns for path in kept]
    assert run(drafters, inputs, output) == results
    assert [path.stat().st_mtime_ns for path in kept] == times
    longer = run(drafters, inputs, output, max_new_tokens=12)  # measured anew, not trained anew
    assert longer["drafts"]["markov-1"]["held_out"] == results["drafts"]["markov-1"]["held_out"]
    assert longer["drafts"]["markov-1"]["acceptance"] != results["drafts"]["markov-1"]["acceptance"]


def test_other_training_settings_are_refused(drafters, inputs, first):
    with pytest.raises(SystemExit, match=r"trained with other settings \(steps\). Choose another `--output`"):
        run(drafters, inputs, first[0], steps=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--configs", "tree-2"], "dflash, markov, gated, rnn, a dash and a number of layers, got 'tree-2'"),
        (["--configs", "markov-0"], "got 'markov-0'"),
        (["--prompts", "gsm8k.jsonl"], "must be DOMAIN=FILE"),
        (["--steps", "0"], "`--steps` must be >= 1, got 0"),
    ],
)
def test_unusable_options(drafters, capsys, options, message):
    given = ["--data", "a.jsonl", "--output", "out", "--prompts", "math=a.jsonl", *options]
    with pytest.raises(SystemExit, match="2"):
        drafters.parse_arguments(given)
    assert message in capsys.readouterr().err
