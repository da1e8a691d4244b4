# SPDX-License-Identifier: Apache-2.0
"""A target, a prompt, its plain text, and a draft that is right two times in three; modules may have their own."""

import pytest

from tests.support.models import random_prompt
from tests.support.scripted import generate, lively_target, scripted_draft


@pytest.fixture(scope="module")
def target():
    return lively_target()


@pytest.fixture(scope="module")
def prompt():
    return random_prompt(11)


@pytest.fixture(scope="module")
def plain(target, prompt):
    return generate(target, prompt)


@pytest.fixture(scope="module")
def draft(target, plain):
    return scripted_draft(target, plain)
