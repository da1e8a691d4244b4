# SPDX-License-Identifier: Apache-2.0
"""Calibration and round times in the files that other engines read, beside a converted draft.

SGLang takes both on its command line. TensorRT-LLM takes the temperatures from the same file, and round times in a
layout of its own; its newer releases also know a table tied to one engine build, which only its own profiler can
write. Times measured here are those of this machine under transformers: measure again on the engine for real use.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ..common.files import write_text
from ..drafts.configuration_dspark import DSparkConfig
from ..scheduling.curve import SPSCurve


STS_FILE, SPS_FILE, COST_TABLE_FILE = "dspark_sts.json", "dspark_sps.json", "dspark_cost_table_trtllm.json"


def sts_calibration(config: DSparkConfig) -> dict[str, Any] | None:  # None for a draft that was not calibrated
    """The temperatures of Sequential Temperature Scaling, for SGLang (`--speculative-dspark-confidence-sts-path`) and
    TensorRT-LLM.
    """
    if config.confidence_temperatures is None:
        return None
    return {"temperatures": [float(value) for value in config.confidence_temperatures]}


def sps_table(curve: SPSCurve) -> dict[str, Any]:
    """Rounds per second against the tokens verified, for SGLang (`--speculative-dspark-sps-table-path`).

    SGLang takes the largest listed number of tokens that is not above the one asked for, so every number is listed;
    otherwise tokens would look free just below a measured point.
    """
    first, last = curve.batch_tokens[0], curve.batch_tokens[-1]
    seconds = curve.draft_s + curve.verify_table(first, last)
    return {
        "sample_batch_tokens": list(range(first, last + 1)),
        "sample_steps_per_sec": [1.0 / float(value) for value in seconds],
        "max_batch_tokens": last,
    }


def cost_table(curve: SPSCurve) -> dict[str, Any]:
    """Step times against the tokens verified, for TensorRT-LLM, which interpolates between them."""
    return {
        "token_counts": list(curve.batch_tokens),
        "step_time_ms": [1000.0 * value for value in curve.verify_s],
        "fixed_overhead_ms": 1000.0 * curve.draft_s,
        "_meta": {"lookup": "interp"},
    }


def write_engine_files(folder: str | os.PathLike, config: DSparkConfig, curve: SPSCurve | None = None) -> list[Path]:
    """Write what is known of calibration and round times."""
    contents = {STS_FILE: sts_calibration(config)}
    if curve is not None:
        contents |= {SPS_FILE: sps_table(curve), COST_TABLE_FILE: cost_table(curve)}
    written = []
    for name, values in contents.items():
        if values is not None:
            path = Path(folder) / name
            write_text(path, json.dumps(values, indent=2) + "\n")
            written.append(path)
    return written
