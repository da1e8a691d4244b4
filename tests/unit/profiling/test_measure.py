# SPDX-License-Identifier: Apache-2.0
"""Timing of rounds, with a clock that the models themselves push on; all its times are exact in binary."""

import functools
import re

import pytest
import torch

from dspark_hf import DSparkDraftModel
from dspark_hf._compat import CACHE_KEY
from dspark_hf.profiling import measure, timed_rounds
from dspark_hf.profiling.measure import PATIENCE, batch_points, measure_curves, without_noise
from tests.integration import test_targets_multimodal as multimodal
from tests.support.closeness import assert_close
from tests.support.models import TARGET_KINDS, oracle_draft, random_draft, random_prompt, tiny_target
from tests.support.scripted import ForwardCounter, draft_config_for, lively_target


CLIFF = {1: 1.0, 2: 1.25, 3: 1.5, 4: 4.0, 5: 4.25}  # seconds of a pass of B tokens
DRAFT_S = 0.25


class Clock:
    """Stands still except while a model runs: B tokens take the target `verify_s[B]` seconds, a block `draft_s`."""

    def __init__(self, target, draft, verify_s=CLIFF, draft_s=DRAFT_S, stalls=()):
        self.now, self.verify_s, self.draft_s = 0.0, verify_s, draft_s
        self.stalls = stalls  # numbers of verification passes that take 100 s more
        self.batches = []  # tokens of each pass of the target, the prefill first
        self.drafted = []  # likewise, of the context that a block reads
        target.register_forward_pre_hook(self.verify, with_kwargs=True)
        draft.register_forward_pre_hook(self.draft, with_kwargs=True)

    def __call__(self):
        return self.now

    def verify(self, module, args, kwargs):
        num_tokens = kwargs["input_ids"].shape[1]
        if num_tokens in self.verify_s:  # a prefill takes no time
            self.now += self.verify_s[num_tokens] + 100 * (len(self.batches) in self.stalls)
        self.batches.append(num_tokens)

    def draft(self, module, args, kwargs):
        self.now += self.draft_s
        self.drafted.append(kwargs["context_hidden_states"].shape[1])


@pytest.fixture
def few_points(monkeypatch):
    """Copies as long as blocks, so that the passes of a measurement can be counted by hand."""
    monkeypatch.setattr(measure, "MOST_COPIES", 4)
    monkeypatch.setattr(timed_rounds, "MOST_COPIES", 4)


@pytest.fixture
def pair(few_points):
    target, draft = tiny_target(), random_draft()
    draft.bind_target(target)  # which probes it once
    return target, draft


def run_clock(monkeypatch, pair, **kwargs):
    clock = Clock(*pair, **kwargs)
    monkeypatch.setattr(timed_rounds, "perf_counter", clock)
    return clock


# Which B, and the monotone rule


@pytest.mark.parametrize(
    ("num_slots", "expected"),
    [
        (1, (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17)),  # the longest copy is one of 16 tokens
        (16, (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17)),
        (31, (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 24, 25, 32)),
    ],
)
def test_long_copies_and_large_blocks_are_measured_at_the_ends_of_tiles(num_slots, expected):
    assert batch_points(num_slots) == expected


def test_passes_of_the_longest_copy_are_measured():
    (measured,) = measure_curves(tiny_target(), random_draft(), (20,), num_repeats=2)
    assert measured.curve.batch_tokens == (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17)


@pytest.mark.parametrize(
    ("medians", "expected"),
    [
        ((1.0, 2.0, 4.0), (1.0, 2.0, 4.0)),
        ((1.0, 3.0, 2.0, 4.0), (1.0, 2.5, 2.5, 4.0)),
        ((3.0, 2.0, 1.0), (2.0, 2.0, 2.0)),
        ((2.0, 4.0, 1.0), (2.0, 2.5, 2.5)),  # 4 and 1 first
        ((3.0, 4.0, 1.0), (8 / 3, 8 / 3, 8 / 3)),  # their mean 2.5 is below the 3 before them
        ((5.0,), (5.0,)),
    ],
)
def test_a_fall_within_the_spread_is_noise(medians, expected):
    spreads = [(median - 5, median + 5) for median in medians]
    assert without_noise(medians, spreads) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("medians", "widths", "expected"),
    [
        ((2.0, 4.0, 1.0), (0.1, 0.1, 0.1), (2.0, 4.0, 1.0)),  # as in float32: more tokens in less time
        ((2.0, 4.0, 1.0), (0.1, 2.0, 0.1), (2.0, 2.5, 1.0)),  # 4 lies 1.5 from the mean of 4 and 1
        ((2.0, 4.0, 1.0), (0.1, 0.1, 2.0), (2.0, 4.0, 2.5)),
        ((2.0, 4.0, 1.0), (2.0, 0.0, 2.0), (2.0, 2.5, 2.5)),  # its own repeats agree by chance: most others do not
    ],
)
def test_a_fall_beyond_the_spread_stays(medians, widths, expected):
    spreads = [(median, median + width) for median, width in zip(medians, widths, strict=True)]
    assert without_noise(medians, spreads) == pytest.approx(expected, abs=1e-12)


# Times


def test_times_are_those_of_the_passes(monkeypatch, pair):
    run_clock(monkeypatch, pair)
    (measured,) = measure_curves(*pair, (20,), num_repeats=3)
    assert measured.context_length == 20
    assert measured.curve.batch_tokens == (1, 2, 3, 4, 5)
    assert measured.curve.verify_s == (1.0, 1.25, 1.5, 4.0, 4.25)
    assert measured.curve.draft_s == 0.25
    assert measured.curve.round_s(4) == 4.25
    assert measured.num_repeats == 3
    assert measured.verify_spread_s == ((1.0, 1.0), (1.25, 1.25), (1.5, 1.5), (4.0, 4.0), (4.25, 4.25))
    assert measured.draft_spread_s == (0.25, 0.25)


def test_drafting_is_told_apart(monkeypatch, pair):
    run_clock(monkeypatch, pair, draft_s=8.0)
    (measured,) = measure_curves(*pair, (20,), num_repeats=2)
    assert measured.curve.draft_s == 8.0
    assert measured.curve.verify_s == tuple(CLIFF.values())


def test_a_stall_moves_a_quartile_and_no_median(monkeypatch, pair):
    # Passes 1 to 5 warm up, from 1 token to 5; 6 to 10 are the first repeat, from 5 tokens to 1.
    run_clock(monkeypatch, pair, stalls=(1, 2, 3, 4, 5, 9))
    (measured,) = measure_curves(*pair, (20,), num_repeats=3)
    assert measured.curve.verify_s == tuple(CLIFF.values())
    # 1.25, 1.25 and 101.25 s: the upper quartile lies half-way between the last two.
    assert measured.verify_spread_s[1] == (1.25, 51.25)
    assert measured.verify_spread_s[0] == (1.0, 1.0)


def test_falls_of_a_steady_machine_stay(monkeypatch, pair):
    run_clock(monkeypatch, pair, verify_s={1: 1.0, 2: 2.0, 3: 1.5, 4: 4.0, 5: 3.0})
    (measured,) = measure_curves(*pair, (20,), num_repeats=2)
    assert measured.curve.verify_s == (1.0, 2.0, 1.5, 4.0, 3.0)
    assert measured.verify_spread_s[3] == (4.0, 4.0)


def test_token_counts_take_turns_after_a_warm_up(monkeypatch, pair):
    clock, progress = run_clock(monkeypatch, pair), []
    measure_curves(*pair, (20,), num_repeats=3, on_progress=lambda: progress.append(len(clock.batches)))
    up, down = [1, 2, 3, 4, 5], [5, 4, 3, 2, 1]
    assert clock.batches == [20, *up, *down, *up, *down]
    assert progress == [6, 11, 16, 21]
    # Each pass begins with a draft that has read the context; then two tokens come with every round.
    assert clock.drafted == [20, 2, 2, 2, 2, 2] * 4


# A pass over all B takes 12 s of verification and 6 blocks of 0.25 s: repeat r begins after 13.5 s * (r + 1).
@pytest.mark.parametrize(("budget_s", "expected"), [(None, 6), (10.0, 2), (40.5, 3), (54.0, 4), (1000.0, 6)])
def test_no_repeat_begins_after_the_budget(monkeypatch, pair, budget_s, expected):
    run_clock(monkeypatch, pair)
    (measured,) = measure_curves(*pair, (20,), num_repeats=6, budget_s=budget_s)
    assert measured.num_repeats == expected


def test_contexts_share_the_budget(monkeypatch, pair):
    run_clock(monkeypatch, pair)
    curves = measure_curves(*pair, (40, 20), num_repeats=6, budget_s=81.0)
    assert [(measured.context_length, measured.num_repeats) for measured in curves] == [(20, 3), (40, 3)]


def test_a_warm_up_far_beyond_the_budget_ends_the_measurement(monkeypatch, pair):
    clock = run_clock(monkeypatch, pair)
    with pytest.raises(RuntimeError, match="warm-up alone takes more than 8 s"):
        measure_curves(*pair, (20,), budget_s=8.0 / PATIENCE)
    assert clock.batches == [20, 1, 2, 3, 4]  # 9 s


# What is run


def test_contexts_are_cut_to_the_positions_of_the_target(pair):
    target, draft = pair
    with ForwardCounter(target) as counter:
        curves = measure_curves(target, draft, (5000, 16, 6000), num_repeats=2)
    assert [measured.context_length for measured in curves] == [16, 507]
    assert max(int(call["position_ids"].max()) for call in counter.calls) == 511


@pytest.mark.usefixtures("few_points")
@pytest.mark.parametrize("kind", TARGET_KINDS)
def test_verification_passes_are_the_loops(kind):
    target = tiny_target(kind)
    draft = oracle_draft(target)
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    generate = functools.partial(
        target.generate, random_prompt(20), assistant_model=draft, do_sample=False, max_new_tokens=8
    )
    generate()  # the target is probed once
    with ForwardCounter(target) as generating:
        generate()
    with ForwardCounter(target) as measuring_calls:
        measure_curves(target, draft, (20,), num_repeats=2)

    def described(call):
        return {name: value.shape if isinstance(value, torch.Tensor) else value for name, value in call.items()} | {
            CACHE_KEY: type(call[CACHE_KEY])
        }

    assert described(measuring_calls.calls[0]) == described(generating.calls[0])
    passes = [described(call) for call in measuring_calls.calls if call["input_ids"].shape[1] == 5]
    assert passes == [described(generating.calls[1])] * 3


@pytest.mark.usefixtures("few_points")
@pytest.mark.parametrize("kind", TARGET_KINDS)
def test_rounds_are_taken_back(kind):
    """Also where the context is longer than the window: every pass sees what the first one saw."""
    target = lively_target(kind)
    seen, lengths = [], []

    def look(module, args, kwargs, outputs):
        seen.append((kwargs["input_ids"], outputs.logits))
        lengths.append(int(kwargs[CACHE_KEY].get_seq_length()) - kwargs["input_ids"].shape[1])

    draft = random_draft()
    draft.bind_target(target)  # which probes it
    target.register_forward_hook(look, with_kwargs=True)
    measure_curves(target, draft, (20,), num_repeats=2)
    target._forward_hooks.clear()
    assert lengths == [0] + [20] * 15
    prompt, longest = seen[0][0], max((ids for ids, _ in seen[1:]), key=lambda ids: ids.shape[1])
    with torch.no_grad():
        expected = target(torch.cat([prompt, longest], dim=1)).logits[:, 20:]
    for ids, logits in seen[1:]:
        assert torch.equal(ids, longest[:, : ids.shape[1]])
        assert_close(logits, expected[:, : ids.shape[1]])


def test_whole_blocks_are_drafted_whatever_the_knobs(pair):
    target, draft = pair
    knobs = draft.generation_config
    knobs.num_assistant_tokens, knobs.assistant_confidence_threshold = 1, 0.9
    slots = []
    draft.markov_head.register_forward_hook(lambda *_: slots.append(1))
    with ForwardCounter(draft) as counter:
        measure_curves(target, draft, (20,), num_repeats=2)
    assert len(slots) == 4 * counter.count
    assert (knobs.num_assistant_tokens, knobs.assistant_confidence_threshold) == (1, 0.9)


def test_text_is_ordinary_and_always_the_same(pair):
    target, draft = pair
    target.config.update({"vision": {"image_token_id": 5}, "suppress_tokens": [7, 11]})
    texts = []
    for _ in range(2):
        with ForwardCounter(target) as counter:
            measure_curves(target, draft, (60,), num_repeats=2)
        texts.append(counter.calls[0]["input_ids"])
    assert torch.equal(*texts)
    ids = set(texts[0].flatten().tolist())
    assert not ids & {0, 1, 2, 5, 7, 11, 96}
    assert len(ids) > 30


# What is left behind


def test_models_and_random_state_stay_as_they_are(pair):
    target, draft = pair
    target.generate(random_prompt(5), assistant_model=draft, do_sample=False, max_new_tokens=4)  # the library's hooks

    def described():
        return {
            (type(model), name, key): value
            for model in pair
            for name, module in model.named_modules()
            for key, value in [*vars(module).items(), *module._parameters.items(), *module._buffers.items()]
            if not isinstance(value, dict)
        }

    before, tensors = described(), [tensor.clone() for model in pair for tensor in model.state_dict().values()]
    configs = [(model.config.to_dict(), model.generation_config.to_dict()) for model in pair]
    modules = [module for model in pair for module in model.modules()]
    num_hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules]
    random_state = torch.get_rng_state()
    measure_curves(target, draft, (20,), num_repeats=2)
    assert torch.equal(torch.get_rng_state(), random_state)
    after = described()
    assert after.keys() == before.keys()
    assert [name for name in before if after[name] is not before[name]] == []
    assert all(map(torch.equal, tensors, (tensor for model in pair for tensor in model.state_dict().values())))
    assert [(model.config.to_dict(), model.generation_config.to_dict()) for model in pair] == configs
    assert [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules] == num_hooks
    assert torch.is_grad_enabled()


def test_dropout_does_not_move_the_random_state(pair):
    target, draft = pair
    for layer in target.model.layers:
        layer.self_attn.attention_dropout = 0.5
    target.train()
    random_state = torch.get_rng_state()
    with torch.no_grad():
        target(random_prompt(5))
    assert not torch.equal(torch.get_rng_state(), random_state)  # it does draw
    random_state = torch.get_rng_state()
    measure_curves(target, draft, (20,), num_repeats=2)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert target.training
    assert not draft.training


image_target = multimodal.target


def test_positions_of_a_chat_with_an_image_stay(image_target, few_points):
    prompt, inputs = multimodal.image_prompt()
    multimodal.generate(image_target, prompt, **inputs)
    shift = image_target.model.rope_deltas
    assert int(shift) == -2
    (measured,) = measure_curves(image_target, DSparkDraftModel(draft_config_for(image_target)), (20,), num_repeats=2)
    assert image_target.model.rope_deltas is shift
    assert len(measured.curve.verify_s) == 5


# Refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_repeats": 1}, "`num_repeats` must be >= 2, got 1"),
        ({"context_lengths": ()}, "got ()"),
        ({"context_lengths": (64, 1)}, "got (64, 1)"),
    ],
)
def test_wrong_numbers_are_refused_before_anything_runs(pair, arguments, message):
    with ForwardCounter(pair[0]) as counter, pytest.raises(ValueError, match=re.escape(message)):
        measure_curves(*pair, **arguments)
    assert counter.count == 0


def test_another_targets_draft_is_refused(pair):
    with pytest.raises(ValueError, match="vocab_size"):
        measure_curves(tiny_target(vocab_size=98), pair[1])
