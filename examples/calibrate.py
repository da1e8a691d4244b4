# SPDX-License-Identifier: Apache-2.0
"""Let confidences mean what they say: fit one temperature per slot on your prompts, and look at the difference.

The few built-in prompts show the way; for temperatures to keep, give hundreds of your own and see docs/calibration.md.

Run it with
    python examples/calibrate.py --prompts my_prompts.txt --output my-draft
"""

import argparse

import torch

from dspark_hf import load_default_pair
from dspark_hf.common.prompts import BUILTIN_PROMPTS, read_prompts
from dspark_hf.evaluation.calibrate import calibrate, save_calibration


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", help="a .txt, .json or .jsonl file; default: the built-in prompts")
    parser.add_argument("--num-answers", type=int, default=1, help="answers to each prompt")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--output", help="folder for the calibrated draft; default: nowhere")
    args = parser.parse_args()

    prompts = read_prompts(args.prompts) if args.prompts else list(BUILTIN_PROMPTS)
    target, draft, tokenizer = load_default_pair()
    torch.manual_seed(0)
    # Half of the prompts are fitted to, the figures come from the other half.
    report = calibrate(
        target,
        draft,
        tokenizer,
        prompts,
        max_new_tokens=args.max_new_tokens,
        num_answers=args.num_answers,
        # Calibrate for the decoding you will use: acceptance is not the same at every temperature.
        generate_arguments={"do_sample": True, "temperature": 1.0, "top_k": 0},
        prompts_name=args.prompts or "built-in",
    )
    print("slot  temperature  ECE before  after  AUC before  after")
    for slot, (before, after) in enumerate(zip(report.before, report.after, strict=True)):
        print(
            f"{slot:4d}  {report.temperatures[slot]:11.2f}  {before.expected_calibration_error:10.3f}  "
            f"{after.expected_calibration_error:5.3f}  {before.area_under_curve:10.2f}  {after.area_under_curve:5.2f}"
        )
    print(f"fitted to {report.num_rounds} rounds, judged on {report.num_check_rounds} others")
    floor = sum(figures.noise_floor for figures in report.after) / len(report.after)
    print(f"so few rounds show a mean ECE of {floor:.3f} where every confidence is exactly right")

    # Nothing else is needed: the next call divides the logits by these.
    print("draft.config.confidence_temperatures =", [round(T, 2) for T in draft.config.confidence_temperatures])
    rates = draft.config.acceptance_prior
    # A prefix of k drafts is accepted with the product of the first k rates.
    survival = torch.tensor(rates).cumprod(dim=0)
    print(f"accepted length: {1 + float(survival.sum()):.2f} tokens per round, with every slot sent")
    if args.output:
        print(f"saved in {save_calibration(draft, args.output)}")


if __name__ == "__main__":
    main()
