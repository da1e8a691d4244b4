# SPDX-License-Identifier: Apache-2.0

import json
import re

import pytest
from transformers import AutoConfig

from dspark_hf import DSparkConfig
from dspark_hf.drafts.configuration_dspark import spread_layer_ids
from dspark_hf.drafts.target_binding import bind
from tests.support.models import MASK_TOKEN_ID, TARGET_KINDS, VOCAB_SIZE, tiny_config, tiny_target


def test_defaults_are_derived():
    config = DSparkConfig(num_attention_heads=8, hidden_size=64, num_hidden_layers=3, mask_token_id=4)
    assert config.num_key_value_heads == 8
    assert config.head_dim == 8
    assert config.layer_types == ["full_attention"] * 3
    assert config.draft_vocab_size is None
    assert config.model_type == "dspark_draft"
    assert config.sample_from_anchor is True
    assert config.markov_rank == 256
    assert config.tie_word_embeddings is False


def test_given_values_win():
    config = tiny_config(num_key_value_heads=1, head_dim=4, layer_types=["full_attention", "full_attention"])
    assert (config.num_key_value_heads, config.head_dim) == (1, 4)


@pytest.mark.parametrize(("sample_from_anchor", "expected"), [(True, 5), (False, 4)])
def test_draft_slots(sample_from_anchor, expected):
    assert tiny_config(block_size=5, sample_from_anchor=sample_from_anchor).num_draft_slots == expected


def test_whole_vocabulary_is_not_a_reduced_one():
    assert tiny_config(draft_vocab_size=VOCAB_SIZE).draft_vocab_size is None
    assert tiny_config(draft_vocab_size=VOCAB_SIZE - 1).draft_vocab_size == VOCAB_SIZE - 1


ERRORS = [
    ({"vocab_size": 0}, "`vocab_size` must be an integer >= 1, got 0"),
    ({"hidden_size": 0}, "`hidden_size` must be an integer >= 1, got 0"),
    ({"intermediate_size": -3}, "`intermediate_size` must be an integer >= 1, got -3"),
    ({"num_hidden_layers": 0}, "`num_hidden_layers` must be an integer >= 1, got 0"),
    ({"num_attention_heads": 0}, "`num_attention_heads` must be an integer >= 1, got 0"),
    ({"num_key_value_heads": 0}, "`num_key_value_heads` must be an integer >= 1, got 0"),
    ({"head_dim": 0}, "`head_dim` must be an integer >= 1, got 0"),
    ({"block_size": 0}, "`block_size` must be >= 1 with `sample_from_anchor=True`, got 0"),
    (
        {"block_size": 1, "sample_from_anchor": False},
        "`block_size` must be >= 2 with `sample_from_anchor=False`, got 1",
    ),
    (
        {"num_attention_heads": 4, "num_key_value_heads": 3},
        "`num_attention_heads` must be a multiple of `num_key_value_heads`, got 4 and 3",
    ),
    ({"layer_types": ["full_attention"]}, "for each of the 2 layers, got ['full_attention']"),
    (
        {"layer_types": ["sliding_attention", "full_attention"]},
        "`sliding_window` must be >= 1 when `layer_types` has sliding layers, got None",
    ),
    (
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 0},
        "`sliding_window` must be >= 1 when `layer_types` has sliding layers, got 0",
    ),
    ({"markov_rank": -1}, "`markov_rank` must be >= 0 (0: no sequential head), got -1"),
    ({"markov_head_type": "lstm"}, "`markov_head_type` must be one of ('vanilla', 'gated', 'rnn'), got 'lstm'"),
    ({"markov_rank": 0}, "`confidence_head_with_markov=True` needs the sequential head's token embedding"),
    ({"draft_vocab_size": 0}, f"`draft_vocab_size` must lie in [1, vocab_size={VOCAB_SIZE}], got 0"),
    ({"draft_vocab_size": 98}, f"`draft_vocab_size` must lie in [1, vocab_size={VOCAB_SIZE}], got 98"),
    ({"mask_token_id": 97}, f"`mask_token_id` must be a row of the target's embedding, in [0, {VOCAB_SIZE}), got 97"),
    ({"mask_token_id": -1}, f"`mask_token_id` must be a row of the target's embedding, in [0, {VOCAB_SIZE}), got -1"),
    ({"target_layer_ids": []}, "`target_layer_ids` must be a non-empty list of integers, got []"),
    ({"target_layer_ids": [1, 1]}, "`target_layer_ids` must not repeat a layer, got [1, 1]"),
    ({"target_layer_ids": [-2, 1]}, "`target_layer_ids` must be >= -1 (-1: the embedding output), got [-2, 1]"),
    ({"target_layer_ids": [0, 3]}, "`target_layer_ids` must lie below the target's last layer 3, got [0, 3]"),
]


@pytest.mark.parametrize(("overrides", "message"), ERRORS, ids=[str(overrides) for overrides, _ in ERRORS])
def test_contradictions_are_refused(overrides, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        tiny_config(**overrides)


@pytest.mark.parametrize("overrides", [{"layer_types": ["full_attention", "linear"]}, {"block_size": "4"}])
def test_values_of_another_kind_are_refused(overrides):
    with pytest.raises(Exception, match=next(iter(overrides))):  # the library's own check or ours
        tiny_config(**overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        {"target_layer_ids": [-1]},
        {"target_layer_ids": [2]},
        {"target_layer_ids": [7], "num_target_layers": None},
        {"mask_token_id": 0},
        {"markov_rank": 0, "enable_confidence_head": False},
        {"markov_rank": 0, "confidence_head_with_markov": False, "markov_head_type": "none"},
        {"block_size": 1},
        {"block_size": 2, "sample_from_anchor": False},
    ],
)
def test_edges_are_accepted(overrides):
    config = tiny_config(**overrides)
    assert {name: getattr(config, name) for name in overrides} == overrides


@pytest.mark.parametrize(
    ("name", "meaning"), [("mask_token_id", "the embedding row"), ("target_layer_ids", "the target layers")]
)
def test_what_cannot_be_guessed_must_be_set(name, meaning):
    config = tiny_config(**{name: None})
    with pytest.raises(ValueError, match=f"`{name}` must be set, got None: {meaning}"):
        config.require_target_fields()
    tiny_config().require_target_fields()


def test_transformers_can_build_one_without_arguments():
    """It does so to find what differs from the defaults, before it writes a config."""
    assert DSparkConfig().block_size == 7
    written = tiny_config().to_diff_dict()
    assert {"block_size", "sample_from_anchor", "target_layer_ids", "mask_token_id"} <= set(written)


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"draft_vocab_size": 48, "markov_head_type": "rnn", "target_name_or_path": "some/target"},
        {
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 6,
            "sliding_window_non_causal": True,
            "sample_from_anchor": False,
        },
        {"rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"}, "target_layer_ids": [-1, 2]},
    ],
)
def test_save_and_load(tmp_path, overrides):
    config = tiny_config(**overrides)
    config.save_pretrained(tmp_path)
    for loaded in (DSparkConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert type(loaded) is DSparkConfig
        ours, theirs = config.to_dict(), loaded.to_dict()
        for fields in (ours, theirs):
            fields.pop("_name_or_path", None)
            fields.pop("transformers_version", None)
        assert theirs == ours


def test_rope_in_the_old_schema():
    assert tiny_config(rope_theta=1234.0).rope_parameters["rope_theta"] == 1234.0


def test_helpers_are_consistent():
    assert tiny_config().mask_token_id == MASK_TOKEN_ID < VOCAB_SIZE


# A new draft for a target.


@pytest.mark.parametrize("kind", TARGET_KINDS)
def test_from_target_fits_its_target(kind):
    target = tiny_target(kind)
    config = DSparkConfig.from_target(target.config, mask_token_id=MASK_TOKEN_ID, block_size=5)
    bind(target, config)  # refuses what does not fit
    assert config.block_size == 5
    assert config.num_hidden_layers == 2
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 8)
    assert config.target_layer_ids == [0, 1, 2]
    assert config.layer_types == ["full_attention"] * 2
    full = target.config.rope_parameters.get("full_attention", target.config.rope_parameters)
    assert config.rope_parameters["rope_theta"] == full["rope_theta"]


def test_from_target_overrides_win_and_are_checked():
    config = DSparkConfig.from_target(
        tiny_target().config, MASK_TOKEN_ID, num_taps=1, markov_rank=3, hidden_act="gelu"
    )
    assert (config.target_layer_ids, config.markov_rank, config.hidden_act) == ([1], 3, "gelu")
    with pytest.raises(ValueError, match="below the target's last layer 3"):
        DSparkConfig.from_target(tiny_target().config, MASK_TOKEN_ID, target_layer_ids=[3])


@pytest.mark.parametrize(
    ("depth", "num_taps", "expected"),
    [
        (30, 5, [1, 8, 14, 20, 27]),
        (36, 5, [1, 9, 17, 25, 33]),
        (30, 1, [14]),
        (4, 5, [0, 1, 2]),
        (4, 2, [1, 2]),
        (2, 1, [0]),
        (2, 5, [0]),
    ],
)
def test_layers_are_spread(depth, num_taps, expected):
    assert spread_layer_ids(depth, num_taps) == expected


def test_spread_layers_are_always_allowed():
    for depth in range(2, 100):
        for num_taps in range(1, 14):
            ids = spread_layer_ids(depth, num_taps)
            assert len(ids) == min(num_taps, depth - 1)
            assert ids == sorted(set(ids))
            assert ids[0] >= 0
            assert ids[-1] <= depth - 2


@pytest.mark.parametrize(("depth", "num_taps"), [(1, 1), (5, 0)])
def test_nothing_to_read_is_refused(depth, num_taps):
    with pytest.raises(ValueError, match=f"got {depth} layers and {num_taps} taps"):
        spread_layer_ids(depth, num_taps)


# Calibration.


CALIBRATION = {
    "confidence_temperatures": [1.5, 1.0, 0.5, 2.0],
    "acceptance_prior": [0.75, 0.5, 0.0, 1.0],
    "copy_prior": [0.25, 0.5, 0.625, 0.75, 0.75, 0.875, 1.0],
    "calibration_info": {"num_rounds": 200, "decoding": "greedy"},
}


def test_calibration_is_saved_and_loaded(tmp_path):
    tiny_config(**CALIBRATION).save_pretrained(tmp_path)
    loaded = DSparkConfig.from_pretrained(tmp_path)
    assert {name: getattr(loaded, name) for name in CALIBRATION} == CALIBRATION


def test_config_of_before_calibration_loads(tmp_path):
    tiny_config(**CALIBRATION).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k not in CALIBRATION}))
    loaded = DSparkConfig.from_pretrained(tmp_path)
    assert [getattr(loaded, name) for name in CALIBRATION] == [None] * 4


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("confidence_temperatures", [1.0, 1.0, 1.0]),
        ("confidence_temperatures", [1.0] * 5),
        ("confidence_temperatures", [1.0, 1.0, 0.0, 1.0]),
        ("confidence_temperatures", [1.0, -2.0, 1.0, 1.0]),
        ("confidence_temperatures", [1.0, float("inf"), 1.0, 1.0]),
        ("confidence_temperatures", [1.0, float("nan"), 1.0, 1.0]),
        ("acceptance_prior", [0.5, 0.5]),
        ("acceptance_prior", [0.5, 1.25, 0.5, 0.5]),
        ("acceptance_prior", [0.5, -0.25, 0.5, 0.5]),
        ("acceptance_prior", [0.5, float("nan"), 0.5, 0.5]),
    ],
)
def test_calibration_of_another_draft_or_out_of_range_is_refused(name, values):
    allowed = {"confidence_temperatures": "positive and finite", "acceptance_prior": "in [0, 1]"}[name]
    message = f"`{name}` must be a list of 4 numbers, one for each draft slot and each {allowed}, got {values!r}"
    with pytest.raises(ValueError, match=re.escape(message)):
        tiny_config(**{name: values})


@pytest.mark.parametrize("values", [[0.5] * 4, [0.5] * 6 + [1.5], [0.5] * 6 + [float("nan")], "high"])
def test_a_copy_prior_of_other_classes_or_out_of_range_is_refused(values):
    message = "`copy_prior` must be a list of 7 numbers, one for each class of match lengths and each in [0, 1], got "
    with pytest.raises(ValueError, match=re.escape(f"{message}{values!r}")):
        tiny_config(copy_prior=values)


def test_one_value_per_slot_where_slot_0_repeats_the_anchor():
    fields = {"block_size": 4, "sample_from_anchor": False}
    assert tiny_config(**fields, acceptance_prior=[0.5, 0.25, 0.0]).acceptance_prior == [0.5, 0.25, 0.0]
    with pytest.raises(ValueError, match="must be a list of 3 numbers"):
        tiny_config(**fields, acceptance_prior=[0.5] * 4)
