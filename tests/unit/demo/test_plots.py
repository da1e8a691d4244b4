# SPDX-License-Identifier: Apache-2.0
"""The tables behind the plots, against rounds counted by hand."""

from dspark_hf import AcceptanceStats, RoundRecord
from dspark_hf.demo.plots import DRAFTS, OWN, acceptance_by_slot, confidence_outcomes, tokens_per_round
from dspark_hf.demo.records import ACCEPTED, REJECTED


ROUNDS = (
    RoundRecord(1, (5, 6, 7), (0.95, 0.5, 0.3), num_accepted=1, bonus_token=8, num_committed=2),
    RoundRecord(8, (5, 6), (0.9, 0.1, 0.9), num_accepted=2, bonus_token=9, num_committed=3),
    RoundRecord(9, (), (), num_accepted=0, bonus_token=4, num_committed=1),
    # The text ended with the second of three drafts.
    RoundRecord(4, (5, 6, 7), (1.0, 0.2, 0.99), num_accepted=2, bonus_token=None, num_committed=2),
)


def test_tokens_per_round_add_up_to_the_text():
    table = tokens_per_round(ROUNDS)
    assert table[table["origin"] == DRAFTS]["tokens"].tolist() == [1, 2, 0, 2]
    assert table[table["origin"] == OWN]["tokens"].tolist() == [1, 1, 1, 0]
    assert table.groupby("round")["tokens"].sum().tolist() == [2, 3, 1, 2]
    assert table["tokens"].sum() == AcceptanceStats(list(ROUNDS)).num_committed


def test_only_judged_drafts_have_an_outcome():
    table = confidence_outcomes(ROUNDS)
    counts = {(row.confidence, row.outcome): row.drafts for row in table.itertuples() if row.drafts}
    # Slot 1 of the first round was rejected, slot 2 not reached; slot 2 of the last one was not judged.
    assert counts == {
        ("80–100 %", ACCEPTED): 3,
        ("40–60 %", REJECTED): 1,
        ("0–20 %", ACCEPTED): 1,
        ("20–40 %", ACCEPTED): 1,
    }
    assert len(table) == 10  # empty ranges are shown too


def test_acceptance_by_slot_is_conditional():
    table = acceptance_by_slot(ROUNDS)
    assert table["slot"].tolist() == ["slot 0", "slot 1", "slot 2"]
    assert table["rounds"].tolist() == [3, 3, 1]
    assert [round(value, 1) for value in table["accepted"]] == [100.0, 66.7, 0.0]


def test_no_rounds_make_empty_tables():
    assert tokens_per_round(()).empty
    assert acceptance_by_slot(()).empty
    assert confidence_outcomes(())["drafts"].sum() == 0
