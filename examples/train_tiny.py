# SPDX-License-Identifier: Apache-2.0
"""From nothing to a draft of your own in about two minutes on two cores: answers, training, use.

It is far too little data for a good draft: it shows the three steps. For a real one see docs/training.md.

Run it with
    python examples/train_tiny.py --num-answers 60 --max-steps 40 --output my-draft
"""

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark_hf import DSparkDraftModel, collect_rounds
from dspark_hf.default_pair import ensure_default_target
from dspark_hf.training import DSparkTrainingArguments
from dspark_hf.training.answers import PrepareSettings, PromptRow, write_answers
from dspark_hf.training.run import DataArguments, DraftArguments, train_draft
from dspark_hf.training.sampling import SamplingSettings


FORMS = ("What is {}?", "Tell me a fact about {}.", "Where do I find {}?", "Why is {} useful?", "Describe {}.")
THINGS = ("water", "bread", "salt", "iron", "wood", "paper", "wool", "glass", "honey", "rice", "milk", "gold")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-answers", type=int, default=60, help="at most 60")
    parser.add_argument("--max-steps", type=int, default=40)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--output", type=Path, help="where to keep answers and draft; default: nowhere")
    args = parser.parse_args()

    path = ensure_default_target()
    tokenizer = AutoTokenizer.from_pretrained(path)
    target = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    questions = [form.format(thing) for thing in THINGS for form in FORMS]
    prompts = [PromptRow(({"role": "user", "content": question},)) for question in questions[: args.num_answers]]
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.output or Path(scratch)
        # 1. The target answers: a draft learns what its target says, not what is true.
        settings = PrepareSettings(path.name, SamplingSettings(max_new_tokens=40, temperature=0))
        added = write_answers(target, tokenizer, prompts, folder / "answers.jsonl", settings)
        print(f"{added} answers written")
        # 2. One forward trains many blocks; the target is frozen.
        draft, figures = train_draft(
            target,
            tokenizer,
            DataArguments(data=[str(folder / "answers.jsonl")], held_out=0.1),
            DraftArguments(draft_num_layers=1, block_size=4, num_taps=3, markov_rank=64),
            DSparkTrainingArguments(
                output_dir=str(folder / "draft"),
                max_steps=args.max_steps,
                per_device_train_batch_size=4,
                num_anchors=16,
                learning_rate=2e-3,
                logging_steps=10,
                save_strategy="no",
                report_to="none",
            ),
        )
        print(f"held-out answers: {figures['eval_accepted_length']:.2f} tokens per round expected when sampling")
        # 3. Any later program loads it like this.
        draft = DSparkDraftModel.from_pretrained(folder / "draft", dtype=target.dtype).to(target.device)
    messages = [{"role": "user", "content": "What is silk?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with collect_rounds() as stats:
        output = target.generate(
            **inputs.to(target.device), assistant_model=draft, do_sample=False, max_new_tokens=args.max_new_tokens
        )
    print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    print(f"---\naccepted length: {stats.accepted_length:.2f} tokens per round, over {stats.num_rounds} rounds")


if __name__ == "__main__":
    main()
