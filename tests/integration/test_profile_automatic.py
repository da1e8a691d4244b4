# SPDX-License-Identifier: Apache-2.0
"""The profile that a `generate` call gets: which one, when one is measured, and that nobody notices."""

import gc
import logging
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch
from huggingface_hub import constants as hub_constants

from dspark_hf import DSparkDraftModel
from dspark_hf.profiling import RoundTimeProfile, measure_profile, profile_for, profile_path
from dspark_hf.profiling import automatic as profiling
from dspark_hf.profiling.automatic import FILE_NAME, SWITCH
from tests.support.models import oracle_draft, random_draft, random_prompt, tiny_target
from tests.support.scripted import ForwardCounter, captured_log


PASSES = 1 + 3 * 11  # prefill, then warm-up and two repeats over 1 to 9, 16 and 17 tokens


@pytest.fixture(autouse=True)
def switched_on(tmp_path, monkeypatch):
    monkeypatch.setenv(SWITCH, "1")
    monkeypatch.setattr(hub_constants, "HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(profiling, "QUICK_REPEATS", 2)


@pytest.fixture
def pair():
    target, draft = tiny_target(), random_draft()
    draft.bind_target(target)  # which probes it once
    return target, draft


def loaded(draft, folder):
    draft.save_pretrained(folder)
    return DSparkDraftModel.from_pretrained(folder)


# Which one


def test_first_use_measures_and_later_ones_do_not(pair):
    target, draft = pair
    with ForwardCounter(target) as counter:
        profile = profile_for(target, draft, 64)
        assert counter.count == PASSES
        assert profile_for(target, draft, 64) is profile
        assert profile_for(target, draft, 1) is profile
        assert counter.count == PASSES
    assert [length for length, _ in profile.curves] == [128]
    assert RoundTimeProfile.load(profile_path(target, draft)) == profile


def test_another_load_of_the_pair_reads_the_file(pair):
    profile = profile_for(*pair, 64)
    target, draft = tiny_target(), random_draft()
    with ForwardCounter(target) as counter:
        assert profile_for(target, draft, 1) == profile
    assert counter.count == 0


def test_the_drafts_own_folder_comes_first(pair, tmp_path):
    target, draft = pair[0], loaded(pair[1], tmp_path / "draft")
    for context_length, path in ((16, tmp_path / "draft" / FILE_NAME), (24, profile_path(target, draft))):
        measure_profile(target, draft, (context_length,), num_repeats=2).save(path)
    with ForwardCounter(target) as counter:
        assert profile_for(target, draft, 64).curves[0][0] == 16
        (tmp_path / "draft" / FILE_NAME).unlink()
        assert profile_for(target, loaded(draft, tmp_path / "draft"), 64).curves[0][0] == 24
    assert counter.count == 0


def test_a_shipped_profile_of_another_machine_is_named_once_and_not_used(pair, tmp_path):
    target, draft = pair[0], loaded(pair[1], tmp_path / "draft")
    foreign = measure_profile(target, draft, (16,), num_repeats=2)
    ours = foreign.fingerprint["device"]
    foreign.fingerprint["device"] = "Abacus 9000"
    foreign.save(tmp_path / "draft" / FILE_NAME)
    with captured_log() as messages:
        assert profile_for(target, draft, 64).curves[0][0] == 128
        assert profile_for(target, loaded(draft, tmp_path / "draft"), 64).curves[0][0] == 128
    assert messages == [
        f"The round times in {str(tmp_path / 'draft' / FILE_NAME)!r} are not used: `device` is 'Abacus 9000' in the "
        f"profile and {ours!r} here. `dspark-hf profile` measures new ones."
    ]


def test_a_damaged_file_is_measured_anew(pair):
    path = profile_path(*pair)
    path.parent.mkdir(parents=True)
    path.write_text('{"format": 2, "curves"')
    with captured_log() as messages:
        profile = profile_for(*pair, 64)
    assert len(messages) == 1
    assert messages[0].startswith(f"The round times in {str(path)!r} are not used: A profile must be JSON")
    assert RoundTimeProfile.load(path) == profile


def test_a_folder_that_cannot_be_written_is_said_once_and_is_no_error(pair, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(hub_constants, "HF_HOME", str(tmp_path / "file"))
    with captured_log() as messages, ForwardCounter(pair[0]) as counter:
        profile = profile_for(*pair, 64)
        assert profile_for(*pair, 64) is profile is not None
    assert counter.count == PASSES
    assert len(messages) == 1
    assert "could not be kept" in messages[0]


def test_a_draft_without_a_folder_does_not_read_the_current_one(pair, tmp_path, monkeypatch):
    measure_profile(*pair, (16,), num_repeats=2).save(tmp_path / FILE_NAME)
    monkeypatch.chdir(tmp_path)
    assert pair[1].name_or_path == ""
    assert profile_for(*pair, 1) is None


# When one is measured


@pytest.mark.parametrize("value", ["0", "false", "OFF", " no "])
def test_switched_off_nothing_is_measured_but_files_are_read(pair, monkeypatch, value):
    monkeypatch.setenv(SWITCH, value)
    with ForwardCounter(pair[0]) as counter:
        assert profile_for(*pair, 1000) is None
    assert counter.count == 0
    assert not Path(hub_constants.HF_HOME).exists()
    measure_profile(*pair, (16,), num_repeats=2).save(profile_path(*pair))
    assert profile_for(tiny_target(), random_draft(), 1000).curves[0][0] == 16


def test_short_texts_are_not_worth_a_measurement(pair, monkeypatch):
    target, draft = pair
    with ForwardCounter(target) as counter:
        assert profile_for(target, draft, 31) is None
        assert counter.count == 0
        assert profile_for(target, draft, 32) is not None  # the earlier answer was not the last word
    assert counter.count == PASSES


def test_it_is_on_where_nothing_is_said(pair, monkeypatch):
    monkeypatch.delenv(SWITCH)
    assert profile_for(*pair, 32) is not None


def test_a_pair_that_changed_is_measured_anew(pair):
    target, draft = pair
    profiles = [profile_for(target, draft, 64), profile_for(target.bfloat16(), draft.bfloat16(), 64)]
    target.set_attn_implementation("eager")
    profiles.append(profile_for(target, draft, 64))
    num_threads = torch.get_num_threads()
    torch.set_num_threads(num_threads + 1)
    try:
        profiles.append(profile_for(target, draft, 64))
    finally:
        torch.set_num_threads(num_threads)
    found = [profile.fingerprint for profile in profiles]
    assert [values["dtype"] for values in found] == ["float32", *["bfloat16"] * 3]
    assert [values["attention"] for values in found] == ["sdpa", "sdpa", "eager", "eager"]
    assert [values["num_threads"] for values in found] == [*[num_threads] * 3, num_threads + 1]
    assert len(list(profile_path(target, draft).parent.glob("*.json"))) == 4


def test_a_target_that_cannot_be_measured_is_tried_once(pair, monkeypatch):
    target, draft = pair
    tried = []

    def broken(input_ids, **kwargs):
        tried.append(input_ids.shape)
        raise RuntimeError("out of order")

    monkeypatch.setattr(target, "forward", broken)
    with captured_log("transformers.dspark_hf.profiling.automatic") as messages:
        assert profile_for(target, draft, 64) is None
        assert profile_for(target, draft, 64) is None
    assert tried == [(1, 128)]
    assert len(messages) == 1
    assert "Qwen3ForCausalLM and its draft could not be measured here (RuntimeError('out of order'))" in messages[0]
    assert not profile_path(target, draft).exists()


def test_a_measurement_is_announced_at_info_level(pair):
    name = "transformers.dspark_hf.profiling.automatic"
    with captured_log(name) as messages:
        logging.getLogger(name).setLevel(logging.INFO)
        profile_for(*pair, 64)
    assert len(messages) == 1
    assert f"kept in {str(profile_path(*pair))!r}" in messages[0]
    assert f"{SWITCH}=0" in messages[0]


def test_threads_measure_once(pair):
    target, draft = pair
    barrier = Barrier(4)

    def ask(_):
        barrier.wait()
        return profile_for(target, draft, 64)

    with ForwardCounter(target) as counter, ThreadPoolExecutor(4) as pool:
        profiles = list(pool.map(ask, range(4)))
    assert counter.count == PASSES
    assert all(profile is profiles[0] is not None for profile in profiles)


def test_threads_with_different_pairs_wait_for_one_another(monkeypatch):
    """Measurements at the same time would time each other."""
    running, most = [], []

    def enter(*_):
        running.append(1)
        most.append(len(running))
        time.sleep(0.002)

    pairs = [(tiny_target(), random_draft()) for _ in range(3)]
    for index, (target, draft) in enumerate(pairs):
        draft.bind_target(target)  # which probes it once
        target.register_forward_pre_hook(enter)
        target.register_forward_hook(lambda *_: running.pop() and None)
        draft.config.markov_head_type = f"vanilla {index}"  # a fingerprint of its own
    barrier = Barrier(3)

    def ask(pair):
        barrier.wait()
        return profile_for(*pair, 64)

    with ThreadPoolExecutor(3) as pool:
        profiles = list(pool.map(ask, pairs))
    assert len({id(profile) for profile in profiles}) == 3
    assert len(most) == 3 * PASSES
    assert max(most) == 1


def test_a_known_answer_costs_next_to_nothing(pair):
    """Beside a forward pass, even of a target as small as this one."""
    target, draft = pair

    def fastest(call) -> float:
        seconds = []
        for _ in range(200):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    profile_for(target, draft, 64)
    with torch.no_grad():
        forward_s = fastest(lambda: target(torch.tensor([[5]])))
    assert fastest(lambda: profile_for(target, draft, 64)) < forward_s / 10


def test_answers_do_not_keep_models_alive():
    target, draft = tiny_target(), random_draft()
    assert profile_for(target, draft, 64) is not None
    references = weakref.ref(target), weakref.ref(draft)
    del target, draft
    gc.collect()
    assert [reference() for reference in references] == [None, None]


# That nobody notices


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_sliding", "mistral", "gemma3"])
def test_greedy_text_is_that_of_plain_generation(kind):
    target = tiny_target(kind)
    draft = oracle_draft(target)
    prompt, arguments = random_prompt(20), {"do_sample": False, "max_new_tokens": 40}
    plain = target.generate(prompt, **arguments)
    assert torch.equal(target.generate(prompt, assistant_model=draft, **arguments), plain)
    assert RoundTimeProfile.load(profile_path(target, draft)).curves[0][1].plain_s > 0, "measured on the way"
    assert torch.equal(target.generate(prompt, **arguments), plain)


def test_a_measurement_does_not_change_what_is_sampled(pair, monkeypatch):
    target, draft = pair
    arguments = {"do_sample": True, "max_new_tokens": 24}
    torch.manual_seed(5)
    expected = torch.cat([target.generate(random_prompt(9), **arguments), torch.rand(1, 4)], dim=1)
    torch.manual_seed(5)
    assert profile_for(target, draft, 64) is not None
    assert torch.equal(torch.cat([target.generate(random_prompt(9), **arguments), torch.rand(1, 4)], dim=1), expected)
