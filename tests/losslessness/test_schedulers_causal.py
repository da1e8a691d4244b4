# SPDX-License-Identifier: Apache-2.0
"""Every scheduler but the search for greedy decoding keeps the target's distribution.

Exact, by enumeration: all drafts of a block, what the scheduler sends of each, and what is accepted. The search
over all counts, which does look ahead, shows that the tests would notice.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from dspark_hf.decoding import verification
from dspark_hf.scheduling import (
    CapacityScheduler,
    FixedScheduler,
    LookaheadScheduler,
    PrefixScheduler,
    RoundOutlook,
    Scheduler,
    SPSCurve,
    all_rules,
    mean_survival,
)
from tests.losslessness.test_non_anticipating import CONFIDENCE, SPS, first_token
from tests.support.closeness import assert_close
from tests.support.searching import SearchingScheduler


FIXED = {"nothing": lambda: FixedScheduler(0), "fixed": lambda: FixedScheduler(2)}
CAUSAL: dict[str, Callable[[], Scheduler]] = FIXED | all_rules(num_slots=0)
EVERY = pytest.mark.parametrize("make", CAUSAL.values(), ids=CAUSAL)


def decide(
    make: Callable[[], Scheduler], earlier: list[torch.Tensor], confidence: torch.Tensor, outlook: RoundOutlook
) -> torch.Tensor:
    """Lengths of a round after the rounds `earlier`, by a scheduler of its own."""
    scheduler = make()
    for round_confidence in earlier:
        scheduler.verify_lengths(round_confidence, outlook)
    return scheduler.verify_lengths(confidence, outlook)


@dataclass(frozen=True)
class Situation:
    """Everything that a scheduler may know before a round."""

    earlier: list[torch.Tensor]
    outlook: RoundOutlook


def some_confidence(rng: random.Random, num_requests: int, num_slots: int) -> torch.Tensor:
    """Of any value, or (for ties, within a request too) of five."""
    values = (0.0, 0.4, 0.8, 0.9, 1.0)
    coarse = rng.random() < 0.5
    rows = [
        [rng.choice(values) if coarse else rng.random() ** 0.4 for _ in range(num_slots)] for _ in range(num_requests)
    ]
    return torch.tensor(rows)


def some_situation(rng: random.Random, num_requests: int, num_slots: int) -> Situation:
    """A curve of stairs, which tempt to look beyond the next, and a past with other requests."""
    points = range(num_requests, num_requests * (num_slots + 1) + 1)
    seconds = itertools.accumulate(
        (rng.choice((0.0, 0.05, rng.uniform(0.4, 1.5))) for _ in points[1:]), initial=num_requests
    )
    curve = SPSCurve(tuple(points), tuple(map(float, seconds)), rng.choice((0.0, 0.3)))
    earlier = [some_confidence(rng, rng.randint(1, 4), num_slots) for _ in range(rng.randint(0, 4))]
    expected = mean_survival([rng.uniform(0.2, 1.0) for _ in range(num_slots)])
    return Situation(earlier, RoundOutlook(curve, expected))


# Slot by slot.


def num_leaks(make: Callable[[], Scheduler], seed: int, num_rounds: int) -> tuple[int, set[int]]:
    """How often whether a slot is sent changed with the confidences after it; and the lengths seen."""
    rng, leaks, seen = random.Random(seed), 0, set()
    for _ in range(num_rounds):
        num_requests, num_slots = rng.randint(1, 4), rng.randint(2, 4)
        situation = some_situation(rng, num_requests, num_slots)
        confidence = some_confidence(rng, num_requests, num_slots)
        lengths = decide(make, situation.earlier, confidence, situation.outlook)
        seen |= set(lengths.tolist())
        for request, slot in itertools.product(range(num_requests), range(num_slots - 1)):
            for later in (0.0, 1.0, some_confidence(rng, 1, num_slots)[0, slot + 1 :]):
                changed = confidence.clone()
                changed[request, slot + 1 :] = later
                again = decide(make, situation.earlier, changed, situation.outlook)
                leaks += bool((again[request] > slot) != (lengths[request] > slot))
    return leaks, seen


@EVERY
@pytest.mark.parametrize("seed", range(2))
def test_no_slot_depends_on_what_comes_after_it(make, seed):
    leaks, seen = num_leaks(make, seed, num_rounds=100)
    assert leaks == 0
    assert make in FIXED.values() or len(seen) > 1


def test_the_search_does_depend_on_it():
    assert num_leaks(SearchingScheduler, seed=0, num_rounds=100)[0] > 20


# The paper's appendix A.

APPENDIX = SPSCurve((1, 2, 3), tuple(1 / speed for speed in SPS))
PASTS = {
    "as at hand": (0.8, 0.4),
    "good": (0.9, 0.8),
    "bad": (0.1, 0.0),
}


@EVERY
@pytest.mark.parametrize("past", PASTS.values(), ids=PASTS)
@pytest.mark.parametrize("earlier", [[], [0, 0], [1, 1], [0, 1, 0]], ids=str)
def test_counterexample_of_the_appendix(monkeypatch, make, past, earlier):
    """Tokens A and B, p = (0.7, 0.3), q = (0.5, 0.5), and a second confidence that betrays the first token."""
    rounds = [torch.tensor([CONFIDENCE[token]]) for token in earlier]

    def length(confidence: tuple[float, float]) -> int:
        return int(decide(make, rounds, torch.tensor([confidence]), RoundOutlook(APPENDIX, past)))

    assert_close(first_token(monkeypatch, length), [0.7, 0.3])


def test_what_is_sent_in_the_appendix():
    """Algorithm 1 sends nothing: 1.8 / 2 < 1. Two look further and send the first slot in any case."""

    def lengths(make, rounds) -> list[int]:
        outlook = RoundOutlook(APPENDIX, (0.8, 0.72))
        return [int(decide(make, rounds, torch.tensor([CONFIDENCE[token]]), outlook)) for token in (0, 1)]

    good, bad = torch.tensor([CONFIDENCE[0]]), torch.tensor([CONFIDENCE[1]])
    assert lengths(PrefixScheduler, []) == [0, 0]
    assert lengths(CapacityScheduler, [good, good]) == [2, 2]  # 2.52 / 2.222 = 1.134
    assert lengths(CapacityScheduler, [bad, good]) == [0, 0]
    assert lengths(LookaheadScheduler, []) == [2, 1]  # the second slot goes by its own confidence
    assert lengths(SearchingScheduler, []) == [2, 0]


@pytest.mark.parametrize("past", PASTS.values(), ids=PASTS)
def test_search_without_early_stop_changes_the_distribution(monkeypatch, past):
    def length(confidence: tuple[float, float]) -> int:
        return int(decide(SearchingScheduler, [], torch.tensor([confidence]), RoundOutlook(APPENDIX, past)))

    assert_close(first_token(monkeypatch, length), [0.85, 0.15])


# Whole texts, by enumeration.


@dataclass(frozen=True)
class Pair:
    """p, q and confidences of one request, for every text so far; and what `verification` makes of them."""

    vocab_size: int
    num_slots: int
    target: dict[tuple[int, ...], torch.Tensor]
    draft: dict[tuple[int, ...], torch.Tensor]
    confidence: dict[tuple[int, ...], float]
    accepted: dict[tuple[int, ...], float]  # by the text, the draft last
    residual: dict[tuple[int, ...], torch.Tensor]

    def texts(self, length: int) -> list[tuple[int, ...]]:
        return list(itertools.product(range(self.vocab_size), repeat=length))

    def plain(self, text: tuple[int, ...]) -> torch.Tensor:
        """Distribution over texts of g + 1 tokens that begin with `text`, by the target alone."""
        law = torch.zeros((self.vocab_size,) * (self.num_slots + 1), dtype=torch.float64)
        for rest in self.texts(self.num_slots + 1 - len(text)):
            whole = (*text, *rest)
            law[whole] = 1.0
            for k in range(len(text), len(whole)):
                law[whole] *= self.target[whole[:k]][whole[k]]
        return law

    def committed(self, drafts: tuple[int, ...], length: int, done: int = 0) -> torch.Tensor:
        """The same when `length` of these drafts are sent, of which `done` were accepted; then plain steps."""
        text = drafts[:done]
        if done == length:
            return self.plain(text)
        accepted = self.accepted[drafts[: done + 1]]
        law = accepted * self.committed(drafts, length, done + 1)
        for token, probability in enumerate(self.residual[text].tolist()):
            law += (1 - accepted) * probability * self.plain((*text, token))
        return law


def acceptance(target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    """Chance that `sampling.accept_drafts` takes each token, `(texts, V)`, from the uniform draw at which it turns."""
    num_texts, vocab_size = target.shape
    ids = torch.arange(vocab_size).repeat(num_texts)[None]
    logits = [table.log().float().repeat_interleave(vocab_size, dim=0)[None] for table in (target, draft)]
    low, high = torch.zeros(ids.shape), torch.ones(ids.shape)
    with pytest.MonkeyPatch.context() as patch:
        for _ in range(24):
            middle = (low + high) / 2
            patch.setattr(torch, "rand_like", lambda like, middle=middle: middle)
            accepted = verification.accept_drafts(ids, *logits, do_sample=True)
            low, high = torch.where(accepted, middle, low), torch.where(accepted, high, middle)
    return ((low + high) / 2).double().view(num_texts, vocab_size)


def residuals(target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    """What `sampling.select_bonus` draws from after a rejection, `(texts, V)`."""
    drawn_from = []

    def capture(probabilities, num_samples, generator=None):
        drawn_from.append(probabilities)
        return torch.zeros(len(probabilities), num_samples, dtype=torch.long)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "multinomial", capture)
        verification.select_bonus(target.log().float(), draft.float(), do_sample=True)
    return torch.nn.functional.normalize(drawn_from[0].double(), p=1, dim=-1)


def some_pair(rng: random.Random, vocab_size: int, num_slots: int) -> Pair:
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    prefixes = [p for n in range(num_slots + 1) for p in itertools.product(range(vocab_size), repeat=n)]
    rows = torch.rand(2, len(prefixes), vocab_size, generator=generator, dtype=torch.float64) + 0.05
    target, draft = (table / table.sum(dim=-1, keepdim=True) for table in rows)
    chances = acceptance(target, draft)
    return Pair(
        vocab_size,
        num_slots,
        dict(zip(prefixes, target, strict=True)),
        dict(zip(prefixes, draft, strict=True)),
        {prefix: float(some_confidence(rng, 1, 1)) for prefix in prefixes},
        {(*prefix, x): float(chances[i, x]) for i, prefix in enumerate(prefixes) for x in range(vocab_size)},
        dict(zip(prefixes, residuals(target, draft), strict=True)),
    )


def joint_law(make: Callable[[], Scheduler], pairs: list[Pair], situation: Situation) -> tuple[torch.Tensor, set[int]]:
    """Distribution of what all requests write together, and the lengths seen."""
    law, seen = torch.zeros(()), set()
    blocks = [pair.texts(pair.num_slots) for pair in pairs]
    committed = [functools.cache(pair.committed) for pair in pairs]
    for drafts in itertools.product(*blocks):
        confidence = torch.tensor(
            [[pair.confidence[x[:k]] for k in range(pair.num_slots)] for pair, x in zip(pairs, drafts, strict=True)]
        )
        lengths = decide(make, situation.earlier, confidence, situation.outlook).tolist()
        seen |= set(lengths)
        part = torch.ones((), dtype=torch.float64)
        for pair, x, length, commit in zip(pairs, drafts, lengths, committed, strict=True):
            part = part * math.prod(float(pair.draft[x[:k]][x[k]]) for k in range(pair.num_slots))
            part = torch.tensordot(part, commit(x, length), dims=0)
        law = law + part
    return law, seen


def plain_law(pairs: list[Pair]) -> torch.Tensor:
    law = torch.ones((), dtype=torch.float64)
    for pair in pairs:
        law = torch.tensordot(law, pair.plain(()), dims=0)
    return law


SIZES = [(1, 3, 2), (1, 2, 3), (2, 2, 2)]  # requests, vocabulary, slots
NUM_SITUATIONS = 16  # of each size


def test_pieces_of_the_enumeration():
    pair = some_pair(random.Random(0), 3, 2)
    for text, p in pair.target.items():
        q = pair.draft[text]
        for token in range(3):
            assert_close(pair.accepted[(*text, token)], min(1.0, float(p[token] / q[token])), scale=1.0)
        rest = (p - q).clamp(min=0)
        assert_close(pair.residual[text], rest / rest.sum())
    assert float(pair.plain(()).sum()) == pytest.approx(1.0)
    assert float(pair.committed((0, 1), 2).sum()) == pytest.approx(1.0)


@EVERY
@pytest.mark.parametrize(("num_requests", "vocab_size", "num_slots"), SIZES)
def test_texts_are_those_of_the_target(make, num_requests, vocab_size, num_slots):
    """Each request, and all together: knowing one text says nothing about another."""
    rng = random.Random(num_slots)
    lengths = set()
    for _ in range(NUM_SITUATIONS):
        pairs = [some_pair(rng, vocab_size, num_slots) for _ in range(num_requests)]
        law, seen = joint_law(make, pairs, some_situation(rng, num_requests, num_slots))
        assert_close(law, plain_law(pairs))
        lengths |= seen
    assert make in FIXED.values() or len(lengths) > 1


@pytest.mark.parametrize(("num_requests", "vocab_size", "num_slots"), SIZES)
def test_texts_under_the_search_are_not(num_requests, vocab_size, num_slots):
    rng = random.Random(num_slots)
    errors = []
    for _ in range(NUM_SITUATIONS):
        pairs = [some_pair(rng, vocab_size, num_slots) for _ in range(num_requests)]
        law, _ = joint_law(SearchingScheduler, pairs, some_situation(rng, num_requests, num_slots))
        errors.append(float((law - plain_law(pairs)).abs().max()))
    assert max(errors) > 1e-3
