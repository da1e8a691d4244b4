# SPDX-License-Identifier: Apache-2.0
"""An evaluation as files: JSON for programs, CSV for spreadsheets, one HTML page for people."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

from ..common.files import shown_name, write_text
from ..common.plots import check_can_plot
from .drafters import PLAIN
from .intervals import Interval
from .plots import acceptance_plot, length_plot, reliability_plot, speedup_plot, threshold_plot
from .summary import Evaluation, interval_text, verdict
from .timed import sources_text


JSON_FILE, SUMMARY_FILE, PROMPTS_FILE, HTML_FILE = "report.json", "summary.csv", "prompts.csv", "report.html"
TEMPLATE = "report.html.jinja"


def check_can_report(tensorboard: Path | None = None) -> None:
    """Whether a report can be written; better asked before the work than after it."""
    check_can_plot(Path(HTML_FILE).with_suffix(".svg"), "report")
    wanted = [("jinja2", "eval")] + ([("tensorboard", "train")] if tensorboard is not None else [])
    for library, extra in wanted:
        try:
            __import__(library)
        except ImportError as error:
            raise RuntimeError(
                f'A report needs {library}, which is not installed: pip install "dspark-hf[{extra}]".'
            ) from error


def write_report(evaluation: Evaluation, folder: Path) -> list[Path]:  # the files, the HTML page last
    """Write the report's files, each whole or not at all."""
    texts = {
        JSON_FILE: json.dumps(evaluation.to_dict(), indent=1, allow_nan=False) + "\n",
        SUMMARY_FILE: _as_csv(summary_rows(evaluation)),
        PROMPTS_FILE: _as_csv(prompt_rows(evaluation)),
        HTML_FILE: as_html(evaluation),
    }
    for name, text in texts.items():
        write_text(Path(folder) / name, text)
    return [Path(folder) / name for name in texts]


def summary_rows(evaluation: Evaluation) -> list[dict[str, Any]]:  # column -> value; seconds are named so
    """One row for each decoding, task and drafter."""
    rows = []
    for entry in evaluation.figures:
        row: dict[str, Any] = {
            "decoding": entry.decoding,
            "task": entry.task,
            "drafter": entry.drafter,
            "questions": entry.num_questions,
            "answers": entry.num_answers,
            "tokens": entry.num_tokens,
            "rounds": entry.num_rounds,
        }
        for name in ("accepted_length", "acceptance_rate", "verified_per_token", "speedup"):
            row |= _interval_columns(name, getattr(entry, name))
        row["tokens_per_s"] = entry.tokens_per_s
        for name in ("token_latency", "first_token"):
            percentiles = getattr(entry, f"{name}_s")
            row |= {f"{name}_p50_s": percentiles.p50, f"{name}_p95_s": percentiles.p95}
        row["different_greedy_answers"] = entry.num_different
        row["sources"] = sources_text(entry.by_source)
        row["conditional_acceptance"] = " ".join(f"{rate.value:.4f}" for rate in entry.conditional_acceptance)
        rows.append(row)
    return rows


def prompt_rows(evaluation: Evaluation) -> list[dict[str, Any]]:
    """One row for each decoding, drafter and question."""
    return [
        {
            "decoding": entry.decoding,
            "drafter": entry.drafter,
            "task": entry.task,
            "index": entry.index,
            "tokens": entry.num_tokens,
            "rounds": entry.num_rounds,
            "accepted_length": entry.accepted_length,
            "acceptance_rate": entry.acceptance_rate,
            "seconds": entry.seconds,
            "speedup": entry.speedup,
            "first_difference": next((index for index in entry.first_differences if index is not None), None),
            "prompt": evaluation.prompts[f"{entry.task}/{entry.index}"],
        }
        for entry in evaluation.questions
    ]


def as_html(evaluation: Evaluation) -> str:
    """The report as one page that needs nothing else: pictures and styles lie inside it."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"interval": interval_text, "number": _number, "ms": _milliseconds}
    environment.filters |= {"verdict": verdict, "shown": shown_name, "sources": sources_text}
    has_others = any(entry.drafter != PLAIN for entry in evaluation.figures)
    plots = {
        "speedup": speedup_plot(evaluation) if has_others else None,
        "acceptance": acceptance_plot(evaluation) if has_others else None,
        "lengths": length_plot(evaluation) if has_others else None,
        "thresholds": threshold_plot(evaluation) if evaluation.confidence else None,
    }
    return environment.get_template(TEMPLATE).render(
        evaluation=evaluation,
        plain=PLAIN,
        plots=plots,
        reliability=[(entry, reliability_plot(entry)) for entry in evaluation.confidence],
        different=evaluation.different,
    )


def write_tensorboard(evaluation: Evaluation, folder: Path) -> None:
    """Log the pooled figures for TensorBoard: one run per drafter, a scalar per figure, task and decoding."""
    from torch.utils.tensorboard import SummaryWriter

    for name in dict.fromkeys(entry.drafter for entry in evaluation.figures):
        with SummaryWriter(str(Path(folder) / "".join(c if c.isalnum() else "_" for c in name))) as writer:
            for entry in evaluation.figures:
                if entry.drafter == name:
                    for figure in ("accepted_length", "acceptance_rate", "verified_per_token", "speedup"):
                        value = getattr(entry, figure).value
                        if not math.isnan(value):
                            writer.add_scalar(f"{figure}/{entry.task}/{entry.decoding}", value)


def _interval_columns(name: str, interval: Interval) -> dict[str, float]:
    return {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}


def _as_csv(rows: list[dict[str, Any]]) -> str:
    """CSV with an empty cell where there is no value; texts that a spreadsheet would compute are quoted."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    return buffer.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, float) and math.isnan(value):
        return ""
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return "'" + value
    return value


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def _milliseconds(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{1000 * seconds:.1f}"
