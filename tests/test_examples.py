# SPDX-License-Identifier: Apache-2.0
"""Every script in examples/ runs as a user would run it, on the default pair, with few tokens."""

import os
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from dspark_hf.default_pair import default_draft_path, ensure_default_target


ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# What each script must print besides the accepted length, as a regular expression.
EXPECTED = {
    "acceptance.py": r"(?m)^   0 +\d+ +[01]\.\d\d +[01]\.\d\d$",
    "batch.py": r"accepted length \d\.\d\d, \d\.\d\d drafts sent per row and round(?s:.*)\d+ tokens for 6 questions",
    "calibrate.py": r"(?m)^   0 +\d+\.\d\d +\d\.\d{3} +\d\.\d{3}",
    "chat.py": r"user: Name three fruits\.\nassistant: .+(?s:.*)\[[1-9]\d* of \d+ prompt tokens cached",
    "evaluate.py": r"builtin, dspark all slots: accepted length \d\.\d\d(?s:.*)dspark, greedy, speed-up: ",
    "export.py": r"deepspec: refused\. .*reduced voc(?s:.*)speculators: .*dspark_sts\.json(?s:.*)same tokens: yes",
    "generate.py": r"--- plain, 12 tokens in(?s:.*)--- with the draft, 12 tokens in(?s:.*)same text: (yes|no)",
    "own_pair.py": r"draft: 5 slots, reads target layers \[1, 8, 14, 20, 27\]",
    "quantized_target.py": r"target: Linear8bitLt layers, \d+ MB",
    "round_times.py": r"(?m)^ +5 +\d+\.\d +\d+\.\d +\d\.\d\d$",
    "sampling.py": r"--- seed 0\n(?s:.*)--- seed 1\n(?s:.*)seed 0 again gives the same text: yes",
    "streaming.py": r"\w+(?s:.*)\n---\n",
    "train_tiny.py": r"8 answers written(?s:.*)held-out answers: \d\.\d\d tokens per round(?s:.*)\n---\n",
}
SHORT = {
    "calibrate.py": ["--num-answers", "3"],
    "evaluate.py": ["--num-questions", "2"],
    "export.py": ["--repeats", "2"],
    "round_times.py": ["--repeats", "3"],
    "train_tiny.py": ["--num-answers", "8", "--max-steps", "3"],
}


@pytest.fixture(scope="module")
def pair():
    """Folders of the default pair, where the scripts look for it, so that the target is converted once at most."""
    return [str(ensure_default_target()), str(default_draft_path())]


def arguments_of(script, pair):
    own = pair if script.name == "own_pair.py" else SHORT.get(script.name, [])
    return [str(script), *own, "--max-new-tokens", "12"]


def test_every_example_is_known():
    assert [script.name for script in EXAMPLES] == sorted(EXPECTED)


def check_printed(script, printed):
    assert re.search(EXPECTED[script.name], printed), printed
    accepted_lengths = re.findall(r"accepted length:? (\d+\.\d\d)", printed)
    assert accepted_lengths
    assert all(1 <= float(length) <= 6 for length in accepted_lengths)  # 5 slots and the bonus token


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.name)
def test_example_runs(script, pair, monkeypatch, capsys):
    """In this process, which has imported what they import: half of their seconds would go into that."""
    if script.name == "quantized_target.py" and find_spec("bitsandbytes") is None:
        pytest.skip("needs bitsandbytes")
    monkeypatch.setattr(sys, "argv", arguments_of(script, pair))
    runpy.run_path(str(script), run_name="__main__")
    check_printed(script, capsys.readouterr().out)


def test_example_runs_in_a_process_of_its_own(pair):
    script = ROOT / "examples" / "generate.py"
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments_of(script, pair)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=900)
    assert "Traceback" not in result.stderr
    check_printed(script, result.stdout)


@pytest.mark.parametrize(("name", "arguments"), [("own_pair.py", []), ("export.py", ["--target"])])
def test_one_half_of_a_pair_is_refused(name, arguments, monkeypatch, capsys):
    script = ROOT / "examples" / name
    monkeypatch.setattr(sys, "argv", [str(script), *arguments, "only-a-target"])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(script), run_name="__main__")
    assert "give both, or neither" in capsys.readouterr().err


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.name)
def test_example_is_short_and_says_how_to_run_it(script):
    text = script.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 80
    assert f"\n    python examples/{script.name}" in text
    assert '"--max-new-tokens"' in text
