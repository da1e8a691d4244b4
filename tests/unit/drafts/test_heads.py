# SPDX-License-Identifier: Apache-2.0
"""The sequential heads and the confidence head by hand: d = 1, r = 1 (or 2), V = 3."""

import math

import pytest
import torch

from dspark_hf.drafts.heads import ConfidenceHead, GatedMarkovHead, MarkovHead, RNNHead, build_sequential_head
from tests.support.closeness import assert_close
from tests.support.models import tiny_config


SIZES = {"vocab_size": 3, "hidden_size": 1, "head_dim": 2, "mask_token_id": 2}


def config(**overrides):
    return tiny_config(**(SIZES | {"markov_rank": 1} | overrides))


def set_parameter(parameter: torch.nn.Parameter, values) -> None:
    with torch.no_grad():
        parameter.copy_(torch.tensor(values))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_markov_head_is_a_bigram_table():
    """W_1[1] W_2 with W_1 = (1, 2; 3, 4; 5, 6), W_2 columns (1, 0), (0, 1), (1, -1): (3, 4, -1)."""
    head = MarkovHead(config(markov_rank=2))
    set_parameter(head.markov_w1.weight, [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    set_parameter(head.markov_w2.weight, [[1.0, 0.0], [0.0, 1.0], [1.0, -1.0]])
    hidden = torch.tensor([[100.0]])
    assert head.initial_state(hidden) is None
    bias, state = head(head.markov_w1(torch.tensor([1])), hidden, None)
    assert bias.tolist() == [[3.0, 4.0, -1.0]]
    assert state is None
    assert head.markov_w2.bias is None


def test_gated_head_gates_the_embedding():
    """e = 2, h = 3: gate sigmoid(0.5 * 3 + 0.25 * 2 - 1) = sigmoid(1) on e, times W_2 = (1, -1, 10)."""
    head = GatedMarkovHead(config())
    set_parameter(head.markov_w1.weight, [[2.0], [0.0], [0.0]])
    set_parameter(head.markov_w2.weight, [[1.0], [-1.0], [10.0]])
    set_parameter(head.gate_proj.weight, [[0.5, 0.25]])  # h, then e
    set_parameter(head.gate_proj.bias, [-1.0])
    bias, state = head(head.markov_w1(torch.tensor([0])), torch.tensor([[3.0]]), None)
    expected = 2 * sigmoid(1.0)
    assert_close(bias, torch.tensor([[expected, -expected, 10 * expected]]))
    assert state is None


def test_rnn_head_step_by_step():
    """z = [s; e; h]; rows of W: gate, candidate, output."""
    head = RNNHead(config())
    set_parameter(head.markov_w1.weight, [[2.0], [-1.0], [0.0]])
    set_parameter(head.markov_w2.weight, [[1.0], [2.0], [-1.0]])
    set_parameter(head.joint_proj.weight, [[0.5, 0.1, 0.2], [0.3, -0.4, 0.7], [1.5, 0.6, -0.2]])
    set_parameter(head.joint_proj.bias, [0.05, -0.1, 0.15])

    def step(state: float, embedding: float, hidden: float) -> tuple[float, float]:
        gate = sigmoid(0.5 * state + 0.1 * embedding + 0.2 * hidden + 0.05)
        candidate = 0.3 * state - 0.4 * embedding + 0.7 * hidden - 0.1
        output = 1.5 * state + 0.6 * embedding - 0.2 * hidden + 0.15
        return gate * state + (1 - gate) * math.tanh(candidate), math.tanh(output)

    state = head.initial_state(torch.zeros(1, 1))
    assert state.tolist() == [[0.0]]
    by_hand = 0.0
    for token, hidden in ((0, 3.0), (1, -0.5), (1, 1.0)):
        embedding = [2.0, -1.0, 0.0][token]
        by_hand, output = step(by_hand, embedding, hidden)
        bias, state = head(head.markov_w1(torch.tensor([token])), torch.tensor([[hidden]]), state)
        assert_close(bias, torch.tensor([[output, 2 * output, -output]]))
        assert_close(state, torch.tensor([[by_hand]]))


def test_rnn_state_takes_shape_device_and_dtype_of_the_slots():
    head = RNNHead(config(markov_rank=2))
    state = head.initial_state(torch.zeros(4, 5, 1, dtype=torch.float64))
    assert (state.shape, state.dtype) == ((4, 5, 2), torch.float64)


@pytest.mark.parametrize("markov_head_type", ["vanilla", "gated", "rnn"])
def test_heads_take_any_leading_dimensions(markov_head_type):
    head = build_sequential_head(config(markov_rank=2, markov_head_type=markov_head_type))
    ids, hidden = torch.tensor([[0, 1], [2, 0], [1, 1]]), torch.randn(3, 2, 1)
    bias, _ = head(head.markov_w1(ids), hidden, head.initial_state(hidden))
    assert bias.shape == (3, 2, 3)
    one, _ = head(head.markov_w1(ids[1, 1]), hidden[1, 1], head.initial_state(hidden[1, 1]))
    assert_close(bias[1, 1], one)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"markov_head_type": "vanilla"}, MarkovHead),
        ({"markov_head_type": "gated"}, GatedMarkovHead),
        ({"markov_head_type": "rnn"}, RNNHead),
    ],
)
def test_head_type(overrides, expected):
    assert type(build_sequential_head(config(**overrides))) is expected


def test_rank_zero_means_no_head():
    assert build_sequential_head(config(markov_rank=0, confidence_head_with_markov=False)) is None


def test_reduced_vocabulary_reads_target_ids_and_writes_draft_ids():
    head = MarkovHead(config(draft_vocab_size=2))
    assert head.markov_w1.weight.shape == (3, 1)
    assert head.markov_w2.weight.shape == (2, 1)


def test_confidence_head():
    """w = (0.5, -2, 1) on [h; e], b = 0.25, h = 3, e = (1, 4): 1.5 - 2 + 4 + 0.25."""
    head = ConfidenceHead(config(markov_rank=2))
    set_parameter(head.proj.weight, [[0.5, -2.0, 1.0]])
    set_parameter(head.proj.bias, [0.25])
    logits = head(torch.tensor([[3.0]]), torch.tensor([[1.0, 4.0]]))
    assert logits.tolist() == [3.75]


def test_confidence_head_without_the_embedding():
    head = ConfidenceHead(config(markov_rank=2, confidence_head_with_markov=False))
    set_parameter(head.proj.weight, [[0.5]])
    set_parameter(head.proj.bias, [0.25])
    assert head(torch.tensor([[3.0]]), torch.tensor([[1.0, 4.0]])).tolist() == [1.75]
    assert head(torch.tensor([[3.0]])).tolist() == [1.75]


@pytest.mark.parametrize(
    ("markov_head_type", "expected"),
    [
        ("vanilla", {"markov_w1.weight", "markov_w2.weight"}),
        ("gated", {"markov_w1.weight", "markov_w2.weight", "gate_proj.weight", "gate_proj.bias"}),
        ("rnn", {"markov_w1.weight", "markov_w2.weight", "joint_proj.weight", "joint_proj.bias"}),
    ],
)
def test_parameter_names_are_the_released_format(markov_head_type, expected):
    head = build_sequential_head(config(markov_head_type=markov_head_type))
    assert {name for name, _ in head.named_parameters()} == expected
    assert {name for name, _ in ConfidenceHead(config()).named_parameters()} == {"proj.weight", "proj.bias"}
