# SPDX-License-Identifier: Apache-2.0
"""A conversation whose turns share one cache, so that no turn runs the target over the earlier ones again.

Run it with
    python examples/chat.py "My name is Ada." "What is my name?"
"""

import argparse

import torch
import transformers
from packaging.version import Version
from transformers import DynamicCache

from dspark_hf import collect_rounds, load_default_pair


# The name of `generate`'s cache argument; it was renamed in transformers 5.24.
CACHE = "cache" if Version(transformers.__version__) >= Version("5.24") else "past_key_values"
TURNS = ("Name three fruits.", "Which of them is the largest?", "Write one sentence about it.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("turns", nargs="*", default=TURNS, help="the user's turns, in order")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="longest answer, in tokens")
    args = parser.parse_args()

    target, draft, tokenizer = load_default_pair()
    cache, text = DynamicCache(config=target.config), torch.zeros(1, 0, dtype=torch.long)
    messages = []
    for turn in args.turns:
        messages.append({"role": "user", "content": turn})
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        # The cache holds the text so far without its last token. It is reused while the new prompt begins with that.
        num_cached = cache.get_seq_length()
        if not torch.equal(inputs["input_ids"][:, :num_cached], text[:, :num_cached]):
            cache, num_cached = DynamicCache(config=target.config), 0
        with collect_rounds() as stats:
            text = target.generate(
                **inputs,
                **{CACHE: cache},
                assistant_model=draft,
                do_sample=False,
                max_new_tokens=args.max_new_tokens,
            )
        num_prompt = inputs["input_ids"].shape[1]
        answer = tokenizer.decode(text[0, num_prompt:], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer})
        print(f"user: {turn}")
        print(f"assistant: {answer}")
        print(f"  [{num_cached} of {num_prompt} prompt tokens cached, accepted length {stats.accepted_length:.2f}]")


if __name__ == "__main__":
    main()
