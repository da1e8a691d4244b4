# SPDX-License-Identifier: Apache-2.0
"""Conversions keep every tensor bit for bit and every field; what a format cannot represent is an error."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dspark_hf import DSparkConfig, DSparkDraftModel
from dspark_hf.export import convert
from dspark_hf.export.convert import convert_draft, parse_stated
from dspark_hf.export.engine_files import cost_table, sps_table, sts_calibration, write_engine_files
from dspark_hf.scheduling import SPSCurve
from tests.support.models import random_draft, tiny_config, tiny_target


GOLDEN = Path(__file__).parents[2] / "data" / "golden"
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
# Golden draft: the formats that have words for it.
SOURCES = {
    "qwen3_gated": ("dspark", "deepspec", "speculators"),
    "qwen3_dflash": ("dspark", "deepspec", "speculators"),
    "gemma4_vanilla": ("dspark", "deepspec"),
    "gemma4_mix": ("dspark", "deepspec"),
    "zlab_dflash": ("dspark", "speculators"),
    "speculators_dspark/sliding_noncausal": ("dspark", "speculators"),
    "speculators_dflash/dflash": ("dspark", "speculators"),
}


def target_of(source: str) -> Path:
    own = GOLDEN / source / "target"
    return own if own.is_dir() else (GOLDEN / source).parent / "target"


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def fields_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def comparable(config: DSparkConfig) -> dict:
    skipped = ("_name_or_path", "transformers_version", "architectures", "target_name_or_path")
    return {name: value for name, value in config.to_dict().items() if name not in skipped}


@pytest.mark.parametrize("source", SOURCES)
def test_round_trips_keep_tensors_and_fields(source, tmp_path):
    """Through each format that has words for the draft, and back to ours."""
    original, target = GOLDEN / source / "draft", target_of(source)
    draft = DSparkDraftModel.from_pretrained(original)
    stored, names = tensors_of(original), set(draft.state_dict())
    for to in SOURCES[source]:
        there = convert_draft(original, to, tmp_path / to, target=target)
        back = convert_draft(there.folder, "dspark", tmp_path / f"{to}-back")
        for folder in (there.folder, back.folder):
            written = tensors_of(folder)
            assert all(torch.equal(written[name], stored[name]) for name in names)
            assert all(written[name].dtype == stored[name].dtype for name in names)
        assert set(tensors_of(back.folder)) == names
        expected = comparable(draft.config)
        if expected["num_target_layers"] is None:  # some formats do not say it; the target does
            expected["num_target_layers"] = there.config.num_target_layers
            assert there.config.num_target_layers >= 5
        assert comparable(there.config) == comparable(back.config) == expected
        assert back.config.target_name_or_path == str(target)


def test_deepspec_layout_holds_the_targets_tensors(tmp_path):
    for source in ("qwen3_vanilla", "gemma4_mix"):
        target = AutoModelForCausalLM.from_pretrained(target_of(source))
        folder = convert_draft(
            GOLDEN / source / "draft", "deepspec", tmp_path / source, target=target_of(source)
        ).folder
        written, original = tensors_of(folder), tensors_of(GOLDEN / source / "draft")
        assert torch.equal(written["embed_tokens.weight"], target.get_input_embeddings().weight)
        assert torch.equal(written["lm_head.weight"], target.get_output_embeddings().weight)
        assert set(written) == set(original)  # as DeepSpec wrote it, embedding and head included
        assert all(torch.equal(written[name], original[name]) for name in original)
        ours, theirs = fields_of(folder), fields_of(GOLDEN / source / "draft")
        differing = {name for name in theirs if name in ours and ours[name] != theirs[name]}
        # Training settings, and spellings of the same thing; stray keys of their RoPE are gone.
        allowed = {"num_anchors", "max_window_layers", "transformers_version", "rope_parameters"}
        assert differing <= allowed | {"num_global_key_value_heads"}
        assert ours["num_anchors"] == 512


def test_kinds_of_a_gemma4_file(tmp_path):
    source = GOLDEN / "gemma4_vanilla"
    fields = fields_of(convert_draft(source / "draft", "deepspec", tmp_path / "x", target=source / "target").folder)
    assert (fields["architectures"], fields["model_type"]) == (["Gemma4DSparkModel"], "gemma4_text")
    assert (fields["global_head_dim"], fields["num_global_key_value_heads"]) == (32, 1)
    assert fields["final_logit_softcapping"] == 8.0  # the target's
    assert fields["num_hidden_layers"] == 2
    assert fields["rope_parameters"]["full_attention"]["partial_rotary_factor"] == 0.25
    assert "per_layer_config" not in fields


def test_deepspec_copies_serve_where_no_target_is_given(tmp_path):
    source = GOLDEN / "qwen3_rnn" / "draft"
    folder = convert_draft(source, "deepspec", tmp_path / "again").folder
    assert all(torch.equal(tensors_of(folder)[name], tensor) for name, tensor in tensors_of(source).items())


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    tiny_target("llama").save_pretrained(folder)
    return folder


def save(folder: Path, **overrides) -> Path:
    random_draft(**overrides).save_pretrained(folder)
    return folder


KEPT = {
    "training_info": {"thinking": False, "data": "some"},
    "confidence_temperatures": [1.0, 0.5, 2.0, 1.25],
    "acceptance_prior": [0.9, 0.8, 0.7, 0.6],
    "copy_prior": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7],
    "calibration_info": {"rounds": 7},
}


@pytest.mark.parametrize("to", ["deepspec", "speculators"])
def test_what_only_we_record_is_kept(tmp_path, target, to):
    save(tmp_path / "own", **KEPT)
    there = convert_draft(tmp_path / "own", to, tmp_path / "there", target=target)
    back = convert_draft(there.folder, "dspark", tmp_path / "back").config
    assert {name: getattr(back, name) for name in KEPT} == KEPT
    assert back.target_name_or_path == str(target)
    assert back.num_target_layers == 4


def test_knobs_are_kept_by_ours_and_reported_lost_by_others(tmp_path, target):
    draft = random_draft()
    draft.generation_config.num_assistant_tokens = 3
    draft.save_pretrained(tmp_path / "own")
    ours = convert_draft(tmp_path / "own", "dspark", tmp_path / "ours")
    assert DSparkDraftModel.from_pretrained(ours.folder).generation_config.num_assistant_tokens == 3
    theirs = convert_draft(tmp_path / "own", "speculators", tmp_path / "theirs", target=target)
    assert (ours.lost, theirs.lost) == ((), ("generation_config.json",))
    plain = convert_draft(save(tmp_path / "plain"), "speculators", tmp_path / "plain-theirs", target=target)
    assert plain.lost == ()


def test_mixed_precision_is_kept(tmp_path, target):
    """Weights in half, the confidence head in full precision."""
    folder = save(tmp_path / "own", confidence_head_with_markov=False)
    tensors = tensors_of(folder)
    mixed = {n: t if n.startswith("confidence_head") else t.bfloat16() for n, t in tensors.items()}
    save_file(mixed, folder / "model.safetensors", metadata={"format": "pt"})
    for to in ("dspark", "deepspec", "speculators"):
        written = tensors_of(convert_draft(folder, to, tmp_path / to, target=target).folder)
        assert all(torch.equal(written[n], t) and written[n].dtype == t.dtype for n, t in mixed.items())


def test_speculators_layout_of_a_reduced_vocabulary(tmp_path, target):
    folder = convert_draft(save(tmp_path / "own", draft_vocab_size=48), "speculators", tmp_path / "x", target).folder
    written, draft = tensors_of(folder), DSparkDraftModel.from_pretrained(folder)
    assert written["t2d"].dtype == torch.bool
    assert written["t2d"].nonzero().flatten().tolist() == draft.draft_token_ids().tolist()
    assert (written["lm_head.weight"].shape, written["d2t"].dtype) == ((48, 32), torch.int64)
    assert "embed_tokens.weight" not in written


@pytest.mark.parametrize(
    ("overrides", "kind", "class_name", "tokens"),
    [
        ({}, "dspark", "DSparkDraftModel", 4),
        ({"sample_from_anchor": False}, "dspark", "DSparkDraftModel", 3),
        ({"markov_rank": 0, "enable_confidence_head": False}, "dspark", "DSparkDraftModel", 4),
        (
            {"markov_rank": 0, "enable_confidence_head": False, "sample_from_anchor": False},
            "dflash",
            "DFlashDraftModel",
            3,
        ),
    ],
)
def test_kinds_of_a_speculators_file(tmp_path, target, overrides, kind, class_name, tokens):
    fields = fields_of(
        convert_draft(save(tmp_path / "own", **overrides), "speculators", tmp_path / "x", target).folder
    )
    assert (fields["speculators_model_type"], fields["architectures"]) == (kind, [class_name])
    assert fields["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == tokens
    assert fields["speculators_config"]["verifier"] == {
        "name_or_path": str(target),
        "architectures": ["LlamaForCausalLM"],
    }
    assert fields["aux_hidden_state_layer_ids"] == [1, 3]
    assert ("markov_rank" in fields) == (kind == "dspark")


REFUSED = [
    ("deepspec", {"draft_vocab_size": 48}, "cannot represent a reduced vocabulary"),
    ("deepspec", {"sample_from_anchor": False}, "cannot represent slots whose first repeats the anchor"),
    ("deepspec", SLIDING, "cannot represent sliding-window layers"),
    ("deepspec", {"target_layer_ids": [2, 0]}, r"must ascend to be written for other engines, got \[2, 0\]"),
    ("speculators", {"target_layer_ids": [2, 0]}, r"must ascend to be written for other engines, got \[2, 0\]"),
    ("speculators", {"layer_kind": "gemma4"}, "cannot represent layers of kind 'gemma4'"),
    ("deepspec", {"layer_kind": "gemma4"}, "is written for a Gemma 4 target, got 'llama'"),
]


@pytest.mark.parametrize(("to", "overrides", "message"), REFUSED, ids=[f"{t} {o}" for t, o, _ in REFUSED])
def test_drafts_a_format_cannot_represent(tmp_path, target, to, overrides, message):
    save(tmp_path / "own", **overrides)
    with pytest.raises(ValueError, match=message):
        convert_draft(tmp_path / "own", to, tmp_path / "x", target)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("to", "message"),
    [
        ("deepspec", r"holds the target's embedding and LM head, which this draft does not have\. Give the target"),
        ("speculators", r"names its target, which this draft does not\. Give it \(`--target`\)"),
    ],
)
def test_formats_that_need_the_target(tmp_path, to, message):
    save(tmp_path / "own")
    with pytest.raises(ValueError, match=message):
        convert_draft(tmp_path / "own", to, tmp_path / "x")


@pytest.mark.parametrize("to", ["dspark", "deepspec", "speculators"])
def test_target_must_fit(tmp_path, to):
    save(tmp_path / "own")
    tiny_target("llama", vocab_size=98).save_pretrained(tmp_path / "target")
    with pytest.raises(ValueError, match="must have the same `vocab_size`, got 98"):
        convert_draft(tmp_path / "own", to, tmp_path / "x", tmp_path / "target")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own", "target"]


def test_request_is_checked_first(tmp_path):
    with pytest.raises(ValueError, match=r"`to` must be one of \('dspark', 'deepspec', 'speculators'\), got 'gguf'"):
        convert_draft(tmp_path / "nothing", "gguf", tmp_path / "x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_text("x")
    with pytest.raises(ValueError, match="`output` must be a new or an empty folder"):
        convert_draft(tmp_path / "nothing", "dspark", tmp_path / "full")
    assert (tmp_path / "full" / "precious").read_text() == "x"


def test_empty_folder_is_filled(tmp_path):
    save(tmp_path / "own")
    (tmp_path / "empty").mkdir()
    convert_draft(tmp_path / "own", "dspark", tmp_path / "empty")
    assert isinstance(DSparkDraftModel.from_pretrained(tmp_path / "empty"), DSparkDraftModel)


def test_ambiguous_source_needs_what_it_leaves_open(tmp_path):
    shutil.copytree(GOLDEN / "speculators_dspark" / "full" / "draft", tmp_path / "draft")
    fields = fields_of(tmp_path / "draft")
    del fields["sample_from_anchor"]
    (tmp_path / "draft" / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="must set `sample_from_anchor`"):
        convert_draft(tmp_path / "draft", "dspark", tmp_path / "x")
    written = convert_draft(tmp_path / "draft", "dspark", tmp_path / "x", stated={"sample_from_anchor": True})
    assert written.config.num_draft_slots == 5


def test_stated_fields_as_text():
    given = ["sample_from_anchor=false", "mask_token_id=4", "target_layer_ids=[1, 9]", "markov_head_type=rnn"]
    expected = {"sample_from_anchor": False, "mask_token_id": 4, "target_layer_ids": [1, 9], "markov_head_type": "rnn"}
    assert parse_stated(given) == expected
    for wrong in ("sample_from_anchor", "hidden_size=4"):
        with pytest.raises(ValueError, match=f"stated as NAME=VALUE, .* got '{wrong}'"):
            parse_stated([wrong])


@pytest.mark.parametrize("what", ["a tensor", r"\['block_size'\]"])
def test_a_writer_that_changes_the_draft_leaves_nothing(tmp_path, monkeypatch, what):
    save(tmp_path / "own")
    right = convert._WRITERS["dspark"]

    def wrong(source):
        fields, extra = right(source)
        if what == "a tensor":
            return fields, extra | {"norm.weight": torch.full((32,), 0.5)}
        return fields | {"block_size": 3}, extra

    monkeypatch.setitem(convert._WRITERS, "dspark", wrong)
    with pytest.raises(RuntimeError, match=f"The format changed {what} of the draft"):
        convert_draft(tmp_path / "own", "dspark", tmp_path / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


# Files for other engines.

CURVE = SPSCurve(batch_tokens=(1, 3, 4), verify_s=(0.010, 0.014, 0.030), draft_s=0.006)


def test_temperatures_for_sglang_and_tensorrt():
    assert sts_calibration(tiny_config()) is None
    config = tiny_config(confidence_temperatures=[1, 0.5, 2.0, 1.25])
    assert sts_calibration(config) == {"temperatures": [1.0, 0.5, 2.0, 1.25]}


def test_round_times_for_sglang_list_every_number_of_tokens():
    """SGLang takes the point below: without B = 2 it would cost what B = 1 does."""
    table = sps_table(CURVE)
    assert table["sample_batch_tokens"] == [1, 2, 3, 4]
    expected = [1 / 0.016, 1 / 0.018, 1 / 0.020, 1 / 0.036]
    assert table["sample_steps_per_sec"] == pytest.approx(expected)
    assert table["max_batch_tokens"] == 4


def test_round_times_for_tensorrt_keep_drafting_apart():
    table = cost_table(CURVE)
    assert table["token_counts"] == [1, 3, 4]
    assert table["step_time_ms"] == pytest.approx([10.0, 14.0, 30.0])
    assert table["fixed_overhead_ms"] == pytest.approx(6.0)


def test_engine_files_are_written_beside_the_draft(tmp_path, target):
    save(tmp_path / "own", **KEPT)
    written = convert_draft(tmp_path / "own", "deepspec", tmp_path / "x", target, curve=CURVE)
    assert [path.name for path in written.engine_files] == [
        "dspark_sts.json",
        "dspark_sps.json",
        "dspark_cost_table_trtllm.json",
    ]
    contents = [json.loads(path.read_text()) for path in written.engine_files]
    assert contents[0] == {"temperatures": [1.0, 0.5, 2.0, 1.25]}
    assert contents[1:] == [sps_table(CURVE), cost_table(CURVE)]
    assert sorted(path.name for path in written.folder.iterdir() if path.suffix == ".json") == [
        "config.json",
        "dspark_cost_table_trtllm.json",
        "dspark_sps.json",
        "dspark_sts.json",
    ]


def test_nothing_known_is_nothing_written(tmp_path):
    assert write_engine_files(tmp_path, tiny_config()) == []
    assert list(tmp_path.iterdir()) == []
