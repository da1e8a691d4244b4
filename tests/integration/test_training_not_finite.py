# SPDX-License-Identifier: Apache-2.0
"""A loss, a gradient or a weight that is not finite ends training, before anything of it is saved."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from dspark_hf import DSparkDraftModel
from dspark_hf.training.checks import last_checkpoint
from dspark_hf.training.dataset import SequenceDataset, TrainingSequence
from tests.support.models import random_draft, rewrite, tiny_target
from tests.support.training import greedy_sequences, losses, trainer_for


@pytest.fixture(scope="module")
def target():
    return tiny_target(context_scale=0.3)


@pytest.fixture(scope="module")
def sequences(target):
    return greedy_sequences(target, 8)


def spoil(trainer, step, change):
    """Change the draft's weights after a step."""

    class Spoiler(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step == step:
                with torch.no_grad():
                    change(trainer.draft)

    trainer.add_callback(Spoiler())


def make_nan(draft):
    draft.fc.weight[0, 0] = float("nan")


def all_finite(folder):
    return all(
        tensor.isfinite().all() for path in folder.rglob("*.safetensors") for tensor in load_file(path).values()
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bf16": True},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
        {"max_grad_norm": 0.0},
        {"logging_nan_inf_filter": True},
        {"eval_strategy": "steps", "eval_steps": 10},
    ],
)
def test_diverged_training_stops_and_names_the_last_checkpoint(tmp_path, target, sequences, options):
    """Steps of 1e30 make weights whose products overflow."""
    settings = {"learning_rate": 1e30, "max_steps": 8, "warmup_steps": 0, "lr_scheduler_type": "constant"}
    trainer = trainer_for(tmp_path, target, sequences, **settings, save_strategy="steps", save_steps=1, **options)
    with pytest.raises(RuntimeError, match=r"must have finite figures, got loss .+ at step \d") as caught:
        trainer.train()
    step = trainer.state.global_step
    assert 1 <= step < 8
    assert f"at step {step + 1}" in str(caught.value)
    assert f"the last checkpoint before is {tmp_path / f'checkpoint-{step}'}. " in str(caught.value)
    assert last_checkpoint(tmp_path) == tmp_path / f"checkpoint-{step}"
    assert all_finite(tmp_path)
    assert all(math.isfinite(loss) for loss in losses(trainer))


def test_without_a_checkpoint_the_message_says_so(tmp_path, target, sequences):
    trainer = trainer_for(tmp_path, target, sequences, max_steps=3)
    spoil(trainer, 1, make_nan)
    with pytest.raises(
        RuntimeError, match="got loss nan, gradient norm nan at step 2. .* no checkpoint was saved before"
    ):
        trainer.train()


def test_gradient_that_overflows_under_a_finite_loss(tmp_path, target, sequences):
    trainer = trainer_for(tmp_path, target, sequences, max_steps=3)
    trainer.draft.fc.weight.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(RuntimeError, match=r"got loss \d\.\d+, gradient norm (nan|inf) at step 1"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_one_micro_batch_of_many(tmp_path, target, sequences, monkeypatch):
    """The third of four is not finite; nothing of the step is taken."""
    options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "max_steps": 2}
    trainer = trainer_for(tmp_path, target, sequences, **options)
    right, count = trainer.compute_loss, []

    def spoiled(*args, **kwargs):
        count.append(1)
        return right(*args, **kwargs) * (float("inf") if len(count) == 3 else 1)

    monkeypatch.setattr(trainer, "compute_loss", spoiled)
    before = trainer.draft.fc.weight.detach().clone()
    with pytest.raises(RuntimeError, match="got loss inf, gradient norm .+ at step 1"):
        trainer.train()
    assert len(count) == 4
    assert torch.equal(trainer.draft.fc.weight, before)


def test_weights_that_overflow_in_the_last_step_are_not_saved(tmp_path, target, sequences):
    trainer = trainer_for(tmp_path, target, sequences, max_steps=2, save_strategy="steps", save_steps=1)
    spoil(trainer, 2, make_nan)
    match = rf"that is saved must have finite weights, got NaN or infinity in `fc.weight`. .*{tmp_path}/checkpoint-1"
    with pytest.raises(ValueError, match=match):
        trainer.train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-1"]
    with pytest.raises(ValueError, match="A draft that is saved must have finite weights"):
        trainer.save_model()
    assert not (tmp_path / "model.safetensors").exists()


def test_held_out_figures_that_are_not_finite(tmp_path, target, sequences):
    trainer = trainer_for(tmp_path, target, sequences, max_steps=1)
    trainer.train()
    with torch.no_grad():
        make_nan(trainer.draft)
    with pytest.raises(RuntimeError, match="must have finite figures, got eval_.+ nan.* at step 1"):
        trainer.evaluate()


def test_evaluation_during_training(tmp_path, target, sequences):
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trainer = trainer_for(tmp_path, target, sequences, max_steps=3, **options)
    spoil(trainer, 2, make_nan)
    with pytest.raises(RuntimeError, match=rf"got eval_.+ at step 2. .* before is {tmp_path}/checkpoint-1"):
        trainer.train()


@pytest.mark.parametrize("resume", [True, "checkpoint-2"])
def test_checkpoint_that_is_not_finite_is_not_gone_on_from(tmp_path, target, sequences, resume):
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    trainer_for(tmp_path, target, sequences, **options).train()
    rewrite(tmp_path / "checkpoint-2", lambda tensors: tensors["fc.weight"].fill_(float("inf")))
    trainer = trainer_for(tmp_path, target, sequences, **(options | {"max_steps": 4}))
    with pytest.raises(ValueError, match="checkpoint-2 must have finite weights, got NaN or infinity in `fc.weight`"):
        trainer.train(resume_from_checkpoint=resume if resume is True else str(tmp_path / resume))
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert trainer.state.global_step == 4


def test_target_and_draft_with_broken_weights_are_refused_by_name(tmp_path, sequences):
    target = tiny_target()
    with torch.no_grad():
        target.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    match = r"The target must have finite weights, got NaN or infinity in `model.layers.1.mlp.up_proj.weight`"
    with pytest.raises(ValueError, match=match):
        trainer_for(tmp_path / "out", target, sequences)
    draft = random_draft()
    with torch.no_grad():
        draft.layers[0].mlp.up_proj.weight[0, 0] = float("inf")
    with pytest.raises(ValueError, match=r"The draft must have finite weights, .+ `layers.0.mlp.up_proj.weight`"):
        trainer_for(tmp_path / "out", tiny_target(), sequences, draft=draft)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("ids", "found"), [((5, 6, 97, 8), 97), ((5, 6, -1, 8), -1)])
def test_tokens_that_the_target_does_not_have(tmp_path, target, sequences, ids, found):
    data = SequenceDataset([*sequences, TrainingSequence(ids, 1)], 512)
    with pytest.raises(ValueError, match=rf"vocabulary of 97, got {found}. .+ \(sequence 8\)"):
        trainer_for(tmp_path / "out", target, sequences, train_dataset=data)
    assert not (tmp_path / "out").exists()


def test_saved_figures_are_json(tmp_path, target, sequences):
    trainer = trainer_for(tmp_path, target, sequences, max_steps=1)
    trainer.train()
    assert json.loads(json.dumps(trainer.evaluate(), allow_nan=False))
    trainer.save_model()
    assert isinstance(DSparkDraftModel.from_pretrained(tmp_path), DSparkDraftModel)
