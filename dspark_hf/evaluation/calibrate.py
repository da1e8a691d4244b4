# SPDX-License-Identifier: Apache-2.0
"""Calibrate a draft on prompts: decode with full blocks, fit temperatures, keep them in the draft's config."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..common.chat_tokens import encode_prompt
from ..common.prompts import Prompt
from ..common.records import RoundRecord, collect_rounds
from ..common.versions import library_versions
from ..drafts.configuration_dspark import DSparkConfig
from ..drafts.modeling_dspark import DSparkDraftModel
from ..scheduling.calibration import CalibrationReport, acceptance_prior, calibration_report
from ..scheduling.copying import measure_copy_prior
from ..scheduling.observations import ConfidenceObservations


CONFIG_FILE = "config.json"
CALIBRATION_FIELDS = ("confidence_temperatures", "acceptance_prior", "copy_prior", "calibration_info")
SAMPLING_NAMES = ("temperature", "top_k", "top_p", "min_p")


def calibrate(
    target: PreTrainedModel,
    draft: DSparkDraftModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    check_prompts: Sequence[Prompt] | None = None,
    max_new_tokens: int = 96,
    num_answers: int = 1,
    raw: bool = False,
    generate_arguments: dict[str, Any] | None = None,
    prompts_name: str | None = None,
    on_progress: Callable[[], None] | None = None,
) -> CalibrationReport:
    """Fit the confidence temperatures of a draft, judge them on other prompts, and set them on `draft.config`.

    Sets `confidence_temperatures`, `acceptance_prior`, `copy_prior` and `calibration_info`. Nothing is written to
    disk (see [`save_calibration`]), and nothing is set where an error is raised. The temperatures describe the
    decoding they were fitted with: greedy ones say how often greedy drafts are accepted.

    Args:
        target (`PreTrainedModel`): The model that generates.
        draft (`DSparkDraftModel`): Its draft, with a confidence head.
        tokenizer (`PreTrainedTokenizerBase`): The target's.
        prompts (`Sequence[Prompt]`): What to generate from; repeated ones count once.
        check_prompts (`Sequence[Prompt]`, *optional*):
            Prompts to judge the temperatures on. By default every second one of `prompts`, domain by domain, which
            is then not fitted to.
        max_new_tokens (`int`, *optional*, defaults to 96): Longest answer, in tokens.
        num_answers (`int`, *optional*, defaults to 1): Answers to each prompt; more than one need sampling.
        raw (`bool`, *optional*, defaults to `False`): Omit the chat template.
        generate_arguments (`dict[str, Any]`, *optional*): Further arguments of `generate`; greedy without any.
        prompts_name (`str`, *optional*): What the prompts are, for `calibration_info`.
        on_progress (`Callable`, *optional*): Called after each answer.

    Returns:
        [`CalibrationReport`]

    Raises:
        ValueError: If the draft has no confidence head, there are too few prompts or rounds, or answers are too short
            for one full block.
    """
    _check_draft(draft.config)
    fit_prompts, judged_prompts = _split(prompts, check_prompts)
    slots, how = draft.config.num_draft_slots, (max_new_tokens, num_answers, raw, generate_arguments, on_progress)
    collected = [collect_full_blocks(target, draft, tokenizer, part, *how) for part in (fit_prompts, judged_prompts)]
    fitted, check = (ConfidenceObservations.from_rounds(own.rounds, slots) for own in collected)
    report = calibration_report(fitted, check)
    rounds, texts = zip(*((own.rounds, own.texts) for own in collected), strict=True)
    everything = ConfidenceObservations.from_rounds(chain(*rounds), slots)
    draft.config.confidence_temperatures = list(report.temperatures)
    draft.config.acceptance_prior = list(acceptance_prior(everything))
    draft.config.copy_prior = list(measure_copy_prior(chain(*texts)))
    draft.config.calibration_info = {
        "prompts": prompts_name,
        "num_prompts": len(fit_prompts) + len(judged_prompts),
        "num_rounds": everything.num_rounds,
        "max_new_tokens": max_new_tokens,
    } | _circumstances(draft, generate_arguments or {})
    return report


def _circumstances(draft: DSparkDraftModel, generate_arguments: dict[str, Any]) -> dict[str, Any]:
    """What a calibration holds for."""
    return {
        "decoding": _decoding(generate_arguments),
        "dtype": str(draft.dtype).removeprefix("torch."),
        "versions": library_versions(),
        "date": datetime.date.today().isoformat(),
    }


@dataclass(frozen=True)
class CollectedAnswers:
    """Answers with every slot of every block sent."""

    rounds: tuple[RoundRecord, ...]  # in order
    texts: tuple[tuple[tuple[int, ...], int], ...]  # tokens of prompt and answer, and how many are the prompt


def collect_full_blocks(
    target: PreTrainedModel,
    draft: DSparkDraftModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    max_new_tokens: int = 96,  # longest answer, in tokens
    num_answers: int = 1,
    raw: bool = False,
    generate_arguments: dict[str, Any] | None = None,
    on_progress: Callable[[], None] | None = None,  # called after each answer
) -> CollectedAnswers:
    """Answer prompts with every slot of every block sent, and the confidences as the head says them.

    The rounds of several calls may be joined, greedy and sampled ones for example, and fitted to together with
    [`ConfidenceObservations.from_rounds`]. The draft's knobs and temperatures are set aside meanwhile.
    """
    arguments = {"do_sample": False, **(generate_arguments or {}), "max_new_tokens": max_new_tokens}
    _check_numbers(draft.config, max_new_tokens, num_answers, arguments["do_sample"])
    encoded = [encode_prompt(tokenizer, prompt.text, raw) for prompt in prompts]
    texts = []
    with _full_blocks(draft), collect_rounds() as stats:
        for inputs in encoded:
            inputs = {name: value.to(target.device) for name, value in inputs.items()}
            for _ in range(num_answers):
                output = target.generate(**inputs, assistant_model=draft, **arguments)
                texts.append((tuple(output[0].tolist()), inputs["input_ids"].shape[1]))
                if on_progress is not None:
                    on_progress()
    return CollectedAnswers(tuple(stats.rounds), tuple(texts))


def num_calibration_answers(
    prompts: Sequence[Prompt], check_prompts: Sequence[Prompt] | None = None, num_answers: int = 1
) -> int:
    """Answers that [`calibrate`] generates, for a progress bar."""
    return num_answers * sum(len(part) for part in _split(prompts, check_prompts))


def save_calibration(draft: DSparkDraftModel, output: str | os.PathLike | None = None) -> Path:
    """Keep a draft's calibration on disk.

    Args:
        draft (`DSparkDraftModel`): A calibrated draft.
        output (`str` or `os.PathLike`, *optional*):
            Folder for a copy of the whole draft. Without it, only config.json in the folder that the draft was loaded
            from is replaced; the weights are not touched.

    Returns:
        `pathlib.Path`: the folder written to.

    Raises:
        RuntimeError: If the draft is not calibrated.
        ValueError: If there is no `output` and the draft's own folder cannot take it.
    """
    if draft.config.confidence_temperatures is None:
        raise RuntimeError("The draft has no `confidence_temperatures` to save. Call `calibrate` first.")
    own_folder = check_can_save(draft, output)
    if output is not None and (own_folder is None or own_folder != Path(output).resolve()):
        draft.save_pretrained(output)
        return Path(output)
    if own_folder is None:
        raise ValueError("The draft has no folder that can take a calibration. Pass `output`.")
    # Only these fields: loading may have changed others, the dtype for example.
    stored = DSparkConfig.from_pretrained(own_folder)
    for name in CALIBRATION_FIELDS:
        setattr(stored, name, getattr(draft.config, name))
    with tempfile.TemporaryDirectory(prefix=".calibration.", dir=own_folder) as scratch:
        stored.save_pretrained(scratch)
        os.replace(Path(scratch) / CONFIG_FILE, own_folder / CONFIG_FILE)
    return own_folder


def check_can_save(
    draft: DSparkDraftModel, output: str | os.PathLike | None = None
) -> Path | None:  # None where it has none that can take a calibration
    """Check that [`save_calibration`] can write; call it before the work."""
    folder = Path(draft.config.name_or_path).resolve() if draft.config.name_or_path else None
    if folder is not None and _is_own_layout(folder):
        return folder
    if output is None:
        raise ValueError(
            "A calibration is written to the draft's own folder, which must be on this machine and in this package's "
            f"layout, got {draft.config.name_or_path!r}. Pass an output folder, for a copy of the draft with it."
        )
    return None


def _is_own_layout(folder: Path) -> bool:
    path = folder / CONFIG_FILE
    return path.is_file() and json.loads(path.read_text(encoding="utf-8")).get("model_type") == DSparkConfig.model_type


@contextlib.contextmanager
def _full_blocks(draft: DSparkDraftModel) -> Iterator[None]:
    """Every slot of every block is sent, with uncalibrated confidences; everything is put back afterwards."""
    knobs, temperatures = draft.generation_config, draft.config.confidence_temperatures
    draft.generation_config = GenerationConfig(num_assistant_tokens_schedule="constant")
    draft.config.confidence_temperatures = None
    try:
        yield
    finally:
        draft.generation_config = knobs
        draft.config.confidence_temperatures = temperatures


def _split(prompts: Sequence[Prompt], check_prompts: Sequence[Prompt] | None) -> tuple[list[Prompt], list[Prompt]]:
    """Prompts to fit to and prompts to check on, none in both."""
    if check_prompts is not None:
        check = list(dict.fromkeys(check_prompts))
        fit = [prompt for prompt in dict.fromkeys(prompts) if prompt not in set(check)]
    else:
        by_domain = sorted(dict.fromkeys(prompts), key=lambda prompt: prompt.domain)
        fit, check = by_domain[::2], by_domain[1::2]
    if not fit or not check:
        raise ValueError(
            "Calibration needs at least one prompt to fit to and another one to check on, got "
            f"{len(fit)} and {len(check)}. Add prompts."
        )
    return fit, check


def _check_draft(config: DSparkConfig) -> None:
    if not config.enable_confidence_head:
        raise ValueError(
            "Calibration needs a confidence head, and this draft has none (`enable_confidence_head` is False). Use a "
            "draft with one. Without it, only the acceptance of each slot can be learned: set "
            "`draft.config.acceptance_prior` to the `conditional_acceptance` of rounds from `collect_rounds`."
        )


def _check_numbers(config: DSparkConfig, max_new_tokens: int, num_answers: int, do_sample: bool) -> None:
    # One token comes from the prefill and one is the bonus token.
    shortest = config.num_draft_slots + 2
    if max_new_tokens < shortest:
        raise ValueError(
            f"`max_new_tokens` must be >= {shortest}, or no block of {config.num_draft_slots} drafts is sent in full, "
            f"got {max_new_tokens}."
        )
    if num_answers < 1:
        raise ValueError(f"`num_answers` must be >= 1, got {num_answers}.")
    if num_answers > 1 and not do_sample:
        raise ValueError(
            f"Greedy answers to the same prompt are all the same, got `num_answers` {num_answers}. Sample "
            "(`do_sample=True`), or add prompts."
        )


def _decoding(arguments: dict[str, Any]) -> str:
    if not arguments.get("do_sample"):
        return "greedy"
    given = [f"{name} {arguments[name]}" for name in SAMPLING_NAMES if arguments.get(name) is not None]
    return ", ".join(["sampled", *given])
