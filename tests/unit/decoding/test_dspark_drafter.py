# SPDX-License-Identifier: Apache-2.0
"""The drafting half of a round; that its logits are the ones sampled from is tested in tests/losslessness."""

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteriaList

from dspark_hf import DraftProposal, DSparkCandidateGenerator, RoundRecord
from dspark_hf.decoding.drafter import CommittedContext, ContextSpan
from dspark_hf.decoding.request import Request
from dspark_hf.scheduling import FixedScheduler, LookaheadScheduler, SPSCurve, ThresholdScheduler
from dspark_hf.scheduling.choice import DraftPlan
from tests.support.closeness import assert_close, assert_differs
from tests.support.drafting import OneText
from tests.support.models import oracle_draft, random_draft, random_prompt, tiny_target, uncached_block


def build(target, draft, **config):
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    return DSparkCandidateGenerator(target, draft, GenerationConfig(do_sample=False, max_length=512, **config))


@torch.no_grad()
def hidden_states(target, ids, **kwargs):
    return target(ids, output_hidden_states=True, **kwargs).hidden_states


@torch.no_grad()
def test_block_follows_the_context_of_many_rounds():
    """Context arrives in pieces, as rounds commit it; a piece without a proposal waits for the next one."""
    target = tiny_target()
    draft = oracle_draft(target, target_layer_ids=[2, -1])
    generator, text = OneText(build(target, draft)), random_prompt(20)
    states = hidden_states(target, text)
    start = 0
    for end, propose in ((7, True), (8, False), (11, False), (12, True), (17, True)):
        generator.add_context(tuple(layer[:, start:end] for layer in states), end - start, {})
        start = end
        if propose:
            proposal = generator.propose(text[:, : end + 1])
            assert torch.equal(proposal.token_ids, uncached_block(target, draft, text[:, : end + 1]).token_ids)
            assert generator.drafter._cache.lengths == [end]


@torch.no_grad()
def test_rows_of_rejected_drafts_are_no_context():
    target = tiny_target()
    draft = oracle_draft(target)
    text = random_prompt(10)
    states = hidden_states(target, text)
    generator = OneText(build(target, draft))
    generator.add_context(states, 6, {})  # the rows behind are of drafts that were rejected
    expected = uncached_block(target, draft, text[:, :7])
    assert torch.equal(generator.propose(text[:, :7]).token_ids, expected.token_ids)


@torch.no_grad()
@pytest.mark.parametrize("num_pads", [1, 4])
def test_left_padding_is_no_context(num_pads):
    target = tiny_target()
    draft = oracle_draft(target, noise=1.0)  # a backbone that matters
    text = random_prompt(9)
    expected = uncached_block(target, draft, text)
    padded = torch.cat([torch.zeros(1, num_pads, dtype=torch.long), text], dim=1)
    mask = (torch.arange(9 + num_pads) >= num_pads).long()[None]
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
    states = hidden_states(target, padded[:, :-1], attention_mask=mask[:, :-1], position_ids=position_ids[:, :-1])
    generator = OneText(build(target, draft))
    generator.add_context(states, num_pads + 8, {"attention_mask": mask, "position_ids": position_ids})
    proposal = generator.propose(padded)
    assert torch.equal(proposal.token_ids, expected.token_ids)
    assert generator.drafter._cache.lengths == [8]
    assert_close(torch.tensor([proposal.confidence]), expected.confidence_logits.sigmoid())


@torch.no_grad()
def test_text_positions_come_first_in_multimodal_ones():
    target = tiny_target()
    draft = oracle_draft(target, noise=1.0)
    text = random_prompt(9)
    states = hidden_states(target, text[:, :-1])
    text_positions = torch.arange(9)[None] + 5  # only differences matter
    generator = OneText(build(target, draft))
    positions = torch.stack([text_positions, *(torch.randint(0, 50, (1, 9)) for _ in range(3))])
    generator.add_context(states, 8, {"position_ids": positions})
    proposal = generator.propose(text)
    expected = uncached_block(target, draft, text)
    assert_close(torch.tensor([proposal.confidence]), expected.confidence_logits.sigmoid())
    scrambled = OneText(build(target, draft))
    scrambled.add_context(states, 8, {"position_ids": positions.flip(0)})
    assert_differs(scrambled.propose(text).confidence, proposal.confidence)


@torch.no_grad()
def test_nothing_is_sent_after_an_eos():
    target = tiny_target()
    draft = oracle_draft(target)
    text = random_prompt(9)
    chain = uncached_block(target, draft, text).token_ids[0].tolist()
    assert len(set(chain)) > 2
    for eos, expected in (([chain[0]], 1), ([chain[2], 90], 1 + chain.index(chain[2])), ([95], 4)):
        config = GenerationConfig(do_sample=False, max_length=512)
        config._eos_token_tensor = torch.tensor(eos)
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        generator = OneText(DSparkCandidateGenerator(target, draft, config))
        generator.add_context(hidden_states(target, text[:, :-1]), 8, {})
        proposal = generator.propose(text)
        assert proposal.token_ids[0].tolist() == chain[:expected]
        assert len(proposal.confidence) == 4, "the confidences of slots that were cut are recorded"


@torch.no_grad()
def test_target_without_hidden_states_is_refused():
    target = tiny_target()
    generator = build(target, oracle_draft(target))
    states = hidden_states(target, random_prompt(5))
    generator.check_hidden_states(states)
    for wrong in ((), (states[0], None, states[2], states[3], states[4])):
        with pytest.raises(ValueError, match=r"returned no hidden states for `target_layer_ids` \[0, 2\]"):
            generator.check_hidden_states(wrong)


# Before 5.23 a list named layers, not entries, so that all of them are asked for.
ENTRIES_CAN_BE_NAMED = Version(transformers.__version__) >= Version("5.23")


@pytest.mark.parametrize(("wanted", "entries"), [(None, [1, 3] if ENTRIES_CAN_BE_NAMED else True), (True, True)])
def test_only_the_layers_that_are_read_are_asked_for(wanted, entries):
    target = tiny_target()
    generator = build(target, oracle_draft(target), output_hidden_states=wanted)
    assert generator.model_kwargs_overrides == {"output_hidden_states": entries}
    assert generator.requires_model_outputs is True


def test_criterion_follows_the_knobs():
    target = tiny_target()
    draft = oracle_draft(target)
    assert build(target, draft).criterion.scheduler == FixedScheduler(4)
    assert not build(target, draft).needs_curve
    draft.generation_config.num_assistant_tokens_schedule = None
    config = GenerationConfig(do_sample=False, max_length=9)
    greedy = DSparkCandidateGenerator(target, draft, config)
    config.do_sample = True
    sampling = DSparkCandidateGenerator(target, draft, config)
    assert greedy.criterion.scheduler == sampling.criterion.scheduler == LookaheadScheduler()
    slow = RoundRecord(1, (2,), (0.5,), 0, 3, 1, draft_s=5.0, verify_s=9.0, round_s=14.0)
    for generator in (greedy, sampling):
        assert generator.needs_curve
        generator.use_curve(SPSCurve((1, 5), (1.0, 2.0), 0.1))
        request = generator._stock_request(random_prompt(4))
        generator.observe([request], [slow])
    assert greedy.criterion.curve.plain_s > 5
    assert sampling.criterion.curve.plain_s == 1.0, "time must not steer the random stream"
    draft.generation_config.assistant_confidence_threshold = 0.25
    threshold = DSparkCandidateGenerator(target, draft, config)
    assert threshold.criterion.scheduler == ThresholdScheduler(0.25)
    assert not threshold.needs_curve


@torch.no_grad()
def test_context_waits_while_drafting_does_not_pay(monkeypatch):
    """A skipped round keeps its context; the next block sees it as if nothing had been skipped."""
    target = tiny_target()
    draft = oracle_draft(target)
    text = random_prompt(9)
    states = hidden_states(target, text)
    proposals = []
    for skip in (False, True):
        generator = OneText(DSparkCandidateGenerator(target, draft, GenerationConfig(do_sample=False, max_length=512)))
        gate = iter((not skip, True))
        policy = generator.drafter.policy
        monkeypatch.setattr(policy, "plan", lambda *_, gate=gate: DraftPlan((0,), (next(gate),), (np.zeros(0),)))
        monkeypatch.setattr(policy, "verify_lengths", lambda _, confidence, *__: torch.tensor([confidence.shape[1]]))
        generator.add_context(states, 6, {})
        first = generator.propose(text[:, :7])
        assert (first.drafted, first.token_ids.shape[1]) == ((False, 0) if skip else (True, 4))
        generator.add_context(tuple(layer[:, 6:] for layer in states), 2, {})
        proposals.append(generator.propose(text[:, :9]))
    assert torch.equal(proposals[0].token_ids, proposals[1].token_ids)
    assert_close(proposals[0].confidence, proposals[1].confidence)


@torch.no_grad()
def test_confidence_uses_the_calibrated_temperatures():
    target = tiny_target()
    draft = oracle_draft(target)
    text = random_prompt(6)

    def confidence() -> torch.Tensor:
        generator = OneText(build(target, draft))
        generator.add_context(hidden_states(target, text[:, :-1]), 5, {})
        return torch.tensor(generator.propose(text).confidence)

    before = confidence()
    draft.config.confidence_temperatures = [0.5, 1.0, 2.0, 4.0]
    after = confidence()
    assert_close(after.logit(), before.logit() / torch.tensor([0.5, 1.0, 2.0, 4.0]))


@torch.no_grad()
def test_draft_without_confidence_head_learns_from_acceptance_alone():
    target = tiny_target()
    draft = random_draft(enable_confidence_head=False)
    generator = OneText(DSparkCandidateGenerator(target, draft, GenerationConfig(do_sample=False, max_length=512)))
    text = random_prompt(6)
    generator.add_context(hidden_states(target, text[:, :-1]), 5, {})
    proposal = generator.propose(text)
    assert proposal.confidence == ()
    assert proposal.token_ids.shape == (1, 4)


@torch.no_grad()
def test_a_request_takes_its_state_along():
    """The context that waits, the pause and the past belong to a request; only the cache goes by places."""
    target = tiny_target()
    draft = oracle_draft(target)
    texts = [random_prompt(7, seed=seed) for seed in (1, 2, 3)]
    drafter, config = build(target, draft), GenerationConfig(do_sample=False)
    requests = [
        Request(i, text, LogitsProcessorList(), StoppingCriteriaList(), 512, config) for i, text in enumerate(texts)
    ]
    drafter.add_requests(requests)
    for place in (2, 1, 0):  # in another order than they stand in
        span = ContextSpan(place, slice(0, 6), torch.arange(7)[None])
        drafter.read(requests, CommittedContext(hidden_states(target, texts[place][:, :-1]), (span,)))
    drafter.keep_requests([2, 0])
    proposals = drafter.propose([requests[2], requests[0]])
    for text, proposal in zip((texts[2], texts[0]), proposals, strict=True):
        assert torch.equal(proposal.token_ids, uncached_block(target, draft, text).token_ids)
    assert [request.drafting.num_waiting for request in requests] == [0, 6, 0]


def test_empty_proposal():
    proposal = DraftProposal(torch.zeros(1, 0, dtype=torch.long))
    assert proposal.draft_logits is None
    assert proposal.confidence == ()


def test_draft_cache_holds_all_but_the_anchor_after_each_round(monkeypatch):
    lengths, right = [], DSparkCandidateGenerator.propose

    def spy(self, requests, *arguments, **named):
        proposals = right(self, requests, *arguments, **named)
        if self._cache.lengths[0] and not requests[0].drafting.context:
            lengths.append((self._cache.lengths[0], requests[0].input_ids.shape[1]))
        return proposals

    monkeypatch.setattr(DSparkCandidateGenerator, "propose", spy)
    target = tiny_target()
    draft = oracle_draft(target)
    draft.generation_config.num_assistant_tokens_schedule = "constant"  # every round drafts
    target.generate(random_prompt(7), do_sample=False, max_new_tokens=20, assistant_model=draft)
    assert len(lengths) > 3
    assert all(cached == text - 1 for cached, text in lengths)


@torch.no_grad()
def test_a_dead_end_does_not_change_what_the_scheduler_sees_of_the_slots_before_it(monkeypatch):
    """Whether a draft leads to a dead end depends on the draft; sending it must not."""
    target = tiny_target()
    draft = oracle_draft(target)
    text, seen = random_prompt(9), []
    for spoiled in (False, True):
        generator = OneText(DSparkCandidateGenerator(target, draft, GenerationConfig(do_sample=False, max_length=512)))
        monkeypatch.setattr(
            generator.drafter.policy,
            "verify_lengths",
            lambda _, confidence, *__: (seen.append(confidence), torch.tensor([confidence.shape[1]]))[1],
        )
        ends = LogitsProcessorList([_DeadEnd(length=11 if spoiled else 99)])
        generator.request.drafting.processors = ends  # reads the text, as a grammar does
        generator.add_context(hidden_states(target, text[:, :-1]), 8, {})
        proposal = generator.propose(text)
        assert proposal.token_ids.shape[1] == len(proposal.confidence) == (2 if spoiled else 4)
    whole, cut = seen
    assert whole.shape == cut.shape == (1, 4)
    assert torch.equal(cut[:, :2], whole[:, :2])
    assert cut[0, 2:].tolist() == [0.0, 0.0]


class _DeadEnd(LogitsProcessor):
    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores):
        return torch.full_like(scores, float("-inf")) if input_ids.shape[1] == self.length else scores
