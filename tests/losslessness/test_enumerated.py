# SPDX-License-Identifier: Apache-2.0
"""Losslessness by proof: every path of small cases, in rational arithmetic, without floats and without sampling.

A vocabulary of three tokens, up to three drafts a round. A round is enumerated over what is drafted, how far the block
is sent, what is accepted and what is drawn instead; rounds follow one another until the text is long enough. The law
of the text must be that of the target, as fractions. The rule is written down here once more, and compared with the
package's on the numbers of the cases.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch

from dspark_hf.decoding import verification


Text = tuple[int, ...]
Law = dict[Text, Fraction]
VOCAB_SIZE, LENGTH, EOS = 3, 4, 2
ONE = Fraction(1)


def table(seed: int, zeros: bool = False) -> Callable[[Text], tuple[Fraction, ...]]:
    """A language model: the distribution after a text, of small denominators."""
    known: dict[Text, tuple[Fraction, ...]] = {}

    def after(text: Text) -> tuple[Fraction, ...]:
        if text not in known:
            rng = random.Random(f"{seed}{text}")
            weights = [rng.randint(0 if zeros else 1, 5) for _ in range(VOCAB_SIZE)]
            weights[rng.randrange(VOCAB_SIZE)] += 1
            known[text] = tuple(Fraction(weight, sum(weights)) for weight in weights)
        return known[text]

    return after


@dataclass(frozen=True)
class Case:
    """A way to draft."""

    target: Callable[[Text], tuple[Fraction, ...]]
    draft: Callable[[Text], tuple[Fraction, ...]]
    num_slots: int = 3
    # Slots of the block at this text, the others are copied; by default all are drawn. It may read the past alone.
    num_drawn: Callable[[Text], int] = lambda text: 3
    copied: Callable[[Text, int], int] = lambda text, slot: (len(text) + slot) % VOCAB_SIZE
    # Whether the slot after the drafts so far is sent: it may read these, not its own draft.
    sends: Callable[[Text, Text], bool] = lambda text, drafts: True
    looks_ahead: bool = False  # `sends` is asked about a slot with its own draft and those after it
    drafts: Callable[[Text], bool] = lambda text: True  # the gate
    eos: int | None = None


def plain(case: Case) -> Law:
    """The target's own law of texts."""
    law: Law = {(): ONE}
    for _ in range(LENGTH):
        longer: Law = defaultdict(Fraction)
        for text, chance in law.items():
            if case.eos is not None and case.eos in text:
                longer[text] += chance
                continue
            for token, p in enumerate(case.target(text)):
                longer[(*text, token)] += chance * p
        law = longer
    return {text: chance for text, chance in law.items() if chance}


def blocks(case: Case, text: Text) -> list[tuple[Text, Fraction]]:
    """Whole blocks and their chances: drawn slots, then copied ones."""
    found, num_drawn = [((), ONE)], case.num_drawn(text)
    for slot in range(case.num_slots):
        longer = []
        for drafts, chance in found:
            if slot < num_drawn:
                longer += [((*drafts, token), chance * q) for token, q in enumerate(case.draft((*text, *drafts))) if q]
            else:
                longer.append(((*drafts, case.copied(text, slot)), chance))
        found = longer
    return found


def sent(case: Case, text: Text, block: Text) -> Text:
    """The drafts of a block that are sent."""
    for slot in range(len(block)):
        if not case.sends(text, block if case.looks_ahead else block[:slot]):
            return block[:slot]
    return block


def q_of(case: Case, text: Text, drafts: Text, slot: int) -> tuple[Fraction, ...]:
    """The distribution that a slot was drafted from."""
    if slot < case.num_drawn(text):
        return case.draft((*text, *drafts[:slot]))
    return tuple(ONE if token == drafts[slot] else Fraction(0) for token in range(VOCAB_SIZE))


def accepted_and_residual(p: tuple, q: tuple, token: int) -> tuple[Fraction, tuple[Fraction, ...]]:
    """Chance that a draft is accepted, and what is drawn from if it is not."""
    accepted = min(ONE, p[token] / q[token])
    rest = [max(a - b, Fraction(0)) for a, b in zip(p, q, strict=True)]
    total = sum(rest)
    return accepted, tuple(own / total for own in rest) if total else p


def committed(case: Case, text: Text, drafts: Text) -> Law:
    """Texts after a round that sends these drafts."""
    law: Law = defaultdict(Fraction)
    chance = ONE
    for slot, token in enumerate(drafts):
        before = (*text, *drafts[:slot])
        p = case.target(before)
        accepted, residual = accepted_and_residual(p, q_of(case, text, drafts, slot), token)
        for other, r in enumerate(residual):
            law[(*before, other)] += chance * (1 - accepted) * r
        chance *= accepted
    for token, p in enumerate(case.target((*text, *drafts))):
        law[(*text, *drafts, token)] += chance * p
    return law


def round_law(case: Case, text: Text) -> Law:
    """Texts after one round."""
    law: Law = defaultdict(Fraction)
    drafted = blocks(case, text) if case.drafts(text) else [((), ONE)]
    for block, chance in drafted:
        for longer, own in committed(case, text, sent(case, text, block)).items():
            law[longer] += chance * own
    return law


def drafted_law(case: Case) -> Law:
    """The law of texts that rounds write, cut where they end."""
    done: Law = defaultdict(Fraction)
    open_texts: Law = {(): ONE}
    while open_texts:
        longer: Law = defaultdict(Fraction)
        for text, chance in open_texts.items():
            for new, own in round_law(case, text).items():
                end = new.index(case.eos) + 1 if case.eos is not None and case.eos in new else LENGTH
                ended = len(new) >= end or len(new) >= LENGTH
                (done if ended else longer)[new[: min(end, LENGTH)]] += chance * own
        open_texts = longer
    return {text: chance for text, chance in done.items() if chance}


def threshold_cut(text: Text, drafts: Text) -> bool:
    """A confidence that has seen the drafts before the slot: every third kind of prefix ends the block."""
    return (sum(drafts) + 2 * len(text) + len(drafts)) % 3 != 0


CASES = {
    "one slot": {"num_slots": 1},
    "whole blocks": {},
    "blocks cut by what precedes the slot": {"sends": threshold_cut},
    "copies": {"num_drawn": lambda text: 0},
    "a block that a copy continues": {"num_drawn": lambda text: 1},
    "blocks and copies in turn, by the text": {"num_drawn": lambda text: (0, 3, 1)[len(text) % 3]},
    "copies cut by what precedes the slot": {"num_drawn": lambda text: 1, "sends": threshold_cut},
    "a gate that skips rounds, by the text": {"drafts": lambda text: sum(text) % 2 == 0},
    "an end of text inside a block": {"eos": EOS},
    "an end of text inside a copy": {"eos": EOS, "num_drawn": lambda text: 0, "copied": lambda text, slot: slot},
    "everything": {
        "eos": EOS,
        "sends": threshold_cut,
        "drafts": lambda text: len(text) != 1,
        "num_drawn": lambda text: (0, 3, 1)[sum(text) % 3],
    },
}


@pytest.mark.parametrize("zeros", [False, True], ids=["full support", "with zeros"])
@pytest.mark.parametrize("name", CASES)
def test_the_law_is_the_targets(name, zeros):
    for seed in range(2):
        case = Case(table(seed, zeros), table(seed + 10, zeros), **CASES[name])
        law = drafted_law(case)
        assert sum(law.values()) == 1
        assert law == plain(case)


def test_equal_models_accept_everything():
    case = Case(table(0), table(0))
    assert drafted_law(case) == plain(case)
    for block, _ in blocks(case, ()):
        full = committed(case, (), block)
        assert sum(chance for text, chance in full.items() if len(text) == case.num_slots + 1) == 1


@pytest.mark.parametrize("name", ["whole blocks", "an end of text inside a block"])
def test_a_cut_that_looks_at_its_own_draft_is_biased(name):
    """The enumeration can fail: whether a slot is sent must not depend on what it holds, or on what comes after."""
    own = Case(table(0), table(10), **CASES[name], sends=lambda text, drafts: drafts[0] != 1, looks_ahead=True)
    assert drafted_law(own) != plain(own)


def test_the_counter_example_of_the_paper():
    """Appendix A: p = (0.7, 0.3), q = (0.5, 0.5); the block is sent only if the first draft is the first token."""
    p, q = (Fraction(7, 10), Fraction(3, 10), Fraction(0)), (Fraction(1, 2), Fraction(1, 2), Fraction(0))
    case = Case(lambda _: p, lambda _: q, num_slots=2, sends=lambda text, drafts: drafts[0] == 0, looks_ahead=True)
    first: dict[int, Fraction] = defaultdict(Fraction)
    for text, chance in drafted_law(case).items():
        first[text[0]] += chance
    assert (first[0], first[1]) == (Fraction(85, 100), Fraction(15, 100))


@pytest.mark.parametrize("kind", ["drawn", "copied"])
def test_the_rule_of_the_package_is_this_one(monkeypatch, kind):
    """Chances of acceptance by the draw at which it turns, and residuals by what is drawn from."""
    drawn_from = []

    def multinomial(weights, num_samples, generator=None):
        drawn_from.append(weights / weights.sum(-1, keepdim=True))
        return torch.zeros(len(weights), num_samples, dtype=torch.long)

    monkeypatch.setattr(torch, "multinomial", multinomial)
    checked = 0
    for seed, token in itertools.product(range(12), range(VOCAB_SIZE)):
        p, drafted = table(seed, zeros=seed % 2 == 1)(()), table(seed + 20, zeros=seed % 3 == 1)(())
        q = drafted if kind == "drawn" else tuple(ONE if own == token else Fraction(0) for own in range(VOCAB_SIZE))
        if not q[token]:
            continue
        accepted, residual = accepted_and_residual(p, q, token)
        logits = torch.tensor([[float(own) for own in p]] * 2).log()
        draft_logits = torch.tensor([[float(own) for own in q]]).log() if kind == "drawn" else None
        for draw, expected in ((float(accepted) - 1e-4, 1), (float(accepted) + 1e-4, 0)):
            if not 0 <= draw < 1:
                continue
            monkeypatch.setattr(torch, "rand_like", lambda like, draw=draw: torch.full_like(like, draw))
            drawn_from.clear()
            result = verification.verify_blocks(torch.tensor([token]), logits, draft_logits, [1], do_sample=True)
            assert int(result.num_accepted) == expected
            (weights,) = drawn_from
            wanted = p if expected else residual
            torch.testing.assert_close(weights[0], torch.tensor([float(own) for own in wanted]), rtol=1e-4, atol=1e-6)
            checked += 1
    assert checked >= 30
