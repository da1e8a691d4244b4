# SPDX-License-Identifier: Apache-2.0
"""DeepSpec's Eagle3 checkpoint gives DeepSpec's numbers."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig

from dspark_hf import collect_rounds
from dspark_hf.decoding.eagle3_drafter import Eagle3CandidateGenerator
from dspark_hf.drafts.modeling_eagle3 import Eagle3DraftModel
from tests.parity.golden import GOLDEN, check_decoding
from tests.support.closeness import assert_close
from tests.support.drafting import OneText
from tests.support.eagle3 import uncached_chain


FOLDER = GOLDEN / "eagle3_qwen3"
CASES = json.loads((FOLDER / "decoding.json").read_text())["cases"]


def load_pair(attention="sdpa"):
    target = AutoModelForCausalLM.from_pretrained(FOLDER / "target", attn_implementation="sdpa")
    target.generation_config = GenerationConfig(pad_token_id=0)  # the data were made with EOS off
    draft = Eagle3DraftModel.from_pretrained(FOLDER / "draft", attn_implementation=attention)
    assert target.dtype == draft.dtype == torch.float32
    return target, draft


def taps(draft, states):
    return torch.cat([states[i + 1] for i in draft.config.target_layer_ids], dim=-1)


def check_steps(draft, binding, hidden, first_position, cache, logits):
    """The steps of one round from the newest output; returns their inputs, outputs and tokens, cache as before."""
    inputs, outputs, tokens = [], [], []
    for step in range(logits.shape[1]):
        inputs.append(hidden)
        row = draft.draft_logits(hidden, binding)
        assert_close(row[:, 0], logits[:, step])
        tokens.append(row.argmax(-1))
        embeds = binding.embed(tokens[-1])
        position = torch.tensor([[first_position + step]])
        hidden = draft(embeds, hidden, position, cache=cache).last_hidden_state
        outputs.append(hidden)
    cache.crop(-len(tokens))
    return torch.cat(inputs, dim=1), torch.cat(outputs, dim=1), torch.cat(tokens, dim=1)


@torch.no_grad()
def check_block(target, draft):
    """Prefill, the steps of a round, verification, the update of the cache, and the steps of the next round."""
    golden, binding, cache = load_file(FOLDER / "block.safetensors"), draft.bind_target(target), DynamicCache()
    prompt, n = golden["prompt"], golden["prompt"].shape[1]
    outputs = target(prompt, output_hidden_states=True)
    assert torch.equal(outputs.logits[:, -1].argmax(-1), golden["first_token"])
    context = taps(draft, outputs.hidden_states)
    assert_close(context, golden["context_hidden_states"])
    projected = draft.project(context)
    assert_close(projected, golden["fc_hidden"])
    shifted = torch.cat([prompt[:, 1:], golden["first_token"][None]], dim=1)
    assert torch.equal(shifted, golden["prefill_token_ids"])
    positions = golden["prefill_position_ids"]
    assert torch.equal(positions, torch.arange(n)[None])
    hidden = draft(binding.embed(shifted), projected, positions, cache=cache).last_hidden_state
    assert_close(hidden, golden["prefill_hidden"])

    steps = check_steps(draft, binding, hidden[:, -1:], n, cache, golden["draft_logits"])
    assert_close(steps[0], golden["step_hidden_in"])
    assert_close(draft.norm(steps[0]), golden["step_normed"])
    assert_close(steps[1], golden["step_hidden_out"])
    assert torch.equal(steps[2], golden["draft_tokens"])
    assert torch.equal(golden["step_position_ids"], n + torch.arange(4)[None])

    verified = torch.cat([golden["first_token"][None], golden["draft_tokens"]], dim=1)
    assert torch.equal(verified, golden["verify_token_ids"])
    outputs = target(torch.cat([prompt, verified], dim=1), output_hidden_states=True)
    assert_close(outputs.logits[:, n:], golden["target_logits"])
    accepted = int(golden["accepted_draft_tokens"])
    choices = outputs.logits[:, n:].argmax(-1)
    assert (choices[:, :-1] == golden["draft_tokens"]).cumprod(-1).sum() == accepted
    committed = choices[:, : accepted + 1]
    assert torch.equal(committed, golden["committed_tokens"])
    context = taps(draft, outputs.hidden_states)[:, n : n + accepted + 1]
    assert_close(context, golden["committed_hidden_states"])
    positions = golden["committed_position_ids"]
    assert torch.equal(positions, n + torch.arange(accepted + 1)[None])

    # The reference masks nothing here. That changes all rows but the last, the only one that is read.
    passes = []
    for mask in (None, torch.ones(1, 1, accepted + 1, n + accepted + 1, dtype=torch.bool)):
        embeds = binding.embed(committed)
        passes.append(draft(embeds, draft.project(context), positions, mask, cache).last_hidden_state)
        if mask is None:
            cache.crop(-accepted - 1)
    assert_close(passes[1], golden["update_hidden"])
    assert_close(passes[0][:, -1:], golden["update_hidden"][:, -1:])
    steps = check_steps(draft, binding, passes[0][:, -1:], n + accepted + 1, cache, golden["next_draft_logits"])
    assert_close(steps[0], golden["next_step_hidden_in"])
    assert torch.equal(steps[2], golden["next_draft_tokens"])
    assert accepted < 4, "the data roll nothing back"


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_block(attention):
    check_block(*load_pair(attention))


def test_every_tensor_counts():
    target, draft = load_pair()
    check_block(target, draft)
    names = list(draft.state_dict())
    assert len(names) == 14  # all in the file but the target's embedding and LM head
    for name in names:
        tensor = draft.get_parameter(name)
        before = tensor.detach().clone()
        with torch.no_grad():
            tensor.view(-1)[tensor.numel() // 2] += 0.1
        with pytest.raises(AssertionError):
            check_block(target, draft)
        tensor.data.copy_(before)
    check_block(target, draft)


@pytest.mark.parametrize("change", ["theta", "layer ids", "epsilon"])
def test_every_field_counts(change):
    target, draft = load_pair()
    config = draft.config
    if change == "theta":
        config.rope_parameters["rope_theta"] = 11_000.0
    elif change == "layer ids":
        config.target_layer_ids = [0, 1, 2, 4, 5]
    else:
        config.rms_norm_eps = 1e-3
    changed = Eagle3DraftModel.from_pretrained(FOLDER / "draft", config=config)
    with pytest.raises(AssertionError):
        check_block(target, changed)


@torch.no_grad()
def test_generator_drafts_the_same_rounds():
    golden, (target, draft) = load_file(FOLDER / "block.safetensors"), load_pair()
    prompt = golden["prompt"]
    generator = OneText(Eagle3CandidateGenerator(target, draft, GenerationConfig(do_sample=False, max_length=512)))
    text = torch.cat([prompt, golden["verify_token_ids"][:, :1]], dim=1)
    generator.add_context(target(prompt, output_hidden_states=True).hidden_states, prompt.shape[1], {})
    proposal = generator.propose(text)
    assert torch.equal(proposal.token_ids, golden["draft_tokens"])
    verified = torch.cat([prompt, golden["verify_token_ids"]], dim=1)
    states = target(verified, output_hidden_states=True).hidden_states
    rows = tuple(layer[:, prompt.shape[1] :] for layer in states)  # those of rejected drafts behind
    generator.add_context(rows, golden["committed_tokens"].shape[1], {})
    proposal = generator.propose(torch.cat([text, golden["committed_tokens"]], dim=1))
    assert torch.equal(proposal.token_ids, golden["next_draft_tokens"])


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_cached_rounds(attention, monkeypatch):
    """Every round of a decoding has the logits that it has without any cache."""
    target, draft = load_pair(attention)
    right, rounds = Eagle3CandidateGenerator._draft_chain, []

    def spy(self, *args):
        rounds.append([])
        return right(self, *args)

    right_logits = Eagle3DraftModel.draft_logits

    def spy_logits(self, *args):
        rounds[-1].append(right_logits(self, *args))
        return rounds[-1][-1]

    case = CASES[0]
    with monkeypatch.context() as patch, collect_rounds() as stats:
        patch.setattr(Eagle3CandidateGenerator, "_draft_chain", spy)
        patch.setattr(Eagle3DraftModel, "draft_logits", spy_logits)
        output = target.generate(
            torch.tensor([case["prompt"]]),
            do_sample=False,
            max_new_tokens=40,
            assistant_model=draft,
            prompt_lookup_num_tokens=0,
        )
    assert output[0].tolist() == case["output"]
    drafted = [record for record in stats.rounds if record.drafted]
    assert len(drafted) == len(rounds) >= 8
    end = len(case["prompt"]) + 1
    for record, logits in zip(drafted, rounds, strict=True):
        chain = uncached_chain(target, draft, output[:, :end], record.verify_length, torch.tensor([record.token_ids]))
        assert_close(torch.stack(logits, dim=1), chain.draft_logits)
        assert list(record.token_ids) == chain.draft_logits.argmax(-1)[0].tolist()
        end += record.num_committed


def test_decoding():
    target, draft = load_pair()
    compared = shortened = 0
    for case in CASES:
        counts = check_decoding(case, target, draft)
        compared, shortened = compared + counts[0], shortened + counts[1]
    assert compared >= 80
    assert shortened <= 4 * len(CASES)  # one per token of a block at most
    # The data hold rounds with all, some and none of the drafts accepted.
    assert {1, 2, 3, 5} <= {length for case in CASES for length in case["accepted_lengths"]}
    assert any(case["stop_token_ids"] for case in CASES)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@torch.no_grad()
def test_steps_of_training(attention):
    """Training-time test: step k reads the outputs of step k - 1, and its own keys on the diagonal alone."""
    golden, (target, draft) = load_file(FOLDER / "training.safetensors"), load_pair(attention)
    binding, cache = draft.bind_target(target), DynamicCache()
    ids, hidden, length = golden["input_ids"], draft.project(golden["context_hidden_states"]), 56
    for step in range(4):
        shift = step + 1
        shifted = torch.cat([ids[:, shift:], ids.new_zeros(2, shift)], dim=1)
        mask = golden["step_attention_masks"][step][:, None, :, : length * (step + 1)]
        positions = (torch.arange(length) + step).expand(2, -1)
        hidden = draft(binding.embed(shifted), hidden, positions, mask, cache).last_hidden_state
        logits = draft.draft_logits(hidden, binding)
        for row, valid in enumerate(golden["attention_mask"].sum(-1).tolist()):  # the rest is not meaningful
            rows = slice(0, valid - shift)
            assert_close(hidden[row, rows], golden["step_hidden_states"][step, row, rows])
            assert_close(logits[row, rows], golden["step_logits"][step, row, rows])


def test_configuration():
    config = load_pair()[1].config
    assert (config.ttt_length, config.num_draft_slots, config.num_hidden_layers) == (4, 4, 1)
    assert (config.target_layer_ids, config.num_target_layers) == ([0, 1, 3, 4, 5], 7)
    assert (config.draft_vocab_size, config.target_name_or_path) == (None, "target")
