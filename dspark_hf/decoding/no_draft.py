# SPDX-License-Identifier: Apache-2.0
"""The drafter that never drafts: the decoding loop is then plain generation, for many texts at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .drafter import DraftProposal
from .request import Request


class NoDraft:
    """Proposes nothing; see [`Drafter`] for the methods."""

    model_kwargs_overrides: dict[str, Any] = {}  # noqa: RUF012
    needs_curve = False

    def propose(self, requests: Sequence[Request], *_: Any, **__: Any) -> list[DraftProposal]:
        """Empty proposals."""
        return [DraftProposal(request.input_ids[:, :0], drafted=False) for request in requests]

    def ignore(self, *_: Any) -> None:
        """Read and learn nothing."""

    use_curve = check_hidden_states = add_requests = keep_requests = read = observe = ignore
