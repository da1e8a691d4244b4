# SPDX-License-Identifier: Apache-2.0
"""What the doctor reads from configs and weights, and what it makes of numbers."""

import json
import types

import pytest
import torch
import transformers

from dspark_hf import DSparkConfig, DSparkDraftModel, RoundRecord
from dspark_hf.common.chat import template_hash
from dspark_hf.common.prompts import Prompt
from dspark_hf.common.thinking import with_thinking
from dspark_hf.doctor import ADVICE, FAULT, Diagnosis, Finding, Gain, Probe
from dspark_hf.doctor.config_checks import check_config, plain_name
from dspark_hf.doctor.diagnosis import DEFAULT_PROMPTS
from dspark_hf.doctor.pair import Pair
from dspark_hf.doctor.probing import Alternative, alternatives, changed, explanation, judge_probe
from dspark_hf.doctor.speedup import (
    break_even_tokens,
    first_draft_s,
    gain_from,
    gain_sentences,
    judge_gain,
    load_limit,
    token_seconds,
)
from dspark_hf.doctor.weight_checks import check_weights, looks_fresh, rows_distance
from dspark_hf.evaluation.compare import PromptComparison
from dspark_hf.evaluation.timed import TimedAnswer
from dspark_hf.scheduling import SPSCurve
from tests.support.models import oracle_draft, random_draft, tiny_target
from tests.support.training import TEMPLATE, word_tokenizer


@pytest.fixture
def target():
    model = tiny_target()
    model.generation_config.eos_token_id = 2
    return model


@pytest.fixture
def draft(target):
    return oracle_draft(target)


def pair_of(target, draft, tokenizer=None, **arguments):
    return Pair(target, draft, tokenizer if tokenizer is not None else word_tokenizer(), **arguments)


def found(pair) -> dict[str, str]:
    return {finding.code: finding.severity for finding in [*check_config(pair), *check_weights(pair)]}


def sentence(pair, code) -> str:
    (finding,) = [f for f in [*check_config(pair), *check_weights(pair)] if f.code == code]
    assert finding.sentence.endswith(".")
    assert finding.remedy.endswith(".")
    return f"{finding.sentence} {finding.remedy}"


def test_a_good_pair_is_not_found_fault_with(target, draft):
    assert found(pair_of(target, draft)) == {}


# Configs


def test_hidden_size(target):
    draft = random_draft(hidden_size=48, target_name_or_path="someone/Other-4B")
    pair = pair_of(target, draft)
    assert found(pair)["hidden_size"] == FAULT
    assert "width 48, and those of the target have width 32" in sentence(pair, "hidden_size")
    assert "(someone/Other-4B)" in sentence(pair, "hidden_size")


def test_vocabulary_padded(draft):
    pair = pair_of(tiny_target(vocab_size=104), draft)
    assert found(pair)["vocabulary_padded"] == FAULT
    assert "resize_token_embeddings(97)`." in sentence(pair, "vocabulary_padded")


def test_another_vocabulary(draft):
    pair = pair_of(tiny_target(vocab_size=64), draft)
    assert found(pair)["vocabulary_size"] == FAULT
    assert "vocabulary_padded" not in found(pair)


def test_layer_ids_beyond_the_depth(target):
    draft = random_draft(target_layer_ids=[1, 3], num_target_layers=None)
    assert found(pair_of(target, draft))["layer_ids"] == FAULT


def test_another_depth(target):
    draft = random_draft(num_target_layers=6)
    assert found(pair_of(target, draft))["target_depth"] == FAULT


def test_mask_token_without_a_row(target, draft):
    target.set_input_embeddings(torch.nn.Embedding(96, 32))
    assert found(pair_of(target, draft))["mask_token_missing"] == FAULT


def test_mask_row_of_zeros(target, draft):
    with torch.no_grad():
        target.get_input_embeddings().weight[96] = 0
    assert found(pair_of(target, draft)) == {"mask_row_zero": ADVICE}


@pytest.mark.parametrize(("mask", "token"), [(20, "'w20'"), (2, "'<eos>'")])
def test_mask_token_that_texts_hold(target, draft, mask, token):
    draft.config.mask_token_id = mask
    pair = pair_of(target, draft)
    assert found(pair) == {"mask_token_written": ADVICE}
    assert token in sentence(pair, "mask_token_written")


def test_rope_and_epsilon(target, draft):
    draft.config.rope_parameters = {"rope_type": "default", "rope_theta": 500.0}
    draft.config.rms_norm_eps = 1e-3
    pair = pair_of(target, draft)
    assert found(pair) == {"rope_theta": ADVICE, "rms_norm_eps": ADVICE}
    assert "500.0 in the draft and 10000.0 in the target" in sentence(pair, "rope_theta")


def test_block_larger_than_trained(target, draft):
    draft.config.training_info = {"block_size": 3}
    assert found(pair_of(target, draft)) == {"block_larger_than_trained": FAULT}
    draft.config.training_info = {"block_size": 4}
    assert found(pair_of(target, draft)) == {}


def test_more_drafts_than_slots(target, draft):
    draft.generation_config.num_assistant_tokens = 5
    pair = pair_of(target, draft)
    assert found(pair) == {"knobs": FAULT}
    assert "[1, 4]" in sentence(pair, "knobs")


def test_template(target, draft):
    draft.config.training_info = {"chat_template_sha256": template_hash(word_tokenizer())}
    assert found(pair_of(target, draft)) == {}
    assert found(pair_of(target, draft, raw=True)) == {"template_unused": FAULT}
    assert found(pair_of(target, draft, word_tokenizer(template=TEMPLATE + " "))) == {"template_differs": FAULT}


@pytest.mark.parametrize(
    ("recorded", "used", "is_fault"),
    [
        (False, None, True),
        (False, True, True),
        (False, False, False),
        (True, None, False),  # this template thinks by itself
        (None, None, False),
        (None, False, True),
    ],
)
def test_thinking_switch(target, draft, recorded, used, is_fault):
    draft.config.training_info = {"enable_thinking": recorded}
    pair = pair_of(target, draft, enable_thinking=used)
    assert found(pair) == ({"thinking_switch": FAULT} if is_fault else {})


def test_the_switch_leaves_the_tokenizer_alone():
    tokenizer = word_tokenizer()
    messages = [{"role": "user", "content": "w9"}]
    switched = with_thinking(tokenizer, False).apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    assert switched == tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False, enable_thinking=False
    )
    assert "nothink" in switched
    assert tokenizer.chat_template == TEMPLATE


def test_target_renamed(target, draft):
    target.config.name_or_path = "folder/Tiny-2-Base"
    draft.config.target_name_or_path = "someone/Tiny-2"
    pair = pair_of(target, draft)
    assert found(pair) == {"target_name": ADVICE}
    assert "trained for someone/Tiny-2, and the target here is folder/Tiny-2-Base" in sentence(pair, "target_name")


@pytest.mark.parametrize(
    "name", ["Tiny-2", "tiny-2-bf16", "a/b/Tiny-2-AWQ/", "Tiny-2-GPTQ-Int4", "C:\\models\\Tiny-2"]
)
def test_storage_formats_are_no_other_name(name):
    assert plain_name(name) == "tiny-2"


def test_end_of_text(target, draft):
    target.generation_config.eos_token_id = [7, 8]
    assert found(pair_of(target, draft)) == {"eos_differs": ADVICE}
    target.generation_config.eos_token_id = None
    assert found(pair_of(target, draft)) == {"eos_missing": ADVICE}


def test_dtypes_differ(target, draft):
    pair = pair_of(target, draft.to(torch.bfloat16))
    assert found(pair) == {"dtype": ADVICE}
    assert "bfloat16 and the target in float32" in sentence(pair, "dtype")


def test_eager_attention(target, draft):
    target.set_attn_implementation("eager")
    assert found(pair_of(target, draft)) == {"attention_eager": ADVICE}


# Weights


@torch.no_grad()
def fill(draft, name, value):
    dict(draft.named_parameters())[name].fill_(value)
    return draft


def test_weights_that_are_not_finite(target, draft):
    with torch.no_grad():
        draft.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    pair = pair_of(target, draft)
    assert found(pair) == {"weights_not_finite": FAULT}
    assert "layers.1.mlp.up_proj.weight" in sentence(pair, "weights_not_finite")


def test_weights_that_are_all_equal(target, draft):
    assert found(pair_of(target, fill(draft, "fc.weight", 0.0))) == {"weights_constant": FAULT}


def test_draft_that_was_never_trained(target, draft):
    assert found(pair_of(target, fill(draft, "norm.weight", 1.0))) == {"draft_untrained": FAULT}


def test_half_of_the_layers_loaded(target, draft):
    with torch.no_grad():
        for name, parameter in draft.layers[0].named_parameters():
            if "norm" in name:
                parameter.add_(0.1)
    pair = pair_of(target, draft)
    assert found(pair) == {"half_loaded": FAULT}
    assert "of layers.1 are exactly 1" in sentence(pair, "half_loaded")


@pytest.mark.parametrize("name", ["markov_w1", "markov_w2"])
def test_head_of_zeros(target, draft, name):
    assert found(pair_of(target, fill(draft, f"markov_head.{name}.weight", 0.0))) == {"head_untrained": FAULT}


def test_head_as_it_was_initialised(target, draft):
    fresh = random_draft(seed=5, markov_rank=97)
    draft.markov_head.load_state_dict(fresh.markov_head.state_dict())
    assert found(pair_of(target, draft)) == {"head_untrained": FAULT}
    with torch.no_grad():
        draft.markov_head.markov_w2.weight.mul_(1.3)
    assert found(pair_of(target, draft)) == {}


def test_confidence_head_of_zeros(target, draft):
    assert found(pair_of(target, fill(draft, "confidence_head.proj.weight", 0.0))) == {"confidence_untrained": ADVICE}


def test_fresh_weights_have_a_size_and_a_shape():
    torch.manual_seed(1)
    fresh = 0.02 * torch.randn(200, 50)
    assert looks_fresh(fresh, 0.02)
    assert not looks_fresh(fresh, 0.021)
    assert not looks_fresh(0.02 * (torch.rand(200, 50) - 0.5) * 12**0.5, 0.02)  # as wide, but not normal


def test_embedding_copies(target, draft):
    weight = target.get_input_embeddings().weight.detach()
    draft.embedding_sample = {i: weight[i].clone() for i in (3, 50)}
    assert found(pair_of(target, draft)) == {}
    draft.embedding_sample = {i: weight[i] * 1.2 for i in (3, 50)}
    assert found(pair_of(target, draft)) == {"embedding_differs": ADVICE}
    other = tiny_target(seed=9).get_input_embeddings().weight.detach()
    draft.embedding_sample = {i: other[i] for i in (3, 50)}
    assert found(pair_of(target, draft)) == {"embedding_differs": FAULT}


def test_distance_of_rows():
    assert rows_distance(torch.tensor([[3.0, 5.0]]), torch.tensor([[3.0, 4.0]])) == pytest.approx(0.2)


# Probing


def probe(accepted_length, error=0.02, **arguments):
    return Probe(accepted_length, error, 100, **arguments)


def test_a_probe_counts_slots():
    rounds = [
        RoundRecord(1, (5, 6, 7), (), 2, 9, 3),
        RoundRecord(9, (5, 6, 7), (), 0, 4, 1),
        RoundRecord(4, (5, 6), (), 2, 9, 3),
        RoundRecord(9, (5, 6, 7), (), 3, 1, 4),
    ]
    counted = Probe.from_rounds(rounds)
    assert (counted.reached, counted.accepted) == ((4, 3, 2), (3, 3, 1))
    assert (counted.accepted_length, counted.num_rounds) == (11 / 4, 4)
    # 3, 1, 3, 4 around 2.75: squares 0.0625 + 3.0625 + 0.0625 + 1.5625 = 4.75, over 3, over 4 rounds
    assert counted.standard_error == pytest.approx((4.75 / 3 / 4) ** 0.5)


def test_only_a_clear_winner_explains():
    first, second = Alternative("a", "", ""), Alternative("b", "", "")
    assert explanation(probe(1.1), []) is None
    assert explanation(probe(1.1), [(first, probe(1.2)), (second, probe(1.28))]) is None  # below the margin
    assert explanation(probe(1.1), [(first, probe(1.9)), (second, probe(1.4))]) == (first, probe(1.9))
    assert explanation(probe(1.1), [(first, probe(1.9, error=0.4))]) is None  # within the noise
    other_text = Alternative("c", "", "", raw=True)
    assert explanation(probe(1.1), [(other_text, probe(1.8)), (first, probe(1.4))]) == (first, probe(1.4))
    assert explanation(probe(1.1), [(other_text, probe(1.9))]) == (other_text, probe(1.9))


def test_what_probes_mean():
    (finding,) = judge_probe(probe(1.1), (Alternative("slots", "Slots are shifted", "Shift."), probe(2.5)))
    assert finding == Finding(
        "slots", FAULT, "Slots are shifted: then a round yields 2.50 tokens, and now 1.10.", "Shift."
    )
    assert [(f.code, f.severity) for f in judge_probe(probe(1.14), None)] == [("acceptance_near_one", FAULT)]
    assert judge_probe(probe(1.16), None) == []


@pytest.mark.parametrize(
    ("reached", "accepted", "slot"),
    [
        ((100, 60, 30), (60, 30, 1), 2),
        ((100, 60, 30), (60, 2, 0), 1),
        ((100, 60, 19), (60, 19, 0), None),  # too few rounds
        ((100, 20, 0), (20, 0, 0), None),  # a weak draft, not a dead slot
        ((100, 60, 30), (60, 30, 2), None),
    ],
)
def test_dead_slots(reached, accepted, slot):
    findings = judge_probe(probe(2.0, reached=reached, accepted=accepted), None)
    assert [f.code for f in findings] == ([] if slot is None else ["block_tail"])
    if slot is not None:
        assert findings[0].severity == ADVICE
        assert findings[0].remedy.endswith(f"num_assistant_tokens = {slot}`.")


def test_alternatives_of_a_pair(target):
    draft = random_draft(
        target_layer_ids=[0, 1],
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=6,
        rope_parameters={"rope_type": "default", "rope_theta": 7.0},
    )
    tried = alternatives(pair_of(target, draft))
    assert [dict(a.fields) for a in tried if a.code == "layer_ids_shifted"] == [
        {"target_layer_ids": [1, 2]},
        {"target_layer_ids": [-1, 0]},
    ]
    assert {a.code: dict(a.fields) for a in tried if a.code in ("slots_shifted", "window_direction", "rope")} == {
        "slots_shifted": {"sample_from_anchor": False},
        "window_direction": {"sliding_window_non_causal": True},
        "rope": {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
    }
    assert [a.raw for a in tried if a.code == "template_not_wanted"] == [True]
    assert [a.enable_thinking for a in tried if a.code == "thinking_switch"] == [False, True]
    assert [dict(a.fields) for a in tried if a.code == "mask_token"] == [{"mask_token_id": 0}]


def test_alternatives_that_cannot_be_are_left_out(target):
    tried = alternatives(pair_of(target, random_draft(), word_tokenizer(template=None)))
    # [1, 3] would read the last layer; there is no template, no sliding layer, no other RoPE.
    assert [a.code for a in tried] == ["layer_ids_shifted", "slots_shifted", "mask_token"]
    with_template = alternatives(pair_of(target, random_draft()), other_prompting=False)
    assert [a.code for a in with_template] == [a.code for a in tried]
    assert [a.code for a in alternatives(pair_of(target, random_draft(block_size=1)))].count("slots_shifted") == 0


def test_changes_are_taken_back(draft):
    before, rotary = draft.config.to_dict(), draft.rotary_emb
    angles = rotary.inv_freq.clone()
    fields = {"target_layer_ids": [1], "rope_parameters": {"rope_type": "default", "rope_theta": 3.0}}
    seen = []

    def stop():
        seen.extend([draft.config.target_layer_ids, torch.equal(draft.rotary_emb.inv_freq, angles)])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), changed(draft, fields):
        stop()
    assert seen == [[1], False]
    assert draft.config.to_dict() == before
    assert draft.rotary_emb is rotary
    assert torch.equal(rotary.inv_freq, angles)


# Speed


def comparison(plain_s, dspark_s, rounds, plain=(1,) * 5, dspark=(1,) * 5):
    sides = (TimedAnswer(plain_s, (plain,), (plain_s,)), TimedAnswer(dspark_s, (dspark,), (dspark_s,), tuple(rounds)))
    return PromptComparison(Prompt("x", "x"), *sides)


def timed(num_committed, draft_s, round_s, drafted=True):
    return RoundRecord(1, (5,), (), num_committed - 1, 1, num_committed, draft_s, 0.0, round_s, drafted)


RESULTS = [
    # 1 s of prefill, then 4 tokens in 4 s without and in 3 s with the draft
    comparison(5.0, 4.0, [timed(2, 0.75, 1.5), timed(1, 0.25, 0.75), timed(1, 0.0, 0.75, drafted=False)]),
    comparison(10.0, 5.0, [timed(2, 0.5, 1.0), timed(2, 0.25, 1.0)]),  # 3 s of prefill, 4 tokens in 7 and in 2 s
]


def test_seconds_per_token():
    assert token_seconds(RESULTS) == ((4 + 7) / 8, (3 + 2) / 8)


def test_cost_of_reading_the_prompt():
    assert first_draft_s(RESULTS) == pytest.approx((0.5 + 0.25) / 2)
    assert first_draft_s([comparison(1.0, 1.0, [timed(4, 0.5, 1.0)])]) == 0


def test_break_even():
    assert break_even_tokens(3.0, 2.0, 0.5) == 2.0
    assert break_even_tokens(3.0, 0.5, 0.5) is None


def test_figures_of_a_comparison():
    gain = gain_from(RESULTS, load=(4, 8))
    assert (gain.speedup, gain.lowest, gain.highest) == pytest.approx((15 / 9, 5 / 4, 2.0))
    assert (gain.num_prompts, gain.num_tokens, gain.num_identical) == (2, 10, 2)
    assert gain.break_even_tokens == pytest.approx(0.375 / (11 / 8 - 5 / 8))
    assert (gain.load_limit, gain.load_tried) == (4, 8)


def full_block(num_accepted):
    return RoundRecord(1, (5, 6), (0.95, 0.95) if num_accepted else (0.05, 0.05), num_accepted, 7, num_accepted + 1)


def test_load_limit():
    rounds = [full_block(2)] * 60 + [full_block(0)] * 4
    flat = SPSCurve((1, 2, 3), (1.0, 1.0, 1.0))  # more tokens cost nothing
    assert load_limit(rounds, flat, 2) == (2, 2)
    # 4 requests verify up to 12 tokens in 1 s; 8 requests fill 8 places, and each draft more costs 1 s.
    cliff = SPSCurve((1, 12, 16, 24), (1.0, 1.0, 5.0, 13.0), draft_s=0.1)
    assert load_limit(rounds, cliff, 2) == (8, 16)
    dear = SPSCurve((1, 2, 3), (1.0, 1.0, 1.0), draft_s=9.0)
    assert load_limit(rounds, dear, 2) == (0, 2)
    assert load_limit([RoundRecord(1, (5, 6), (), 1, 7, 2)], flat, 2) is None  # no confidence head


def gain(**arguments):
    defaults = {
        "speedup": 1.25,
        "lowest": 0.9,
        "highest": 1.5,
        "num_prompts": 6,
        "num_tokens": 288,
        "accepted_length": 2.1,
        "num_identical": 6,
        "plain_token_s": 0.02,
        "dspark_token_s": 0.01,
        "break_even_tokens": 10.2,
        "load_limit": 8,
        "load_tried": 16,
    }
    return Gain(**(defaults | arguments))


def test_gain_in_words():
    first, second, third = gain_sentences(gain())
    assert first.startswith("Expect 1.25 times the speed of plain generation")
    assert "(0.90 to 1.50 from prompt to prompt)" in first
    assert second == "It pays for answers of 12 tokens or more."
    assert gain_sentences(gain(break_even_tokens=2.0))[1] == "It pays for answers of any length."
    assert third.startswith("It pays up to 8 request(s) at a time")
    assert third.endswith("measured with one request.")
    assert "up to at least 16 request(s)" in gain_sentences(gain(load_limit=16))[2]
    never = gain_sentences(gain(break_even_tokens=None, load_limit=None))
    assert never[1:] == ["It does not pay for answers of any length."]
    assert "does not pay for one request" in gain_sentences(gain(load_limit=0))[2]


def test_slower_than_plain_generation():
    assert judge_gain(gain(), "bfloat16", "cpu") == []
    slow = {"speedup": 0.8}
    remedies = [
        judge_gain(gain(**slow, accepted_length=tau), dtype, "cpu")[0].remedy
        for dtype, tau in (("float32", 3.0), ("bfloat16", 1.4), ("bfloat16", 3.0))
    ]
    assert ["try bfloat16" in remedies[0], "better draft" in remedies[1], "profile" in remedies[2]] == [True] * 3
    assert judge_gain(gain(**slow), "bfloat16", "cpu")[0].severity == ADVICE


# The report


def test_default_prompts_begin_with_every_domain():
    assert [prompt.domain for prompt in DEFAULT_PROMPTS] == ["math", "code", "chat"] * 2
    assert len(set(DEFAULT_PROMPTS)) == 6


def test_report():
    advice, fault = Finding("a", ADVICE, "A.", "B."), Finding("f", FAULT, "F.", "G.")
    healthy = Diagnosis("my target", "d", (advice,), probe(2.0, error=float("inf")), gain())
    assert (healthy.exit_status, healthy.faults) == (0, ())
    assert len(healthy.sentences()) == 4
    assert "--target 'my target' " in healthy.training_commands[1]
    written = json.loads(json.dumps(healthy.to_dict(), allow_nan=False))
    assert written["probe"]["standard_error"] is None
    assert written["findings"] == [{"code": "a", "severity": "advice", "sentence": "A.", "remedy": "B."}]
    ill = Diagnosis("t", "d", (fault, advice))
    assert (ill.exit_status, ill.faults) == (1, (fault,))
    assert ill.sentences() == ["The pair was not run: fix the faults below first."]


def test_targets_without_a_plain_embedding_are_not_read(target, draft):
    """An offloaded or quantised embedding has no weights to look at."""
    draft.embedding_sample = {3: torch.zeros(32)}
    target.get_input_embeddings = lambda: types.SimpleNamespace(num_embeddings=97)
    assert found(pair_of(target, draft)) == {}


@pytest.mark.parametrize("kind", ["gemma4", "gpt2", "mpt"])
def test_targets_whose_configs_have_other_names(kind):
    """A draft made for a target with widths per layer, or under other names, is found sound, an altered one is not."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16}
    layers = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}
    other = {"hidden_size": 32, "intermediate_size": 64, "hidden_size_per_layer_input": 0}
    config = {
        "gemma4": lambda: transformers.Gemma4TextConfig(vocab_size=97, **heads, **layers, **other),
        "gpt2": lambda: transformers.GPT2Config(vocab_size=97, n_embd=32, n_head=4, n_layer=4),
        "mpt": lambda: transformers.MptConfig(vocab_size=97, d_model=32, n_heads=4, n_layers=4),
    }[kind]()
    target = transformers.AutoModelForCausalLM.from_config(config).eval()
    made = DSparkDraftModel(DSparkConfig.from_target(config, mask_token_id=96, markov_rank=8))
    assert not {"rope_theta", "rope_type", "rms_norm_eps"} & set(found(pair_of(target, made)))
    made.config.rope_parameters["rope_theta"] = 12345.0
    assert found(pair_of(target, made))["rope_theta"] == ADVICE
