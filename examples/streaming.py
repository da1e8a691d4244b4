# SPDX-License-Identifier: Apache-2.0
"""Streaming from a thread: the text appears round by round, up to a block of tokens at a time.

Run it with
    python examples/streaming.py "Tell a short story about a lighthouse."
"""

import argparse
from threading import Thread

from transformers import TextIteratorStreamer

from dspark_hf import AcceptanceStats, collect_rounds, load_default_pair


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="Give me three tips for learning to cook.")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    args = parser.parse_args()

    target, draft, tokenizer = load_default_pair()
    messages = [{"role": "user", "content": args.prompt}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    stats = AcceptanceStats()

    def generate() -> None:
        # `collect_rounds` counts the calls of its own thread, so it belongs in here.
        with collect_rounds() as collected:
            target.generate(
                **inputs,
                assistant_model=draft,
                do_sample=False,
                max_new_tokens=args.max_new_tokens,
                streamer=streamer,
            )
        stats.rounds.extend(collected.rounds)

    thread = Thread(target=generate)
    thread.start()
    for piece in streamer:
        print(piece, end="", flush=True)
    thread.join()
    print()
    print("---")
    print(f"accepted length: {stats.accepted_length:.2f} tokens per round, over {stats.num_rounds} rounds")


if __name__ == "__main__":
    main()
