# SPDX-License-Identifier: Apache-2.0
"""A session runs both sides, one at a time, with the texts of plain `generate` calls, and ends when told to."""

import threading
import time
from contextlib import contextmanager

import pytest
import torch

from dspark_hf import AcceptanceStats
from dspark_hf.demo.records import CORRECTION
from dspark_hf.demo.session import Pair, Session
from dspark_hf.demo.settings import Limits, RunSettings
from tests.support.models import oracle_draft, spread_confidence, tiny_target
from tests.support.scripted import letter_tokenizer, text_of


PROMPT = "What is this?"
NUM_NEW = 24


@pytest.fixture(scope="module")
def pair():
    target = tiny_target()
    draft = spread_confidence(oracle_draft(target))
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    return Pair(target, draft, letter_tokenizer())


@pytest.fixture
def session(pair):
    return Session(pair, Limits(max_new_tokens=300), update_s=0.01)


@contextmanager
def slowed(target, seconds=0.02):
    """Every pass of the target takes at least so long."""
    handle = target.register_forward_pre_hook(lambda *_: time.sleep(seconds))
    try:
        yield
    finally:
        handle.remove()


def generated(pair, **arguments):
    inputs = pair.tokenizer(PROMPT, return_tensors="pt")
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    text = pair.target.generate(**inputs, **arguments)
    return tuple(text[0, inputs["input_ids"].shape[1] :].tolist())


def wait_for_threads():
    deadline = time.monotonic() + 20
    while any(thread.name == "dspark-demo" for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "the models are still running"
        time.sleep(0.01)


def test_both_sides_have_the_text_of_generate(pair, session):
    *_, last = session.compare(RunSettings(PROMPT, max_new_tokens=NUM_NEW))
    assert last.phase == "done"
    assert last.plain.token_ids == generated(pair, do_sample=False, max_new_tokens=NUM_NEW)
    assert last.identical
    assert last.dspark.text == pair.tokenizer.decode(last.dspark.token_ids)


def test_tokens_agree_with_the_rounds(session):
    *_, last = session.compare(RunSettings(PROMPT, max_new_tokens=NUM_NEW))
    stats = last.dspark.stats
    assert isinstance(stats, AcceptanceStats)
    assert stats.num_committed == NUM_NEW - 1  # the prefill's token is in no round
    assert list(last.dspark.token_ids[1:]) == text_of(stats)
    assert 1 < stats.accepted_length < 5
    for token in last.dspark.tokens[1:]:
        record = last.dspark.rounds[token.round_index]
        if token.slot is not None:
            assert token.confidence == record.confidence[token.slot]
            assert (record.token_ids[token.slot] == token.token_id) == (token.origin != CORRECTION)
    assert last.plain.rounds == ()


def test_the_sides_are_streamed_one_after_the_other(pair, session):
    with slowed(pair.target):
        seen = list(session.compare(RunSettings(PROMPT, max_new_tokens=NUM_NEW)))
    phases = [progress.phase for progress in seen]
    assert phases == sorted(phases, key=["plain", "dspark", "done"].index)
    for phase, name in (("plain", "plain"), ("dspark", "dspark")):
        lengths = [len(getattr(progress, name).tokens) for progress in seen if progress.phase == phase]
        assert lengths[0] == 0
        assert len(set(lengths)) >= 4
        assert lengths == sorted(lengths)
    assert all(progress.dspark is None for progress in seen if progress.phase == "plain")
    assert all(progress.plain.finished for progress in seen if progress.phase == "dspark")


def test_the_same_seed_gives_the_same_text(pair, session):
    def sampled(seed):
        *_, last = session.compare(RunSettings(PROMPT, temperature=1.0, max_new_tokens=NUM_NEW, seed=seed))
        return last

    first, again, other = sampled(0), sampled(0), sampled(1)
    assert (first.plain.token_ids, first.dspark.token_ids) == (again.plain.token_ids, again.dspark.token_ids)
    assert first.plain.token_ids != other.plain.token_ids
    torch.manual_seed(0)
    assert first.plain.token_ids == generated(pair, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=NUM_NEW)


def test_knobs_hold_for_one_call_only(pair, session):
    before = pair.draft.generation_config.to_dict()
    *_, short = session.compare(RunSettings(PROMPT, max_new_tokens=NUM_NEW, num_assistant_tokens=2))
    assert {record.verify_length for record in short.dspark.rounds} <= {0, 1, 2}
    assert max(record.verify_length for record in short.dspark.rounds) == 2
    *_, whole = session.compare(RunSettings(PROMPT, max_new_tokens=NUM_NEW, schedule="constant"))
    assert max(record.verify_length for record in whole.dspark.rounds) == 4
    assert pair.draft.generation_config.to_dict() == before


def test_a_chosen_schedule_goes_before_a_saved_threshold(pair, session):
    pair.draft.generation_config.assistant_confidence_threshold = 1.0  # nothing would ever be sent
    try:
        *_, cut = session.compare(RunSettings(PROMPT, max_new_tokens=NUM_NEW))
        *_, whole = session.compare(RunSettings(PROMPT, max_new_tokens=NUM_NEW, schedule="constant"))
        assert pair.draft.generation_config.assistant_confidence_threshold == 1.0
    finally:
        pair.draft.generation_config.assistant_confidence_threshold = None
    assert cut.dspark.stats.num_drafted == 0
    assert whole.dspark.stats.num_drafted > 0


@pytest.mark.parametrize("phase", ["plain", "dspark"])
def test_stop_ends_a_side_at_the_next_token(pair, session, phase):
    stop = threading.Event()
    with slowed(pair.target):
        for progress in session.compare(RunSettings(PROMPT, max_new_tokens=300 if phase == "plain" else 60), stop):
            side = getattr(progress, phase)
            if side is not None and len(side.tokens) >= 3:
                stop.set()
    assert progress.phase == "stopped"
    assert 3 <= len(getattr(progress, phase).tokens) < 50
    assert (progress.dspark is None) == (phase == "plain")
    wait_for_threads()


def test_a_comparison_stopped_before_its_turn_runs_nothing(pair, session):
    stop = threading.Event()
    stop.set()
    (progress,) = session.compare(RunSettings(PROMPT), stop)
    assert (progress.phase, progress.plain, progress.dspark) == ("stopped", None, None)


def test_closing_the_iterator_ends_the_run(pair, session):
    with slowed(pair.target):
        steps = session.compare(RunSettings(PROMPT, max_new_tokens=300))
        assert len([next(steps), next(steps)]) == 2
        begun = time.monotonic()
        steps.close()
        wait_for_threads()
        assert time.monotonic() - begun < 3  # 300 tokens would take 6 seconds


def test_two_visitors_never_run_at_once(pair, session):
    running, most = [], []

    def enter(*_):
        running.append(threading.get_ident())
        most.append(len(set(running)))
        time.sleep(0.002)

    handles = [
        pair.target.register_forward_pre_hook(enter),
        pair.target.register_forward_hook(lambda *_: running.remove(threading.get_ident())),
    ]
    results = []

    def visit():
        *_, last = session.compare(RunSettings(PROMPT, max_new_tokens=NUM_NEW))
        results.append(last)

    threads = [threading.Thread(target=visit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    for handle in handles:
        handle.remove()
    assert max(most) == 1
    assert [result.identical for result in results] == [True] * 4


def test_a_prompt_of_too_many_tokens_is_refused(pair):
    session = Session(pair, Limits(max_prompt_tokens=10, max_new_tokens=20))
    with pytest.raises(ValueError, match="too long for the demo: 11 tokens, and at most 10"):
        next(session.compare(RunSettings(PROMPT, max_new_tokens=5)))
    # 512 positions, of which 20 are kept for the answer.
    with pytest.raises(ValueError, match="600 tokens, and at most 492"):
        Session(pair, Limits()).check(RunSettings("a" * 600, max_new_tokens=20))


def test_errors_of_the_models_reach_the_caller(pair, session):
    def fail(*_):
        raise RuntimeError("out of memory")

    handle = pair.target.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        list(session.compare(RunSettings(PROMPT, max_new_tokens=NUM_NEW)))
    handle.remove()
    *_, last = session.compare(RunSettings(PROMPT, max_new_tokens=NUM_NEW))  # the models are free again
    assert last.identical


def test_warm_up_is_short_and_uses_the_draft(pair, session):
    lengths = []
    handles = [
        model.register_forward_pre_hook(lambda *_, kind=kind: lengths.append(kind))
        for kind, model in (("target", pair.target), ("draft", pair.draft))
    ]
    session.warm_up()
    wait_for_threads()
    for handle in handles:
        handle.remove()
    assert lengths.count("target") < 90
    assert "draft" in lengths


def test_characters_of_several_tokens_come_whole():
    class Bytes:
        """Decodes each id as one byte."""

        def decode(self, ids, **_):
            return bytes(ids).decode("utf-8", errors="replace")

    from dspark_hf.demo.session import _PieceDecoder

    decoder = _PieceDecoder(Bytes())
    pieces = [decoder.add(byte) for byte in "aé€b".encode()]
    assert pieces == ["a", "", "é", "", "", "€", "b"]
