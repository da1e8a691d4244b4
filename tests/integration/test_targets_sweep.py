# SPDX-License-Identifier: Apache-2.0
"""Every causal language model that transformers can build: the text of plain generation, or a refusal in words.

One row and a batch, with all drafts right, some and none. docs/compatibility.md lists what is refused; the list is
compared with what happens here.
"""

from __future__ import annotations

import functools
import itertools
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import dspark_hf
from tests.helpers import random_prompt
from tests.integration.support import ScriptedDraft, StreamerSpy, draft_config_for
from tests.integration.tiny_targets import build, model_types


NUM_NEW = 24
LONG, SHORT = random_prompt(20, seed=5), random_prompt(11, seed=6)  # windows are 8 wide
PACKAGE = str(Path(dspark_hf.__file__).parent)
# How many drafts are right: all, two of three, none; the last with as many drafts as a block holds.
SPOILS = {"all": 10**6, "some": 3, "none": 1}


class RowsDraft(ScriptedDraft):
    """A draft that proposes several texts, each in its row: it knows a row by its position and anchor."""

    scripts: Sequence[list[int]] = ()
    embeddings: torch.nn.Module | None = None

    def forward(self, noise_embeds, context_hidden_states, position_ids, attention_mask=None, cache=None):
        block = position_ids[0, -noise_embeds.shape[0] * self.config.block_size :]
        starts = block.view(noise_embeds.shape[0], -1)[:, 0].tolist()
        self.rows = [self._row(start, noise_embeds[row, 0]) for row, start in enumerate(starts)]
        return super().forward(noise_embeds, context_hidden_states, position_ids, attention_mask, cache)

    def _row(self, start: int, anchor: torch.Tensor) -> tuple[int, list[int]]:
        """Position of a row's anchor, and its script."""
        scripts = [script for script in self.scripts if start < len(script)]
        distances = [
            float((self.embeddings(torch.tensor([script[start]]))[0] - anchor).abs().max()) for script in scripts
        ]
        return start, scripts[distances.index(min(distances))]

    def base_logits(self, hidden, binding):
        logits = dspark_hf.DSparkDraftModel.base_logits(self, hidden, binding)
        ids = torch.zeros(hidden.shape[:2], dtype=torch.long)
        for row, (start, script) in enumerate(self.rows):
            for slot in range(hidden.shape[1]):
                position = start + 1 + slot
                if position < len(script):
                    ids[row, slot] = (script[position] + (position % self.spoil == 0)) % self.config.vocab_size
        return torch.nn.functional.one_hot(ids, logits.shape[-1]).to(logits) * self.script_logit


@dataclass(frozen=True)
class Outcome:
    """What became of a model type: "equal", "refused", "wrong text", "crash" or "not built", and the message."""

    kind: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}" if self.detail else self.kind


def rows_draft(target: PreTrainedModel, texts: Sequence[torch.Tensor], spoil: int, schedule: str | None):
    """A draft for the plain texts of each row, `(1, s)`, without padding."""
    torch.manual_seed(1)
    draft = RowsDraft(draft_config_for(target)).eval()
    draft.scripts, draft.spoil = [text[0].tolist() for text in texts], spoil
    object.__setattr__(draft, "embeddings", target.get_input_embeddings())
    if schedule is not None:
        draft.generation_config.num_assistant_tokens_schedule = schedule
    return draft


def generate(target: PreTrainedModel, prompt: torch.Tensor, **kwargs) -> torch.Tensor:
    return target.generate(prompt, do_sample=False, max_new_tokens=NUM_NEW, **kwargs)


def left_padded(prompts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """One tensor, and its mask."""
    longest = max(prompt.shape[1] for prompt in prompts)
    batch = torch.cat([torch.nn.functional.pad(prompt, (longest - prompt.shape[1], 0)) for prompt in prompts])
    mask = torch.stack([torch.arange(longest) >= longest - prompt.shape[1] for prompt in prompts]).long()
    return batch, mask


def compared(target: PreTrainedModel, prompts: Sequence[torch.Tensor], plain: Sequence[torch.Tensor]) -> Outcome:
    """The texts of a call with the prompts as its rows, for drafts of every quality, held to plain generation."""
    batch, mask = left_padded(prompts)
    for name, schedule in itertools.product(SPOILS, (None, "constant")):
        spy = StreamerSpy() if len(prompts) == 1 else None
        try:
            draft = rows_draft(target, plain, SPOILS[name], schedule)
            with dspark_hf.collect_rounds() as stats:
                texts = generate(target, batch, attention_mask=mask, assistant_model=draft, streamer=spy)
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            words = isinstance(error, (NotImplementedError, ValueError)) and frame.filename.startswith(PACKAGE)
            if words and (spy is None or len(spy.puts) <= 1):  # a prompt may have been put
                return Outcome("refused", str(error))
            where = f"{Path(frame.filename).name}:{frame.lineno} {frame.name}"
            return Outcome("crash", f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''} ({where})")
        num_accepted = sum(record.num_accepted for record in stats.rounds)
        for row, (prompt, text) in enumerate(zip(prompts, plain, strict=True)):
            ours, theirs = texts[row, batch.shape[1] :].tolist(), text[0, prompt.shape[1] :].tolist()
            if ours != theirs:
                first = next(i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1])
                return Outcome("wrong text", f"row {row} from token {first} on, {name} right, schedule {schedule}")
        if (name != "none" and schedule == "constant") != (num_accepted > 0) and schedule == "constant":
            return Outcome("wrong acceptance", f"{num_accepted} drafts kept, {name} right, schedule {schedule}")
    return Outcome("equal")


@functools.cache
def outcomes(model_type: str) -> tuple[Outcome, Outcome]:
    """Of one row, and of a batch."""
    try:
        target = build(model_type, model_types()[model_type])
        plain = [generate(target, prompt) for prompt in (LONG, SHORT)]
    except Exception as error:
        message = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
        return Outcome("not built", message), Outcome("not built", message)
    return compared(target, [LONG], plain[:1]), compared(target, [LONG, SHORT], plain)
