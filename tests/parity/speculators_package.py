# SPDX-License-Identifier: Apache-2.0
"""Shows our exports to the speculators package, and records what it computes and writes.

The package pins an older transformers than this one is tested with, so this runs in an environment of its own, and
`test_speculators_package.py` compares with the record:

    python -m venv other
    other/bin/pip install speculators==0.9.0 transformers==5.19.0 torch==2.13.0 -e .
    other/bin/python -m tests.parity.speculators_package tests/data/golden/speculators_package
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import load_file, save_file


TEXT_LENGTH = 24
ANCHOR = 15  # position; the window of the sliding cases is shorter
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
# What a format can say: slots, heads, vocabulary, windows. Every draft is random, and so is every confidence.
CASES = {
    "vanilla": {"markov_head_type": "vanilla"},
    "reduced_sliding": {"markov_head_type": "gated", "draft_vocab_size": 48, **SLIDING},
    "rnn_looking_both_ways": {"markov_head_type": "rnn", **SLIDING, "sliding_window_non_causal": True},
    "first_slot_repeats": {"sample_from_anchor": False, "confidence_head_with_markov": False, "draft_vocab_size": 60},
    "dflash": {"sample_from_anchor": False, "markov_rank": 0, "enable_confidence_head": False, **SLIDING},
}


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    """The package reads its target from a path; a relative one keeps the record free of this machine's."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def their_block(folder: str, text: torch.Tensor, context: torch.Tensor) -> dict[str, torch.Tensor]:
    """One block through the package's own forward: logits over the draft vocabulary, and confidence."""
    import speculators.models.dflash.core as dflash_core
    import speculators.models.dspark.core as dspark_core
    from speculators import SpeculatorModel, SpeculatorModelConfig

    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "sdpa"
    model = SpeculatorModel.from_pretrained(folder, config=config).eval()
    assert type(model).__name__ == config.architectures[0]
    captured: list[tuple] = []

    def capture(*args, **_):
        captured.append(args)
        return torch.zeros(()), {}

    loss_mask = torch.zeros_like(text)
    loss_mask[:, ANCHOR] = 1  # the only place where a block can start
    core = dspark_core if config.speculators_model_type == "dspark" else dflash_core
    with torch.no_grad(), mock.patch.object(core, "compute_metrics", capture):
        model(
            hidden_states=context,
            input_ids=text,
            loss_mask=loss_mask,
            verifier_last_hidden_states=context[..., : model.hidden_size],
            document_ids=torch.zeros_like(text),
            max_anchors=1,
        )
    block = {"draft_logits": captured[0][0].contiguous()}
    if config.speculators_model_type == "dspark" and captured[0][2] is not None:
        block["confidence_logits"] = captured[0][2].contiguous()
    return block


def record(case: str, folder: Path) -> float:
    """Write one case into `folder`; returns how far the package's numbers are from ours, in units of rounding."""
    from dspark_hf import DSparkDraftModel
    from dspark_hf.export.convert import convert_draft
    from tests.support.closeness import tolerance_of
    from tests.support.models import random_draft, random_prompt, spread_confidence, tiny_target, uncached_block

    target = tiny_target("qwen3", context_scale=1.0)
    target.save_pretrained(folder / "target")
    random = spread_confidence(random_draft(10 + list(CASES).index(case), **CASES[case]))
    text = random_prompt(TEXT_LENGTH)
    with inside(folder), torch.no_grad():
        random.save_pretrained(f"{case}/own")
        export = str(convert_draft(f"{case}/own", "speculators", f"{case}/export", target="target").folder)
        shutil.rmtree(f"{case}/own")
        draft = DSparkDraftModel.from_pretrained(export)
        states = target(text, output_hidden_states=True).hidden_states
        context = torch.cat([states[i + 1] for i in draft.config.target_layer_ids], dim=-1)
        theirs = their_block(export, text, context)
        save_file({"text": text} | theirs, f"{case}/block.safetensors")
        rewrite(export, f"{case}/written")
        ours = uncached_block(target, draft, text[:, : ANCHOR + 1], token_ids=text[:, ANCHOR + 1 :])
    slots = draft.config.num_draft_slots
    pairs = [(getattr(ours, name), values[:, -slots:]) for name, values in theirs.items()]
    return max(float((a - b).abs().max()) / tolerance_of(b, factor=1.0) for a, b in pairs)


def rewrite(source: str, written: str) -> None:
    """Load and save with the package; of what it writes the config is kept, for the tensors are the same."""
    from speculators import SpeculatorModel

    SpeculatorModel.from_pretrained(source).save_pretrained(written)
    before, after = (load_file(Path(folder) / "model.safetensors") for folder in (source, written))
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    for path in Path(written).iterdir():
        if path.name != "config.json":
            path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    from tests.support.closeness import ROUNDING

    worst = 0.0
    for case in CASES:
        shutil.rmtree(folder / case, ignore_errors=True)
        (folder / case).mkdir(parents=True)
        difference = record(case, folder)
        worst = max(worst, difference)
        print(f"{case}: largest difference {difference:.0f} units of rounding")
    if worst > ROUNDING:
        sys.exit("the package computes something else than this one")


if __name__ == "__main__":
    main()
