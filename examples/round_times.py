# SPDX-License-Identifier: Apache-2.0
"""What a round costs on this machine, and how many tokens it must bring to be worth it.

Run it with
    python examples/round_times.py --context-lengths 128 512 --repeats 7
"""

import argparse

from dspark_hf import collect_rounds, load_default_pair
from dspark_hf.profiling import measure_profile, profile_path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context-lengths", type=int, nargs="+", default=[128])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="keep it where `generate` looks for it")
    parser.add_argument("--prompt", default="Write a Python function that reverses a string.")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    args = parser.parse_args()

    target, draft, tokenizer = load_default_pair()
    profile = measure_profile(target, draft, args.context_lengths, args.repeats)
    if args.save:
        profile.save(profile_path(target, draft))
    found = profile.fingerprint
    print(f"{found['device']}, {found['num_threads']} thread(s), {found['dtype']}")
    for context_length, curve in profile.curves:
        print(f"context of {context_length} tokens, drafting takes {1000 * curve.draft_s:.1f} ms")
        print("drafts  verification ms  round ms  tokens to break even")
        for b, verify_s in zip(curve.batch_tokens, curve.verify_s, strict=True):
            # Without drafts a round is a plain step: nothing is drafted, and it yields one token.
            round_s = curve.round_s(b) if b > 1 else curve.plain_s
            print(f"{b - 1:6d}  {1000 * verify_s:15.1f}  {1000 * round_s:8.1f}  {round_s / curve.plain_s:20.2f}")

    messages = [{"role": "user", "content": args.prompt}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with collect_rounds() as stats:
        target.generate(**inputs, assistant_model=draft, do_sample=False, max_new_tokens=args.max_new_tokens)
    if not stats.num_rounds:
        parser.error("no round was needed: raise --max-new-tokens")
    print(f"accepted length: {stats.accepted_length:.2f} tokens per round on one prompt")


if __name__ == "__main__":
    main()
