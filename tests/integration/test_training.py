# SPDX-License-Identifier: Apache-2.0
"""The trainer on tiny targets: it learns, and how rows are split, cached or resumed does not change what it learns."""

import copy
import dataclasses
import importlib
import json
import math

import pytest
import torch
from safetensors.torch import load_file

from dspark_hf import DSparkDraftModel, collect_rounds
from dspark_hf.training import DSparkTrainer, DSparkTrainingArguments
from dspark_hf.training.dataset import SequenceDataset
from dspark_hf.training.feature_cache import FeatureCache
from dspark_hf.training.warm_start import copy_target_head
from tests.support.closeness import TRAINED, assert_close
from tests.support.models import random_draft, tiny_target
from tests.support.training import StopAt, greedy_sequences, losses, peaked, trainer_for


BLOCK = 4  # of the drafts here
VARIANTS = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "dflash": {"markov_rank": 0, "confidence_head_with_markov": False, "enable_confidence_head": False},
    "no confidence head": {"enable_confidence_head": False, "confidence_head_with_markov": False},
    "confidence without markov": {"confidence_head_with_markov": False},
    "sliding": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
    "sliding, both directions": {
        "layer_types": ["sliding_attention"] * 2,
        "sliding_window": 6,
        "sliding_window_non_causal": True,
    },
    "one layer, one tap": {"num_hidden_layers": 1, "target_layer_ids": [1]},
}


@pytest.fixture(scope="module")
def target():
    return tiny_target(context_scale=0.3)


@pytest.fixture(scope="module")
def sequences(target):
    """8 texts of 17 to 38 tokens, prompts of 5."""
    return greedy_sequences(target, 8)


def parameters(trainer: DSparkTrainer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.draft.named_parameters()}


# Overfitting: the best test there is that training and decoding mean the same by everything


def overfit(tmp_path, steps, **overrides):
    """Trained on 4 texts of a target that is nearly certain; the accepted length that training expects."""
    target = peaked(tiny_target(context_scale=0.3))
    sequences = greedy_sequences(target, 4, shortest=40, step=0)
    draft = random_draft(**({"initializer_range": 0.02, "markov_rank": 16} | overrides))
    trainer = trainer_for(
        tmp_path, target, sequences, draft, max_steps=steps, learning_rate=6e-3, num_anchors=32, logging_steps=steps
    )
    trainer.train()
    return target, draft, sequences, trainer.evaluate()["eval_accepted_length"]


def accepted_length(target, draft, sequence):
    """Greedy decoding of the text trained on: 1 token from the prefill, then whole rounds."""
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    prompt = torch.tensor([sequence.input_ids[: sequence.num_prompt_tokens]])
    with collect_rounds() as stats:
        text = target.generate(prompt, assistant_model=draft, do_sample=False, max_new_tokens=1 + 6 * (BLOCK + 1))
    assert tuple(text[0].tolist()) == sequence.input_ids[: text.shape[1]]
    return stats.accepted_length


def check_overfit(target, draft, sequences, expected):
    assert expected >= 0.95 * (BLOCK + 1)
    found = [accepted_length(target, draft, sequence) for sequence in sequences]
    assert sum(found) / len(found) >= 0.95 * (BLOCK + 1)
    assert abs(sum(found) / len(found) - expected) <= 0.05 * (BLOCK + 1)


def test_overfitted_draft_is_accepted_as_training_says(tmp_path):
    check_overfit(*overfit(tmp_path, 220))


@pytest.mark.slow
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "vanilla"])
def test_every_kind_of_draft_can_be_overfitted(tmp_path, variant):
    check_overfit(*overfit(tmp_path, 400, **VARIANTS[variant]))


# How rows are split into batches


@pytest.mark.parametrize("strategy", ["group_by_length", "random"])
def test_accumulation_is_a_larger_batch(tmp_path, target, sequences, strategy):
    """8 rows of different lengths at once or one by one: each slot weighs the same."""
    trained = []
    for rows, accumulation in ((8, 1), (1, 8), (2, 4)):
        trainer = trainer_for(
            tmp_path,
            target,
            sequences,
            max_steps=4,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=accumulation,
            train_sampling_strategy=strategy,
        )
        trainer.train()
        trained.append((losses(trainer), parameters(trainer)))
    for other_losses, other in trained[1:]:
        assert_close(other_losses, trained[0][0])
        assert_close(other, trained[0][1], TRAINED)


def test_last_step_of_an_epoch_may_be_smaller(tmp_path, target, sequences):
    """8 rows in steps of 3 rows: 3, 3 and 2, whether at once or one by one."""
    trained = []
    for rows, accumulation in ((3, 1), (1, 3)):
        trainer = trainer_for(
            tmp_path,
            target,
            sequences,
            num_train_epochs=2,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=accumulation,
        )
        trainer.train()
        assert trainer.state.global_step == 6
        trained.append((losses(trainer), parameters(trainer)))
    assert_close(trained[0][0], trained[1][0])
    assert_close(trained[0][1], trained[1][1], TRAINED)


class EpochSpy(DSparkTrainer):
    """Which epoch's blocks each batch was given: first to count the step's slots, then to train on them."""

    def blocks_of(self, inputs, epoch):
        if epoch >= 0:
            self.__dict__.setdefault("epochs", []).append((self.state.global_step, epoch))
        return super().blocks_of(inputs, epoch)


@pytest.mark.parametrize("stop_at", [None, 2, 3, 4, 6])
def test_epoch_of_a_batch_is_the_one_it_is_in(tmp_path, target, sequences, stop_at, monkeypatch):
    """7 batches an epoch in steps of 3 batches: 3, 3 and 1. Also after a resume, at a border (3, 6) and inside."""
    monkeypatch.setattr("tests.support.training.DSparkTrainer", EpochSpy)

    def trainer():
        return trainer_for(
            tmp_path,
            target,
            sequences[:7],
            num_train_epochs=3,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=3,
            save_strategy="steps",
            save_steps=1,
        )

    seen = []
    if stop_at is not None:
        first = trainer()
        first.add_callback(StopAt(stop_at))
        first.train()
        seen = first.epochs
    last = trainer()
    last.train(resume_from_checkpoint=stop_at is not None)
    seen = seen + last.epochs
    batches = [3, 3, 1] * 3
    assert seen == [(step, step // 3) for step in range(9) for _ in range(2 * batches[step])]


# Cached features


def test_cached_features_give_the_losses_of_online_ones(tmp_path, target, sequences):
    online = trainer_for(tmp_path, target, sequences, max_steps=5)
    online.train()
    data = SequenceDataset(sequences, 512)
    cache = FeatureCache(tmp_path / "features", data, target, online.draft.config.target_layer_ids, shard_size=3)
    runs = []

    class NeverRun(torch.nn.Module):  # the target's layers are not needed any more
        def forward(self, *_, **__):
            runs.append(1)

    idle = copy.deepcopy(target)
    online.draft.bind_target(idle)  # which probes it once
    idle.model.layers[0] = NeverRun()
    cached = trainer_for(tmp_path, idle, sequences, train_dataset=cache, max_steps=5)
    cached.train()
    assert runs == []
    assert_close(losses(cached), losses(online))
    assert_close(parameters(cached), parameters(online), TRAINED)


# The target, and what is saved


def test_target_stays_as_it_is_and_outside_of_checkpoints(tmp_path, sequences):
    target = tiny_target(context_scale=0.3)
    before = {name: value.clone() for name, value in target.state_dict().items()}
    trainer = trainer_for(tmp_path, target, sequences, max_steps=2, save_strategy="steps", save_steps=1)
    started = {name: value.clone() for name, value in trainer.draft.state_dict().items()}
    trainer.train()
    trainer.save_model()
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in target.parameters())
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())
    for folder in (tmp_path / "checkpoint-2", tmp_path):
        saved = load_file(folder / "model.safetensors")
        assert set(saved) == set(started)
        assert all(saved[name].shape == value.shape for name, value in started.items())
        assert not torch.equal(saved["fc.weight"], started["fc.weight"])
        assert sorted(path.name for path in folder.glob("*.safetensors")) == ["model.safetensors"]
    optimized = torch.load(tmp_path / "checkpoint-2" / "optimizer.pt", weights_only=True)
    assert len(optimized["state"]) == len(list(trainer.draft.parameters()))
    names = [name for name, _ in trainer.model.named_modules()]
    assert not [name for name in names if "target" in name or "embed_tokens" in name]


def test_saved_draft_is_the_trained_one(tmp_path, target, sequences):
    trainer = trainer_for(tmp_path, target, sequences, max_steps=3)
    trainer.train()
    trainer.save_model()
    loaded = DSparkDraftModel.from_pretrained(tmp_path)
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in trainer.draft.state_dict().items())
    assert loaded.config.block_size == BLOCK
    prompt = torch.tensor([sequences[0].input_ids[:5]])
    plain = target.generate(prompt, do_sample=False, max_new_tokens=10)
    assert torch.equal(target.generate(prompt, assistant_model=loaded, do_sample=False, max_new_tokens=10), plain)


# What is logged


def test_figures_are_logged_at_every_step(tmp_path, target, sequences):
    trainer = trainer_for(tmp_path, target, sequences, max_steps=3)
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(steps) == 3
    for entry in steps:
        assert 1 <= entry["accepted_length"] <= BLOCK + 1
        assert 0 <= entry["total_variation"] <= 1
        assert 0 <= entry["confidence_error"] <= 1
        assert all(0 <= entry[f"acceptance_rate_{slot}"] <= 1 for slot in range(BLOCK))
        parts = 0.1 * entry["cross_entropy"] + 0.9 * 2 * entry["total_variation"] + entry["confidence_loss"]
        assert_close(entry["loss"], parts)
    assert steps[-1]["loss"] < steps[0]["loss"]


def test_figures_of_several_steps_are_pooled(tmp_path, target, sequences):
    fine, coarse = (
        trainer_for(tmp_path, target, sequences, max_steps=4, logging_steps=logging_steps) for logging_steps in (1, 4)
    )
    fine.train()
    coarse.train()
    (entry,) = [entry for entry in coarse.state.log_history if "loss" in entry]
    each = [entry for entry in fine.state.log_history if "loss" in entry]
    assert_close(entry["loss"], sum(e["loss"] for e in each) / 4)
    assert min(e["accepted_length"] for e in each) < entry["accepted_length"] < max(e["accepted_length"] for e in each)


def test_evaluation_takes_in_the_heads(tmp_path, target, sequences):
    """A change of either head alone shows in the held-out loss."""
    trainer = trainer_for(tmp_path, target, sequences)
    before = trainer.evaluate()
    with torch.no_grad():
        trainer.draft.confidence_head.proj.bias.add_(3.0)
    changed = trainer.evaluate()
    assert changed["eval_confidence_loss"] > before["eval_confidence_loss"] + 0.5
    assert_close(changed["eval_cross_entropy"], before["eval_cross_entropy"])
    with torch.no_grad():
        trainer.draft.markov_head.markov_w2.weight.add_(50 * torch.randn(97, 8))
    again = trainer.evaluate()
    assert abs(again["eval_cross_entropy"] - changed["eval_cross_entropy"]) > 0.1
    assert abs(again["eval_loss"] - changed["eval_loss"]) > 0.01


def test_evaluation_is_the_same_each_time_and_for_every_batch_size(tmp_path, target, sequences):
    """One loss over all slots, not a mean over batches, and with anchors of its own that never change."""
    results = []
    for rows in (1, 3, 8):
        trainer = trainer_for(tmp_path, target, sequences, per_device_eval_batch_size=rows)
        results += [trainer.evaluate(), trainer.evaluate()]
    names = [name for name in results[0] if not name.endswith(("runtime", "per_second", "preparation_time"))]
    assert {"eval_loss", "eval_accepted_length", "eval_confidence_error", "eval_acceptance_rate_3"} <= set(names)
    for other in results[1:]:
        for name in names:
            assert_close(other[name], results[0][name])


def test_evaluation_during_training_leaves_training_as_it_is(tmp_path, target, sequences):
    plain = trainer_for(tmp_path, target, sequences, max_steps=4)
    plain.train()
    evaluated = trainer_for(tmp_path, target, sequences, max_steps=4, eval_strategy="steps", eval_steps=1)
    evaluated.train()
    assert losses(evaluated) == losses(plain)
    held_out = [entry["eval_loss"] for entry in evaluated.state.log_history if "eval_loss" in entry]
    assert len(held_out) == 4
    assert held_out[-1] < held_out[0]


def test_figures_go_to_tensorboard(tmp_path, target, sequences, monkeypatch):
    event_accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "runs"))
    trainer = trainer_for(
        tmp_path, target, sequences, max_steps=3, report_to="tensorboard", eval_strategy="steps", eval_steps=3
    )
    trainer.train()
    events = event_accumulator.EventAccumulator(str(next((tmp_path / "runs").rglob("events.*"))))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {"train/loss", "train/accepted_length", "train/acceptance_rate_0", "eval/accepted_length"} <= tags
    logged = [event.value for event in events.Scalars("train/accepted_length")]
    wanted = [e["accepted_length"] for e in trainer.state.log_history if "accepted_length" in e]
    assert logged == pytest.approx(wanted)


# Every kind of draft


def check_learns(trainer, draft):
    before = {name: parameter.detach().clone() for name, parameter in draft.named_parameters()}
    trainer.train()
    found = losses(trainer)
    assert all(math.isfinite(loss) for loss in found)
    assert found[-1] < found[0]
    moved = {name for name, parameter in draft.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == {name for name, parameter in draft.named_parameters() if parameter.requires_grad}
    assert ("confidence_loss" in trainer.state.log_history[0]) == (draft.confidence_head is not None)
    figures = trainer.evaluate()
    assert 1 <= figures["eval_accepted_length"] <= BLOCK + 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_kinds_of_drafts(tmp_path, target, sequences, variant):
    draft = random_draft(initializer_range=0.02, **VARIANTS[variant])
    check_learns(trainer_for(tmp_path, target, sequences, draft, max_steps=4), draft)


@pytest.mark.parametrize("train_lm_head", [False, True])
def test_reduced_vocabulary(tmp_path, target, sequences, train_lm_head):
    draft = random_draft(initializer_range=0.02, draft_vocab_size=30)
    copy_target_head(draft, target, list(range(10, 40)))
    draft.lm_head.requires_grad_(train_lm_head)
    trainer = trainer_for(tmp_path, target, sequences, draft, max_steps=4)
    check_learns(trainer, draft)
    trainer.save_model()
    saved = load_file(tmp_path / "model.safetensors")
    assert torch.equal(saved["lm_head.weight"], target.lm_head.weight[10:40]) != train_lm_head
    assert DSparkDraftModel.from_pretrained(tmp_path).draft_token_ids().tolist() == list(range(10, 40))


@pytest.mark.parametrize("kind", ["llama_tied", "mistral", "gemma3"])
def test_kinds_of_targets(tmp_path, kind):
    """A tied head, windows, scaled embeddings."""
    target = tiny_target(kind)
    draft = random_draft(initializer_range=0.02)
    check_learns(trainer_for(tmp_path, target, greedy_sequences(target, 4), draft, max_steps=4), draft)


def test_bfloat16_target_and_mixed_precision(tmp_path, sequences):
    """The draft's weights and the optimizer's stay in fp32."""
    target = tiny_target(context_scale=0.3).bfloat16()
    draft = random_draft(initializer_range=0.02)
    trainer = trainer_for(tmp_path, target, sequences, draft, max_steps=4, bf16=True, save_strategy="steps")
    check_learns(trainer, draft)
    assert {parameter.dtype for parameter in draft.parameters()} == {torch.float32}
    trainer.save_model()
    assert {value.dtype for value in load_file(tmp_path / "model.safetensors").values()} == {torch.float32}
    optimized = torch.load(tmp_path / "checkpoint-4" / "optimizer.pt", weights_only=True)["state"]
    assert {state["exp_avg"].dtype for state in optimized.values()} == {torch.float32}


def test_activation_checkpointing_changes_nothing(tmp_path, target, sequences):
    plain = trainer_for(tmp_path, target, sequences, max_steps=3)
    plain.train()
    new_name = "activation_checkpointing"  # since transformers 5.24
    has_new_name = new_name in {field.name for field in dataclasses.fields(DSparkTrainingArguments)}
    switch = {new_name if has_new_name else "gradient_checkpointing": True}
    saving = trainer_for(tmp_path, target, sequences, max_steps=3, **switch)
    saving.train()
    assert_close(losses(saving), losses(plain))
    assert_close(parameters(saving), parameters(plain), TRAINED)


def test_log_is_plain_numbers(tmp_path, target, sequences):
    trainer = trainer_for(tmp_path, target, sequences, max_steps=1)
    trainer.train()
    assert json.loads(json.dumps(trainer.state.log_history)) == trainer.state.log_history
