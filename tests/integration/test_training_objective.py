# SPDX-License-Identifier: Apache-2.0
"""What a batch of blocks contributes: losses, figures by hand, and the anchors that a row gets.

A stand-in for the LM head passes hidden states through, so that hidden states are the logits themselves.
"""

import math
import subprocess
import sys

import pytest
import torch

from dspark_hf import DSparkDraftModel
from dspark_hf.drafts.target_binding import TargetBinding
from dspark_hf.training import DSparkTrainer, DSparkTrainingArguments
from dspark_hf.training.blocks import label_blocks
from dspark_hf.training.dataset import SequenceDataset, TargetFeatures, TrainingSequence, collate, target_features
from dspark_hf.training.objective import BlockObjective, draft_blocks
from dspark_hf.training.trainer import EpochLengthSampler
from tests.support.closeness import assert_close
from tests.support.models import random_draft, random_prompt, tiny_config, tiny_target
from tests.support.training import trainer_for


class PassThrough(torch.nn.Module):
    def forward(self, hidden):
        return hidden


BINDING = TargetBinding(torch.nn.Embedding(4, 4), PassThrough())
# A text of 4 symbols; the answer is positions 1 to 5. Blocks of 2 slots at anchors 1, 3 and 4.
TEXT = torch.tensor([[0, 1, 2, 3, 1, 2]])
ANSWER = torch.tensor([[0, 1, 1, 1, 1, 1]]).bool()
P = torch.tensor([0.1, 0.2, 0.3, 0.4])  # the target's distribution everywhere
Q = torch.tensor([0.4, 0.1, 0.3, 0.2])  # the draft's


def draft_of(**overrides) -> DSparkDraftModel:
    sizes = {"vocab_size": 4, "hidden_size": 4, "head_dim": 4, "mask_token_id": 3, "block_size": 2}
    fields = {"markov_rank": 0, "confidence_head_with_markov": False, "enable_confidence_head": False}
    return DSparkDraftModel(tiny_config(**(sizes | fields | overrides)))


def evaluate(draft, **settings):
    return whole_evaluation(draft, **settings)[1:]


def whole_evaluation(draft, q=Q, p=P, chunk_size=1024, keep=(True, True, True), decay=math.inf):
    blocks = label_blocks(TEXT, ANSWER, torch.tensor([[1, 3, 4]]), torch.tensor([keep]), 2)
    hidden = q.log().expand(1, 3, 2, 4).clone().requires_grad_()
    features = TargetFeatures(torch.zeros(1, 6, 4), p.log().expand(1, 6, 4))
    return BlockObjective(draft, BINDING, decay, chunk_size)(hidden, TEXT, features, blocks)


@pytest.mark.parametrize("chunk_size", [1, 2, 1024])
def test_figures_by_hand(chunk_size):
    """Labels: 2, 3 | 1, 2 | 2 and then the end. min(1, q / p): token 1: 0.5, token 2: 1, token 3: 0.5.

    Whole blocks: 1 + 1 + 1 * 0.5 = 2.5 and 1 + 0.5 + 0.5 * 1 = 2. Acceptance: 0.1 + 0.1 + 0.3 + 0.2 = 0.7 anywhere.
    """
    sums, slots = evaluate(draft_of(), chunk_size=chunk_size)
    assert_close(slots.accepted_length, 4.5)
    assert slots.num_blocks.item() == 2  # the block that the end cuts short says nothing about whole ones
    assert_close(slots.acceptance_rate, [3 * 0.7, 2 * 0.7])
    assert slots.count.tolist() == [3, 2]
    assert slots.confidence_error.tolist() == [0, 0]
    assert_close(sums.cross_entropy, -sum(math.log(q) for q in (0.3, 0.2, 0.1, 0.3, 0.3)))
    assert_close(sums.total_variation, 5 * 2 * 0.3)
    assert sums.weight.item() == 5


def test_later_slots_weigh_less():
    sums, _ = evaluate(draft_of(), decay=4.0)
    later = math.exp(-0.25)
    assert_close(sums.weight, 3 + 2 * later)
    assert_close(sums.total_variation, 0.6 * (3 + 2 * later))


def test_draft_like_its_target_is_always_accepted():
    _, slots = evaluate(draft_of(), q=P)
    assert_close(slots.accepted_length / slots.num_blocks, 3)
    assert_close(slots.acceptance_rate, [3, 2])


def test_text_that_the_target_would_never_write():
    """p = 0 in fp32 where q is 0, too: a ratio of 0, not NaN."""
    certain = torch.tensor([1.0, 0.0, 0.0, 0.0])
    _, slots = evaluate(draft_of(), q=certain, p=certain)
    assert slots.accepted_length.item() / slots.num_blocks.item() == 1


def test_confidence_error_is_the_distance_to_the_acceptance_rate():
    """A head without weights says sigmoid(bias) = 0.6; the acceptance rate is 0.7."""
    draft = draft_of(enable_confidence_head=True)
    with torch.no_grad():
        draft.confidence_head.proj.weight.zero_()
        draft.confidence_head.proj.bias.fill_(math.log(0.6 / 0.4))
    sums, slots = evaluate(draft)
    assert_close(slots.confidence_error, [3 * 0.1, 2 * 0.1])
    assert_close(sums.confidence, -5 * (0.7 * math.log(0.6) + 0.3 * math.log(0.4)))


def test_reduced_vocabulary_by_hand():
    """Kept 0, 2: q = (0.4, 0.6) there. The mass 0.6 of 1 and 3 is distance; labels 1 and 3 have no CE and ratio 0.

    L1: |0.4 - 0.1| + |0.6 - 0.3| + 0.6 = 1.2, acceptance 0.1 + 0.3. Blocks: 2, 3 gives 1 + 1 + 0; 1, 2 gives 1.
    """
    draft = draft_of(draft_vocab_size=2)
    with torch.no_grad():
        draft.d2t.copy_(torch.tensor([0, 1]))
        draft.lm_head.weight.copy_(torch.eye(4)[[0, 2]])
    sums, slots = evaluate(draft, q=torch.tensor([0.4, 0.5, 0.6, 0.7]))
    assert draft.draft_token_ids().tolist() == [0, 2]
    assert_close(sums.total_variation, 5 * 1.2)
    assert_close(slots.acceptance_rate, [3 * 0.4, 2 * 0.4])
    assert_close(sums.cross_entropy, -3 * math.log(0.6))  # three labels are 2
    assert sums.weight.item() == 5
    assert_close(slots.accepted_length, 2 + 1)


def test_no_block_at_all():
    total, sums, slots = whole_evaluation(draft_of(), keep=(False, False, False))
    assert [value.item() for value in vars(sums).values()] == [0, 0, 0, 0]
    assert slots.num_blocks.item() == slots.accepted_length.item() == 0
    assert total.item() == 0
    total.backward()  # a process without a block takes part in the step all the same


# With a real target


@pytest.fixture(scope="module")
def target():
    return tiny_target(context_scale=0.3).requires_grad_(False)


def batch_of(count=3, num_prompt=4):
    rows = [
        TrainingSequence(tuple(random_prompt(14 + 5 * i, seed=20 + i)[0].tolist()), num_prompt) for i in range(count)
    ]
    return collate([SequenceDataset(rows, 64)[i] for i in range(count)])


def loss_of(target, draft, batch, blocks, chunk_size=1024, decay=4.0):
    binding = draft.bind_target(target)
    features = target_features(target, batch["input_ids"], draft.config.target_layer_ids)
    hidden = draft_blocks(draft, binding, batch["input_ids"], features, blocks)
    total, sums, _ = BlockObjective(draft, binding, decay, chunk_size)(hidden, batch["input_ids"], features, blocks)
    return total / sums.weight


def some_blocks(batch, positions=((4, 8, 10), (5, 6, 14), (6, 11, 20))):
    positions = torch.tensor(positions)
    keep = torch.ones_like(positions, dtype=torch.bool)
    return label_blocks(batch["input_ids"], batch["loss_mask"], positions, keep, 4)


VARIANTS = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "dflash": {"markov_rank": 0, "confidence_head_with_markov": False, "enable_confidence_head": False},
    "confidence without markov": {"confidence_head_with_markov": False},
    "reduced": {"draft_vocab_size": 40},
    "sliding": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5},
    "sliding, both directions": {
        "layer_types": ["sliding_attention"] * 2,
        "sliding_window": 5,
        "sliding_window_non_causal": True,
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_chunks_change_nothing(target, variant):
    draft, batch = random_draft(**VARIANTS[variant]), batch_of()
    blocks, grads, losses = some_blocks(batch), [], []
    for chunk_size in (1, 5, 1024):
        draft.zero_grad()
        loss = loss_of(target, draft, batch, blocks, chunk_size)
        loss.backward()
        losses.append(loss.item())
        grads.append({name: p.grad.clone() for name, p in draft.named_parameters()})
    assert_close(losses[0], losses[2])
    assert_close(losses[1], losses[2])
    for name, grad in grads[2].items():
        for other in grads[:2]:
            assert_close(other[name], grad)


@pytest.mark.parametrize("variant", VARIANTS)
def test_blocks_together_are_blocks_alone(target, variant):
    """All blocks in one forward give the slots of one block drafted as in decoding: prefix, anchor, masks."""
    draft, batch = random_draft(**VARIANTS[variant]), batch_of()
    ids, blocks, binding = batch["input_ids"], some_blocks(batch), draft.bind_target(target)
    features = target_features(target, ids, draft.config.target_layer_ids)
    with torch.no_grad():
        together = draft_blocks(draft, binding, ids, features, blocks)
        for row in range(3):
            for index, anchor in enumerate(blocks.positions[row].tolist()):
                block = torch.tensor([[int(ids[row, anchor]), *[draft.config.mask_token_id] * 3]])
                alone = draft(
                    noise_embeds=binding.embed(block),
                    context_hidden_states=features.context_hidden_states[row : row + 1, :anchor],
                    position_ids=torch.arange(anchor + 4)[None],
                ).last_hidden_state
                assert_close(together[row, index], alone[0])


def test_no_gradient_reaches_the_target(target):
    draft, batch = random_draft(), batch_of()
    loss_of(target, draft, batch, some_blocks(batch)).backward()
    assert all(parameter.grad is None for parameter in target.parameters())
    assert all(parameter.grad is not None for parameter in draft.parameters())


# Which blocks a row gets


def anchors_of(trainer, rows, epoch, order):
    data = SequenceDataset(rows, 64)
    blocks = trainer.blocks_of(collate([data[i] for i in order]), epoch)
    return {
        row: blocks.positions[at][blocks.keep_mask[at]].tolist() for at, row in enumerate(order)
    }  # without dummies


def rows_of(count=6):
    return [TrainingSequence(tuple(random_prompt(20 + 4 * i, seed=i)[0].tolist()), 3) for i in range(count)]


def test_anchors_of_a_row_do_not_depend_on_its_batch(tmp_path, target):
    trainer = trainer_for(tmp_path, target, rows_of(), num_anchors=5)
    together = anchors_of(trainer, rows_of(), 3, [0, 1, 2, 3, 4, 5])
    for order in ([5, 0], [4], [2, 3, 1]):
        alone = anchors_of(trainer, rows_of(), 3, order)
        assert all(together[row] == alone[row] for row in order)
    assert all(len(anchors) == 5 for anchors in together.values())


def test_anchors_differ_between_epochs_rows_and_seeds(tmp_path, target):
    alike = [TrainingSequence(tuple(range(3, 60)), 3)] * 6
    trainer = trainer_for(tmp_path, target, alike, num_anchors=5)
    first, second = (anchors_of(trainer, alike, epoch, [0, 1, 2, 3, 4, 5]) for epoch in (0, 1))
    assert first != second
    assert len({tuple(anchors) for anchors in first.values()}) == 6
    assert anchors_of(trainer, alike, 0, [2]) == {2: first[2]}
    other = trainer_for(tmp_path, target, alike, num_anchors=5, seed=7)
    assert anchors_of(other, alike, 0, [2]) != {2: first[2]}
    assert anchors_of(trainer, alike, -1, [2]) != {2: first[2]}  # evaluation has anchors of its own


def test_seeds_of_anchors_are_the_same_in_every_process():
    """Python's hash of a tuple of integers does not depend on PYTHONHASHSEED; that of a text does."""
    seeds = [(0, -1, 0), (0, 0, 0), (42, 3, 17), (7, 2**31, 2**40)]
    for hash_seed in ("0", "1", "12345"):
        result = subprocess.run(
            [sys.executable, "-c", f"print([hash(seed) for seed in {seeds}])"],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": hash_seed},
        )
        assert result.stdout.strip() == str([hash(seed) for seed in seeds])


def test_order_of_an_epoch_depends_on_seed_and_epoch_alone():
    lengths = [10 + (7 * i) % 50 for i in range(40)]
    epoch = [0]

    def order(seed=0):
        return list(EpochLengthSampler(lengths, 4, seed, lambda: epoch[0]))

    first = order()
    torch.rand(100)  # the global stream has gone on
    assert order() == first
    assert sorted(first) == list(range(40))
    assert order(seed=1) != first
    epoch[0] = 1
    assert order() != first
    epoch[0] = 0
    assert order() == first
    assert lengths[first[0]] == max(lengths)  # so that memory runs out in the first step, or never


# What is refused


def test_slot_convention_of_the_original_dflash_is_refused(tmp_path, target):
    draft = random_draft(sample_from_anchor=False)
    with pytest.raises(NotImplementedError, match="`sample_from_anchor=True` only, .+ got False. Start from a new"):
        DSparkTrainer(draft, target, DSparkTrainingArguments(output_dir=str(tmp_path), report_to="none"))


def test_draft_of_another_target_is_refused(tmp_path, target):
    draft = random_draft(vocab_size=50, mask_token_id=49)
    with pytest.raises(ValueError, match="must have the same `vocab_size`, got 97"):
        DSparkTrainer(draft, target, DSparkTrainingArguments(output_dir=str(tmp_path), report_to="none"))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_anchors", 0, "`num_anchors` must be >= 1, got 0"),
        ("head_chunk_size", 0, "`head_chunk_size` must be >= 1, got 0"),
        ("loss_decay", 0.0, "`loss_decay` must be > 0, got 0"),
        ("confidence_weight", -1.0, "`confidence_weight` must be >= 0, got -1"),
        ("cross_entropy_weight", -0.1, "`cross_entropy_weight` must be >= 0, got -0.1"),
    ],
)
def test_arguments_out_of_range(tmp_path, field, value, message):
    with pytest.raises(ValueError, match=message):
        DSparkTrainingArguments(output_dir=str(tmp_path), **{field: value})


def test_defaults_are_the_papers_recipe(tmp_path):
    arguments = DSparkTrainingArguments(output_dir=str(tmp_path))
    assert (arguments.learning_rate, arguments.weight_decay, arguments.max_grad_norm) == (6e-4, 0.0, 1.0)
    assert arguments.lr_scheduler_type == "cosine"
    assert arguments.get_warmup_steps(1000) == 40
    assert (arguments.num_anchors, arguments.loss_decay) == (512, 4.0)
    weights = (arguments.cross_entropy_weight, arguments.total_variation_weight, arguments.confidence_weight)
    assert weights == (0.1, 0.9, 1.0)
