# SPDX-License-Identifier: Apache-2.0
"""How well the draft does on your prompts, slot by slot: the figures to look at before you decide to use one.

Run it with
    python examples/acceptance.py --prompts my_prompts.txt --max-new-tokens 128
"""

import argparse

from dspark_hf import collect_rounds, load_default_pair
from dspark_hf.common.prompts import BUILTIN_PROMPTS, read_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", help="a .txt, .json or .jsonl file; default: the built-in prompts")
    parser.add_argument("--num-prompts", type=int, default=4, help="how many of them to use")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    args = parser.parse_args()

    prompts = (read_prompts(args.prompts) if args.prompts else list(BUILTIN_PROMPTS))[: args.num_prompts]
    target, draft, tokenizer = load_default_pair()
    # Every slot of every block is sent, so that late slots are judged as often as early ones.
    draft.generation_config.num_assistant_tokens_schedule = "constant"

    with collect_rounds() as stats:
        for prompt in prompts:
            inputs = tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt.text}],
                add_generation_prompt=True,
                return_tensors="pt",
                return_dict=True,
            )
            target.generate(**inputs, assistant_model=draft, do_sample=False, max_new_tokens=args.max_new_tokens)

    if not stats.num_rounds:
        parser.error("no round was needed: raise --max-new-tokens")
    print("slot  reached  accepted  mean confidence")
    for slot, rate in enumerate(stats.conditional_acceptance):
        reached = [r for r in stats.rounds if r.verify_length > slot and r.num_accepted >= slot]
        confidence = sum(r.confidence[slot] for r in reached) / len(reached) if reached else float("nan")
        print(f"{slot:4d}  {len(reached):7d}  {rate:8.2f}  {confidence:15.2f}")
    print(f"{len(prompts)} prompts, {stats.num_rounds} rounds, {stats.num_committed} tokens")
    print(f"accepted length: {stats.accepted_length:.2f} tokens per round, the target's own token included")
    print(f"tokens verified per token: {stats.num_verified / stats.num_committed:.2f}")
    draft_share, verify_share = stats.draft_s / stats.round_s, stats.verify_s / stats.round_s
    print(f"drafting: {draft_share:.0%} of the time, verification: {verify_share:.0%}")


if __name__ == "__main__":
    main()
