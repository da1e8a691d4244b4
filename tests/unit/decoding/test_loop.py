# SPDX-License-Identifier: Apache-2.0
"""The loop's own statements; that its text is right is tested in tests/losslessness."""

import logging

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.utils import logging as library_logging

from dspark_hf import collect_rounds
from dspark_hf.decoding.hopeless import HOPELESS_ROUNDS
from tests.support.models import character_tokenizer, oracle_draft, random_draft, random_prompt, tiny_target


class RecordingProcessor(LogitsProcessor):
    """Changes nothing; remembers the length of the text it was called with."""

    def __init__(self, calls: list):
        self.calls = calls

    def __call__(self, input_ids, scores):
        self.calls.append(("processor", input_ids.shape[1]))
        return scores


class RecordingCriterion(StoppingCriteria):
    """Likewise, and ends the text at a length."""

    def __init__(self, calls: list, stop_at: int | None):
        self.calls, self.stop_at = calls, stop_at

    def __call__(self, input_ids, scores, **kwargs):
        self.calls.append(("criterion", input_ids.shape[1]))
        return torch.tensor([input_ids.shape[1] == self.stop_at])


def calls(target, prompt, stop_at=None, **kwargs):
    recorded = []
    target.generate(
        prompt,
        do_sample=False,
        max_new_tokens=20,
        logits_processor=LogitsProcessorList([RecordingProcessor(recorded)]),
        stopping_criteria=StoppingCriteriaList([RecordingCriterion(recorded, stop_at)]),
        **kwargs,
    )
    return recorded


@pytest.mark.parametrize("end", ["length", "eos", "stop string", "criterion"])
def test_processors_and_criteria_are_called_as_in_plain_generation(end):
    """In turn, once per token, on its own prefix, and no more once the text has ended.

    Their state may outlive the call, and one may read what the other has written.
    """
    target, tokenizer = tiny_target("gemma3"), character_tokenizer()
    draft = oracle_draft(target)
    prompt = random_prompt(9, seed=4)
    text = target.generate(prompt, do_sample=False, max_new_tokens=20)[0, 9:].tolist()
    inside = 0
    for position in range(20):
        kwargs, stop_at = {}, None
        if end == "eos":
            kwargs["eos_token_id"] = text[position]
        elif end == "stop string":
            kwargs |= {"stop_strings": tokenizer.decode([text[position]]), "tokenizer": tokenizer}
        elif end == "criterion":
            stop_at = 10 + position
        plain = calls(target, prompt, stop_at, **kwargs)
        with collect_rounds() as stats:
            drafted = calls(target, prompt, stop_at, assistant_model=draft, **kwargs)
        assert drafted == plain
        inside += any(record.truncated for record in stats.rounds)
    assert (inside > 0) == (end != "length"), "no text ended with a draft"


def messages(monkeypatch):
    found = []

    class Handler(logging.Handler):
        def emit(self, record):
            found.append(record.getMessage())

    library = logging.getLogger("transformers")
    handler = Handler()
    monkeypatch.setattr(library, "handlers", [*library.handlers, handler])
    return found


def test_a_hopeless_draft_is_reported(monkeypatch):
    found = messages(monkeypatch)
    library_logging.warning_once.cache_clear()  # once per process, or until the cache is cleared
    target = tiny_target()
    kwargs = {"do_sample": False, "max_new_tokens": HOPELESS_ROUNDS + 2}
    draft = random_draft(seed=6)
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    with collect_rounds() as stats:
        target.generate(random_prompt(5), assistant_model=draft, **kwargs)
    assert stats.accepted_length == 1.0, "choose another seed"
    assert [message for message in found if "almost never accepted" in message]
    found.clear()
    target.generate(random_prompt(5), assistant_model=draft, **kwargs)
    assert len(found) == 1, "every call speaks for itself"


def test_a_hopeless_draft_is_reported_although_it_is_soon_left_alone(monkeypatch):
    """The default schedule stops drafting after a few rounds of a call; the calls are counted together."""
    found = messages(monkeypatch)
    library_logging.warning_once.cache_clear()
    target, draft = tiny_target(), random_draft(seed=6)
    draft.generation_config.prompt_lookup_num_tokens = 0
    for _ in range(16):
        with collect_rounds() as stats:
            target.generate(random_prompt(5), do_sample=False, max_new_tokens=40, assistant_model=draft)
        assert sum(not record.drafted for record in stats.rounds) > 20
        if found:
            break
    assert sum("almost never accepted" in message for message in found) == 1
    assert "rounds of the last" in found[0]


def test_calls_with_another_target_are_no_evidence(monkeypatch):
    """The draft is useless for one target and good for the other; what it did there is not said here."""
    found = messages(monkeypatch)
    target, other = tiny_target(), tiny_target(seed=5)
    draft = oracle_draft(target)
    for _ in range(16):
        other.generate(random_prompt(5), do_sample=False, max_new_tokens=HOPELESS_ROUNDS - 4, assistant_model=draft)
        if found:
            break
    assert found
    found.clear()
    target.generate(random_prompt(6), do_sample=False, max_new_tokens=HOPELESS_ROUNDS - 4, assistant_model=draft)
    assert not found


@pytest.mark.parametrize("what", ["a good draft", "too few rounds"])
def test_other_drafts_are_not_reported(monkeypatch, what):
    found = messages(monkeypatch)
    library_logging.warning_once.cache_clear()
    target = tiny_target()
    draft = oracle_draft(target) if what == "a good draft" else random_draft(seed=6)
    length = 24 if what == "a good draft" else HOPELESS_ROUNDS - 4
    target.generate(random_prompt(6), do_sample=False, max_new_tokens=length, assistant_model=draft)
    assert not [message for message in found if "almost never" in message]


def test_records_tell_the_text():
    target = tiny_target()
    with collect_rounds() as stats:
        output = target.generate(
            random_prompt(8), do_sample=False, max_new_tokens=24, assistant_model=oracle_draft(target)
        )
    text, rebuilt = output[0, 8:].tolist(), output[0, 8:9].tolist()
    for record in stats.rounds:
        assert record.anchor_id == rebuilt[-1]
        rebuilt += [*record.token_ids[: record.num_accepted], record.bonus_token][: record.num_committed]
        assert record.num_drawn <= len(record.confidence)
        assert (record.source == "copy") == (record.num_copied > 0 and not record.confidence)
        assert record.draft_s > 0
        assert record.verify_s > 0
        assert record.round_s >= record.draft_s + record.verify_s
    assert rebuilt == text


def test_rounds_reach_every_collector():
    target = tiny_target()
    draft = oracle_draft(target)
    with collect_rounds() as outer:
        target.generate(random_prompt(8), do_sample=False, max_new_tokens=12, assistant_model=draft)
        with collect_rounds() as inner:
            target.generate(random_prompt(8), do_sample=False, max_new_tokens=12, assistant_model=draft)
    assert 0 < inner.num_rounds < outer.num_rounds
    assert outer.rounds[-inner.num_rounds :] == inner.rounds
    assert outer.num_committed == 22
