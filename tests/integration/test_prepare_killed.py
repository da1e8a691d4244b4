# SPDX-License-Identifier: Apache-2.0
"""A process that writes answers is killed by the system; the same command goes on."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import torch

from dspark_hf.training.answers import PrepareSettings, PromptRow, write_answers
from dspark_hf.training.sampling import SamplingSettings
from tests.support.models import tiny_target
from tests.support.training import word_tokenizer, words


ROOT = Path(__file__).parents[2]
SETTINGS = PrepareSettings("tiny", SamplingSettings(max_new_tokens=9, temperature=0))
PROMPTS = [PromptRow(({"role": "user", "content": words(*range(10, 12 + i % 5), 40 + i)},)) for i in range(17)]


def write(path, on_row=None):
    target = tiny_target(context_scale=0.2)
    target.generation_config.eos_token_id = list(range(70, 90))  # answers of many lengths
    return write_answers(target, word_tokenizer(), PROMPTS, path, SETTINGS, num_rows=5, on_row=on_row)


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from tests.integration.test_prepare_killed import write

count = 0

def kill(row):
    global count
    count += 1
    if count == 6:
        os.kill(os.getpid(), signal.SIGKILL)

write(Path(sys.argv[1]), kill)
"""


def test_no_answer_is_lost_or_written_twice(tmp_path):
    path = tmp_path / "answers.jsonl"
    result = subprocess.run(
        [sys.executable, "-c", KILLED, str(path)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == -signal.SIGKILL, result.stderr
    before = path.read_bytes()
    assert len(before.splitlines()) == 6
    assert write(path) == 11
    assert path.read_bytes().startswith(before)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted(row["key"] for row in rows) == sorted(prompt.key for prompt in PROMPTS)
    assert len({len(row["answer_ids"]) for row in rows}) > 2
    target = tiny_target(context_scale=0.2)
    for row in rows:
        ids = torch.tensor([row["prompt_ids"]])
        text = target.generate(ids, do_sample=False, max_new_tokens=9, eos_token_id=list(range(70, 90)) + [2])
        assert row["answer_ids"] == text[0, ids.shape[1] :].tolist()
