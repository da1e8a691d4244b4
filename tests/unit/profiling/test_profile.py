# SPDX-License-Identifier: Apache-2.0
"""Profiles: what they hold, when they are refused, and their files. Timing itself: test_measuring.py."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants as hub_constants

from dspark_hf import __version__
from dspark_hf.profiling import RoundTimeProfile, fingerprint, measure_profile, profile_path
from dspark_hf.profiling import automatic as profiling
from dspark_hf.profiling.fingerprint import setup
from dspark_hf.profiling.measure import MeasuredCurve
from dspark_hf.scheduling import SPSCurve
from tests.support.models import random_draft, tiny_target


@pytest.fixture(autouse=True)
def hub_home(tmp_path, monkeypatch):
    monkeypatch.setattr(hub_constants, "HF_HOME", str(tmp_path / "home"))


@pytest.fixture
def pair():
    return tiny_target(), random_draft()


def measured(context_length, verify_s=(1.0, 1.5, 3.0), draft_s=0.25, batch_tokens=(1, 2, 3)):
    spread = tuple((seconds - 0.125, seconds + 0.125) for seconds in verify_s)
    return MeasuredCurve(context_length, SPSCurve(batch_tokens, verify_s, draft_s), spread, (0.2, 0.3), 5)


def profile(pair=None, **changes):
    """A hand-made profile, of `pair` or of nothing."""
    found = fingerprint.fingerprint(*pair) if pair else {"device": "none"}
    curves = (measured(100), measured(300, (2.0, 2.5, 5.0), 0.5))
    made = RoundTimeProfile(curves, found, {"torch": "0.0.0"}, "2026-01-01T00:00:00+00:00")
    return dataclasses.replace(made, **changes)


# The record


@pytest.mark.parametrize(
    ("context_length", "verify_s", "draft_s"),
    [
        (1, (1.0, 1.5, 3.0), 0.25),
        (100, (1.0, 1.5, 3.0), 0.25),
        (150, (1.25, 1.75, 3.5), 0.3125),  # a quarter of the way
        (299, (1.995, 2.495, 4.99), 0.49875),
        (300, (2.0, 2.5, 5.0), 0.5),
        (9999, (2.0, 2.5, 5.0), 0.5),
    ],
)
def test_curve_is_interpolated_between_context_lengths_and_not_beyond(context_length, verify_s, draft_s):
    curve = profile().curve(context_length)
    assert curve.batch_tokens == (1, 2, 3)
    assert curve.verify_s == pytest.approx(verify_s, rel=1e-12)
    assert curve.draft_s == pytest.approx(draft_s, rel=1e-12)


def test_one_context_length_serves_all():
    alone = profile(measured=(measured(100),))
    assert alone.curves == ((100, SPSCurve((1, 2, 3), (1.0, 1.5, 3.0), 0.25)),)
    assert alone.curve(1) == alone.curve(100) == alone.curve(5000) == alone.curves[0][1]


@pytest.mark.parametrize(
    ("curves", "message"),
    [
        ((), "must be ascending, got []"),
        ((measured(200), measured(100)), "must be ascending, got [200, 100]"),
        ((measured(100), measured(100)), "must be ascending, got [100, 100]"),
        (
            (measured(100), measured(200, batch_tokens=(1, 2, 4))),
            "must have the same `batch_tokens`, got [(1, 2, 3), (1, 2, 4)]",
        ),
    ],
)
def test_curves_that_do_not_go_together_are_refused(curves, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        profile(measured=curves)


def test_measured_profile_says_where_it_comes_from(pair):
    made = measure_profile(*pair, (16, 32), num_repeats=2)
    assert [length for length, _ in made.curves] == [16, 32]
    assert [curve.num_repeats for curve in made.measured] == [2, 2]
    assert all(curve.batch_tokens == (*range(1, 10), 16, 17) for _, curve in made.curves)
    assert made.fingerprint == fingerprint.fingerprint(*pair)
    assert made.versions["dspark_hf"] == __version__
    assert made.versions["torch"] == torch.__version__
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", made.date)
    assert made.mismatch(*pair) is None


# Files


def test_round_trip(pair, tmp_path):
    made = profile(pair)
    path = tmp_path / "new" / "folder" / "round_times.json"
    made.save(path)
    assert RoundTimeProfile.load(path) == made
    assert RoundTimeProfile.from_dict(made.to_dict()) == made
    assert RoundTimeProfile.load(path).mismatch(*pair) is None
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_json_has_the_documented_fields(pair):
    values = profile((pair[0], random_draft(draft_vocab_size=40))).to_dict()
    page = (Path(__file__).parents[3] / "docs" / "profiling.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```json\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)

    def shape(value):
        if isinstance(value, dict):
            return {name: shape(item) for name, item in value.items() if item is not None}
        return [shape(value[0])] if isinstance(value, list) else type(value)

    documented = json.loads(example)
    assert shape(documented["curves"]) == shape(values["curves"])
    assert documented.keys() == values.keys()
    ours = values["fingerprint"]
    assert documented["fingerprint"].keys() == ours.keys()
    assert documented["fingerprint"]["draft"].keys() == ours["draft"].keys()
    assert documented["fingerprint"]["target"].keys() == ours["target"].keys()
    assert RoundTimeProfile.from_dict(documented).curves[0][0] == 128


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: [], "must have `format` 2, got 'list'"),
        (lambda values: values | {"format": 1}, "must have `format` 2, got 1"),
        (lambda values: values | {"curves": []}, "must be ascending, got []"),
        (lambda values: {name: values[name] for name in values if name != "versions"}, "KeyError: 'versions'"),
        (lambda values: values | {"fingerprint": None}, "is damaged (TypeError"),
        (lambda values: values | {"curves": [values["curves"][0] | {"verify_s": [1.0, -1.0, 2.0]}]}, "-1.0"),
        (lambda values: values | {"curves": [values["curves"][0] | {"draft_spread_s": [1.0]}]}, "is damaged"),
    ],
)
def test_damaged_profiles_are_refused(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        RoundTimeProfile.from_dict(change(profile().to_dict()))


@pytest.mark.parametrize("content", [b"", b'{"format": 2, "cur', b"\xff\xfe\x00", b"[]"])
def test_files_that_hold_no_profile_are_refused(tmp_path, content):
    path = tmp_path / "round_times.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"A profile must .*Re-run `dspark-hf profile`\."):
        RoundTimeProfile.load(path)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "round_times.json"
    profile().save(path)
    before = path.read_bytes()

    def full_disk(source, target):
        raise OSError("No space left on device")

    monkeypatch.setattr(profiling.os, "replace", full_disk)
    with pytest.raises(OSError, match="No space left"):
        profile(date="later").save(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


# What must be the same


def set_field(values, name, value):
    *outer, last = name.split(".")
    for part in outer:
        values = values[part]
    values[last] = value


FIELDS = [
    *("device", "num_threads", "dtype", "attention", "torch", "target.class", "target.quantization"),
    *("target.hidden_size", "target.num_hidden_layers", "target.intermediate_size", "target.vocab_size"),
    *("draft.device", "draft.dtype", "draft.attention", "draft.num_hidden_layers", "draft.block_size"),
    *("draft.markov_rank", "draft.markov_head_type", "draft.draft_vocab_size", "draft.num_captured_layers"),
]


@pytest.mark.parametrize("name", FIELDS)
def test_a_different_field_is_named_with_both_values(pair, name):
    made = profile(pair)
    assert made.mismatch(*pair) is None
    ours = made.fingerprint
    for part in name.split("."):
        ours = ours.get(part)  # a full draft vocabulary is no field
    set_field(made.fingerprint, name, "another")
    assert made.mismatch(*pair) == f"`{name}` is 'another' in the profile and {ours!r} here"


def test_a_field_of_a_later_version_is_refused(pair):
    made = profile(pair)
    made.fingerprint["clock"] = "fast"
    assert made.mismatch(*pair) == "`clock` is 'fast' in the profile and None here"


def test_other_versions_and_dates_are_no_reason(pair):
    assert profile(pair, versions={"transformers": "4.0.0", "torch": "0.1"}, date="1999").mismatch(*pair) is None


def test_torch_counts_without_its_last_number(pair, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    made = profile(pair)
    monkeypatch.setattr(torch, "__version__", "2.9.4")
    assert made.mismatch(*pair) is None
    monkeypatch.setattr(torch, "__version__", "2.10.1")
    assert made.mismatch(*pair) == "`torch` is '2.9' in the profile and '2.10' here"


OTHERS = {
    "dtype": lambda target, draft: (target.bfloat16(), draft),
    "draft.dtype": lambda target, draft: (target, draft.bfloat16()),
    "attention": lambda target, draft: (target.set_attn_implementation("eager") or target, draft),
    "draft.attention": lambda target, draft: (target, draft.set_attn_implementation("eager") or draft),
    "target.class": lambda target, draft: (tiny_target("llama"), draft),
    "target.vocab_size": lambda target, draft: (tiny_target(vocab_size=98), draft),
    "draft.block_size": lambda target, draft: (target, random_draft(block_size=5)),
    "draft.draft_vocab_size": lambda target, draft: (target, random_draft(draft_vocab_size=40)),
    "draft.markov_rank": lambda target, draft: (target, random_draft(markov_rank=4)),
    "draft.markov_head_type": lambda target, draft: (target, random_draft(markov_head_type="gated")),
    "draft.num_captured_layers": lambda target, draft: (target, random_draft(target_layer_ids=[1])),
    "draft.num_hidden_layers": lambda target, draft: (target, random_draft(num_hidden_layers=1)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_pairs_have_other_fingerprints_and_files(pair, name):
    made, path = profile(pair), profile_path(*pair)
    other = OTHERS[name](*pair)
    assert made.mismatch(*other).startswith(f"`{name}` is ")
    assert profile_path(*other) != path


def test_other_thread_counts_are_refused(pair, monkeypatch):
    made, before = profile(pair), setup(*pair)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    assert made.mismatch(*pair) == f"`num_threads` is {made.fingerprint['num_threads']} in the profile and 7 here"
    assert setup(*pair) != before


@pytest.mark.parametrize("name", ["dtype", "draft.dtype", "attention", "draft.attention"])
def test_setup_notices_what_can_change(pair, name):
    before = setup(*pair)
    assert setup(*pair) == before
    assert setup(*OTHERS[name](*pair)) != before


def test_the_same_pair_loaded_twice_shares_its_file(pair):
    assert profile_path(*pair) == profile_path(tiny_target(seed=4), random_draft(seed=5))
    assert str(profile_path(*pair)).startswith(str(Path(hub_constants.HF_HOME) / "dspark_hf" / "profiles"))


def test_quantisation_is_told_apart(pair):
    target, draft = pair
    made = profile(pair)
    target.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    reason = made.mismatch(target, draft)
    assert reason.startswith('`target.quantization` is None in the profile and \'{"load_in_4bit": true')


def test_split_targets_name_all_their_devices(pair):
    target, draft = pair
    alone = fingerprint.fingerprint(target, draft)["device"]
    target.hf_device_map = {"model": "cpu", "lm_head": "disk"}
    assert set(fingerprint.fingerprint(target, draft)["device"].split(" + ")) == {alone, "disk"}
    target.hf_device_map = {"": "disk"}  # not split: where the weights are counts
    assert fingerprint.fingerprint(target, draft)["device"] == alone


def test_cpu_is_named(pair):
    name = fingerprint.fingerprint(*pair)["device"]
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists() and (found := re.search(r"^model name\s*: (.+)$", cpuinfo.read_text(), re.MULTILINE)):
        assert name.startswith(found[1])
    assert name
