# SPDX-License-Identifier: Apache-2.0
"""Finds where a text said before what it says now: the source of copied drafts. Imports no model code.

The index is the text itself, and a lookup one vectorised pass over it. That takes about 0.1 ms for 32,000 tokens,
nothing has to be built for a prompt, and the match is exactly the longest; an automaton takes longer than that for
each token that it reads. Legend: s text, k drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


LONGEST_MATCH = 32  # longer ones say no more about what comes next
# Only the latest of more places than this count, once they agree in two tokens: a text of one token repeated.
MOST_PLACES = 512


@dataclass(frozen=True)
class Match:
    """The latest of the longest earlier occurrences of a text's own ending."""

    length: int  # tokens that agree, the last of the text among them, at most `LONGEST_MATCH`; 0: no occurrence
    end: int  # place after the occurrence: what followed it begins here


NO_MATCH = Match(0, 0)


class TextIndex:
    """A text that grows, and the earlier occurrences of its ending."""

    def __init__(self, token_ids: Sequence[int] | np.ndarray = ()):
        self._buffer = np.zeros(256, dtype=np.int32)
        self._length = 0
        self.extend(token_ids)

    def __len__(self) -> int:
        return self._length

    def extend(self, token_ids: Sequence[int] | np.ndarray) -> None:
        """Append tokens."""
        end = self._length + len(token_ids)
        if end > len(self._buffer):
            self._buffer = np.concatenate([self._buffer[: self._length], np.zeros(2 * end - self._length, np.int32)])
        self._buffer[self._length : end] = token_ids
        self._length = end

    def longest_match(self, longest: int = LONGEST_MATCH) -> Match:
        """Look up the ending of the text, of at most `longest` tokens."""
        text = self._buffer[: self._length]
        if self._length < 2:
            return NO_MATCH
        ends, length = np.flatnonzero(text[:-1] == text[-1]) + 1, 1
        if not len(ends):
            return NO_MATCH
        while length < longest:
            inside = ends[ends > length]  # the others begin with the text
            longer = inside[text[inside - length - 1] == text[-length - 1]]
            if not len(longer):
                break
            ends, length = longer[-MOST_PLACES:], length + 1
        return Match(length, int(ends[-1]))

    def continuation(self, match: Match, count: int) -> np.ndarray:  # [count]
        """The tokens after an occurrence; where it reaches the end of the text, it goes on with what it copied."""
        return np.resize(self._buffer[match.end : self._length], count)
