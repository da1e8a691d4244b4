# SPDX-License-Identifier: Apache-2.0
"""Draws the tokens of blocks slot by slot, and ends a block at a slot that has no distribution to draw from.

Two things leave a slot without a distribution: numbers of the draft that are not finite (float16 ends at 65504), and
a constraint that allows nothing of a reduced draft vocabulary. Ending the block there is lossless under sampling:
a slot's logits depend on the text and on the drafts before it, never on the slot's own draft or on one after it, and
no draft before the slot is judged by them.

Legend: R requests, k slots, V target vocabulary, D draft vocabulary (= V unless reduced).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.utils import logging

from .drafter_inputs import over_target_vocabulary
from .processors import are_rowwise
from .verification import draw_token


logger = logging.get_logger("transformers.dspark_hf.decoding.drawing")


@dataclass(frozen=True)
class DrawnBlocks:
    """The drafts of a round, and the logits that they were drawn from."""

    token_ids: torch.Tensor  # [R, k], target ids; those from `lengths` on mean nothing
    draft_logits: torch.Tensor | None  # [R, k, D or V], what they came from; None when greedy
    lengths: list[int]  # leading slots of each request that may be sent
    overflowed: list[bool]  # whether a request's block ended at logits of the draft that are not finite


class BlockDrawer:
    """Draws the slots of a round one after the other, for all requests at once."""

    def __init__(
        self,
        texts: Sequence[torch.Tensor],  # R of [1, s], the anchor last
        processors: Sequence[LogitsProcessorList],  # [R], the mirrored processors of each request
        limits: Sequence[int],  # [R], most slots of each request
        do_sample: bool,  # sampling or greedy decoding
        vocab_size: int,  # V
        draft_token_ids: torch.Tensor | None,  # [D], target ids of a reduced draft vocabulary
    ):
        self._texts, self._processors, self._limits = list(texts), processors, list(limits)
        self._do_sample, self._vocab_size, self._draft_token_ids = do_sample, vocab_size, draft_token_ids
        self._rowwise = are_rowwise(processors[0])
        self._open = [limit > 0 for limit in limits]
        self._tokens: list[torch.Tensor] = []
        self._rows: list[torch.Tensor] = []
        self._witnesses: list[torch.Tensor] = []  # [R] for each slot, finite where it was a distribution
        self._finite: list[torch.Tensor] = []  # [R] for each slot, before the processors; empty without any

    @property
    def has_open_blocks(self) -> bool:
        """Whether any block is still open; known only if processors read the text, else `True`."""
        return any(self._open)

    def draw(
        self,
        logits: torch.Tensor,  # [R, D]
    ) -> torch.Tensor:  # [R], target ids, valid ones also where a block has ended
        """Draw the next slot."""
        row, finite = self._process(logits)
        token_ids, witness = draw_token(row, self._do_sample)
        self._witnesses.append(witness)
        if finite is not None:
            self._finite.append(finite)
        token_ids = self._to_target_ids(token_ids, row.shape[-1])
        self._tokens.append(token_ids)
        if self._do_sample:
            self._rows.append(row)
        if not self._rowwise:  # such processors wait for the device anyway
            usable = torch.isfinite(witness) if finite is None else torch.isfinite(witness) & finite
            slot, flags = len(self._tokens), zip(self._limits, self._open, usable.tolist(), strict=True)
            self._open = [is_open and is_usable and slot < limit for limit, is_open, is_usable in flags]
            added = token_ids.to(self._texts[0].device)
            self._texts = [torch.cat([text, added[i : i + 1, None]], dim=1) for i, text in enumerate(self._texts)]
        return token_ids

    def draw_all(
        self,
        logits: torch.Tensor,  # [R, k, D]
    ) -> None:
        """Draw all slots at once: greedy, without processors, and where no slot depends on the drafts before it."""
        token_ids, witness = draw_token(logits, do_sample=False)
        self._tokens = list(self._to_target_ids(token_ids, logits.shape[-1]).unbind(1))
        self._witnesses = list(witness.unbind(1))

    def _to_target_ids(self, token_ids: torch.Tensor, width: int) -> torch.Tensor:
        if self._draft_token_ids is None or width == self._vocab_size:
            return token_ids
        return self._draft_token_ids[token_ids]

    def _process(self, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Mirrored processors on one slot's logits, over the draft vocabulary where they allow it.

        The second says which rows were finite before, `None` where there are no processors to change that.
        """
        processors = self._processors[0]
        if self._do_sample or processors:
            row = row.float()
        if not processors:
            return row, None
        finite = torch.isfinite(row.amax(dim=-1))  # a maximum propagates NaN and inf
        row.masked_fill_(~finite[:, None], 0.0)  # some processors reject NaN, others turn it into numbers
        if self._rowwise:  # the same for every request, and they do not read the text
            return processors(self._texts[0], row), finite
        parts = over_target_vocabulary(row, self._draft_token_ids, self._vocab_size).split(1)
        columns = zip(self._processors, self._texts, parts, self._open, strict=True)
        # A grammar may not accept a text that continues after its block has ended.
        return torch.cat([own(text, part) if is_open else part for own, text, part, is_open in columns]), finite

    def finish(self) -> DrawnBlocks:
        """End the round; the only place where the host waits for the drawn tokens."""
        is_usable = torch.isfinite(torch.stack(self._witnesses, dim=1))  # [R, k]
        usable_rows = finite_rows = is_usable.tolist()
        if self._finite:
            is_finite = torch.stack(self._finite, dim=1)
            usable_rows, finite_rows = (is_usable & is_finite).tolist(), is_finite.tolist()
        lengths, overflowed = [], []
        for limit, usable, finite in zip(self._limits, usable_rows, finite_rows, strict=True):
            length = next((slot for slot, flag in enumerate(usable[:limit]) if not flag), min(limit, len(usable)))
            lengths.append(length)
            overflowed.append(length < min(limit, len(usable)) and not finite[length])
        draft_logits = torch.stack(self._rows, dim=1) if self._rows else None
        return DrawnBlocks(torch.stack(self._tokens, dim=1), draft_logits, lengths, overflowed)


def warn_not_finite(draft: PreTrainedModel, what: str) -> None:
    """Warn once why blocks end early, with the remedy."""
    dtype = str(draft.dtype).removeprefix("torch.")
    if draft.dtype == torch.float16:
        remedy = "float16 ends at 65504. Load the draft in bfloat16 or float32"
    else:
        remedy = (
            "Its weights, or what it reads of the target, are damaged or beyond the range of their dtype: check the "
            "checkpoint, and load draft and target in bfloat16 or float32"
        )
    logger.warning_once(
        f"The draft computed {what} that are not finite, in {dtype}, so its drafts end there. The target still "
        "decides every token, so the text is unaffected; but less is gained, or nothing. "
        f"{remedy} (`from_pretrained(..., dtype=torch.bfloat16)`)."
    )
