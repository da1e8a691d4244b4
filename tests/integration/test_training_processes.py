# SPDX-License-Identifier: Apache-2.0
"""Two processes on one global batch train what one process trains; none waits for the other forever."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dspark_hf.training import DSparkTrainingArguments
from dspark_hf.training.dataset import SequenceDataset, TrainingSequence
from dspark_hf.training.run import DataArguments, DraftArguments, train_draft
from tests.integration.test_training_resume import DRAFT, target_without_mask
from tests.support.closeness import TRAINED, assert_close
from tests.support.models import random_draft, random_prompt
from tests.support.training import greedy_sequences, losses, trainer_for, word_tokenizer


ROOT = Path(__file__).parents[2]
TIME_LIMIT_S = 240
# Of 7 held-out rows in batches of 2 by 2, the last is short of one: the second process repeats a row.
NUM_TRAIN, NUM_HELD_OUT = 12, 7


def without_answers(data: SequenceDataset, rows: list[int]) -> SequenceDataset:
    """Some rows have no token to learn from."""
    for row in rows:
        ids = data.sequences[row].input_ids
        data.sequences[row] = TrainingSequence(ids, len(ids))
    return data


def outcome(trainer):
    return {"losses": losses(trainer), "log": trainer.state.log_history}


def run_grouped(folder, target, sequences, rows):
    """Rows of different lengths, grouped, with accumulation and an evaluation whose last batch is not full."""
    trainer = trainer_for(
        folder,
        target,
        sequences,
        max_steps=4,
        per_device_train_batch_size=rows,
        per_device_eval_batch_size=rows,
        gradient_accumulation_steps=2,
    )
    trainer.eval_dataset = SequenceDataset(sequences[:NUM_HELD_OUT], 512)
    trainer.train()
    figures = trainer.evaluate()
    trainer.save_model()
    return outcome(trainer) | {"figures": figures}


def run_idle(folder, target, sequences, rows, idle=(2, 3)):
    """The rows of the second process have nothing to learn from, in every step."""
    data = without_answers(SequenceDataset(sequences[:4], 512), list(idle))
    trainer = trainer_for(
        folder,
        target,
        sequences[:4],
        random_draft(initializer_range=0.02, markov_head_type="gated"),
        train_dataset=data,
        max_steps=3,
        per_device_train_batch_size=rows,
        train_sampling_strategy="sequential",
    )
    trainer.train()
    trainer.save_model()
    return outcome(trainer)


def run_from_data(folder, target, sequences, rows):
    """Both processes want the same features at once."""
    data = folder / "answers.jsonl"
    arguments = DSparkTrainingArguments(
        output_dir=str(folder / "run"),
        max_steps=3,
        per_device_train_batch_size=rows,
        per_device_eval_batch_size=rows,
        learning_rate=3e-3,
        logging_steps=1,
        num_anchors=6,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    data_arguments = DataArguments([str(data)], held_out=0.27, feature_cache=str(folder / "features"))
    _, figures = train_draft(target, word_tokenizer(), data_arguments, DraftArguments(**DRAFT), arguments)
    return {"figures": figures}


def run_diverged(folder, target, sequences, rows):
    """The loss of the last process is infinite in the second step, that of the others is not."""
    trainer = trainer_for(folder, target, sequences, max_steps=4, per_device_train_batch_size=rows)
    right, rank = trainer.compute_loss, int(os.environ.get("RANK", "0"))

    def spoiled(*args, **kwargs):
        is_last = rank == int(os.environ.get("WORLD_SIZE", "1")) - 1
        return right(*args, **kwargs) * (float("inf") if trainer.state.global_step == 1 and is_last else 1)

    trainer.compute_loss = spoiled
    with pytest.raises(RuntimeError, match="must have finite figures, got loss .+ at step 2") as caught:
        trainer.train()
    return {"steps": trainer.state.global_step, "message": str(caught.value)}


RUNS = {"grouped": run_grouped, "idle": run_idle, "from_data": run_from_data, "diverged": run_diverged}


def run_all(folder, rows):
    """In every process alike; the main one writes down what came of it."""
    torch.set_num_threads(1)
    target = target_without_mask()
    sequences = greedy_sequences(target, NUM_TRAIN, shortest=10, step=2)
    for name, run in RUNS.items():
        result = run(folder / name, target, sequences, rows)
        if int(os.environ.get("RANK", "0")) == 0:
            (folder / name / "result.json").write_text(json.dumps(result))


# Threads of gloo that are still there when a process exits abort it now and then.
WORKER = """
import sys
from pathlib import Path
import torch
from tests.integration.test_training_processes import run_all

run_all(Path(sys.argv[1]), rows=2)
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


# The command makes a process group of its own, then runs in one of ours; what it leaves is said on standard output.
COMMAND_WORKER = """
import os
import sys
import torch
from dspark_hf.cli import app

torch.set_num_threads(1)
app(sys.argv[2:], standalone_mode=False)
print("group after the first run:", torch.distributed.is_initialized(), flush=True)
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=rank, world_size=size)
app([*sys.argv[2:], "--output_dir", sys.argv[1] + "/again"], standalone_mode=False)
print("group after the second run:", torch.distributed.is_initialized(), flush=True)
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


def prepare_folder(folder):
    for name in RUNS:
        (folder / name).mkdir(parents=True)
    write_answers(folder / "from_data" / "answers.jsonl")


def write_answers(path):
    sequences = greedy_sequences(target_without_mask(), NUM_TRAIN, shortest=10, step=2)
    # 8 rows to train on: accelerate fills up the last training batch of an epoch with rows from the start.
    rows = [{"prompt_ids": q.input_ids[:5], "answer_ids": q.input_ids[5:]} for q in sequences[:11]]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def launch(folder, worker, *arguments):
    """Two processes, over gloo; what they wrote."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("needs a torch with gloo")
    script = folder / "worker.py"
    script.write_text(worker)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    log = folder / "log.txt"
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, str(folder), *map(str, arguments)],
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=file,
        )
        try:
            code = process.wait(TIME_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # which ends the workers, too: they have sessions of their own
            process.wait(60)
            pytest.fail(f"still running after {TIME_LIMIT_S} s\n" + log.read_text()[-3000:])
    assert code == 0, log.read_text()[-5000:]
    return log.read_text()


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """One process, 4 rows at a time."""
    folder = tmp_path_factory.mktemp("one")
    prepare_folder(folder)
    run_all(folder, rows=4)
    return folder


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two processes, 2 rows each, over gloo."""
    folder = tmp_path_factory.mktemp("two")
    prepare_folder(folder)
    launch(folder, WORKER)
    return folder


def result(folder, name):
    return json.loads((folder / name / "result.json").read_text())


def assert_same_weights(one, two):
    ours, theirs = load_file(two / "model.safetensors"), load_file(one / "model.safetensors")
    assert_close(ours, theirs, TRAINED)


def test_two_processes_train_what_one_trains(one, two):
    ours, theirs = result(two, "grouped"), result(one, "grouped")
    assert len(ours["losses"]) == 4
    assert_close(ours["losses"], theirs["losses"])
    assert_same_weights(one / "grouped", two / "grouped")


def test_figures_are_those_of_all_processes(one, two):
    ours, theirs = ([entry for entry in result(folder, "grouped")["log"] if "loss" in entry] for folder in (two, one))
    for entry, other in zip(ours, theirs, strict=True):
        for name in ("accepted_length", "cross_entropy", "total_variation", "confidence_error", "acceptance_rate_0"):
            assert_close(entry[name], other[name])


@pytest.mark.parametrize("name", ["grouped", "from_data"])
def test_rows_that_fill_up_the_last_batch_count_once(one, two, name):
    ours, theirs = result(two, name)["figures"], result(one, name)["figures"]
    compared = [key for key in theirs if key.startswith("eval_") and not key.endswith(("time", "per_second"))]
    assert {"eval_loss", "eval_accepted_length", "eval_acceptance_rate_3"} <= set(compared)
    for key in compared:
        assert_close(ours[key], theirs[key])


def test_process_without_an_anchor_does_not_hang(one, two):
    ours, theirs = result(two, "idle"), result(one, "idle")
    assert_close(ours["losses"], theirs["losses"])
    assert_same_weights(one / "idle", two / "idle")


def test_processes_share_one_feature_cache(one, two):
    assert_same_weights(one / "from_data" / "run", two / "from_data" / "run")
    names = [sorted(path.name for path in (f / "from_data" / "features" / "train").iterdir()) for f in (one, two)]
    assert names[0] == names[1] == [".lock", "features-00000.safetensors", "manifest.json"]


def test_step_in_which_nobody_has_an_anchor(tmp_path):
    """Nothing is learnt, and nothing becomes NaN."""
    target = target_without_mask()
    sequences = [TrainingSequence(tuple(random_prompt(9 + i, seed=i)[0].tolist()), 3) for i in range(4)]
    found = run_idle(tmp_path, target, sequences, 4, idle=(0, 1, 2, 3))
    assert found["losses"] == [0, 0, 0]
    assert all(torch.isfinite(value).all() for value in load_file(tmp_path / "model.safetensors").values())


def test_command_prints_once_and_leaves_no_group_of_its_own(tmp_path):
    target = tmp_path / "target"
    target_without_mask().save_pretrained(target)
    word_tokenizer().save_pretrained(target)
    write_answers(tmp_path / "answers.jsonl")
    draft = [text for name, value in DRAFT.items() for text in (f"--{name}", value)]
    options = ["--max_steps", 1, "--num_anchors", 6, "--save_strategy", "no", "--report_to", "none", "--use_cpu"]
    output = launch(
        *(tmp_path, COMMAND_WORKER, "train", "--target", target, "--data", tmp_path / "answers.jsonl"),
        *("--held_out", 0.27, "--disable_tqdm", "true", "--output_dir", tmp_path / "run", *draft, *options),
    )
    assert len(re.findall(r'(?m)^  "eval_loss": ', output)) == 2  # once a run, not once a process
    assert output.count("group after the first run: False\n") == 2
    assert output.count("group after the second run: True\n") == 2
    for name in ("run", "again"):
        figures = json.loads((tmp_path / name / "held_out.json").read_text())
        assert figures["eval_accepted_length"] >= 1


def test_all_processes_stop_when_one_diverges(one, two):
    for folder in (one, two):
        assert result(folder, "diverged")["steps"] == 1
