# SPDX-License-Identifier: Apache-2.0
"""A target in 8 bits (bitsandbytes, here on the CPU) with a draft that stays as it is. Needs the `quantization` extra.

Run it with
    python examples/quantized_target.py --max-new-tokens 48
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from dspark_hf import DSparkDraftModel, collect_rounds
from dspark_hf.default_pair import default_draft_path, ensure_default_target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="A box holds 12 eggs. How many eggs are in 5 boxes? Explain.")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    args = parser.parse_args()

    path = ensure_default_target()
    target = AutoModelForCausalLM.from_pretrained(
        path,
        quantization_config=BitsAndBytesConfig(load_in_8bit=True),
        device_map="cpu",  # a quantised model is placed when it is loaded, never moved with `.to()`
        dtype=torch.float16,
    )
    draft = DSparkDraftModel.from_pretrained(default_draft_path(), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path)

    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": args.prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with collect_rounds() as stats:
        output = target.generate(**inputs, assistant_model=draft, do_sample=False, max_new_tokens=args.max_new_tokens)
    print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    print("---")
    layer = type(target.model.layers[0].mlp.up_proj).__name__
    print(f"target: {layer} layers, {target.get_memory_footprint() / 1e6:.0f} MB")
    print(f"accepted length: {stats.accepted_length:.2f} tokens per round, over {stats.num_rounds} rounds")


if __name__ == "__main__":
    main()
