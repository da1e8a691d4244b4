# SPDX-License-Identifier: Apache-2.0
"""Targets are asked, not believed: heads, widths, caches, input preparation, and a round over fixed tokens."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, Qwen3ForCausalLM

from dspark_hf import DSparkDraftModel
from dspark_hf._compat import CACHE_KEY
from dspark_hf.drafts.target_probe import Closeness
from tests.support.models import random_draft, random_prompt, tiny_target
from tests.support.scripted import ForwardCounter, StreamerSpy, draft_config_for, lively_target, scripted_draft


SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
PROMPT = random_prompt(11)


def build(model_name: str, config_name: str, **extra) -> PreTrainedModel:
    torch.manual_seed(0)
    target = getattr(transformers, model_name)(getattr(transformers, config_name)(**(SIZES | extra))).eval()
    target.generation_config = GenerationConfig(pad_token_id=0)
    return target


def changed(kind: type[PreTrainedModel]) -> PreTrainedModel:
    """A lively Qwen3 target with another class."""
    original = lively_target()
    target = kind(original.config).eval()
    target.load_state_dict(original.state_dict())
    target.generation_config = original.generation_config
    return target


def assert_same_text(target: PreTrainedModel, **arguments) -> None:
    arguments = {"do_sample": False, "max_new_tokens": 18} | arguments
    plain = target.generate(PROMPT, **arguments)
    draft = scripted_draft(target, plain)
    assert target.generate(PROMPT, assistant_model=draft, **arguments).tolist() == plain.tolist()


def assert_refused(target: PreTrainedModel, match: str, prompt: torch.Tensor = PROMPT, **arguments) -> None:
    spy = StreamerSpy()
    draft = DSparkDraftModel(draft_config_for(target)).eval()
    streamer = {"streamer": spy} if len(prompt) == 1 else {}
    with ForwardCounter(target) as forwards, pytest.raises(NotImplementedError, match=match):
        target.generate(prompt, assistant_model=draft, do_sample=False, max_new_tokens=8, **streamer, **arguments)
    assert forwards.num_prompts == 0
    assert len(spy.puts) <= 1


# Preparation of inputs


class DropsKeywords(Qwen3ForCausalLM):
    """Knows its own arguments only."""

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **kwargs):
        cache = kwargs.get(CACHE_KEY)
        past = cache.get_seq_length() if cache is not None else 0
        return {"input_ids": input_ids[:, past:], CACHE_KEY: cache, "attention_mask": attention_mask}


class LastTokenOnly(Qwen3ForCausalLM):
    """Of a cached text it takes the last token."""

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **kwargs):
        cache = kwargs.get(CACHE_KEY)
        ids = input_ids[:, -1:] if cache is not None and cache.get_seq_length() else input_ids
        return {"input_ids": ids, CACHE_KEY: cache, "attention_mask": attention_mask}


class LastTokenAndItsPosition(Qwen3ForCausalLM):
    """The same with positions made from the mask, as in models of 2023."""

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **kwargs):
        cache = kwargs.get(CACHE_KEY)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
        if cache is not None and cache.get_seq_length():
            input_ids, positions = input_ids[:, -1:], positions[:, -1:]
        return {"input_ids": input_ids, "position_ids": positions, CACHE_KEY: cache, "attention_mask": attention_mask}


class NeverMoreThanOneRow(Qwen3ForCausalLM):
    """Returns the logits of the last token, whatever is asked for."""

    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits[:, -1:]
        return outputs


@pytest.mark.parametrize("kind", [DropsKeywords, LastTokenOnly, LastTokenAndItsPosition])
def test_older_preparations_of_inputs_work(kind):
    assert_same_text(changed(kind))
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), PROMPT], dim=1)
    mask = torch.ones_like(padded)
    mask[:, :3] = 0
    target = changed(kind)
    plain = target.generate(padded, attention_mask=mask, do_sample=False, max_new_tokens=12)
    draft = scripted_draft(target, plain[:, 3:])
    text = target.generate(padded, attention_mask=mask, do_sample=False, max_new_tokens=12, assistant_model=draft)
    assert text.tolist() == plain.tolist()


def test_a_target_that_returns_fewer_logits_than_tokens_is_refused():
    assert_refused(changed(NeverMoreThanOneRow), "must have shape|returned logits for 1")


# Heads


class DividesFirst(Qwen3ForCausalLM):
    """Logits by a factor that no config names."""

    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits / 24
        return outputs


class LayerBeforeTheHead(Qwen3ForCausalLM):
    """A dense layer and a norm between backbone and LM head."""

    def __init__(self, config):
        super().__init__(config)
        torch.manual_seed(5)
        self.before = nn.Sequential(
            nn.Linear(config.hidden_size, config.hidden_size), nn.LayerNorm(config.hidden_size)
        )

    def forward(self, input_ids=None, **kwargs):
        kwargs.pop("logits_to_keep", None)
        outputs = self.model(input_ids=input_ids, **kwargs)
        logits = self.lm_head(self.before(outputs.last_hidden_state))
        return transformers.modeling_outputs.CausalLMOutputWithPast(
            logits=logits, hidden_states=outputs.hidden_states, **{CACHE_KEY: getattr(outputs, CACHE_KEY)}
        )


class AddsPastTheHead(Qwen3ForCausalLM):
    """Something that no module does."""

    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits + outputs.logits.flip(-1)
        return outputs


@torch.no_grad()
def assert_logits_are_the_targets_own(target: PreTrainedModel) -> None:
    outputs = target(PROMPT, output_hidden_states=True)
    binding = DSparkDraftModel(draft_config_for(target)).bind_target(target)
    taken = binding.logits(outputs.hidden_states[-1])
    scale = outputs.logits.abs().max()
    assert (taken - outputs.logits).abs().max() < 1e-5 * scale


@pytest.mark.parametrize("kind", [DividesFirst, LayerBeforeTheHead])
def test_heads_that_the_config_does_not_describe(kind):
    torch.manual_seed(0)
    original = lively_target()
    target = kind(original.config).eval()
    target.load_state_dict(original.state_dict(), strict=False)
    target.generation_config = original.generation_config
    assert_logits_are_the_targets_own(target)
    assert_same_text(target)


def test_a_measured_factor_under_a_soft_cap():
    class Gemma2Divided(transformers.Gemma2ForCausalLM):
        def forward(self, *args, **kwargs):
            outputs = super().forward(*args, **kwargs)
            raw = torch.atanh(outputs.logits / 30.0) * 30.0
            outputs.logits = torch.tanh(raw / 5 / 30.0) * 30.0
            return outputs

    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        **(SIZES | {"head_dim": 8, "final_logit_softcapping": 30.0, "sliding_window": 8})
    )
    assert_logits_are_the_targets_own(Gemma2Divided(config).eval())


@pytest.mark.parametrize("name", ["ModernBertDecoder", "Cohere", "Granite", "Roberta"])
def test_heads_of_real_classes(name):
    extra = {
        "Roberta": {"is_decoder": True, "max_position_embeddings": 64},
        "ModernBertDecoder": {"cls_token_id": 1, "sep_token_id": 2},
        "Cohere": {"logit_scale": 0.25},
        "Granite": {"logits_scaling": 4.0},
    }[name]
    target = build(f"{name}ForCausalLM", f"{name}Config", **extra)
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.3)
    assert_logits_are_the_targets_own(target)


def test_a_reduced_vocabulary_reads_what_the_lm_head_reads():
    target = LayerBeforeTheHead(lively_target().config).eval()
    draft = random_draft(draft_vocab_size=40)
    ids, hidden = draft.draft_token_ids(), torch.randn(2, 32)
    with torch.no_grad():
        draft.lm_head.weight.copy_(target.lm_head.weight[ids])
        binding = draft.bind_target(target)
        torch.testing.assert_close(draft.base_logits(hidden, binding), binding.logits(hidden)[:, ids])


def test_a_head_that_is_more_than_modules_is_refused():
    assert_refused(changed(AddsPastTheHead), "AddsPastTheHead finds others than the target does")


# Widths


def test_logits_wider_than_the_vocabulary_are_refused():
    target = lively_target()
    target.lm_head = nn.Linear(32, 128, bias=False)  # padded for the hardware; the config still says 97
    assert_refused(target, r"logits of Qwen3ForCausalLM must have shape \(1, 5, 97\) for 5 tokens, got \(1, 5, 128\)")


def test_narrow_embeddings_are_refused():
    target = build("OPTForCausalLM", "OPTConfig", word_embed_proj_dim=16, ffn_dim=64, max_position_embeddings=64)
    assert_refused(target, r"embeddings of OPTForCausalLM must have shape \(1, 5, 32\) for 5 tokens, got \(1, 5, 16\)")


# Caches


@pytest.mark.parametrize(
    ("model_name", "config_name", "extra"),
    [
        (
            "GraniteMoeHybridForCausalLM",
            "GraniteMoeHybridConfig",
            {"layer_types": ["attention"] * 4, "num_local_experts": 0, "shared_intermediate_size": 64}
            | {"position_embedding_type": "rope", "mamba_n_heads": 4, "mamba_d_head": 16},
        ),
        (
            "BambaForCausalLM",
            "BambaConfig",
            {"attn_layer_indices": [0, 1, 2, 3], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8},
        ),
        ("Qwen3NextForCausalLM", "Qwen3NextConfig", {"layer_types": ["full_attention"] * 4, "head_dim": 8}),
    ],
)
def test_hybrid_classes_with_attention_layers_only(model_name, config_name, extra):
    target = build(model_name, config_name, **extra)
    assert type(target)._is_stateful
    assert_same_text(target)


@pytest.mark.parametrize(
    ("model_name", "config_name", "extra"),
    [
        ("Mamba2ForCausalLM", "Mamba2Config", {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1}),
        ("MambaForCausalLM", "MambaConfig", {"state_size": 8}),
    ],
)
def test_recurrent_states_are_refused(model_name, config_name, extra):
    assert_refused(build(model_name, config_name, **extra), f"the recurrent state of {model_name}")


def test_a_target_without_a_cache_is_refused():
    target = build("OpenAIGPTLMHeadModel", "OpenAIGPTConfig", n_positions=64)
    assert_refused(target, "continues from a cache, and OpenAIGPTLMHeadModel returned none")


# A round over fixed tokens


class ForgetsThePast(Qwen3ForCausalLM):
    """Several tokens at once see nothing before them, as in some recurrent models."""

    def forward(self, input_ids=None, **kwargs):
        cache = kwargs.get(CACHE_KEY)
        if cache is not None and cache.get_seq_length() and input_ids.shape[1] > 1:
            alone = super().forward(input_ids=input_ids, use_cache=False)
            outputs = super().forward(input_ids=input_ids, **kwargs)
            outputs.logits = alone.logits[:, -outputs.logits.shape[1] :]
            return outputs
        return super().forward(input_ids=input_ids, **kwargs)


class SeesTheFuture(Qwen3ForCausalLM):
    """Tokens of a later pass see one another."""

    def forward(self, input_ids=None, **kwargs):
        outputs = super().forward(input_ids=input_ids, **kwargs)
        cache = kwargs.get(CACHE_KEY)
        if cache is not None and cache.get_seq_length() > input_ids.shape[1] > 1:
            outputs.logits = outputs.logits.mean(dim=1, keepdim=True).expand_as(outputs.logits)
        return outputs


class KeepsWhatWasTakenBack(Qwen3ForCausalLM):
    """A cache that says it can be cropped, and crops nothing of its first layer."""

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        model_kwargs[CACHE_KEY].layers[1].crop = lambda *_: None


@pytest.mark.parametrize("kind", [ForgetsThePast, SeesTheFuture])
def test_a_pass_of_several_tokens_that_is_not_several_steps_is_refused(kind):
    assert_refused(changed(kind), f"in which {kind.__name__} gets other logits")


class OneTokenOnly(Qwen3ForCausalLM):
    """Goes on from a cache with one token only."""

    def forward(self, input_ids=None, **kwargs):
        cache = kwargs.get(CACHE_KEY)
        if cache is not None and cache.get_seq_length() and input_ids.shape[1] > 1:
            raise AssertionError("one token at a time, please")
        return super().forward(input_ids=input_ids, **kwargs)


def test_a_target_that_cannot_run_a_round_is_refused_before_the_first_token():
    assert_refused(changed(OneTokenOnly), "OneTokenOnly does not run: AssertionError: one token at a time")


# Windows: the check goes on behind an invented past that is longer than the window


class WindowOnlyInTheCache(transformers.MistralForCausalLM):
    """The cache drops what left the window, the masks hide nothing of what it keeps."""

    def __init__(self, config):
        super().__init__(config)
        self.hidden_window = config.sliding_window

    def forward(self, *args, **kwargs):
        self.config.sliding_window = None
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.config.sliding_window = self.hidden_window


def mistral(kind: type[PreTrainedModel]) -> PreTrainedModel:
    original = lively_target("mistral")  # a window of 8
    target = kind(original.config).eval()
    target.load_state_dict(original.state_dict())
    target.generation_config = original.generation_config
    return target


def test_a_window_that_only_the_cache_knows_is_refused_where_texts_outgrow_it():
    assert_refused(mistral(WindowOnlyInTheCache), "in which WindowOnlyInTheCache gets other logits")
    target, short = mistral(WindowOnlyInTheCache), random_prompt(3)
    plain = target.generate(short, do_sample=False, max_new_tokens=4)
    draft = scripted_draft(target, plain)
    assert target.generate(short, do_sample=False, max_new_tokens=4, assistant_model=draft).equal(plain)


def test_a_window_that_all_parts_know_is_right():
    target = mistral(transformers.MistralForCausalLM)
    assert_same_text(target)
    draft = random_draft()
    batch = torch.cat([PROMPT, random_prompt(11, seed=4)])
    text = target.generate(batch, do_sample=False, max_new_tokens=12, assistant_model=draft)
    for row in range(2):
        plain = target.generate(batch[row : row + 1], do_sample=False, max_new_tokens=12)
        assert text[row].tolist() == plain[0].tolist()


@pytest.mark.parametrize(("name", "extra"), [("Doge", {}), ("Phimoe", {"num_local_experts": 4})])
def test_a_window_that_only_masks_know_is_refused_in_batches(name, extra):
    target = build(f"{name}ForCausalLM", f"{name}Config", sliding_window=8, **extra)
    assert_refused(
        target, f"{name}ForCausalLM (gets other logits|does not run).*one row at a time", PROMPT.repeat(2, 1)
    )
    assert_same_text(target)


def test_a_cache_that_takes_nothing_back_is_refused():
    target = changed(KeepsWhatWasTakenBack)
    draft = DSparkDraftModel(draft_config_for(target)).eval()
    with pytest.raises((NotImplementedError, RuntimeError)):
        target.generate(PROMPT, assistant_model=draft, do_sample=False, max_new_tokens=8)


class WrongInBatches(Qwen3ForCausalLM):
    """Reads a mask of four dimensions as one of its own."""

    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        outputs = super().forward(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        if attention_mask is not None and attention_mask.ndim == 4:
            outputs.logits = outputs.logits.roll(1, dims=1)
        return outputs


def test_a_batch_that_is_not_its_rows_is_refused_and_one_row_is_not():
    target = changed(WrongInBatches)
    assert_refused(
        target,
        "^DSpark verifies several tokens in one pass, in which WrongInBatches gets other logits",
        PROMPT.repeat(2, 1),
    )
    assert_same_text(target)


def test_what_was_found_is_remembered_until_something_changes():
    target = lively_target()
    draft = random_draft()
    arguments = {"do_sample": False, "max_new_tokens": 2, "assistant_model": draft}
    with ForwardCounter(target) as first:
        target.generate(PROMPT, **arguments)
    with ForwardCounter(target) as second:
        target.generate(PROMPT, **arguments)
    assert first.count > second.count == 2
    target.lm_head = nn.Linear(32, 128, bias=False)
    with pytest.raises(NotImplementedError, match="128"):
        target.generate(PROMPT, **arguments)


def test_a_probe_leaves_no_trace():
    target, reference = lively_target(), lively_target()
    state, random_state = {**target.state_dict()}, torch.get_rng_state()
    hooks = sum(len(module._forward_hooks) for module in target.modules())
    draft = random_draft()
    torch.set_rng_state(random_state)
    draft.bind_target(target)
    assert target.state_dict().keys() == state.keys()
    assert torch.equal(torch.get_rng_state(), random_state)
    assert sum(len(module._forward_hooks) for module in target.modules()) == hooks
    assert not target.training
    plain = reference.generate(PROMPT, do_sample=False, max_new_tokens=8)
    assert torch.equal(target.generate(PROMPT, do_sample=False, max_new_tokens=8), plain)


def test_a_target_on_the_meta_device_or_in_training_is_not_run():
    with torch.device("meta"):
        empty = Qwen3ForCausalLM(tiny_target().config).eval()
    random_draft().bind_target(empty)
    training = tiny_target().train()
    with ForwardCounter(training) as forwards:
        random_draft().bind_target(training)
    assert forwards.count == 0


def test_closeness_by_hand():
    expected = torch.tensor([[1.0, -1.0], [2.0, -2.0], [3.0, -3.0]])  # spreads sqrt(2) * 1, 2, 3
    off = expected.clone()
    off[2] += torch.tensor([0.3, -0.3])  # by a tenth of the spread
    assert Closeness(0.11, 1.0).accepts(off, expected)
    assert not Closeness(0.09, 1.0).accepts(off, expected)
    assert Closeness(0.09, 0.5).accepts(off, expected)  # most rows agree
    ruled_out = off.clone(), expected.clone()
    for logits in ruled_out:
        logits[:, 1] = -torch.inf
    # Only one entry is left to compare: 3.3 for 3, where the spread of (3, 0) is 1.5 * sqrt(2).
    assert Closeness(0.15, 1.0).accepts(*ruled_out)
    assert not Closeness(0.14, 1.0).accepts(*ruled_out)
    assert not Closeness(9.0, 0.0).accepts(ruled_out[0], expected)  # it rules out what the other does not
    broken = torch.full_like(expected, float("nan"))
    assert not Closeness(0.5, 0.0).accepts(broken, expected)
    assert not Closeness(0.5, 0.0).accepts(expected, broken)
    assert Closeness(0.01, 1.0).accepts(broken, broken)  # a broken target is the same in every pass


def test_a_target_with_its_own_rule_for_growing_inputs():
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    assert_same_text(build("MllamaForCausalLM", "MllamaTextConfig", cross_attention_layers=[1], rope_parameters=rope))


class Noisy(Qwen3ForCausalLM):
    """Draws random numbers in every pass."""

    def forward(self, *args, **kwargs):
        torch.rand(3)
        return super().forward(*args, **kwargs)


def test_a_probe_leaves_the_random_stream_of_a_target_that_draws():
    target, draft = changed(Noisy), random_draft()
    torch.manual_seed(7)
    texts = []
    for _ in range(2):  # the first call probes
        torch.manual_seed(7)
        texts.append(target.generate(PROMPT, do_sample=True, max_new_tokens=12, assistant_model=draft).tolist())
    assert texts[0] == texts[1]
