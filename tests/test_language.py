# SPDX-License-Identifier: Apache-2.0
"""Plain English in what users and readers see: none of the turns of phrase that earlier texts had."""

import re
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]
ARCHAIC = r"leave \w+ away|for ever\b|\banew\b|no words for|goes before|of no account|\bdear in\b|nobody'?s"
FILES = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "dspark_hf/**/*.py", "demo/*.py", "examples/*.py", "benchmarks/*.py")
    for path in ROOT.glob(pattern)
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_words(path):
    text = path.read_text(encoding="utf-8")
    assert re.findall(ARCHAIC, text, re.IGNORECASE) == []
