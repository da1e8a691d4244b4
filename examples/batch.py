# SPDX-License-Identifier: Apache-2.0
"""Many prompts at once: a batch, and a stream of prompts of which a few are answered at a time.

Run it with
    python examples/batch.py
"""

import argparse

from dspark_hf import collect_rounds, generate_many, load_default_pair


QUESTIONS = (
    "What is the capital of France?",
    "A box holds 12 eggs. How many eggs are in 7 boxes?",
    "Write a Python function that reverses a string.",
    "Name three colours.",
    "Why is the sky blue?",
    "What is 15 % of 80?",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--max-batch", type=int, default=3, help="texts at a time")
    args = parser.parse_args()

    target, draft, tokenizer = load_default_pair()
    tokenizer.padding_side = "left"
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        for question in QUESTIONS
    ]

    # A batch, as in plain generation: each row gets the text that it would get alone.
    batch = tokenizer(texts[:3], padding=True, return_tensors="pt")
    with collect_rounds() as stats:
        output = target.generate(**batch, assistant_model=draft, do_sample=False, max_new_tokens=args.max_new_tokens)
    for answer in tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True):
        print("-", answer.strip().splitlines()[0])
    print(f"accepted length {stats.accepted_length:.2f}, {stats.mean_verify_length:.2f} drafts sent per row and round")

    # All of them, a few at a time: when a text ends, the next prompt takes its place.
    prompts = [tokenizer(text).input_ids for text in texts]

    def report(number: int, answer) -> None:
        print(f"question {number} is answered with {len(answer)} tokens")

    answers = generate_many(
        target,
        draft,
        prompts,
        max_batch=args.max_batch,
        on_finished=report,
        do_sample=False,
        max_new_tokens=args.max_new_tokens,
    )
    print(f"{sum(map(len, answers))} tokens for {len(answers)} questions")


if __name__ == "__main__":
    main()
