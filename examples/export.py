# SPDX-License-Identifier: Apache-2.0
"""The draft in the layouts that other engines read, with its calibration and this machine's round times beside it.

The default draft has a reduced vocabulary, for which DeepSpec's layout has no words: it says so, and goes on.

Run it with
    python examples/export.py --output exported
    python examples/export.py --target Qwen/Qwen3-4B --draft my-draft --output exported --max-new-tokens 64
"""

import argparse
import tempfile
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark_hf import DSparkDraftModel, collect_rounds, measure_profile
from dspark_hf.default_pair import default_draft_path, ensure_default_target
from dspark_hf.export.convert import FORMATS, convert_draft


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="default: that of the default pair")
    parser.add_argument("--draft", help="its draft; default: that of the default pair")
    parser.add_argument("--output", type=Path, help="where to keep the folders; default: nowhere")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each round time")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    args = parser.parse_args()
    if (args.target is None) != (args.draft is None):
        parser.error("a draft fits one target only: give both, or neither")

    target_path, draft_path = args.target or ensure_default_target(), args.draft or default_draft_path()
    tokenizer = AutoTokenizer.from_pretrained(target_path)
    target = AutoModelForCausalLM.from_pretrained(target_path, dtype="auto")
    draft = DSparkDraftModel.from_pretrained(draft_path, dtype="auto")
    # Times of transformers on this machine, for one request, only to test the set-up. Measure again where you serve.
    curve = measure_profile(target, draft, context_lengths=[64], num_repeats=args.repeats).curves[0][1]

    with tempfile.TemporaryDirectory() as scratch:
        folder = args.output or Path(scratch)
        written = []
        for to in FORMATS:
            try:
                written.append(convert_draft(draft_path, to, folder / to, target_path, curve=curve))
            except ValueError as error:
                print(f"{to}: refused. {error}")
            else:
                files = sorted(written[-1].folder.iterdir())
                print(f"{to}: " + ", ".join(f"{path.name} ({path.stat().st_size / 1e3:.1f} kB)" for path in files))

        if not written:
            raise SystemExit("Nothing was written: every layout was refused.")

        # The written draft is read like any other checkpoint, and drafts the same tokens.
        inputs = tokenizer("The three primary colours are", return_tensors="pt")
        drafted = []
        for model in (draft, *(DSparkDraftModel.from_pretrained(one.folder, dtype="auto") for one in written)):
            model.generation_config.num_assistant_tokens_schedule = "constant"
            with collect_rounds() as stats:
                target.generate(**inputs, assistant_model=model, do_sample=False, max_new_tokens=args.max_new_tokens)
            drafted.append([record.token_ids for record in stats.rounds])
    same = all(tokens == drafted[0] for tokens in drafted)
    print(f"every layout drafts the same tokens: {'yes' if same else 'no'}")
    print(f"accepted length: {stats.accepted_length:.2f} tokens per round, over {stats.num_rounds} rounds")


if __name__ == "__main__":
    main()
