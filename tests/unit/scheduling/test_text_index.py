# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from dspark_hf.scheduling.text_index import LONGEST_MATCH, MOST_PLACES, NO_MATCH, Match, TextIndex


def searched(text: list[int], longest: int) -> Match:
    """The longest earlier occurrence of the ending, the latest of equal ones, place by place."""
    best = NO_MATCH
    for end in range(1, len(text)):
        length = 0
        while length < min(longest, end) and text[end - 1 - length] == text[-1 - length]:
            length += 1
        if length and length >= best.length:
            best = Match(length, end)
    return best


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([], NO_MATCH),
        ([7], NO_MATCH),
        ([7, 8], NO_MATCH),
        ([7, 7], Match(1, 1)),
        ([5, 6, 7, 9, 6, 7], Match(2, 3)),
        ([5, 6, 7, 8, 6, 7, 9, 6, 7], Match(2, 6)),  # the latest of equal ones
        ([5, 6, 7, 8, 6, 7, 9, 5, 6, 7], Match(3, 3)),  # a longer one before it
        ([4, 4, 4, 4], Match(3, 3)),  # an occurrence may overlap the ending
    ],
)
def test_by_hand(text, expected):
    assert TextIndex(text).longest_match() == expected


def test_random_texts_against_a_search():
    rng = random.Random(0)
    for _ in range(400):
        text = [rng.randrange(rng.randint(1, 5)) for _ in range(rng.randint(0, 60))]
        longest = rng.choice([1, 2, 3, LONGEST_MATCH])
        assert TextIndex(text).longest_match(longest) == searched(text, longest), (text, longest)


def test_a_text_that_grows_is_the_text_as_a_whole():
    rng = random.Random(1)
    text = [rng.randrange(9) for _ in range(900)]  # beyond the first buffer
    index, end = TextIndex(), 0
    while end < len(text):
        count = rng.randint(0, 70)
        index.extend(text[end : end + count])
        end = min(end + count, len(text))
        assert len(index) == end
        assert index.longest_match() == TextIndex(text[:end]).longest_match() == searched(text[:end], LONGEST_MATCH)


def test_a_match_has_at_most_as_many_tokens_as_asked_for():
    text = list(range(50)) * 2
    assert [TextIndex(text).longest_match(n).length for n in (1, 4, LONGEST_MATCH)] == [1, 4, LONGEST_MATCH]


@pytest.mark.parametrize(
    ("text", "count", "expected"),
    [
        ([5, 6, 7, 8, 9, 5, 6], 3, [7, 8, 9]),
        ([5, 6, 7, 5, 6], 7, [7, 5, 6, 7, 5, 6, 7]),  # it goes on with what it copied
        ([4, 4], 3, [4, 4, 4]),
    ],
)
def test_continuation(text, count, expected):
    index = TextIndex(text)
    assert index.continuation(index.longest_match(), count).tolist() == expected


def test_of_many_equal_places_the_latest_count():
    """Longer endings are looked for among the latest places only, and the match is still a true one."""
    text = [1, 2, 3] + [9, 2, 3] * (MOST_PLACES + 5) + [1, 2, 3]
    match = TextIndex(text).longest_match()
    assert match.length == 2 or text[match.end - match.length : match.end] == text[-match.length :]
    assert match.end == len(text) - 3


@pytest.mark.parametrize("kind", ["random", "one token", "period", "words"])
def test_a_long_text_costs_little_each_round(kind):
    """One pass of a vectorised comparison, not one of Python: a loop over 32,000 tokens takes milliseconds."""
    rng = np.random.default_rng(0)
    text = {
        "random": rng.integers(0, 50_000, 32_768),
        "one token": np.zeros(32_768),
        "period": np.arange(32_768) % 7,
        "words": np.minimum(rng.zipf(1.3, 32_768), 49_000),
    }[kind]
    index, as_list = TextIndex(text), text.tolist()

    def seconds(run) -> float:
        times = []
        for _ in range(5):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return min(times)

    assert seconds(index.longest_match) < seconds(lambda: [i for i, own in enumerate(as_list) if own == as_list[-1]])
