# SPDX-License-Identifier: Apache-2.0
"""Every causal language model that transformers can build: the text of plain generation, or a refusal in words.

One row and a batch, with all drafts right, some and none. docs/compatibility.md lists what is refused; the list is
compared with what happens here.
"""

from __future__ import annotations

import functools
import itertools
import re
import traceback
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub import constants as hub_constants
from transformers import PreTrainedModel

import dspark_hf
from dspark_hf.profiling import automatic
from tests.support.models import random_prompt
from tests.support.scripted import ScriptedDraft, StreamerSpy, draft_config_for
from tests.support.tiny_targets import IMAGE_TEXT, PROMPT, VARIANTS, build, model_types


NUM_NEW, NUM_NEW_PROFILED = 24, 40  # texts of 32 more tokens or longer have round times measured for them
SHORT = random_prompt(11, seed=6)
PACKAGE = str(Path(dspark_hf.__file__).parent)
COMPATIBILITY = Path(__file__).parents[2] / "docs" / "compatibility.md"
DOCUMENTED_RELEASE = "5.24"
MIN_NUM_TYPES, MIN_NUM_DISTINCT = 110, 4

# How many drafts are right: all, two of three, none.
SPOILS = {"all": 10**6, "some": 3, "none": 1}

# One of each mechanism, for the default suite.
FEW = {
    "gpt2": "learned positions",
    "gemma3_text": "windows",
    "deepseek_v32": "latent attention, an indexer, experts",
    "bloom": "biases by distance, attention of its own",
    "lfm2": "short convolutions",
    "mamba": "recurrent state",
    "openai-gpt": "no cache",
    "moshi": "a window that its cache has and its masks have not",
    "cpmant": "tokens of one pass see those after them",
}

# Models with images whose parts stay large.
LARGE = {"janus", "kosmos-2", "kosmos-2.5", "qwen2_vl"}

# What docs/compatibility.md says of a refusal -> what its message says.
REASONS = {
    "a recurrent state that cannot be rolled back": "recurrent state",
    "a model-specific cache": "cache of its own kind|which [A-Za-z]*Cache of",
    "no cache": "returned none",
    "a window that is not passed to the attention": "(gets other logits|does not run).*one row at a time",
    "several tokens in one pass give other results than one by one": "gets other logits|does not run",
    "hidden states of several streams": "hidden states of 4 dimensions",
    "hidden states of fewer layers than the config declares": "returned no hidden states",
    "logits that come from more than the LM head": "finds others than the target does",
    "other widths than the config says": "must have shape",
    "layers other than full and windowed attention": "full or sliding attention",
    "attention that cannot be replaced": "attention can be replaced",
    "attention with capped scores or sinks": "plain softmax attention",
}


class RowsDraft(ScriptedDraft):
    """A draft that proposes several texts, each in its row: it knows a row by its position and anchor."""

    scripts: Sequence[list[int]] = ()
    embeddings: torch.nn.Module | None = None

    def forward(self, noise_embeds, context_hidden_states, position_ids, attention_mask=None, cache=None):
        block = position_ids[0, -noise_embeds.shape[0] * self.config.block_size :]
        starts = block.view(noise_embeds.shape[0], -1)[:, 0].tolist()
        self.rows = [self._row(start, noise_embeds[row, 0]) for row, start in enumerate(starts)]
        return super().forward(noise_embeds, context_hidden_states, position_ids, attention_mask, cache)

    def _row(self, start: int, anchor: torch.Tensor) -> tuple[int, list[int]]:
        """Position of a row's anchor, and its script."""
        scripts = [script for script in self.scripts if start < len(script)]
        distances = [
            float((self.embeddings(torch.tensor([script[start]]))[0] - anchor).abs().max()) for script in scripts
        ]
        return start, scripts[distances.index(min(distances))]

    def base_logits(self, hidden, binding):
        logits = dspark_hf.DSparkDraftModel.base_logits(self, hidden, binding)
        ids = torch.zeros(hidden.shape[:2], dtype=torch.long)
        for row, (start, script) in enumerate(self.rows):
            for slot in range(hidden.shape[1]):
                position = start + 1 + slot
                if position < len(script):
                    ids[row, slot] = (script[position] + (position % self.spoil == 0)) % self.config.vocab_size
        return torch.nn.functional.one_hot(ids, logits.shape[-1]).to(logits) * self.script_logit


@dataclass(frozen=True)
class Outcome:
    """What became of a model type: "equal", "refused", "wrong text", "crash" or "not built", and the message."""

    kind: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}" if self.detail else self.kind


def rows_draft(target: PreTrainedModel, texts: Sequence[torch.Tensor], spoil: int, schedule: str | None):
    """A draft for the plain texts of each row, `(1, s)`, without padding."""
    torch.manual_seed(1)
    draft = RowsDraft(draft_config_for(target)).eval()
    draft.scripts, draft.spoil = [text[0].tolist() for text in texts], spoil
    object.__setattr__(draft, "embeddings", target.get_input_embeddings())
    if schedule is not None:
        draft.generation_config.num_assistant_tokens_schedule = schedule
    return draft


def generate(target: PreTrainedModel, prompt: torch.Tensor, num_new: int = NUM_NEW, **kwargs) -> torch.Tensor:
    return target.generate(prompt, do_sample=False, max_new_tokens=num_new, **kwargs)


def left_padded(prompts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """One tensor, and its mask."""
    longest = max(prompt.shape[1] for prompt in prompts)
    batch = torch.cat([torch.nn.functional.pad(prompt, (longest - prompt.shape[1], 0)) for prompt in prompts])
    mask = torch.stack([torch.arange(longest) >= longest - prompt.shape[1] for prompt in prompts]).long()
    return batch, mask


def compared(
    target: PreTrainedModel,
    prompts: Sequence[torch.Tensor],
    plain: Sequence[torch.Tensor],
    calls: Sequence[tuple[str, str | None]] = tuple(itertools.product(SPOILS, (None, "constant"))),
) -> Outcome:
    """The texts of calls with the prompts as their rows, for drafts of every quality, held to plain generation."""
    for quality, schedule in calls:
        spy = StreamerSpy() if len(prompts) == 1 else None
        try:
            draft = rows_draft(target, plain, SPOILS[quality], schedule)
            with dspark_hf.collect_rounds() as stats:
                batch, mask = left_padded(prompts)
                num_new = plain[0].shape[1] - prompts[0].shape[1]
                texts = generate(target, batch, num_new, attention_mask=mask, assistant_model=draft, streamer=spy)
        except Exception as error:
            return _of_error(error, spy)
        call = f"{quality} drafts right, schedule {schedule or 'default'}"
        for row, (prompt, text) in enumerate(zip(prompts, plain, strict=True)):
            ours, theirs = texts[row, batch.shape[1] :].tolist(), text[0, prompt.shape[1] :].tolist()
            if ours != theirs:
                first = next(i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1])
                return Outcome("wrong text", f"row {row} from new token {first} on, {call}")
        num_accepted = sum(record.num_accepted for record in stats.rounds)
        # By chance a wrong draft of one row is right for the script of the other.
        if schedule == "constant" and len(prompts) == 1 and (quality != "none") != (num_accepted > 0):
            return Outcome("wrong acceptance", f"{num_accepted} drafts kept, {call}")
    return Outcome("equal")


def _of_error(error: Exception, spy: StreamerSpy | None) -> Outcome:
    """A refusal is an error of ours, in words, before any token; everything else is a crash."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    is_ours = isinstance(error, (NotImplementedError, ValueError)) and frame.filename.startswith(PACKAGE)
    if is_ours and (spy is None or len(spy.puts) <= 1):  # a streamer is handed the prompt
        return Outcome("refused", str(error))
    place = f"{Path(frame.filename).name}:{frame.lineno}, {frame.name}"
    return Outcome("crash", f"{_in_a_line(error)} ({place})")


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


@functools.cache
def outcomes(model_type: str) -> tuple[Outcome, Outcome]:
    """Of one row, and of a batch."""
    try:
        target = build(model_type)
        plain = [generate(target, prompt) for prompt in (PROMPT, SHORT)]
    except Exception as error:
        return (Outcome("not built", _in_a_line(error)),) * 2
    one_row, batch = compared(target, [PROMPT], plain[:1]), compared(target, [PROMPT, SHORT], plain)
    if one_row.kind == "equal" and len(set(plain[0][0, PROMPT.shape[1] :].tolist())) < MIN_NUM_DISTINCT:
        one_row = Outcome("trivial", str(plain[0][0].tolist()))
    return one_row, batch


def check(model_type: str) -> None:
    """Fails where a text differs, or something breaks that was not refused."""
    one_row, batch = outcomes(model_type)
    if one_row.kind == "not built":
        pytest.skip(f"{model_type} cannot be built and run here: {one_row.detail}")
    assert one_row.kind in ("equal", "refused"), f"{model_type}, one row: {one_row}"
    assert batch.kind in ("equal", "refused"), f"{model_type}, batch: {batch}"


@pytest.mark.parametrize("model_type", [name for name in FEW if name in model_types()])
def test_text_or_refusal(model_type):
    check(model_type)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [name for name in model_types() if name not in FEW])
def test_text_or_refusal_of_every_model_type(model_type):
    check(model_type)


@pytest.mark.parametrize(
    "variant", [name for name, (model_type, _) in VARIANTS.items() if model_type in model_types()]
)
def test_text_or_refusal_of_variants(variant):
    check(variant)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type", [name for name in model_types(IMAGE_TEXT) if name not in model_types() and name not in LARGE]
)
def test_text_or_refusal_of_models_that_read_images(model_type):
    check(model_type)  # with text alone


@pytest.mark.slow
def test_enough_model_types_are_tried():
    tried = [name for name in model_types() if outcomes(name)[0].kind != "not built"]
    assert len(tried) >= MIN_NUM_TYPES


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [name for name in FEW if name in model_types()])
def test_text_with_measured_round_times(model_type, tmp_path, monkeypatch):
    if outcomes(model_type)[0].kind == "refused":
        pytest.skip("refused")
    monkeypatch.setenv(automatic.SWITCH, "1")
    monkeypatch.setattr(hub_constants, "HF_HOME", str(tmp_path))
    monkeypatch.setattr(automatic, "QUICK_REPEATS", 2)
    target = build(model_type)
    prompts = [PROMPT, SHORT]
    plain = [generate(target, prompt, NUM_NEW_PROFILED) for prompt in prompts]
    calls = [(quality, None) for quality in SPOILS]
    assert compared(target, prompts[:1], plain[:1], calls) == Outcome("equal")
    assert compared(target, prompts, plain, calls).kind in ("equal", "refused")


def found_refusals() -> dict[tuple[str, str], set[str]]:
    """(Place, reason) -> model types, of what happens here."""
    found = defaultdict(set)
    for name in model_types():
        one_row, batch = outcomes(name)
        if one_row.kind == "not built":
            found["not tried", "cannot be built in a tiny form, or does not generate from text alone"].add(name)
            continue
        for place, outcome in (("always", one_row), ("in batches", batch)):
            if outcome.kind == "refused":
                known = (words for words, pattern in REASONS.items() if re.search(pattern, outcome.detail))
                found[place, next(known, outcome.detail)].add(name)
                break  # what one row is refused is refused to a batch
    return dict(found)


def documented_refusals() -> dict[tuple[str, str], set[str]]:
    """(Place, reason) -> model types, of docs/compatibility.md."""
    section = COMPATIBILITY.read_text(encoding="utf-8").split("### Model types")[1].split("\n#")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if "`" in line]
    return {(row[0], row[1]): set(re.findall("`([^`]+)`", row[2])) for row in rows if len(row) == 3}


def as_table(refusals: dict[tuple[str, str], set[str]]) -> str:
    """The table of docs/compatibility.md."""
    rows = [
        f"| {place} | {reason} | {', '.join(f'`{name}`' for name in sorted(names))} |"
        for (place, reason), names in sorted(refusals.items())
    ]
    return "\n".join(["| refused | why | model types |", "|---|---|---|", *rows])


@pytest.mark.slow
def test_documented_refusals():
    found = found_refusals()
    print(as_table(found))
    if not transformers.__version__.startswith(DOCUMENTED_RELEASE):
        pytest.skip(f"the table in docs/compatibility.md is that of transformers {DOCUMENTED_RELEASE}")
    assert documented_refusals() == found, f"docs/compatibility.md must hold:\n{as_table(found)}"


def test_documented_model_types_exist():
    if not transformers.__version__.startswith(DOCUMENTED_RELEASE):
        pytest.skip(f"the table in docs/compatibility.md is that of transformers {DOCUMENTED_RELEASE}")
    documented = documented_refusals()
    assert {place for place, _ in documented} == {"always", "in batches", "not tried"}
    assert set().union(*documented.values()) <= set(model_types())
