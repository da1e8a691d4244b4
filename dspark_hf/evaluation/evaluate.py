# SPDX-License-Identifier: Apache-2.0
"""Runs every conversation with every drafter, in turns, and records each answer."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..common.chat import template_hash
from ..common.chat_tokens import encode_messages, encode_prompt
from ..common.data_file import DataFile
from ..common.decoding_options import Decoding
from ..common.versions import library_versions
from ..drafts.modeling_dspark import DSparkDraftModel
from ..profiling.automatic import profile_for
from .drafters import PLAIN, UNFIT, LoadedDrafter
from .record import Run, run_key
from .tasks import Question, TaskData
from .timed import TimedAnswer, timed_generate


RUNS_FILE = "runs.jsonl"
WARM_UP_TOKENS = 8
NUM_VALUES = 16  # of each tensor, for the fingerprint
# Of a config: where it comes from, not what it says. The dtype is a setting of its own.
ORIGIN = ("_name_or_path", "transformers_version", "dtype")


@dataclass(frozen=True)
class Settings:
    """The settings of an evaluation. A folder is continued only with the same settings."""

    target: str  # name or path of the target
    weights: dict[str, str]  # fingerprints of the target and of each drafter that has weights, knobs included
    tasks: dict[str, str]  # task -> fingerprint of its questions
    drafters: list[dict[str, Any]]  # the drafters, as they were asked for
    temperatures: list[float]  # one for each decoding
    top_p: float  # nucleus, when sampling
    max_new_tokens: int  # longest answer, in tokens
    seed: int  # random seed
    raw: bool  # whether the chat template is omitted
    enable_thinking: bool | None  # the chat template's thinking switch
    template_sha256: str  # hash of the chat template
    dtype: str  # of the weights
    device: str  # name of the processor
    num_threads: int  # threads of torch
    versions: dict[str, str]  # versions of the libraries

    @property
    def decodings(self) -> list[Decoding]:
        """The ways to choose tokens."""
        return [Decoding(temperature, self.top_p) for temperature in self.temperatures]


def settings_for(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[TaskData],
    drafters: Sequence[LoadedDrafter],
    temperatures: Sequence[float] = (0.0, 1.0),  # one for each decoding; 0 is greedy
    top_p: float = 1.0,
    max_new_tokens: int = 256,  # longest answer, in tokens
    seed: int = 0,
    raw: bool = False,
    enable_thinking: bool | None = None,
) -> Settings:
    """Describe an evaluation."""
    if max_new_tokens < 2:
        raise ValueError(f"`max_new_tokens` must be >= 2, or there is no round, got {max_new_tokens}.")
    if not temperatures or min(temperatures) < 0 or len(set(temperatures)) < len(temperatures):
        raise ValueError(f"`temperatures` must be different numbers >= 0, at least one, got {list(temperatures)}.")
    if not 0 < top_p <= 1:
        raise ValueError(f"`top_p` must lie in (0, 1], got {top_p}.")
    return Settings(
        target=target.config.name_or_path,
        weights={"target": weights_fingerprint(target, target.generation_config)}
        | {
            loaded.name: weights_fingerprint(loaded.assistant, loaded.knobs)
            for loaded in drafters
            if loaded.assistant is not None
        },
        tasks={task.name: task.fingerprint for task in tasks},
        drafters=[json.loads(json.dumps(dataclasses.asdict(loaded.drafter))) for loaded in drafters],
        temperatures=[float(temperature) for temperature in temperatures],
        top_p=top_p,
        max_new_tokens=max_new_tokens,
        seed=seed,
        raw=raw or not tokenizer.chat_template,
        enable_thinking=enable_thinking,
        template_sha256=template_hash(tokenizer),
        dtype=str(target.dtype).removeprefix("torch."),
        device=_device_name(target.device),
        num_threads=torch.get_num_threads(),
        versions=library_versions(),
    )


def weights_fingerprint(model: PreTrainedModel, knobs: GenerationConfig | None = None) -> str:
    """Tell a model from the same one trained further, calibrated or set otherwise, in little time."""
    digest = hashlib.sha256()
    for config in (model.config, knobs):
        values = config.to_dict() if config is not None else {}
        said = {name: value for name, value in values.items() if name not in ORIGIN}
        digest.update(json.dumps(said, sort_keys=True, default=str).encode())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        if tensor.device.type != "meta":  # weights that are offloaded
            digest.update(tensor.detach().flatten()[:NUM_VALUES].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def warm_up(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[TaskData],
    drafters: Sequence[LoadedDrafter],
    settings: Settings,
) -> list[LoadedDrafter]:
    """Generate a few tokens with every drafter before anything counts, and find out which do not fit the target."""
    inputs = _encode(tokenizer, tasks[0].questions[0], (), settings)
    return [_warmed_up(target, loaded, inputs, settings) for loaded in drafters]


def evaluate(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[TaskData],
    drafters: Sequence[LoadedDrafter],
    settings: Settings,
    folder: Path,
    on_progress: Callable[[], None] | None = None,
) -> list[Run]:
    """Record an answer of every drafter to every turn of every question, in every decoding.

    The drafters take turns on each question, and which goes first moves on from question to question, so that a
    machine that slows down favours none. In later turns all see the same conversation: the answers of plain
    generation. Each answer is appended to `folder/runs.jsonl` at once; recorded answers are not generated again.

    Args:
        target (`PreTrainedModel`): The target.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        tasks (`Sequence[TaskData]`): From [`load_tasks`].
        drafters (`Sequence[LoadedDrafter]`): From [`warm_up`], plain generation first; those refused are left out.
        settings (`Settings`): From [`settings_for`].
        folder (`Path`): Where to record; made if it is missing.
        on_progress (`Callable`, *optional*): Called for each answer, also for those that were there.

    Returns:
        `list[Run]`

    Raises:
        ValueError: If the folder holds runs of other settings, or a broken file.
    """
    file, runs = _recorded(Path(folder) / RUNS_FILE, settings)
    active = [loaded for loaded in drafters if loaded.refusal is None]
    questions = [question for task in tasks for question in task.questions]
    for number, question in enumerate(questions):
        for decoding in settings.decodings:
            answers: list[str] = []
            for turn in range(len(question.turns)):
                inputs = _encode(tokenizer, question, answers, settings)
                for loaded in _rotated(active, number + turn):
                    names = (question.task, question.index, turn, decoding.name, loaded.name)
                    if run_key(*names) not in runs:
                        torch.manual_seed(settings.seed + number)
                        answer = _generate(target, loaded, inputs, decoding, settings.max_new_tokens)
                        run = Run.of(answer, *names, num_prompt_tokens=inputs["input_ids"].shape[1])
                        runs[run.key] = run
                        file.append(run.to_row())
                    if on_progress is not None:
                        on_progress()
                plain = runs[run_key(question.task, question.index, turn, decoding.name, PLAIN)]
                answers.append(tokenizer.decode(plain.token_ids, skip_special_tokens=True))
    return list(runs.values())


def num_answers(tasks: Sequence[TaskData], settings: Settings) -> int:
    """Answers of one drafter, for a progress bar."""
    return len(settings.temperatures) * sum(len(q.turns) for task in tasks for q in task.questions)


def _recorded(path: Path, settings: Settings) -> tuple[DataFile, dict[str, Run]]:
    """The file of runs, made or continued, and what it holds."""
    try:
        file = DataFile(path, settings)
        lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
        runs = [Run.from_row(json.loads(line)) for line in lines if line]
    except (json.JSONDecodeError, KeyError) as error:
        raise ValueError(
            f"{path} has a line that is no recorded run ({error}). Remove the line, which is then made again, or "
            "choose another output."
        ) from error
    return file, {run.key: run for run in runs}


def _encode(
    tokenizer: PreTrainedTokenizerBase, question: Question, answers: Sequence[str], settings: Settings
) -> dict[str, torch.Tensor]:
    """The conversation up to the turn after the answers, `(1, s)`."""
    turns = question.turns[: len(answers) + 1]
    said = [("system", question.system)] if question.system else []
    for turn, answer in zip(turns, [*answers, None], strict=True):
        said += [("user", turn)] if answer is None else [("user", turn), ("assistant", answer)]
    if settings.raw:
        return encode_prompt(tokenizer, "\n\n".join(text for _, text in said), raw=True)
    messages = tuple({"role": role, "content": text} for role, text in said)
    ids = torch.tensor([encode_messages(tokenizer, messages, settings.enable_thinking)])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _rotated(drafters: Sequence[LoadedDrafter], number: int) -> list[LoadedDrafter]:
    first = number % len(drafters)
    return [*drafters[first:], *drafters[:first]]


def _generate(
    target: PreTrainedModel,
    loaded: LoadedDrafter,
    inputs: dict[str, torch.Tensor],
    decoding: Decoding,
    max_new_tokens: int,
) -> TimedAnswer:
    """One timed call."""
    if loaded.assistant is not None:
        # A copy, since transformers' own schedules write what they learn into it.
        loaded.assistant.generation_config = copy.deepcopy(loaded.knobs)
    return timed_generate(target, inputs, loaded.arguments | decoding.arguments | {"max_new_tokens": max_new_tokens})


def _warmed_up(
    target: PreTrainedModel, loaded: LoadedDrafter, inputs: dict[str, torch.Tensor], settings: Settings
) -> LoadedDrafter:
    if loaded.refusal is not None:
        return loaded
    try:
        for decoding in settings.decodings:
            _generate(target, loaded, inputs, decoding, min(WARM_UP_TOKENS, settings.max_new_tokens))
    except UNFIT as error:
        if loaded.drafter.kind == PLAIN:
            raise
        return dataclasses.replace(loaded, refusal=" ".join(str(error).split()) or repr(error))
    if isinstance(loaded.assistant, DSparkDraftModel):  # the first long text would measure round times if this did not
        profile_for(target, loaded.assistant, settings.max_new_tokens)
    return loaded


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} ({platform.machine()})"
