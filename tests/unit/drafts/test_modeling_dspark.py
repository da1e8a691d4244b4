# SPDX-License-Identifier: Apache-2.0
"""The parallel stage: masks of decoding, caching, saving and loading."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, GenerationConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dspark_hf import DSparkConfig, DSparkDraftModel
from dspark_hf.drafts.draft_cache import DraftCache
from dspark_hf.drafts.modeling_dspark import DSparkAttention, apply_rope
from tests.support.closeness import assert_close, assert_differs, tolerance_of
from tests.support.eagle3 import random_eagle3
from tests.support.models import oracle_draft, random_draft, tiny_config, tiny_target


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}


def inputs(config: DSparkConfig, num_context: int, seed: int = 0, batch: int = 1):
    generator = torch.Generator().manual_seed(seed)
    embeds = torch.randn(batch, config.block_size, config.hidden_size, generator=generator)
    context = torch.randn(batch, num_context, len(config.target_layer_ids) * config.hidden_size, generator=generator)
    return embeds, context, torch.arange(num_context + config.block_size).expand(batch, -1)


def test_rope_rotates_queries_at_the_end_of_the_positions():
    config = tiny_config()
    cos, sin = Qwen3RotaryEmbedding(config)(torch.zeros(1, 1), torch.tensor([[3, 4, 9]]))
    states = torch.randn(1, 2, 3, 8)
    queries, keys = apply_rope(states[:, :, 1:], states, cos, sin)
    assert_close(queries, keys[:, :, 1:])
    # Relative: the product of two rotated vectors depends on the distance alone.
    shifted = Qwen3RotaryEmbedding(config)(torch.zeros(1, 1), torch.tensor([[13, 14, 19]]))
    more_queries, more_keys = apply_rope(states[:, :, 1:], states, *shifted)
    assert_close(more_queries @ more_keys.transpose(-1, -2), queries @ keys.transpose(-1, -2))
    assert_differs(keys, states)


@pytest.mark.parametrize("overrides", [{}, SLIDING, {**SLIDING, "sliding_window_non_causal": True}])
@torch.no_grad()
def test_masks_of_decoding(overrides):
    """Which inputs change which slots: found by changing them."""
    layer_types = overrides.get("layer_types", ["full_attention"])[:1]
    config = tiny_config(**(overrides | {"num_hidden_layers": 1, "layer_types": layer_types}))
    torch.manual_seed(0)
    draft = DSparkDraftModel(config).eval()
    embeds, context, positions = inputs(config, num_context=6)
    base = draft(embeds, context, positions).last_hidden_state
    window = config.sliding_window or 6
    for j in range(6):
        changed = context.clone()
        changed[:, j] += 1
        moved = (draft(embeds, changed, positions).last_hidden_state - base).abs().amax(-1)[0] > tolerance_of(base)
        assert moved.tolist() == [6 - j <= window] * 4, "the window is counted from the anchor for every slot"
    causal = bool(config.sliding_window) and not config.sliding_window_non_causal
    for j in range(4):
        changed = embeds.clone()
        changed[:, j] += 1
        moved = (draft(changed, context, positions).last_hidden_state - base).abs().amax(-1)[0] > tolerance_of(base)
        assert moved.tolist() == [i >= j if causal else True for i in range(4)]


@pytest.mark.parametrize("overrides", [{}, SLIDING, {**SLIDING, "sliding_window_non_causal": True}])
@pytest.mark.parametrize("chunks", [[6], [1, 5], [3, 1, 2], [2, 0, 4]])
@torch.no_grad()
def test_cached_context_is_as_good_as_new(overrides, chunks):
    draft = random_draft(**overrides)
    embeds, context, positions = inputs(draft.config, num_context=6)
    expected = draft(embeds, context, positions).last_hidden_state
    cache, start = DraftCache(2, min_capacity=4), 0
    for n in chunks:
        end = start + n
        where = torch.cat([positions[:, start:end], torch.arange(end, end + 4)[None]], dim=1)
        block = embeds if end == 6 else torch.randn_like(embeds)  # blocks of earlier rounds leave no trace
        cache.begin([n], 4)
        output = draft(block, context[:, start:end], where, cache=cache).last_hidden_state
        start = end
        assert cache.lengths == [end]
    assert_close(output, expected)


@pytest.mark.parametrize("overrides", [{}, SLIDING, {"num_key_value_heads": 4}, {"attention_bias": True}])
@torch.no_grad()
def test_eager_and_sdpa_agree(overrides):
    draft = random_draft(**overrides)
    draft_inputs = inputs(draft.config, num_context=7)
    results = []
    for implementation in ("eager", "sdpa"):
        draft.set_attn_implementation(implementation)
        results.append(draft(*draft_inputs).last_hidden_state)
    assert_close(*results)


@torch.no_grad()
def test_an_explicit_mask_replaces_that_of_decoding():
    draft = random_draft(**SLIDING)
    embeds, context, positions = inputs(draft.config, num_context=5)
    columns, slots = torch.arange(9), torch.arange(4)[:, None]
    full = torch.ones(4, 9, dtype=torch.bool)
    sliding = (columns >= 2) & (columns <= 5 + slots)
    mask = {"full_attention": full[None, None], "sliding_attention": sliding[None, None]}
    expected = draft(embeds, context, positions).last_hidden_state
    explicit = draft(embeds, context, positions, mask).last_hidden_state
    assert_close(explicit, expected)
    mask["sliding_attention"] = full[None, None]
    assert_differs(draft(embeds, context, positions, mask).last_hidden_state, expected)


@torch.no_grad()
def test_rows_of_a_batch_are_independent():
    draft = random_draft()
    embeds, context, positions = inputs(draft.config, num_context=5, batch=3)
    together = draft(embeds, context, positions).last_hidden_state
    for row in range(3):
        alone = draft(embeds[row : row + 1], context[row : row + 1], positions[:1]).last_hidden_state
        assert_close(together[row : row + 1], alone)


def test_layers_know_their_window():
    draft = random_draft(**SLIDING)
    windows = [layer.self_attn.sliding_window for layer in draft.layers]
    assert windows == [3, None]
    assert isinstance(draft.layers[0].self_attn, DSparkAttention)


def test_what_cannot_be_guessed_is_needed_to_build_a_model():
    with pytest.raises(ValueError, match="`target_layer_ids` must be set"):
        DSparkDraftModel(tiny_config(target_layer_ids=None))


def test_reduced_vocabulary():
    draft = random_draft(draft_vocab_size=48)
    ids = draft.draft_token_ids()
    assert torch.equal(ids, draft.d2t + torch.arange(48))
    assert (ids[1:] > ids[:-1]).all()
    assert random_draft().draft_token_ids() is None
    assert not hasattr(random_draft(), "d2t")


def test_fresh_weights():
    torch.manual_seed(0)
    draft = DSparkDraftModel(tiny_config(initializer_range=0.02))
    for name, parameter in draft.named_parameters():
        if "norm" in name:
            assert (parameter == 1).all(), name
        elif parameter.ndim == 2:
            assert float(parameter.std().detach()) == pytest.approx(0.02, rel=0.3), name


# Saving and loading.


VARIANTS = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn", "confidence_head_with_markov": False},
    "reduced": {"draft_vocab_size": 48},
    "dflash": {"markov_rank": 0, "enable_confidence_head": False},
    "sliding": SLIDING,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", VARIANTS)
def test_save_and_load(tmp_path, name, dtype):
    random_draft(**VARIANTS[name]).save_pretrained(tmp_path / "fp32")
    draft = DSparkDraftModel.from_pretrained(tmp_path / "fp32", dtype=dtype)
    draft.save_pretrained(tmp_path / "saved")
    loaded = DSparkDraftModel.from_pretrained(tmp_path / "saved")
    assert loaded.dtype == dtype
    assert not loaded.training
    ours, theirs = draft.state_dict(), loaded.state_dict()
    assert list(theirs) == list(ours)
    for key in ours:
        assert theirs[key].dtype == ours[key].dtype, key
        assert torch.equal(theirs[key], ours[key]), key
    buffers = dict(loaded.named_buffers())
    assert buffers.keys() == dict(draft.named_buffers()).keys()
    for key, buffer in draft.named_buffers():  # those that are not saved are made again
        assert buffers[key].dtype == buffer.dtype, key
        assert torch.equal(buffers[key], buffer), key
    draft_inputs = [x.to(dtype) if x.is_floating_point() else x for x in inputs(draft.config, num_context=4)]
    assert torch.equal(loaded(*draft_inputs).last_hidden_state, draft(*draft_inputs).last_hidden_state)


def test_inverse_frequencies_stay_in_fp32_in_half_precision(tmp_path):
    random_draft().save_pretrained(tmp_path)
    loaded = DSparkDraftModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert loaded.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(loaded.rotary_emb.inv_freq, random_draft().rotary_emb.inv_freq)


def test_checkpoint_holds_the_draft_only_under_the_released_names(tmp_path):
    random_draft().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    layer = {f"self_attn.{n}.weight" for n in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")}
    layer |= {f"mlp.{n}.weight" for n in ("gate_proj", "up_proj", "down_proj")}
    layer |= {"input_layernorm.weight", "post_attention_layernorm.weight"}
    assert set(tensors) == {
        "fc.weight",
        "hidden_norm.weight",
        "norm.weight",
        "markov_head.markov_w1.weight",
        "markov_head.markov_w2.weight",
        "confidence_head.proj.weight",
        "confidence_head.proj.bias",
        *(f"layers.{i}.{name}" for i in range(2) for name in layer),
    }
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "dspark_draft"
    assert config["sample_from_anchor"] is True


def test_generation_knobs_survive(tmp_path):
    draft = random_draft()
    assert draft.generation_config.num_assistant_tokens is None
    draft.generation_config.update(
        num_assistant_tokens=3, assistant_confidence_threshold=0.4, num_assistant_tokens_schedule="constant"
    )
    draft.save_pretrained(tmp_path)
    knobs = DSparkDraftModel.from_pretrained(tmp_path).generation_config
    assert knobs.num_assistant_tokens == 3
    assert knobs.assistant_confidence_threshold == 0.4  # the library's own default, but somebody's choice here
    assert knobs.num_assistant_tokens_schedule == "constant"


def test_no_knobs_in_a_checkpoint_means_unset(tmp_path):
    random_draft().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    knobs = DSparkDraftModel.from_pretrained(tmp_path).generation_config
    assert isinstance(knobs, GenerationConfig)
    names = ("num_assistant_tokens", "assistant_confidence_threshold", "num_assistant_tokens_schedule")
    assert [getattr(knobs, name) for name in names] == [None] * 3


def test_auto_classes(tmp_path):
    draft = random_draft(draft_vocab_size=48)
    draft.save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is DSparkConfig
    loaded = AutoModel.from_pretrained(tmp_path)
    assert type(loaded) is DSparkDraftModel
    assert torch.equal(loaded.d2t, draft.d2t)
    assert type(AutoModel.from_config(tiny_config())) is DSparkDraftModel


def test_loading_info_and_config_arguments(tmp_path):
    random_draft().save_pretrained(tmp_path)
    model, info = DSparkDraftModel.from_pretrained(tmp_path, output_loading_info=True)
    assert type(model) is DSparkDraftModel
    assert not info["missing_keys"]
    config = DSparkConfig.from_pretrained(tmp_path)
    config.sample_from_anchor = False
    assert DSparkDraftModel.from_pretrained(tmp_path, config=config).config.num_draft_slots == 3


def test_can_be_pushed(monkeypatch, tmp_path):
    """The knobs are there before the upload starts."""
    uploads = []

    def push(self, repo_id, **kwargs):
        uploads.append((repo_id, kwargs, sorted(path.name for path in folder.iterdir())))

    folder = tmp_path / "my-draft"
    monkeypatch.setattr(DSparkDraftModel, "push_to_hub", push)
    random_draft().save_pretrained(folder, push_to_hub=True, private=True)
    random_draft().save_pretrained(folder, push_to_hub=True, repo_id="someone/other")
    assert [upload[0] for upload in uploads] == ["my-draft", "someone/other"]
    assert uploads[0][1] == {"private": True}
    assert {"config.json", "generation_config.json", "model.safetensors"} <= set(uploads[0][2])


def test_push_to_hub_is_there():
    assert callable(DSparkDraftModel.push_to_hub)
    assert callable(DSparkConfig.push_to_hub)


def test_oracle_agrees_with_its_target():
    """The tests' own oracle: its best guess after a token is the target's, most of the time."""
    target = tiny_target()
    for overrides in ({}, {"markov_head_type": "gated"}, {"markov_head_type": "rnn"}):
        head = oracle_draft(target, **overrides).markov_head
        ids = torch.arange(97)
        with torch.no_grad():
            bias, _ = head(head.markov_w1(ids), torch.zeros(97, 32), head.initial_state(torch.zeros(97, 32)))
            expected = target(ids[:, None]).logits[:, -1].argmax(-1)
        assert (bias.argmax(-1) == expected).float().mean() > 0.95


@pytest.mark.parametrize("make", [random_draft, random_eagle3])
def test_own_head_is_the_last_parameter(make):
    """Saved optimizer states number the parameters, so a head moved forward would get the state of another one."""
    names = [name for name, _ in make(draft_vocab_size=48).named_parameters()]
    assert names[0] == "fc.weight"
    assert names[-1] == "lm_head.weight"
    assert names[:-1] == [name for name, _ in make().named_parameters()]
