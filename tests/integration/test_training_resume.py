# SPDX-License-Identifier: Apache-2.0
"""From a data file to a draft with `train_draft`: killed runs go on as if nothing had happened, others are refused."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dspark_hf import DSparkDraftModel
from dspark_hf.training import DSparkTrainingArguments
from dspark_hf.training import run as module
from dspark_hf.training.run import DataArguments, DraftArguments, new_draft, read_sequences, train_draft
from tests.support.closeness import TRAINED, assert_close
from tests.support.models import tiny_target
from tests.support.scripted import captured_log
from tests.support.training import greedy_sequences, word_tokenizer


ROOT = Path(__file__).parents[2]
DRAFT = {"draft_num_layers": 1, "block_size": 4, "num_taps": 2, "markov_rank": 8}
# 11 training rows in steps of 4: 3 steps an epoch, 12 in all.
TRAINING = {
    "per_device_train_batch_size": 4,
    "num_train_epochs": 4,
    "learning_rate": 3e-3,
    "logging_steps": 1,
    "save_strategy": "steps",
    "save_steps": 2,
    "num_anchors": 6,
    "report_to": "none",
    "use_cpu": True,
    "disable_tqdm": True,
}


@torch.no_grad()
def target_without_mask():
    """Never writes the token that has no word, so that it can be the mask."""
    target = tiny_target(context_scale=0.3)
    target.lm_head.weight[96] = 0
    return target


@pytest.fixture(scope="module")
def target():
    return target_without_mask()


@pytest.fixture(scope="module")
def data(tmp_path_factory, target):
    """12 texts, as `dspark-hf prepare` writes them."""
    path = tmp_path_factory.mktemp("data") / "answers.jsonl"
    rows = [
        {"prompt_ids": list(q.input_ids[:5]), "answer_ids": list(q.input_ids[5:])}
        for q in greedy_sequences(target, 12, shortest=10, step=2)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(output, data, target, draft=None, data_arguments=None, **training):
    return train_draft(
        target,
        word_tokenizer(),
        DataArguments(data=[str(data)], **(data_arguments or {})),
        DraftArguments(**(DRAFT | (draft or {}))),
        DSparkTrainingArguments(output_dir=str(output), **(TRAINING | training)),
    )


def logged(output, step):
    """What every step up to a checkpoint logged."""
    state = json.loads((output / f"checkpoint-{step}" / "trainer_state.json").read_text())
    return [(e["step"], e["loss"], e["accepted_length"]) for e in state["log_history"] if "loss" in e]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, data, target):
    output = tmp_path_factory.mktemp("unbroken")
    draft, figures = run(output, data, target)
    return output, draft, figures


KILLED_RUN = """
import os, signal, sys
import torch
torch.set_num_threads(1)
from pathlib import Path
from tests.integration import test_training_resume as test
from dspark_hf.training import DSparkTrainer

output, data, step = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
right = DSparkTrainer.training_step

def killed(self, *args, **kwargs):
    if self.state.global_step == step:
        os.kill(os.getpid(), signal.SIGKILL)
    return right(self, *args, **kwargs)

DSparkTrainer.training_step = killed
test.run(output, data, test.target_without_mask())
"""


def test_killed_run_goes_on_bit_for_bit(tmp_path, data, target, unbroken):
    """Killed in the third epoch, one step after a checkpoint: that step is done again, with the same rows."""
    result = subprocess.run(
        [sys.executable, "-c", KILLED_RUN, str(tmp_path), str(data), "7"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [f"checkpoint-{i}" for i in (2, 4, 6)]
    assert not (tmp_path / "model.safetensors").exists()
    torch.rand(7)  # another state of the global stream than in the run that was killed
    draft, figures = run(tmp_path, data, target)
    output, expected, expected_figures = unbroken
    assert logged(tmp_path, 12) == logged(output, 12)
    assert [step for step, _, _ in logged(tmp_path, 12)] == list(range(1, 13))
    assert all(torch.equal(p, q) for p, q in zip(draft.parameters(), expected.parameters(), strict=True))
    same = [name for name in figures if not name.endswith(("runtime", "per_second"))]
    assert {name: figures[name] for name in same} == {name: expected_figures[name] for name in same}


@pytest.mark.parametrize("step", [4, 6])
def test_any_checkpoint_can_be_gone_on_from(tmp_path, data, target, unbroken, step):
    """In the second epoch, and at the border to the third."""
    shutil.copytree(unbroken[0] / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    run(tmp_path, data, target)
    assert logged(tmp_path, 12) == logged(unbroken[0], 12)


@pytest.mark.parametrize("state", [None, "", '{"global_step": 8, "log_his'])
def test_checkpoint_that_a_kill_cut_short_is_not_used(tmp_path, data, target, unbroken, state):
    shutil.copytree(unbroken[0] / "checkpoint-6", tmp_path / "checkpoint-6")
    shutil.copytree(unbroken[0] / "checkpoint-8", tmp_path / "checkpoint-8")
    (tmp_path / "checkpoint-best").mkdir()
    if state is None:
        (tmp_path / "checkpoint-8" / "trainer_state.json").unlink()
    else:
        (tmp_path / "checkpoint-8" / "trainer_state.json").write_text(state)
    run(tmp_path, data, target)
    assert logged(tmp_path, 12) == logged(unbroken[0], 12)


def test_finished_run_does_nothing_more(tmp_path, data, target, unbroken):
    shutil.copytree(unbroken[0], tmp_path, dirs_exist_ok=True)
    draft, figures = run(tmp_path, data, target)
    assert all(torch.equal(p, q) for p, q in zip(draft.parameters(), unbroken[1].parameters(), strict=True))
    assert figures["eval_loss"] == unbroken[2]["eval_loss"]


def test_what_a_run_leaves(data, target, unbroken):
    output, draft, figures = unbroken
    assert json.loads((output / "held_out.json").read_text()) == figures
    assert {"eval_loss", "eval_accepted_length", "eval_acceptance_rate_0", "eval_confidence_error"} <= set(figures)
    loaded = DSparkDraftModel.from_pretrained(output)
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in draft.state_dict().items())
    config = loaded.config
    assert (config.block_size, config.target_layer_ids, config.mask_token_id) == (4, [1, 2], 96)
    assert (config.hidden_size, config.vocab_size, config.num_target_layers) == (32, 97, 4)
    info = config.training_info
    assert info["num_sequences"] == 11
    assert info["data_files"] == ["answers.jsonl"]
    assert len(info["chat_template_sha256"]) == 64
    assert set(info["versions"]) == {"dspark_hf", "transformers", "torch"}
    assert "answers.jsonl" in (output / "config.json").read_text()
    assert str(data.parent) not in (output / "config.json").read_text()  # no path of this machine
    text = target.generate(torch.tensor([[9, 8, 7]]), assistant_model=loaded, do_sample=False, max_new_tokens=9)
    assert torch.equal(text, target.generate(torch.tensor([[9, 8, 7]]), do_sample=False, max_new_tokens=9))


@pytest.mark.parametrize(
    ("draft", "fields"),
    [
        ({"block_size": 5}, "block_size"),
        ({"markov_head_type": "gated"}, "markov_head_type"),
        ({"num_taps": 1}, "target_layer_ids"),
        ({"draft_num_layers": 2}, "layer_types, num_hidden_layers"),
        ({"confidence_head": False}, "confidence_head_with_markov, enable_confidence_head"),
    ],
)
def test_another_draft_in_the_same_folder_is_refused(tmp_path, data, target, unbroken, draft, fields):
    shutil.copytree(unbroken[0] / "checkpoint-4", tmp_path / "checkpoint-4")
    with pytest.raises(ValueError, match=r"holds a run with other settings: .+Choose another `output_dir`") as error:
        run(tmp_path, data, target, draft)
    for field in fields.split(", "):
        assert f"'{field}': " in str(error.value)


def test_other_data_in_the_same_folder_is_refused(tmp_path, data, target, unbroken):
    shutil.copytree(unbroken[0] / "checkpoint-4", tmp_path / "checkpoint-4")
    fewer = tmp_path / "answers.jsonl"
    fewer.write_text("".join(data.read_text().splitlines(keepends=True)[:10]))
    with pytest.raises(ValueError, match=r"'num_sequences': 11.+ got .+'num_sequences': 9"):
        run(tmp_path, fewer, target)


def test_moved_data_and_longer_training_go_on(tmp_path, data, target, unbroken):
    shutil.copytree(unbroken[0] / "checkpoint-12", tmp_path / "checkpoint-12")
    moved = shutil.copy(data, tmp_path / "moved.jsonl")
    run(tmp_path, moved, target, num_train_epochs=5, save_steps=1)
    assert logged(tmp_path, 15)[:12] == logged(unbroken[0], 12)


# Data


def test_same_rows_are_held_out_in_every_run(data):
    parts = [read_sequences(word_tokenizer(), DataArguments(data=[str(data)], held_out=0.25)) for _ in range(2)]
    assert parts[0] == parts[1]
    train, held_out = parts[0]
    assert (len(train), len(held_out)) == (9, 3)
    assert not set(train) & set(held_out)


@pytest.mark.parametrize("held_out", [0.0, 1.0, -0.1])
def test_share_held_out_must_be_a_share(data, held_out):
    with pytest.raises(ValueError, match=rf"`held_out` must lie in \(0, 1\), got {held_out}"):
        read_sequences(word_tokenizer(), DataArguments(data=[str(data)], held_out=held_out))


def test_one_row_cannot_be_split(tmp_path):
    path = tmp_path / "one.jsonl"
    path.write_text('{"prompt_ids": [5], "answer_ids": [6, 7]}\n')
    with pytest.raises(ValueError, match="1 sequences cannot be split into training and held-out ones. Add data"):
        read_sequences(word_tokenizer(), DataArguments(data=[str(path)]))


def test_data_of_another_target_is_refused(tmp_path, target):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt_ids": [5], "answer_ids": [6, 97, 8]}\n' * 3)
    with pytest.raises(ValueError, match="must lie below the target's vocabulary of 97, got 97. The data was made"):
        run(tmp_path / "out", path, target)


def test_sequences_without_an_anchor_are_counted(tmp_path, data, target):
    path = tmp_path / "rows.jsonl"
    short = '{"prompt_ids": [5, 6], "answer_ids": [7]}\n'
    path.write_text(data.read_text() + 2 * short)
    with captured_log() as messages:
        run(tmp_path / "out", path, target, max_steps=1)
    assert [m for m in messages if "left out" in m] == [
        "2 sequences are left out: too little of an answer within `max_length`."
    ]


# The draft


def test_reduced_vocabulary_from_the_answers(tmp_path, data, target):
    for train_lm_head in (False, True):
        output = tmp_path / str(train_lm_head)
        with captured_log() as messages:
            draft, _ = run(output, data, target, {"draft_vocab_size": 20, "train_lm_head": train_lm_head}, max_steps=2)
        assert re.fullmatch(r"The reduced vocabulary of 20 tokens covers \d+\.\d\d% of the answers\.", messages[0])
        ids = load_file(output / "model.safetensors")["d2t"] + torch.arange(20)
        assert 2 in ids.tolist()  # the end token
        assert torch.equal(draft.lm_head.weight.detach(), target.lm_head.weight[ids]) != train_lm_head


def test_reduced_vocabulary_holds_every_end(data):
    """The tokenizer's end token and all of those that `generate` stops at, though no answer has them."""
    target = target_without_mask()
    target.generation_config.eos_token_id = [91, 94]
    train, _ = read_sequences(word_tokenizer(), DataArguments(data=[str(data)]))
    draft = new_draft(target, word_tokenizer(), train, DraftArguments(**(DRAFT | {"draft_vocab_size": 5})))
    assert {2, 91, 94} <= set(draft.draft_token_ids().tolist())
    with pytest.raises(ValueError, match="`draft_vocab_size` must hold the 3 tokens that end an answer, got 2"):
        new_draft(target, word_tokenizer(), train, DraftArguments(**(DRAFT | {"draft_vocab_size": 2})))


@pytest.mark.parametrize("start", ["bigram_start", "target_layer_start"])
def test_warm_starts_are_options(data, target, start):
    train, _ = read_sequences(word_tokenizer(), DataArguments(data=[str(data)]))
    drafts = []
    for value in (False, True):
        torch.manual_seed(0)
        arguments = DraftArguments(**(DRAFT | {"bigram_start": False, "target_layer_start": False, start: value}))
        drafts.append(new_draft(target, word_tokenizer(), train, arguments))
    plain, warm = (dict(draft.named_parameters()) for draft in drafts)
    changed = {name.split(".")[0] for name in plain if not torch.equal(plain[name], warm[name])}
    assert changed == ({"markov_head"} if start == "bigram_start" else {"layers", "fc", "norm"})


def test_dflash_is_two_settings(tmp_path, data, target):
    draft, figures = run(tmp_path, data, target, {"markov_rank": 0, "confidence_head": False}, max_steps=2)
    assert draft.markov_head is None
    assert draft.confidence_head is None
    assert "eval_confidence_loss" not in figures


def test_mask_token_can_be_chosen(data, target):
    train, _ = read_sequences(word_tokenizer(), DataArguments(data=[str(data)]))
    draft = new_draft(target, word_tokenizer(), train, DraftArguments(**DRAFT, mask_token_id=0))
    assert draft.config.mask_token_id == 0


def test_features_are_kept_beside_the_run(tmp_path, data, target, unbroken, monkeypatch):
    """The same losses; a second run, after its checkpoints are gone, finds the features."""
    cache = tmp_path / "features"
    built = []
    right = module.FeatureCache

    def spy(*args):
        built.append(args[0].name)
        return right(*args)

    monkeypatch.setattr(module, "FeatureCache", spy)
    run(tmp_path / "one", data, target, data_arguments={"feature_cache": str(cache)})
    assert built == ["train", "held_out"]
    online, cached = logged(unbroken[0], 12), logged(tmp_path / "one", 12)
    assert_close([loss for _, loss, _ in cached], [loss for _, loss, _ in online], TRAINED)
    files = {path: path.stat().st_mtime_ns for path in cache.rglob("*.safetensors")}
    run(tmp_path / "two", data, target, data_arguments={"feature_cache": str(cache)})
    assert logged(tmp_path / "two", 12) == cached
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*.safetensors")} == files
