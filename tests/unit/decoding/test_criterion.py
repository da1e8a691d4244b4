# SPDX-License-Identifier: Apache-2.0
"""The user's knobs; the criterion itself is tested in tests/losslessness/test_non_anticipating.py."""

import re

import pytest
import torch
from transformers import GenerationConfig

from dspark_hf import AdaptiveConfidenceCriteria, RoundRecord, collect_rounds
from dspark_hf._compat import LIBRARY_DEFAULTS
from dspark_hf.decoding.criterion import DraftingOptions, resolve_options
from dspark_hf.scheduling import CopyOptions, LookaheadScheduler, SPSCurve
from tests.support.models import oracle_draft, random_prompt, tiny_config, tiny_target


def resolve(draft=None, call=None, **config):
    call_config = GenerationConfig(**LIBRARY_DEFAULTS)  # as `generate` merges it
    call_config.update(**(call or {}))
    return resolve_options(tiny_config(**config), GenerationConfig(**(draft or {})), call_config)


SCHEDULED = CopyOptions()


def options(num_tokens, threshold, schedule, copies=SCHEDULED):
    return DraftingOptions(num_tokens, threshold, schedule, copies)


def test_nothing_set():
    assert resolve() == options(4, None, "hardware")
    assert resolve(block_size=6, sample_from_anchor=False) == options(5, None, "hardware")


def test_library_defaults_are_nobodys_choice():
    assert LIBRARY_DEFAULTS["num_assistant_tokens"] == 20
    assert LIBRARY_DEFAULTS["assistant_confidence_threshold"] == 0.4
    assert LIBRARY_DEFAULTS["num_assistant_tokens_schedule"] == "constant"


def test_without_a_call():
    assert resolve_options(tiny_config(), GenerationConfig()) == options(4, None, "hardware")


@pytest.mark.parametrize(
    ("knobs", "expected"),
    [
        ({"num_assistant_tokens": 2}, options(2, None, "hardware")),
        ({"assistant_confidence_threshold": 0.0}, options(4, 0.0, "hardware", None)),
        ({"assistant_confidence_threshold": 1.0}, options(4, 1.0, "hardware", None)),
        ({"num_assistant_tokens_schedule": "confidence"}, options(4, None, "confidence")),
    ],
)
@pytest.mark.parametrize("where", ["draft", "call"])
def test_knobs_count_in_both_places(where, knobs, expected):
    assert resolve(**{where: knobs}) == expected


def test_on_the_draft_every_value_counts():
    knobs = {"assistant_confidence_threshold": 0.4, "num_assistant_tokens_schedule": "constant"}
    assert resolve(draft=knobs) == options(4, 0.4, "constant", None)


@pytest.mark.parametrize(
    ("knobs", "expected"),
    [
        ({"prompt_lookup_num_tokens": 0}, None),
        ({"prompt_lookup_num_tokens": 5}, CopyOptions(num_tokens=5)),
        ({"prompt_lookup_num_tokens": 40}, CopyOptions(num_tokens=40)),
        ({"max_matching_ngram_size": 3}, CopyOptions(longest_match=3)),
        ({"num_assistant_tokens_schedule": "confidence"}, SCHEDULED),
        ({"num_assistant_tokens": 2}, SCHEDULED),  # which limits blocks
        ({"assistant_confidence_threshold": 0.5}, None),  # nothing decides what a copy is worth
        ({"assistant_confidence_threshold": 0.5, "prompt_lookup_num_tokens": 7}, CopyOptions(7, shortest_match=2)),
        ({"assistant_confidence_threshold": 0.5, "max_matching_ngram_size": 7}, None),
        (
            {"assistant_confidence_threshold": 0.5, "prompt_lookup_num_tokens": 7, "max_matching_ngram_size": 1},
            CopyOptions(7, longest_match=1, shortest_match=1),
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("where", ["draft", "call"])
def test_copying(where, knobs, expected):
    assert resolve(**{where: knobs}).copies == expected


def test_a_constant_number_of_drafts_copies_only_if_asked():
    constant = {"num_assistant_tokens_schedule": "constant"}  # in a call it is nobody's choice
    assert resolve(draft=constant).copies is None
    assert resolve(draft=constant, call={"prompt_lookup_num_tokens": 5}).copies == CopyOptions(5, shortest_match=2)


def test_the_call_turns_copying_off_and_on():
    assert resolve({"prompt_lookup_num_tokens": 5}, {"prompt_lookup_num_tokens": 0}).copies is None
    assert resolve({"prompt_lookup_num_tokens": 0}, {"prompt_lookup_num_tokens": 3}).copies == CopyOptions(3)


def test_copies_use_the_prior_of_the_draft():
    prior = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]
    assert resolve(copy_prior=prior).copies == CopyOptions(prior=prior)


def test_the_call_comes_first():
    draft = {"num_assistant_tokens": 4, "assistant_confidence_threshold": 0.9}
    call = {"num_assistant_tokens": 1, "assistant_confidence_threshold": 0.2}
    assert resolve(draft, call) == options(1, 0.2, "hardware", None)


ERRORS = [
    ({"num_assistant_tokens": 0}, "`num_assistant_tokens` must lie in [1, 4] (the drafts of a block of 4), got 0"),
    ({"num_assistant_tokens": 5}, "`num_assistant_tokens` must lie in [1, 4] (the drafts of a block of 4), got 5"),
    ({"num_assistant_tokens": True}, "got True"),
    ({"num_assistant_tokens": 2.0}, "got 2.0"),
    ({"num_assistant_tokens_schedule": "heuristic"}, "`num_assistant_tokens_schedule` must be one of"),
    ({"num_assistant_tokens_schedule": "lookahead"}, "got 'lookahead'. It was replaced by \"hardware\"."),
    ({"num_assistant_tokens_schedule": "capacity"}, "got 'capacity'. It was replaced by \"hardware\"."),
    ({"assistant_confidence_threshold": 1.5}, "`assistant_confidence_threshold` must lie in [0, 1], got 1.5"),
    ({"assistant_confidence_threshold": -0.1}, "`assistant_confidence_threshold` must lie in [0, 1], got -0.1"),
    ({"prompt_lookup_num_tokens": -1}, "`prompt_lookup_num_tokens` must be an integer >= 0, got -1. 0 turns copying"),
    ({"prompt_lookup_num_tokens": True}, "`prompt_lookup_num_tokens` must be an integer >= 0, got True"),
    ({"prompt_lookup_num_tokens": 2.0}, "`prompt_lookup_num_tokens` must be an integer >= 0, got 2.0"),
    ({"max_matching_ngram_size": 0}, "`max_matching_ngram_size` must be an integer >= 1, got 0"),
    ({"max_matching_ngram_size": "3"}, "`max_matching_ngram_size` must be an integer >= 1, got '3'"),
]


@pytest.mark.parametrize(("knobs", "message"), ERRORS, ids=[str(knobs) for knobs, _ in ERRORS])
def test_impossible_knobs_are_refused(knobs, message):
    draft = GenerationConfig()
    for name, value in knobs.items():  # past the library's own checks
        setattr(draft, name, value)
    with pytest.raises(ValueError, match=re.escape(message)):
        resolve_options(tiny_config(), draft)


def test_slot_convention_limits_the_tokens():
    with pytest.raises(ValueError, match=re.escape("must lie in [1, 3] (the drafts of a block of 4), got 4")):
        resolve(draft={"num_assistant_tokens": 4}, sample_from_anchor=False)


def test_threshold_needs_a_confidence_head():
    knobs = {"assistant_confidence_threshold": 0.3}
    with pytest.raises(ValueError, match=r"needs a confidence head, which this draft does not have; got\s0\.3"):
        resolve(draft=knobs, enable_confidence_head=False)
    none = resolve(draft={"assistant_confidence_threshold": 0.0}, enable_confidence_head=False)
    assert none.confidence_threshold == 0.0


def sent(draft, target, **call):
    with collect_rounds() as stats:
        target.generate(random_prompt(8), do_sample=False, max_new_tokens=24, assistant_model=draft, **call)
    room = 23
    lengths = []
    for record in stats.rounds:
        lengths.append((record.verify_length, min(room - 1, 4)))
        room -= record.num_committed
    return lengths


def test_constant_schedule_always_sends_the_whole_block():
    target = tiny_target()
    draft = oracle_draft(target)
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    assert all(length == full for length, full in sent(draft, target))


def test_call_limits_the_drafts_of_every_round():
    target = tiny_target()
    draft = oracle_draft(target)
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    lengths = {length for length, _ in sent(draft, target, num_assistant_tokens=2)}
    assert max(lengths) == 2


def test_threshold_of_one_sends_nothing():
    target = tiny_target()
    assert {length for length, _ in sent(oracle_draft(target), target, assistant_confidence_threshold=1.0)} == {0}


def test_the_row_that_would_end_last_gets_more_drafts():
    """The paces differ, the confidences of the round do not."""
    curve = SPSCurve((1, 2, 12), (1.0, 1.0, 1.5))
    criterion = AdaptiveConfidenceCriteria(LookaheadScheduler(), 4, curve=curve, learn_times=False)
    histories = [criterion.new_history(), criterion.new_history()]
    # Of one a draft is sent and accepted, of the other nothing is sent: confidences are corrected for neither.
    rounds = [RoundRecord(1, (5,), (1.0,), 1, 2, 2), RoundRecord(1, (), (), 0, 2, 1)]
    for _ in range(8):
        criterion.observe(histories, rounds)
    confidence = torch.full((2, 4), 0.6)
    fast, slow = criterion.verify_lengths(histories, confidence, [50, 50]).tolist()
    assert fast < slow
    others_wait_fast, others_wait_slow = criterion.verify_lengths(histories, confidence).tolist()
    assert fast < others_wait_fast <= others_wait_slow
    few, many = criterion.verify_lengths(histories, confidence, [2, 100]).tolist()
    assert few < many
