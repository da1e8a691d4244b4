# SPDX-License-Identifier: Apache-2.0
"""A target and a draft of your own, each a folder or a name on the Hugging Face Hub. Without them: the default pair.

Run it with
    python examples/own_pair.py Qwen/Qwen3-4B deepseek-ai/dspark_qwen3_4b_block7 --prompt "Explain recursion."
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark_hf import DSparkDraftModel, collect_rounds
from dspark_hf.default_pair import default_draft_path, ensure_default_target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", help="the model to speed up")
    parser.add_argument("draft", nargs="?", help="a DSpark draft made for it")
    parser.add_argument("--prompt", default="Write a Python function that reverses a string.")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    args = parser.parse_args()
    if (args.target is None) != (args.draft is None):
        parser.error("a draft fits one target only: give both, or neither")

    target_path = args.target or ensure_default_target()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(target_path)
    target = AutoModelForCausalLM.from_pretrained(target_path, dtype="auto").to(device)
    draft = DSparkDraftModel.from_pretrained(args.draft or default_draft_path(), dtype="auto").to(device)
    draft.bind_target(target)  # `generate` also checks that the two fit; here it fails earlier
    config = draft.config
    print(f"draft: {config.num_draft_slots} slots, reads target layers {config.target_layer_ids}")

    # The chat template, and thinking on or off, should be what the draft was trained with.
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": args.prompt}],
        add_generation_prompt=True,
        enable_thinking=False,
        return_tensors="pt",
        return_dict=True,
    ).to(device)
    with collect_rounds() as stats:
        output = target.generate(**inputs, assistant_model=draft, do_sample=False, max_new_tokens=args.max_new_tokens)
    print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    print("---")
    print(f"accepted length: {stats.accepted_length:.2f} tokens per round, over {stats.num_rounds} rounds")
    print("by slot: " + ", ".join(f"{rate:.2f}" for rate in stats.conditional_acceptance))


if __name__ == "__main__":
    main()
