# SPDX-License-Identifier: Apache-2.0

import ast
import math
import sys
import threading
from pathlib import Path

import pytest

from dspark_hf.common import records
from dspark_hf.common.records import AcceptanceStats, RoundRecord, active_collectors, collect_rounds


def record(num_drafts: int, num_accepted: int, num_committed: int | None = None, **times: float) -> RoundRecord:
    committed = num_accepted + 1 if num_committed is None else num_committed
    return RoundRecord(1, tuple(range(num_drafts)), (0.5,) * num_drafts, num_accepted, 9, committed, **times)


def test_record():
    whole, cut = record(3, 2), record(3, 2, num_committed=1)
    assert (whole.verify_length, whole.accepted_length, whole.truncated) == (3, 3, False)
    assert (cut.verify_length, cut.accepted_length, cut.truncated) == (3, 3, True)
    assert record(0, 0).accepted_length == 1


def test_records_cannot_be_changed():
    with pytest.raises(AttributeError):
        record(1, 0).num_accepted = 1


def test_figures_pool_over_rounds():
    """4 + 1 + 2 + 1 tokens in 4 rounds, 3 of 7 drafts accepted; the mean of the rounds' own rates would be 0.5."""
    stats = AcceptanceStats([record(4, 3, num_committed=4), record(2, 0), record(1, 1), record(0, 0)])
    assert stats.num_rounds == 4
    assert stats.num_committed == 8
    assert stats.num_drafted == 7
    assert stats.num_verified == 11
    assert stats.accepted_length == 2.0
    assert stats.acceptance_rate == pytest.approx(4 / 7)


def test_conditional_acceptance_counts_rounds_that_reached_the_slot():
    """Slot 0: sent thrice, accepted twice. Slot 1: reached twice, accepted once. Slot 2: reached once, rejected."""
    stats = AcceptanceStats([record(3, 2), record(2, 1), record(4, 0)])
    rates = stats.conditional_acceptance
    assert rates[:3] == [pytest.approx(2 / 3), 0.5, 0.0]
    assert math.isnan(rates[3])
    assert len(rates) == 4


def test_truncated_rounds_count_what_was_committed():
    stats = AcceptanceStats([record(4, 4, num_committed=2)])
    assert stats.accepted_length == 2.0
    assert stats.acceptance_rate == 1.0


def test_empty():
    stats = AcceptanceStats()
    assert (stats.num_rounds, stats.num_committed, stats.num_drafted, stats.num_verified) == (0, 0, 0, 0)
    assert math.isnan(stats.accepted_length)
    assert math.isnan(stats.acceptance_rate)
    assert math.isnan(stats.loop_efficiency)
    assert stats.conditional_acceptance == []


def test_no_drafts_sent_is_no_rate():
    stats = AcceptanceStats([record(0, 0)])
    assert math.isnan(stats.acceptance_rate)
    assert stats.accepted_length == 1.0


def test_times():
    stats = AcceptanceStats()
    stats.add(record(1, 1, draft_s=0.1, verify_s=0.5, round_s=0.8))
    stats.add(record(1, 0, draft_s=0.1, verify_s=0.2, round_s=0.2 + 0.1))
    assert stats.draft_s == pytest.approx(0.2)
    assert stats.verify_s == pytest.approx(0.7)
    assert stats.round_s == pytest.approx(1.1)
    assert stats.loop_efficiency == pytest.approx(0.9 / 1.1)


def test_stats_do_not_share_their_list():
    first = AcceptanceStats()
    first.add(record(1, 1))
    assert AcceptanceStats().rounds == []


def test_collectors_nest():
    assert active_collectors() == ()
    with collect_rounds() as outer:
        assert active_collectors() == (outer,)
        with collect_rounds() as inner:
            assert active_collectors() == (outer, inner)
        assert active_collectors() == (outer,)
    assert active_collectors() == ()


def test_collectors_end_with_an_error():
    with pytest.raises(KeyError), collect_rounds():
        raise KeyError
    assert active_collectors() == ()


def test_collectors_belong_to_their_thread():
    seen = []
    with collect_rounds():
        thread = threading.Thread(target=lambda: seen.append(active_collectors()))
        thread.start()
        thread.join()
    assert seen == [()]


def test_imports_the_standard_library_only():
    tree = ast.parse(Path(records.__file__).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} <= set(sys.stdlib_module_names)


def test_counts_of_each_slot_and_what_was_verified():
    """Slot 1 is reached once, in the first round, and accepted there; the second round sends one draft of two."""
    stats = AcceptanceStats([RoundRecord(1, (5, 6), (), 2, 7, 3), RoundRecord(7, (8,), (), 0, 9, 1)])
    assert stats.slot_counts == [(2, 1), (1, 1)]
    assert stats.mean_verify_length == 1.5
    assert stats.verified_per_token == 5 / 4
    assert math.isnan(AcceptanceStats().mean_verify_length)
    assert math.isnan(AcceptanceStats().verified_per_token)


@pytest.mark.parametrize(
    ("record", "is_full"),
    [
        (RoundRecord(1, (5, 6), (0.9, 0.8), 1, 7, 2), True),
        (RoundRecord(1, (5, 6), (0.9, 0.8), 2, None, 2), True),  # the text ended behind the last draft
        (RoundRecord(1, (5, 6), (0.9, 0.8), 1, None, 1), False),  # it ended before the second was judged
        (RoundRecord(1, (5,), (0.9, 0.8), 1, 7, 2), False),  # cut
        (RoundRecord(1, (5, 6), (), 1, 7, 2), False),
        (RoundRecord(1, (5, 6, 4), (0.9, 0.8, 0.7), 1, 7, 2), False),  # of another draft
    ],
)
def test_full_blocks(record, is_full):
    assert record.is_full_block(2) == is_full
