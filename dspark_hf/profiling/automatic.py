# SPDX-License-Identifier: Apache-2.0
"""The profile of a call: read from a file, else measured quickly, once for each pair, machine and set-up."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from transformers import PreTrainedModel
from transformers.utils import logging

from ..drafts.modeling_dspark import DSparkDraftModel
from ..drafts.target_probe import findings_of
from .fingerprint import setup
from .profile import FILE_NAME, RoundTimeProfile, measure_profile, profile_folder, profile_path


logger = logging.get_logger("transformers.dspark_hf.profiling.automatic")

SWITCH = "DSPARK_HF_AUTO_PROFILE"
# The quick measurement: long enough to tell a cliff from noise, short beside the text that it is made for.
QUICK_CONTEXT, QUICK_REPEATS, QUICK_BUDGET_S, QUICK_MIN_TOKENS = 128, 7, 2.5, 32
LONGEST_QUICK_BUDGET_S = 10.0  # a pass over many texts takes longer
LONGEST_WAIT_S = 30.0  # for the measurement of another thread or process


@dataclass(frozen=True)
class _Answer:
    """The result found for a pair in a set-up, and whether everything was tried."""

    profile: RoundTimeProfile | None
    is_final: bool


def profile_for(
    target: PreTrainedModel, draft: DSparkDraftModel, remaining_tokens: int, num_requests: int = 1
) -> RoundTimeProfile | None:
    """The profile of a pair on this machine, or `None`; costs microseconds once the answer is known.

    Any failure gives one warning, and the call continues without a profile; only an interrupt is re-raised.

    The first of these that fits: `round_times.json` in the draft's own folder, the file in the user's cache folder
    ([`profile_path`]), a quick measurement of about three seconds, which goes to the cache folder. The measurement
    is made only for texts of 32 more tokens or longer, and not where the environment variable
    `DSPARK_HF_AUTO_PROFILE` is "0", "false", "off" or "no". Batches have profiles of their own, for 2, 4, 8, ...
    texts, which take up to ten seconds; that of the next larger number is taken.

    Args:
        target (`PreTrainedModel`): The model that generates.
        draft (`DSparkDraftModel`): Its draft.
        remaining_tokens (`int`): Most tokens that the call may still add to a text.
        num_requests (`int`, *optional*, defaults to 1): Texts of the batch.

    Returns:
        [`RoundTimeProfile`] or `None`
    """
    is_switched_on = os.environ.get(SWITCH, "1").strip().lower() not in ("0", "false", "off", "no")
    may_measure = remaining_tokens >= QUICK_MIN_TOKENS and is_switched_on
    num_requests = 1 << (num_requests - 1).bit_length()  # the next power of two
    try:
        key = (
            "round times",
            num_requests,
            id(draft),
            *setup(target, draft),
        )  # a draft loaded again looks for its file
        answer = _known(target, key, may_measure)
        if answer is None:
            answer = _ask(target, draft, key, may_measure)
        return answer.profile
    except Exception as error:  # whatever the error is, generation works without round times
        _warn_without(target, error)
        return None


def _ask(target: PreTrainedModel, draft: DSparkDraftModel, key: tuple, may_measure: bool) -> _Answer:
    """Read, else measure; an error is an answer too, so that it costs one call only."""
    try:
        profile = _read(target, draft, key[1])
        answer = _Answer(profile, is_final=profile is not None)
        if may_measure and profile is None:
            with _one_at_a_time():
                answer = _known(target, key, may_measure) or _Answer(_measure(target, draft, key[1]), is_final=True)
                findings_of(target)[key] = answer
    except Exception as error:
        _warn_without(target, error)
        answer = _Answer(None, is_final=True)
    findings_of(target)[key] = answer
    return answer


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Keep other threads and processes from measuring; no more than that where nothing can be written."""
    folder = profile_folder()
    with contextlib.ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(FileLock(folder / "measuring.lock", timeout=LONGEST_WAIT_S))
        except Timeout as error:
            raise TimeoutError(f"another measurement takes more than {LONGEST_WAIT_S:.3g} s") from error
        except (OSError, NotImplementedError):
            pass
        yield


def _warn_without(target: PreTrainedModel, error: Exception) -> None:
    """Warn that the round times of a typical machine are used instead."""
    logger.warning_once(
        f"No round times: {type(target).__name__} and its draft could not be measured here ({error!r}). Drafts are "
        f"weighed by those of a typical machine instead; the text is the same. {SWITCH}=0 stops measuring."
    )


def _known(target: PreTrainedModel, key: tuple, may_measure: bool) -> _Answer | None:
    answer = findings_of(target).get(key)
    return answer if answer is not None and (answer.is_final or not may_measure) else None


def _read(target: PreTrainedModel, draft: DSparkDraftModel, num_requests: int) -> RoundTimeProfile | None:
    """A profile on disk that fits; those that do not are warned of, once."""
    places = [profile_path(target, draft, num_requests)]
    if num_requests == 1 and draft.name_or_path and os.path.isdir(draft.name_or_path):
        places.insert(0, Path(draft.name_or_path) / FILE_NAME)
    for path in places:
        try:
            profile = RoundTimeProfile.load(path)
            reason = profile.mismatch(target, draft, num_requests)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except Exception as error:  # files can be damaged in many ways
            reason = str(error) or repr(error)
        if reason is None:
            return profile
        logger.warning_once(
            f"The round times in {str(path)!r} are not used: {reason.rstrip('.')}. `dspark-hf profile` measures new "
            "ones."
        )
    return None


def _measure(target: PreTrainedModel, draft: DSparkDraftModel, num_requests: int) -> RoundTimeProfile:
    """The quick measurement, kept for other processes where that is possible."""
    budget_s = min(QUICK_BUDGET_S * max(1.0, num_requests / 4), LONGEST_QUICK_BUDGET_S)
    profile = measure_profile(target, draft, (QUICK_CONTEXT,), QUICK_REPEATS, budget_s, num_requests=num_requests)
    path = profile_path(target, draft, num_requests)
    try:
        profile.save(path)
    except Exception as error:
        logger.warning_once(
            f"The round times of {type(target).__name__} and its draft could not be kept in {str(path)!r} ({error}): "
            f"every process measures them. Set HF_HOME to a folder that can be written, or {SWITCH}=0."
        )
    else:
        what = f"Round times of {type(target).__name__} and its draft were measured"
        logger.info(f"{what} and kept in {str(path)!r}. {SWITCH}=0 stops this.")
    return profile
