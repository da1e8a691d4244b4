# SPDX-License-Identifier: Apache-2.0
"""Settings of the whole suite: no network, few threads, quiet libraries, no deprecated calls, no leftovers."""

import logging
import os
import sys


# Before the Hub client is imported: it reads the variable once.
os.environ["HF_HUB_OFFLINE"] = "1"
# No `generate` stops for seconds to time its rounds; the tests of that switch it on.
os.environ["DSPARK_HF_AUTO_PROFILE"] = "0"

import pytest  # noqa: E402
import torch  # noqa: E402
from transformers.utils import logging as library_logging  # noqa: E402

import dspark_hf  # noqa: E402


SLOW_MARK, GPU_MARK = "not slow and not gpu and not browser", "not gpu and not browser"

library_logging.disable_progress_bar()


class _Deprecations(logging.Handler):
    """Collects what transformers says it is about to remove."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if "deprecat" in message.lower() or "will be removed" in message.lower():
            self.messages.append(message)


_DEPRECATIONS = _Deprecations()


def pytest_addoption(parser):
    parser.addoption("--run-slow", action="store_true", help="also run the tests marked `slow`")
    parser.addoption("--threads", type=int, default=1, help="threads of torch (default: 1)")


def pytest_configure(config):
    os.environ["COLUMNS"] = "200"  # no line of a command's output is wrapped, however long a path is
    torch.set_num_threads(config.getoption("--threads"))
    if config.getoption("--run-slow") and config.option.markexpr == SLOW_MARK:
        config.option.markexpr = GPU_MARK
    # Errors are shown; warnings are still made, so that deprecations can be seen.
    library = library_logging.get_logger("transformers")
    for handler in library.handlers:
        handler.setLevel(logging.ERROR)
    library_logging.set_verbosity_warning()
    library.addHandler(_DEPRECATIONS)


@pytest.fixture(autouse=True)
def no_deprecated_calls():
    """Fails a test in which transformers announced the end of something that was used; yields what it has said."""
    _DEPRECATIONS.messages.clear()
    yield _DEPRECATIONS.messages
    assert not _DEPRECATIONS.messages, f"deprecated by transformers: {_DEPRECATIONS.messages}"


@pytest.fixture(autouse=True)
def integration_as_before():
    """Leaves `generate` enabled or disabled for DSpark drafts as it was found."""
    enabled = dspark_hf.is_enabled()
    yield
    (dspark_hf.enable if enabled else dspark_hf.disable)()


@pytest.fixture(autouse=True)
def fixed_seed():
    """Every test starts from the same random state, whichever ran before."""
    torch.manual_seed(0)


def pytest_report_header():
    return f"torch {torch.__version__}, {torch.get_num_threads()} thread(s), python {sys.version.split()[0]}"
