# SPDX-License-Identifier: Apache-2.0
"""Round times of batches: what is measured, where it is kept, and what a call does with it."""

from __future__ import annotations

import pytest
import torch
from huggingface_hub import constants as hub_constants
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from dspark_hf import DSparkDraftModel, RoundTimeProfile, SPSCurve, collect_rounds, integration, measure_profile
from dspark_hf.cli import app
from dspark_hf.cli import profile as tuning
from dspark_hf.profiling import automatic as profiling
from dspark_hf.profiling import profile_for, profile_path, timed_rounds
from dspark_hf.profiling.automatic import SWITCH
from dspark_hf.profiling.measure import batch_points, measure_curves
from tests.support.models import (
    character_tokenizer,
    oracle_draft,
    random_draft,
    random_prompt,
    spread_confidence,
    tiny_target,
)
from tests.support.scripted import ForwardCounter


@pytest.fixture
def pair():
    return tiny_target(), random_draft()


@pytest.fixture
def switched_on(tmp_path, monkeypatch):
    monkeypatch.setenv(SWITCH, "1")
    monkeypatch.setattr(hub_constants, "HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(profiling, "QUICK_REPEATS", 2)


def test_points_cover_fewer_rows_and_whole_blocks():
    assert batch_points(5, 8) == (1, 4, 8, 28, 48)
    assert batch_points(4, 2) == (1, 2, 6, 10)
    assert batch_points(4, 1) == (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17)  # a copy is longer than the block


def test_times_of_a_batch(monkeypatch, pair):
    """A clock that the models push on: a pass of B tokens takes 1 + B / 8 s, drafting 1/4 s and 1/16 s a row."""
    target, draft = pair
    now, batches = [0.0], []
    monkeypatch.setattr(timed_rounds, "perf_counter", lambda: now[0])

    def verify(module, args, kwargs):
        batches.append(kwargs["input_ids"].shape[1])
        now[0] += 1 + batches[-1] / 8

    def drafts(module, args, kwargs):
        now[0] += 0.25 + kwargs["noise_embeds"].shape[0] / 16

    draft.bind_target(target)  # which probes it once
    target.register_forward_pre_hook(verify, with_kwargs=True)
    draft.register_forward_pre_hook(drafts, with_kwargs=True)
    (measured,) = measure_curves(target, draft, (20,), num_repeats=2, num_requests=4)
    assert batches[0] == 80  # the prompts
    assert sorted(set(batches[1:])) == [1, 2, 4, 12, 20]
    assert measured.curve == SPSCurve((1, 2, 4, 12, 20), (1.125, 1.25, 1.5, 2.5, 3.5), 0.3125, 0.0625)
    assert measured.curve.for_requests(4).draft_s == 0.5
    assert target.config._attn_implementation == "sdpa"


def test_profile_of_a_batch_survives_its_file(pair, tmp_path):
    profile = measure_profile(*pair, (8,), num_repeats=2, num_requests=2)
    profile.save(tmp_path / "times.json")
    read = RoundTimeProfile.load(tmp_path / "times.json")
    assert read == profile
    assert read.mismatch(*pair, num_requests=2) is None
    assert read.mismatch(*pair) == "`num_requests` is 2 in the profile and None here"
    assert read.curve(100).draft_request_s == profile.measured[0].curve.draft_request_s


@pytest.mark.usefixtures("switched_on")
def test_the_next_power_of_two_is_measured_once(pair):
    three = profile_for(*pair, 64, num_requests=3)
    assert three.fingerprint["num_requests"] == 4
    assert profile_path(*pair, 4).exists()
    with ForwardCounter(pair[0]) as counter:
        assert profile_for(*pair, 64, num_requests=4) is three
        assert counter.count == 0
        alone = profile_for(*pair, 64)
        assert counter.count > 0
    assert alone != three
    assert "num_requests" not in alone.fingerprint


@pytest.mark.usefixtures("switched_on")
def test_a_call_schedules_by_the_times_of_its_batch(monkeypatch):
    target = tiny_target("llama")
    draft = spread_confidence(oracle_draft(target))
    prompt = random_prompt(6).expand(3, -1)
    asked = []

    def spy(target, draft, remaining, num_requests):
        asked.append(num_requests)
        return None

    monkeypatch.setattr(integration, "profile_for", spy)
    target.generate(prompt, assistant_model=draft, do_sample=False, max_new_tokens=40)
    assert asked == [3]


@pytest.mark.parametrize(("cost", "sends"), [(1e-3, True), (10.0, False)])
def test_what_a_verified_token_costs_decides(monkeypatch, cost, sends):
    """Drafts are sent where tokens are nearly free, and hardly any where each costs ten passes."""
    target = tiny_target("llama")
    draft = oracle_draft(target)
    batch_tokens = (1, 64)
    curve = SPSCurve(batch_tokens, (1.0, 1.0 + 63 * cost), 1e-3)

    class Profile:
        def curve(self, length):
            return curve

    monkeypatch.setattr(integration, "profile_for", lambda *_: Profile())
    only_the_prior = "dspark_hf.scheduling.live_curve.LiveRoundTimes.observe"
    monkeypatch.setattr(only_the_prior, lambda *_: None)
    prompts = torch.cat([random_prompt(6, seed=row) for row in range(3)])
    with collect_rounds() as stats:
        target.generate(prompts, assistant_model=draft, do_sample=False, max_new_tokens=40)
    assert (stats.mean_verify_length > 1.0) == sends
    assert sends or stats.mean_verify_length < 0.2


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    tiny_target().save_pretrained(folder / "target")
    character_tokenizer().save_pretrained(folder / "target")
    random_draft().save_pretrained(folder / "draft")
    return ["--target", str(folder / "target"), "--draft", str(folder / "draft"), "--dtype", "float32"]


@pytest.mark.usefixtures("switched_on")
@pytest.mark.parametrize("num_requests", [1, 4])
def test_command_writes_where_generate_looks(folders, num_requests):
    options = ["--context-lengths", "8", "--repeats", "2", "--num-requests", str(num_requests)]
    result = CliRunner().invoke(app, ["profile", *folders, *options])
    assert result.exit_code == 0, result.output
    target = AutoModelForCausalLM.from_pretrained(folders[1])
    draft = DSparkDraftModel.from_pretrained(folders[3])
    with ForwardCounter(target) as counter:
        found = profile_for(target, draft, 64, num_requests)
    assert counter.count == 0
    assert [length for length, _ in found.curves] == [8]
    assert found.curves[0][1].batch_tokens[-1] == (5 * num_requests if num_requests > 1 else 17)


def test_command_refuses_numbers_that_generate_does_not_look_for(folders):
    result = CliRunner().invoke(app, ["profile", *folders, "--num-requests", "3"])
    assert result.exit_code == 2
    assert "must be a power of two, got 3" in result.output


@pytest.mark.parametrize("error", [KeyError("rope"), AttributeError("no field"), StopIteration(), MemoryError("full")])
def test_command_reports_whatever_a_target_raises(folders, monkeypatch, error):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(tuning, "measure_profile", fail)
    result = CliRunner().invoke(app, ["profile", *folders])
    assert result.exit_code == 2
    assert "Error:" in result.output
    assert "Traceback" not in result.output
