# SPDX-License-Identifier: Apache-2.0
"""Sampling with a draft: the distribution is that of plain sampling, and a seed gives the same text again.

Run it with
    python examples/sampling.py "Write a haiku about rain." --temperature 0.9 --num-samples 3
"""

import argparse

import torch

from dspark_hf import collect_rounds, load_default_pair


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="Invent a name for a friendly robot and describe it.")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--top-p", type=float, default=0.9)
    parser.add_argument("--num-samples", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first sample; the next ones count up")
    args = parser.parse_args()

    target, draft, tokenizer = load_default_pair()
    messages = [{"role": "user", "content": args.prompt}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    num_prompt = inputs["input_ids"].shape[1]

    def sample(seed: int) -> list[int]:
        torch.manual_seed(seed)
        output = target.generate(
            **inputs,
            assistant_model=draft,
            do_sample=True,
            temperature=args.temperature,
            top_p=args.top_p,
            max_new_tokens=args.max_new_tokens,
        )
        return output[0, num_prompt:].tolist()

    # A seed for each sample, so several calls; without seeds `num_return_sequences` does it in one.
    with collect_rounds() as stats:
        samples = {seed: sample(seed) for seed in range(args.seed, args.seed + args.num_samples)}
    for seed, token_ids in samples.items():
        print(f"--- seed {seed}")
        print(tokenizer.decode(token_ids, skip_special_tokens=True))
    print("---")
    print(f"accepted length: {stats.accepted_length:.2f} tokens per round, over {stats.num_rounds} rounds")
    print(f"seed {args.seed} again gives the same text: {'yes' if sample(args.seed) == samples[args.seed] else 'no'}")


if __name__ == "__main__":
    main()
