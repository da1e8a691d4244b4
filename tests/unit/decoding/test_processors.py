# SPDX-License-Identifier: Apache-2.0

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, PrefixConstrainedLogitsProcessor, TopKLogitsWarper
from transformers.generation import logits_process

from dspark_hf.decoding.processors import are_rowwise, mirrored
from tests.support.models import tiny_target


class Custom(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


class CustomTopK(TopKLogitsWarper):
    """A subclass may do anything."""


ROWWISE = [
    logits_process.TemperatureLogitsWarper(0.5),
    logits_process.TopKLogitsWarper(3),
    logits_process.TopPLogitsWarper(0.5),
    logits_process.TopHLogitsWarper(0.4),
    logits_process.MinPLogitsWarper(0.1),
    logits_process.TypicalLogitsWarper(0.5),
    logits_process.EpsilonLogitsWarper(0.02),
    logits_process.EtaLogitsWarper(0.02),
    logits_process.InfNanRemoveLogitsProcessor(),
    logits_process.LogitNormalization(),
]
READS_TEXT = [
    logits_process.RepetitionPenaltyLogitsProcessor(1.5),
    logits_process.NoRepeatNGramLogitsProcessor(2),
    logits_process.NoBadWordsLogitsProcessor([[4, 5]]),
    logits_process.MinLengthLogitsProcessor(9, torch.tensor([2])),
    logits_process.MinNewTokensLengthLogitsProcessor(2, 5, torch.tensor([2])),
    logits_process.ForcedEOSTokenLogitsProcessor(9, torch.tensor([2])),
    logits_process.SequenceBiasLogitsProcessor([[[3], 2.0]]),
    logits_process.ExponentialDecayLengthPenalty((2, 1.1), torch.tensor([2]), 3),
    logits_process.SuppressTokensAtBeginLogitsProcessor([4], 3),
    PrefixConstrainedLogitsProcessor(lambda batch_id, ids: [3, 4], 1),
]


def name(processor):
    return type(processor).__name__


@pytest.mark.parametrize("processor", ROWWISE, ids=name)
def test_rowwise_ones_treat_rows_alike_and_alone(processor):
    """What the classification promises: many rows at once is each row alone, whatever the text."""
    assert are_rowwise(LogitsProcessorList([processor]))
    scores = torch.randn(4, 30)
    together = processor(torch.tensor([[1, 2, 3]]), scores.clone())
    alone = [processor(torch.tensor([[9, 9]]), row[None].clone()) for row in scores]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("processor", [*READS_TEXT, Custom(), CustomTopK(3)], ids=name)
def test_all_others_are_not_rowwise(processor):
    assert not are_rowwise(LogitsProcessorList([processor]))
    assert not are_rowwise(LogitsProcessorList([ROWWISE[0], processor, ROWWISE[1]]))


def test_no_processors_are_rowwise():
    assert are_rowwise(LogitsProcessorList())
    assert are_rowwise(LogitsProcessorList(ROWWISE))


def test_the_library_s_own_are_mirrored_in_order():
    processors = LogitsProcessorList([*READS_TEXT, *ROWWISE])
    assert list(mirrored(processors)) == [*READS_TEXT, *ROWWISE]


def test_stateful_and_foreign_ones_are_not_mirrored():
    guidance = logits_process.UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, tiny_target())
    watermark = logits_process.SynthIDTextWatermarkLogitsProcessor(
        ngram_len=3, keys=[1, 2], sampling_table_size=8, sampling_table_seed=0, context_history_size=4, device="cpu"
    )
    processors = LogitsProcessorList([Custom(), guidance, ROWWISE[0], CustomTopK(3), watermark])
    assert list(mirrored(processors)) == [ROWWISE[0]]
    assert len(processors) == 5, "the target's own list was changed"
