# SPDX-License-Identifier: Apache-2.0
"""Rows that are left out: the first are named, all are counted."""

import pytest

from dspark_hf.training.left_out import LeftOut
from tests.support.scripted import captured_log


def test_rows_are_named_and_counted():
    left_out = LeftOut()
    with captured_log() as messages:
        left_out.add("a:1", "it is blank.")
        left_out.add("a:4", "it is long.")
        left_out.finish(num_good=3)
    assert messages == [
        "a:1: it is blank. The row is left out.",
        "a:4: it is long. The row is left out.",
        "2 of 5 rows were left out.",
    ]


def test_many_rows_do_not_flood_the_log():
    left_out = LeftOut()
    with captured_log() as messages:
        for number in range(1, 1001):
            left_out.add(f"a:{number}", "it is blank.")
        left_out.finish(num_good=1)
    assert len(messages) == 21
    assert messages[19].startswith("a:20: ")
    assert messages[20] == "1000 of 1001 rows were left out, the first 20 of which are named above."


def test_no_good_row_is_an_error_with_different_reasons():
    left_out = LeftOut()
    for number, reason in enumerate(["blank.", "blank.", "long.", "blank.", "odd.", "new."], start=1):
        left_out.add(f"a:{number}", reason)
    with pytest.raises(ValueError, match=r"^None of 6 rows can be used. a:1: blank.\na:3: long.\na:5: odd.$"):
        left_out.finish(num_good=0)


def test_nothing_to_say():
    with captured_log() as messages:
        LeftOut().finish(num_good=0)
    assert messages == []
