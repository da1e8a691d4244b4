# SPDX-License-Identifier: Apache-2.0
"""Reading of the golden data, and the comparisons that all reference formats share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from dspark_hf import DSparkCandidateGenerator, DSparkDraftModel, collect_rounds
from tests.support.closeness import assert_close
from tests.support.drafting import OneText
from tests.support.models import uncached_block


GOLDEN = Path(__file__).parents[1] / "data" / "golden"


def load_pair(
    folder: Path, target_folder: Path | None = None, attention: str = "sdpa"
) -> tuple[PreTrainedModel, DSparkDraftModel]:
    # The references ran with sdpa; under another one transformers' Gemma 4 differs from itself by more than rounding.
    target = AutoModelForCausalLM.from_pretrained(target_folder or folder / "target", attn_implementation="sdpa")
    target.generation_config = GenerationConfig(pad_token_id=0)  # the data were made with EOS off
    draft = DSparkDraftModel.from_pretrained(folder / "draft", attn_implementation=attention)
    assert target.dtype == draft.dtype == torch.float32
    return target, draft


def check_block(folder: Path, target: PreTrainedModel, draft: DSparkDraftModel) -> None:
    """One block after a prefill: context, backbone, base and corrected logits, greedy chain, confidence.

    References whose slot 0 repeats the anchor record its hidden states too; only the slots that draft are compared.
    """
    golden = load_file(folder / "block.safetensors")
    prompt, text = golden["prompt"], torch.cat([golden["prompt"], golden["anchor"][None]], dim=1)
    states = target(prompt, output_hidden_states=True).hidden_states
    context = torch.cat([states[i + 1] for i in draft.config.target_layer_ids], dim=-1)
    assert_close(context, golden["context_hidden_states"])
    block = uncached_block(target, draft, text)
    slots = draft.config.num_draft_slots
    assert_close(block.hidden, golden["block_hidden"][:, -slots:])
    if draft.markov_head is not None or "base_logits" in golden:
        assert_close(block.base_logits, golden["base_logits"][:, -slots:])
    assert_close(block.draft_logits, golden["draft_logits"])
    assert torch.equal(block.token_ids, golden["draft_tokens"])
    assert (block.confidence_logits is None) == ("confidence_logits" not in golden)
    if block.confidence_logits is not None:
        assert_close(block.confidence_logits, golden["confidence_logits"])
    if "draft_vocab_ids" in golden:
        assert torch.equal(block.draft_logits.argmax(-1), golden["draft_vocab_ids"])

    draft.generation_config.num_assistant_tokens_schedule = "constant"
    generator = OneText(DSparkCandidateGenerator(target, draft, GenerationConfig(do_sample=False, max_length=512)))
    generator.add_context(states, prompt.shape[1], {})
    proposal = generator.propose(text)
    assert torch.equal(proposal.token_ids, golden["draft_tokens"])
    if block.confidence_logits is not None:
        confidence = golden["confidence_logits"].sigmoid()
        assert_close(torch.tensor([proposal.confidence]), confidence)


def check_cached_rounds(folder: Path, target: PreTrainedModel, draft: DSparkDraftModel, monkeypatch) -> int:
    """Every round of a decoding equals the same block without any cache; returns how many there were."""
    right, rounds = DSparkCandidateGenerator._parallel_stage, []

    def spy(self, *args):
        rounds.append(right(self, *args))
        return rounds[-1]

    case = json.loads((folder / "decoding.json").read_text())["cases"][0]
    with monkeypatch.context() as patch, collect_rounds() as stats:
        patch.setattr(DSparkCandidateGenerator, "_parallel_stage", spy)
        output = target.generate(
            torch.tensor([case["prompt"]]),
            do_sample=False,
            max_new_tokens=case["max_new_tokens"],
            assistant_model=draft,
            assistant_confidence_threshold=0.0,
        )
    assert output[0].tolist() == case["output"]
    end, count = len(case["prompt"]) + 1, 0
    for record in stats.rounds:
        if record.confidence or record.token_ids:  # else the length limit left no room to draft
            block = uncached_block(target, draft, output[:, :end])
            assert_close(rounds[count], block.hidden)
            assert list(record.token_ids) == block.token_ids[0, : record.verify_length].tolist()
            count += 1
        end += record.num_committed
    assert count == len(rounds)
    return count


def check_decoding(case: dict[str, Any], target: PreTrainedModel, draft: DSparkDraftModel) -> tuple[int, int]:
    """Rounds of a whole decoding, up to where our last blocks are shortened; returns rounds compared and shortened."""
    prompt, stops = torch.tensor([case["prompt"]]), case.get("stop_token_ids")
    with collect_rounds() as stats:
        output = target.generate(
            prompt,
            do_sample=False,
            max_new_tokens=case["max_new_tokens"],
            eos_token_id=stops,
            assistant_model=draft,
            assistant_confidence_threshold=case.get("threshold", 0.0),
            prompt_lookup_num_tokens=0,
        )
    assert output[0].tolist() == case["output"] == case["plain_greedy"][: len(case["output"])]
    room, compared, shortened = case["max_new_tokens"] - 1, 0, 0  # the prefill makes the first token
    # References differ in what they count of the round that a stop token ends.
    for index, record in enumerate(stats.rounds[:-1] if stops else stats.rounds):
        proposed = case["proposal_lengths"][index]
        reference = case["rounds"][index]
        assert record.anchor_id == reference["anchor"]
        # Ours leaves the last place to the bonus token.
        assert record.verify_length == min(proposed, room - 1)
        assert list(record.token_ids) == reference["drafts"][: record.verify_length]
        if record.confidence:
            confidence = torch.tensor(reference.get("confidence_logits") or []).sigmoid()  # of the slots it sent
            common = min(len(record.confidence), len(confidence))
            assert common >= record.verify_length
            assert_close(torch.tensor(record.confidence)[:common], confidence[:common])
        if record.verify_length == proposed:
            assert record.num_committed == case["accepted_lengths"][index]
            compared += 1
        else:
            shortened += 1
        room -= record.num_committed
    assert room == 0 or stops
    return compared, shortened
