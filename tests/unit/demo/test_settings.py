# SPDX-License-Identifier: Apache-2.0
"""Requests out of bounds are refused in words."""

import pytest

from dspark_hf.demo.settings import Limits, RunSettings


LIMITS = Limits(max_prompt_chars=20, max_new_tokens=50)


def test_settings_within_bounds_are_taken():
    RunSettings("Hello").check(Limits(), num_slots=5)
    settings = RunSettings("x" * 20, True, 2.0, 1.0, 50, 5, "constant", 2**31 - 1)
    settings.check(LIMITS, num_slots=5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": "   "}, "Write a prompt first"),
        ({"prompt": None}, "Write a prompt first"),
        ({"prompt": "x" * 1021}, r"too long for the demo: 1,021 characters, and at most 20"),
        ({"temperature": -0.1}, "Temperature must be a number from 0 to 2, got -0.1"),
        ({"temperature": float("nan")}, "Temperature must be"),
        ({"temperature": "hot"}, "Temperature must be a number from 0 to 2, got 'hot'"),
        ({"top_p": 0}, "Top-p must be above 0"),
        ({"top_p": 1.1}, "Top-p must be a number"),
        ({"max_new_tokens": 0}, "The longest answer must be a whole number from 1 to 50 tokens, got 0"),
        ({"max_new_tokens": 51}, "got 51"),
        ({"max_new_tokens": True}, "got True"),
        ({"num_assistant_tokens": 6}, "Drafts per round must be a whole number from 1 to 5, got 6"),
        ({"schedule": "sometimes"}, "The schedule must be one of constant, .*hardware, got 'sometimes'"),
        ({"seed": None}, "The seed must be a whole number"),
        ({"seed": -1}, "The seed must be a whole number from 0"),
    ],
)
def test_settings_out_of_bounds_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        RunSettings(**({"prompt": "Hello", "max_new_tokens": 50} | change)).check(LIMITS, num_slots=5)


def test_arguments_of_generate():
    assert RunSettings("a", max_new_tokens=7).generate_arguments == {"do_sample": False, "max_new_tokens": 7}
    sampled = RunSettings("a", temperature=0.7, top_p=0.9).generate_arguments
    assert (sampled["do_sample"], sampled["temperature"], sampled["top_p"]) == (True, 0.7, 0.9)


@pytest.mark.parametrize("name", ["max_prompt_chars", "max_prompt_tokens", "max_new_tokens", "max_queue"])
def test_limits_must_leave_something(name):
    with pytest.raises(ValueError, match=f"`{name}` must be >= 1, got 0"):
        Limits(**{name: 0})
