# SPDX-License-Identifier: Apache-2.0
"""What the tests of training share: a tokenizer of words with a chat template, texts of tiny targets, a trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, TrainerCallback

from dspark_hf import DSparkDraftModel
from dspark_hf.training import DSparkTrainer, DSparkTrainingArguments
from dspark_hf.training.dataset import SequenceDataset, TrainingSequence
from tests.support.models import VOCAB_SIZE, random_draft, random_prompt


EOS = 2
USER, ASSISTANT, SYSTEM, NO_THINKING = 3, 4, 5, 6
TEMPLATE = (
    "{% for message in messages %}<bos> {{ message['role'] }} {{ message['content'] }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}<bos> assistant "
    "{% if enable_thinking is defined and not enable_thinking %}nothink {% endif %}{% endif %}"
)


def word_tokenizer(vocab_size: int = VOCAB_SIZE - 1, template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """A word per id: 7 is "w7". The last row of a `tiny_target` has no word, so it can be the mask."""
    names = ["<pad>", "<bos>", "<eos>", "user", "assistant", "system", "nothink"]
    names += [f"w{i}" for i in range(len(names), vocab_size)]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = template
    return fast


def words(*ids: int) -> str:
    return " ".join(f"w{i}" for i in ids)


@torch.no_grad()
def peaked(target: PreTrainedModel, factor: float = 20.0) -> PreTrainedModel:
    """Sharpen a target until its distribution is nearly one-hot."""
    target.get_output_embeddings().weight.mul_(factor)
    return target


def greedy_sequences(
    target: PreTrainedModel, count: int, num_prompt: int = 5, shortest: int = 12, step: int = 3
) -> list[TrainingSequence]:
    """Texts of the target itself, each longer than the one before."""
    sequences = []
    for seed in range(count):
        prompt = random_prompt(num_prompt, seed=seed, vocab_size=target.config.vocab_size)
        text = target.generate(prompt, do_sample=False, max_new_tokens=shortest + step * seed)
        sequences.append(TrainingSequence(tuple(text[0].tolist()), num_prompt))
    return sequences


def trainer_for(
    folder: Path,
    target: PreTrainedModel,
    sequences: list[TrainingSequence],
    draft: DSparkDraftModel | None = None,
    train_dataset: Any = None,
    **arguments: Any,
) -> DSparkTrainer:
    """A quiet trainer on the CPU that logs every step."""
    defaults = {
        "per_device_train_batch_size": 4,
        "learning_rate": 3e-3,
        "logging_steps": 1,
        "num_anchors": 8,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
    }
    data = SequenceDataset(sequences, 512)
    return DSparkTrainer(
        draft if draft is not None else random_draft(initializer_range=0.02),
        target,
        DSparkTrainingArguments(output_dir=str(folder), **(defaults | arguments)),
        train_dataset=train_dataset if train_dataset is not None else data,
        eval_dataset=data,
    )


def losses(trainer: DSparkTrainer) -> list[float]:
    """The loss of each step."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


class StopAt(TrainerCallback):
    """Ends training after a step, as an interruption would."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step
