# SPDX-License-Identifier: Apache-2.0
"""Options of transformers' TrainingArguments: each works, or is refused in words before anything is written."""

import pytest
from huggingface_hub import constants as hub_constants

from dspark_hf.training import DSparkTrainingArguments
from dspark_hf.training.run import DataArguments, DraftArguments, train_draft
from tests.support.models import random_draft, tiny_target
from tests.support.training import greedy_sequences, losses, trainer_for, word_tokenizer


@pytest.fixture(scope="module")
def target():
    return tiny_target(context_scale=0.3)


@pytest.fixture(scope="module")
def sequences(target):
    return greedy_sequences(target, 8)


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt_ids": [5, 6], "answer_ids": [7, 8, 9, 10]}\n' * 6)
    return path


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("neftune_noise_alpha", 5.0),
        ("neftune_noise_alpha", 0.0),
        ("label_smoothing_factor", 0.1),
        ("include_for_metrics", ["inputs"]),
        ("batch_eval_metrics", True),
        ("remove_unused_columns", True),
        ("use_liger_kernel", True),
        ("bf16_full_eval", True),
        ("fp16_full_eval", True),
        ("fsdp", "full_shard"),
        ("deepspeed", "zero3.json"),
        ("debug", "underflow_overflow"),
    ],
)
def test_options_that_cannot_be_used(tmp_path, name, value):
    with pytest.raises(NotImplementedError, match=rf"`{name}` cannot be used to train a draft, got .+: .+ unset\."):
        DSparkTrainingArguments(output_dir=str(tmp_path / "out"), **{name: value})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name", ["per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"]
)
def test_counts_must_be_positive(tmp_path, name):
    with pytest.raises(ValueError, match=f"`{name}` must be >= 1, got 0"):
        DSparkTrainingArguments(output_dir=str(tmp_path / "out"), **{name: 0})


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"push_to_hub": True}, "`push_to_hub` needs a token, got none"),
        ({"resume_from_checkpoint": "somewhere"}, "`resume_from_checkpoint` must stay unset, got 'somewhere'"),
        ({"optim": "galore_adamw"}, "`optim`=galore_adamw needs a package that is missing"),
        ({"learning_rate": -1.0}, "Invalid learning rate: -1.0"),
        ({"adam_beta1": 2.0}, "Invalid beta parameter at index 0: 2.0"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "min_lr"),
        ({"lr_scheduler_type": "warmup_stable_decay"}, "do not fit `lr_scheduler_type`=warmup_stable_decay, got None"),
    ],
)
def test_runs_that_would_fail_later(tmp_path, target, data, options, match, monkeypatch):
    monkeypatch.setattr(hub_constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    arguments = DSparkTrainingArguments(
        output_dir=str(tmp_path / "out"), report_to="none", use_cpu=True, max_steps=1, **options
    )
    data_arguments = DataArguments([str(data)], held_out=0.5, feature_cache=str(tmp_path / "cache"))
    draft_arguments = DraftArguments(draft_num_layers=1, block_size=3, num_taps=2, markov_rank=8)
    with pytest.raises(ValueError, match=match):
        train_draft(target, word_tokenizer(), data_arguments, draft_arguments, arguments)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "cache").exists()


def test_checkpoints_without_an_optimizer_are_not_gone_on_from(tmp_path, target, data):
    def run(**options):
        settings = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_steps": 1} | options
        arguments = DSparkTrainingArguments(output_dir=str(tmp_path / "out"), **settings)
        draft_arguments = DraftArguments(draft_num_layers=1, block_size=3, num_taps=2, markov_rank=8)
        return train_draft(
            target, word_tokenizer(), DataArguments([str(data)], held_out=0.5), draft_arguments, arguments
        )

    run(max_steps=1, save_only_model=True)
    with pytest.raises(ValueError, match="checkpoint-1 was saved without the state of its optimizer"):
        run(max_steps=2)


def trained(folder, target, sequences, **options):
    trainer = trainer_for(folder, target, sequences, **({"max_steps": 3} | options))
    trainer.train()
    trainer.save_model()
    assert trainer.state.global_step == 3
    return losses(trainer)


@pytest.mark.parametrize(
    "options",
    [
        {"torch_compile": True, "torch_compile_backend": "eager"},
        {"auto_find_batch_size": True},
        {"dataloader_num_workers": 1},
        {"dataloader_drop_last": True},
        {"eval_on_start": True},
        {"skip_memory_metrics": False},
        {"include_num_input_tokens_seen": "all"},
        {"prediction_loss_only": True},
        {"torch_empty_cache_steps": 1},
        {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
        | {"load_best_model_at_end": True},
    ],
)
def test_options_that_leave_the_losses_as_they_are(tmp_path, target, sequences, options):
    plain = trained(tmp_path / "plain", target, sequences)
    assert trained(tmp_path / "out", target, sequences, **options) == pytest.approx(plain, rel=1e-4)


@pytest.mark.parametrize("strategy", ["random", "sequential", "group_by_length"])
def test_sampling_strategies(tmp_path, target, sequences, strategy):
    assert len(trained(tmp_path, target, sequences, train_sampling_strategy=strategy)) == 3


def test_data_has_a_seed_of_its_own(tmp_path, target, sequences):
    orders = []
    for seed, data_seed in ((1, 7), (2, 7), (1, 8)):
        options = {"per_device_train_batch_size": 1, "seed": seed, "data_seed": data_seed}
        trainer = trainer_for(tmp_path, target, sequences, draft=random_draft(), **options)
        orders.append(list(trainer._get_train_sampler()))
    assert orders[0] == orders[1] != orders[2]
