# SPDX-License-Identifier: Apache-2.0
"""What the tests of `generate(assistant_model=draft)` share: a draft that proposes a known text, spies, comparisons.

`scripted_draft` proposes the given text by position, every `spoil`-th token wrong, whatever the target is. So the
rounds are known in advance (`expected_accepted`), and a position that is off by one shows in them.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.generation.streamers import BaseStreamer

from dspark_hf import AcceptanceStats, DSparkConfig, DSparkDraftModel
from dspark_hf._compat import CACHE_KEY
from dspark_hf.drafts.target_probe import NUM_TOKENS
from tests.support.closeness import assert_close
from tests.support.models import VOCAB_SIZE, tiny_target


# Static caches can take tokens back, and so be used with drafts, since transformers 5.24.
STATIC_CACHE_CAN_CROP = CACHE_KEY == "cache"


NUM_NEW = 18  # tokens of the texts below


def generate(
    target: PreTrainedModel, prompt: torch.Tensor, draft: DSparkDraftModel | None = None, **kwargs: Any
) -> Any:
    """A greedy text of `NUM_NEW` tokens, unless the arguments say otherwise."""
    arguments = {"do_sample": False, "max_new_tokens": NUM_NEW} | kwargs
    return target.generate(prompt, **arguments, assistant_model=draft)


def lively_target(kind: str = "qwen3", seed: int = 0) -> PreTrainedModel:
    """A tiny target that reads its whole context: its text does not repeat, nor forgive a wrong cache or mask."""
    return tiny_target(kind, seed, context_scale=1.0)


class ScriptedDraft(DSparkDraftModel):
    """A real draft, run in full, whose base logits are then replaced by the script's tokens."""

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        self.script: list[int] = []
        self.script_logit = 20.0
        self.spoil = 3
        self.contexts: list[torch.Tensor] = []  # what each round was handed, and where it lies
        self.positions: list[torch.Tensor] = []

    def forward(self, noise_embeds, context_hidden_states, position_ids, attention_mask=None, cache=None):
        self.contexts.append(context_hidden_states)
        self.positions.append(position_ids)
        return super().forward(noise_embeds, context_hidden_states, position_ids, attention_mask, cache)

    def base_logits(self, hidden, binding):
        logits = super().base_logits(hidden, binding)
        first = int(self.positions[-1][0, -self.config.block_size]) + 1
        ids = [
            (self.script[p] + (p % self.spoil == 0)) % self.config.vocab_size if p < len(self.script) else 0
            for p in range(first, first + hidden.shape[1])
        ]
        return torch.nn.functional.one_hot(torch.tensor([ids]), logits.shape[-1]).to(logits) * self.script_logit


def draft_config_for(target: PreTrainedModel, **overrides: Any) -> DSparkConfig:
    """A 2-layer draft's configuration for any target."""
    text = target.config.get_text_config(decoder=True)
    sizes = {
        "vocab_size": text.vocab_size,
        "hidden_size": text.hidden_size,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "block_size": 4,
        "mask_token_id": text.vocab_size - 1,
        "target_layer_ids": [0, text.num_hidden_layers - 2],
        "num_target_layers": text.num_hidden_layers,
        "markov_rank": 0,
        "confidence_head_with_markov": False,
        "initializer_range": 0.3,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return DSparkConfig(**(sizes | overrides))


def scripted_draft(target: PreTrainedModel, text: torch.Tensor, spoil: int = 3, **overrides: Any) -> ScriptedDraft:
    """A draft that proposes `text` (one row, no padding), wrong where the position is a multiple of `spoil`."""
    torch.manual_seed(1)
    draft = ScriptedDraft(draft_config_for(target, **overrides)).eval()
    draft.script, draft.spoil = text.flatten().tolist(), spoil
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    return draft


def expected_accepted(num_prompt: int, num_new: int, block_size: int = 4, spoil: int = 3) -> list[int]:
    """Accepted drafts of each round with `scripted_draft`, greedy, by the rules of decoding alone."""
    rounds, length, end = [], num_prompt + 1, num_prompt + num_new
    while length < end:
        limit = min(block_size, end - length - 1)  # the target adds the last token itself
        accepted = next((k for k in range(limit) if (length + k) % spoil == 0), limit)
        rounds.append(accepted)
        length += accepted + 1
    return rounds


def num_accepted(stats: AcceptanceStats) -> list[int]:
    """Accepted drafts of each round."""
    return [record.num_accepted for record in stats.rounds]


def text_of(stats: AcceptanceStats) -> list[int]:
    """The committed tokens, put together from the rounds; the prefill's one token is not among them."""
    tokens = []
    for record in stats.rounds:
        tokens += [*record.token_ids[: record.num_accepted], record.bonus_token][: record.num_committed]
    return tokens


def with_cache(cache: Any) -> dict[str, Any]:
    """`cache` as a keyword argument of `generate`, under this release's name."""
    return {CACHE_KEY: cache}


def cache_states(cache: Any) -> list[torch.Tensor]:
    """Every tensor of a cache that a later call can read."""
    states = []
    for layer in cache.layers:
        if getattr(layer, "keys", None) is not None:
            states += [layer.keys, layer.values]
        convolutions = getattr(layer, "conv_states", None)
        if isinstance(convolutions, dict):
            states += [convolutions[i] for i in sorted(convolutions)]
        elif convolutions is not None:
            states.append(convolutions)
    return states


def assert_same_cache(cache: Any, expected: Any) -> None:
    """Same length, same shapes, close values, and no layer left recording its past."""
    assert cache.get_seq_length() == expected.get_seq_length()
    assert [layer.get_seq_length() for layer in cache.layers if hasattr(layer, "get_seq_length")] == [
        layer.get_seq_length() for layer in expected.layers if hasattr(layer, "get_seq_length")
    ]
    states, expected_states = cache_states(cache), cache_states(expected)
    assert [state.shape for state in states] == [state.shape for state in expected_states]
    for state, expected_state in zip(states, expected_states, strict=True):
        assert_close(state, expected_state)
    assert not any(getattr(layer, "record_past", False) for layer in cache.layers)


def assert_same_up_to_near_ties(target: PreTrainedModel, text: torch.Tensor, plain: torch.Tensor, gap: float) -> None:
    """Equal, or first different where the target's two best logits lie within `gap` of the largest logit."""
    length = min(text.shape[1], plain.shape[1])
    different = (text[:, :length] != plain[:, :length]).nonzero()
    if not different.numel():
        assert text.shape == plain.shape
        return
    first = int(different[0, 1])
    logits = target(plain[:, :first]).logits[0, -1].float()
    best = logits.topk(2).values
    assert best[0] - best[1] <= gap * logits.abs().max(), f"token {first} differs without a near tie"
    assert logits[text[0, first]] >= best[1] - gap * logits.abs().max()


class StreamerSpy(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self):
        self.puts: list[list[int]] = []
        self.num_ends = 0

    def put(self, value):
        self.puts.append(value.flatten().tolist())

    def end(self):
        self.num_ends += 1


class ForwardCounter:
    """Counts the forward passes of a model inside a `with` block, and keeps their keyword arguments."""

    def __init__(self, model: torch.nn.Module):
        self._model = model
        self.calls: list[dict[str, Any]] = []

    @property
    def count(self) -> int:
        return len(self.calls)

    @property
    def num_prompts(self) -> int:
        """Passes over more tokens than a target is probed with."""
        return sum(call["input_ids"].shape[1] > NUM_TOKENS for call in self.calls if call.get("input_ids") is not None)

    def __enter__(self):
        self._handle = self._model.register_forward_pre_hook(self._record, with_kwargs=True)
        return self

    def __exit__(self, *error):
        self._handle.remove()

    def _record(self, module, args, kwargs):
        self.calls.append(kwargs)


@contextmanager
def captured_log(name: str = "transformers.dspark_hf"):
    """The messages logged under `name`, with transformers' memory of what it said once cleared."""
    logger = logging.getLogger(name)
    logger.warning_once.__func__.cache_clear()
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    level = logger.level
    logger.setLevel(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def letter_tokenizer() -> PreTrainedTokenizerFast:
    """One printable character per id: 3 is "!", 96 is "~"; 0, 1, 2 are special."""
    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {chr(30 + i): i for i in range(3, VOCAB_SIZE)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
    )
