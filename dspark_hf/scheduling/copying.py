# SPDX-License-Identifier: Apache-2.0
"""Drafts copied from a request's own text, and how often they are right. Imports no model code.

How often the token after an earlier occurrence comes again depends on how many tokens before it agree. A copy that was
right makes the match longer by one, so one number for each length of the match says how far a copy gets:
P(copy k accepted | all before it were) = acceptance(length + k). Every token of the text teaches these numbers,
whether it was copied, drafted or neither. Legend: n new tokens, k copied ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from .text_index import LONGEST_MATCH, NO_MATCH, TextIndex


# Shortest match of each class of lengths.
MATCH_LENGTHS = (1, 2, 3, 4, 5, 8, 16)
# Acceptance by class, of chat answers in general; `dspark-hf calibrate` measures those of a target and its prompts.
COPY_PRIOR = (0.2, 0.5, 0.6, 0.65, 0.75, 0.85, 0.95)
MOST_COPIES = 16  # tokens copied in a round, unless the user says another number
_CLASS_OF_LENGTH = np.searchsorted(MATCH_LENGTHS, np.arange(MATCH_LENGTHS[-1] + 1), side="right") - 1


def measure_copy_prior(
    texts: Iterable[tuple[Sequence[int], int]],  # tokens of a text, and how many of them are the prompt
) -> tuple[float, ...]:  # in [0, 1], one for each class
    """How often the token after an earlier occurrence came again, at every place of the answers.

    Each rate is shrunk towards that of `COPY_PRIOR`, with the weight of a few observations.
    """
    accepted, reached = np.zeros((2, len(MATCH_LENGTHS)))
    for token_ids, num_prompt_tokens in texts:
        text = TextIndex(token_ids[:num_prompt_tokens])
        for token_id in token_ids[num_prompt_tokens:]:
            match = text.longest_match()
            if match.length:
                own = _CLASS_OF_LENGTH[min(match.length, MATCH_LENGTHS[-1])]
                reached[own] += 1
                accepted[own] += text.continuation(match, 1)[0] == token_id
            text.extend([token_id])
    weight = CopySource.PRIOR_TOKENS
    return tuple(((accepted + weight * np.asarray(COPY_PRIOR)) / (reached + weight)).tolist())


class CopySource:
    """The text of a request, what its ending was followed by before, and how often that came again."""

    DECAY = 0.98
    PRIOR_TOKENS = 4.0  # observations that the prior counts as, in each class
    # How far the prior is trusted follows the last dozen copies of any length: where texts mislead, classes that have
    # not failed yet are not tried one by one.
    TRUST_DECAY, TRUST_TOKENS = 0.9, 1.5

    def __init__(self, prior: Sequence[float] | None = None, longest_match: int = LONGEST_MATCH):
        self._text, self._match, self._longest = TextIndex(), NO_MATCH, longest_match
        self._prior = np.asarray(prior if prior is not None else COPY_PRIOR)
        self._accepted, self._reached = np.zeros((2, len(MATCH_LENGTHS)))
        self._recent = self._expected = self.TRUST_TOKENS  # copies that were right, and that should have been

    @property
    def num_read(self) -> int:
        """Tokens of the text that were read."""
        return len(self._text)

    @property
    def match_length(self) -> int:
        """Tokens of the text's ending that agree with its latest earlier occurrence; 0 without one."""
        return self._match.length

    def read(self, new_ids: Sequence[int] | np.ndarray) -> None:
        """Append tokens to the text, learn from them, and look up its new ending."""
        if self._match.length:
            expected = self.tokens(len(new_ids))
            differs = np.flatnonzero(expected != np.asarray(new_ids))
            num_right = int(differs[0]) if len(differs) else len(new_ids)
            self._observe(num_right, min(num_right + 1, len(new_ids)))
        self._text.extend(new_ids)
        self._match = self._text.longest_match(self._longest)

    def tokens(self, count: int) -> np.ndarray:  # [count]
        """The next tokens of a copy."""
        return self._text.continuation(self._match, count)

    def acceptance(self, count: int) -> np.ndarray:  # [count], in [0, 1]
        """P(copy k accepted | all before it were)."""
        prior = self._prior * min(1.0, self._recent / self._expected)
        rates = (self._accepted + self.PRIOR_TOKENS * prior) / (self._reached + self.PRIOR_TOKENS)
        return rates[self._classes(count)]

    def _classes(self, count: int) -> np.ndarray:
        lengths = self._match.length + np.arange(count)
        return _CLASS_OF_LENGTH[np.minimum(lengths, MATCH_LENGTHS[-1])]

    def _observe(self, num_right: int, num_judged: int) -> None:
        classes = self._classes(num_judged)
        for sums in (self._accepted, self._reached):
            sums *= self.DECAY
        np.add.at(self._reached, classes, 1.0)
        np.add.at(self._accepted, classes[:num_right], 1.0)
        fixed = (1 - self.TRUST_DECAY) * self.TRUST_TOKENS  # the weight of the prior does not fade
        self._recent = self.TRUST_DECAY * self._recent + fixed + num_right
        self._expected = self.TRUST_DECAY * self._expected + fixed + float(self._prior[classes].sum())
