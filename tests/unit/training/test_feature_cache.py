# SPDX-License-Identifier: Apache-2.0
"""Features on disk: the same values as online, resumable, and never those of another target or data set."""

import json
import pickle

import peft
import pytest
import torch
from peft.tuners.tuners_utils import BaseTunerLayer

from dspark_hf.training import feature_cache
from dspark_hf.training.dataset import SequenceDataset, TargetFeatures, TrainingSequence, collate, target_features
from dspark_hf.training.feature_cache import FeatureCache, cached_features, collate_features, target_fingerprint
from tests.support.closeness import assert_close
from tests.support.models import HIDDEN_SIZE, random_prompt, tiny_target


LAYERS = [0, 2]


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def sequences(count=7, seed=0):
    return [
        TrainingSequence(tuple(random_prompt(6 + 3 * (i % 4), seed=seed + i)[0].tolist()), 3) for i in range(count)
    ]


@pytest.fixture
def data():
    return SequenceDataset(sequences(), 64)


def build(folder, data, target, layers=LAYERS, **kwargs):
    return FeatureCache(folder, data, target, layers, **({"shard_size": 3, "batch_size": 2} | kwargs))


class CountedTarget:
    """How often the target was run."""

    def __init__(self, monkeypatch):
        self.count = 0
        right = feature_cache.target_features

        def counted(*args):
            self.count += 1
            return right(*args)

        monkeypatch.setattr(feature_cache, "target_features", counted)


def test_rows_hold_the_features_of_an_online_forward(tmp_path, data, target):
    cache = build(tmp_path, data, target)
    assert len(cache) == len(data) == 7
    for index in range(7):
        row, plain = cache[index], data[index]
        assert {name: row[name] for name in plain} == plain
        online = target_features(target, torch.tensor([plain["input_ids"]]), LAYERS)
        assert row["context"].shape == (plain["length"], 2 * HIDDEN_SIZE)
        assert_close(row["context"], online.context_hidden_states[0])
        assert_close(row["last"], online.last_hidden_states[0])


def test_batches_hold_the_features_of_their_rows(tmp_path, data, target):
    cache = build(tmp_path, data, target)
    rows = [cache[0], cache[3], cache[1]]
    batch = collate_features(rows)
    plain = collate([data[0], data[3], data[1]])
    assert all(torch.equal(batch[name], plain[name]) for name in plain)
    features = cached_features(batch)
    online = target_features(target, plain["input_ids"], LAYERS)
    for index, row in enumerate(rows):
        for name in ("context_hidden_states", "last_hidden_states"):
            ours = getattr(features, name)[index, : row["length"]]
            assert_close(ours, getattr(online, name)[index, : row["length"]])
    assert cached_features(plain) is None


def test_dtype_of_the_target_is_kept(tmp_path, data):
    row = build(tmp_path, data, tiny_target().bfloat16())[0]
    assert row["context"].dtype == row["last"].dtype == torch.bfloat16


def test_rows_can_be_iterated_over(tmp_path, data, target):
    assert [row["row_id"] for row in build(tmp_path, data, target)] == list(range(7))
    with pytest.raises(IndexError, match="Row -1 of 7"):
        build(tmp_path, data, target)[-1]


def test_second_run_computes_two_sequences(tmp_path, data, target, monkeypatch):
    first = build(tmp_path, data, target)
    counted, progress = CountedTarget(monkeypatch), []
    second = build(tmp_path, data, target, on_shard=lambda *counts: progress.append(counts))
    assert counted.count == 2  # the shortest and the longest sequence, to compare
    assert progress == [(1, 3), (2, 3), (3, 3)]
    assert torch.equal(first[5]["context"], second[5]["context"])


def test_lengths_are_known_without_reading(tmp_path, data, target):
    cache = build(tmp_path, data, target)
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    assert cache.lengths == data.lengths == [6, 9, 12, 15, 6, 9, 12]


def test_killed_run_goes_on(tmp_path, data, target, monkeypatch):
    """A kill in the second shard leaves a temporary file and a manifest of one shard."""
    right = feature_cache.save_file

    def killed(tensors, path):
        if "00001" in str(path):
            path.write_bytes(b"half a sha")
            raise KeyboardInterrupt
        right(tensors, path)

    with monkeypatch.context() as patch:
        patch.setattr(feature_cache, "save_file", killed)
        with pytest.raises(KeyboardInterrupt):
            build(tmp_path, data, target)
    assert list(json.loads((tmp_path / "manifest.json").read_text())["checksums"]) == ["0"]
    untouched = (tmp_path / "features-00000.safetensors").stat().st_mtime_ns
    counted = CountedTarget(monkeypatch)
    cache = build(tmp_path, data, target)
    assert counted.count == 5  # two sequences to compare, two batches of the second shard, one of the third
    assert (tmp_path / "features-00000.safetensors").stat().st_mtime_ns == untouched
    assert torch.isfinite(cache[6]["last"]).all()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *(f"features-0000{i}.safetensors" for i in range(3)),
        "manifest.json",
    ]


def test_shard_without_an_entry_is_written_again(tmp_path, data, target, monkeypatch):
    """What the messages about a damaged file advise."""
    before = build(tmp_path, data, target)[4]["last"].clone()  # not the mapped file
    path = tmp_path / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["checksums"]["1"]
    path.write_text(json.dumps(manifest))
    (tmp_path / "features-00001.safetensors").write_bytes(b"damaged")
    counted = CountedTarget(monkeypatch)
    assert torch.equal(build(tmp_path, data, target)[4]["last"], before)
    assert counted.count == 4  # two sequences to compare, two batches


@pytest.mark.parametrize("damage", ["missing", "changed", "cut"])
def test_damaged_shard(tmp_path, data, target, damage):
    build(tmp_path, data, target)
    path = tmp_path / "features-00001.safetensors"
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "changed":
        content[-5] ^= 1
        path.write_bytes(content)
    else:
        path.write_bytes(content[:-8])
    with pytest.raises(ValueError, match=r"features-00001\.safetensors is missing or damaged\. Delete the folder"):
        build(tmp_path, data, target)


@torch.no_grad()
def fine_tuned():
    """The same shapes and the same embedding; one weight differs, as after merging an adapter."""
    target = tiny_target()
    target.model.layers[1].self_attn.q_proj.weight.add_(1e-3)
    return target


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("target", {"target": lambda: tiny_target(seed=9)}),
        ("target", {"target": fine_tuned}),
        ("target", {"target": lambda: tiny_target("llama")}),
        ("target_layer_ids", {"layers": [0, 1]}),
        ("target_layer_ids", {"layers": [2, 0]}),
        ("sequences", {"sequences": sequences(6)}),
        ("sequences", {"sequences": sequences(seed=50)}),
        ("sequences", {"sequences": [TrainingSequence(q.input_ids, 4) for q in sequences()]}),
        ("shard_size", {"shard_size": 4}),
        ("(target|dtype)", {"target": lambda: tiny_target().bfloat16()}),  # rounded weights are other weights, too
    ],
)
def test_cache_of_something_else_is_refused(tmp_path, data, target, field, change):
    build(tmp_path, data, target)
    other = change["target"]() if "target" in change else target
    dataset = SequenceDataset(change["sequences"], 64) if "sequences" in change else data
    layers, shard_size = change.get("layers", LAYERS), change.get("shard_size", 3)
    with pytest.raises(ValueError, match=f"was made with another `{field}`: .+ choose another folder"):
        build(tmp_path, dataset, other, layers, shard_size=shard_size)


@torch.no_grad()
def one_row_of_the_embedding():
    """A row of a token that the data does not hold."""
    target = tiny_target()
    target.model.embed_tokens.weight[1].add_(1e-3)
    return target


def test_every_weight_counts(tmp_path, data, target):
    build(tmp_path, data, target)
    with pytest.raises(ValueError, match=r"was made with another `(target|weights)`: .+ choose another folder"):
        build(tmp_path, data, one_row_of_the_embedding())


def altered(kind="qwen3", **fields):
    """The same weights under a config that differs."""
    right = tiny_target(kind)
    config = type(right.config).from_dict(right.config.to_dict() | fields)
    target = type(right)(config).eval()
    target.load_state_dict(right.state_dict())
    return target


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("kind", "fields", "name"),
    [
        ("qwen3", {"rope_parameters": YARN}, "rope_parameters"),
        ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}, "rope_parameters"),
        ("qwen3", {"rms_norm_eps": 1e-2}, "rms_norm_eps"),
        ("mistral", {"sliding_window": 3}, "sliding_window"),
        ("gemma3", {"query_pre_attn_scalar": 3}, "query_pre_attn_scalar"),
    ],
)
def test_another_config_with_the_same_weights_is_refused(tmp_path, data, kind, fields, name):
    build(tmp_path, data, tiny_target(kind))
    with pytest.raises(ValueError, match=f"was made with another `config.{name}`: .+ choose another folder"):
        build(tmp_path, data, altered(kind, **fields))


@pytest.mark.parametrize(
    "fields",
    [{"use_cache": False}, {"pad_token_id": 5}, {"transformers_version": "5.18.0"}, {"attention_dropout": 0.1}],
)
def test_fields_that_say_nothing_about_hidden_states(tmp_path, data, target, fields):
    build(tmp_path, data, target)
    assert len(build(tmp_path, data, altered(**fields))) == 7


def adapted_target(scale=1.0):
    """Adapters that every layer has, twice as strong as usual at scale 2."""
    torch.manual_seed(5)
    config = peft.LoraConfig(
        r=4, lora_alpha=8 * scale, target_modules=["q_proj", "down_proj"], init_lora_weights=False
    )
    return peft.inject_adapter_in_model(config, tiny_target(context_scale=0.3))


def switched_off():
    target = adapted_target()
    for module in target.modules():
        if isinstance(module, BaseTunerLayer):
            module.enable_adapters(False)
    return target


def with_other_frequencies():
    target = adapted_target()
    target.model.rotary_emb.inv_freq.mul_(0.25)
    return target


@pytest.mark.parametrize("change", [switched_off, lambda: adapted_target(scale=2.0), with_other_frequencies])
def test_what_neither_weights_nor_config_tell_shows_in_the_features(tmp_path, data, change):
    build(tmp_path, data, adapted_target())
    with pytest.raises(ValueError, match=r"other hidden states: those of sequence \d+ lie .+ choose another folder"):
        build(tmp_path, data, change())
    assert len(build(tmp_path, data, adapted_target())) == 7


@pytest.mark.parametrize(("dtype", "noise"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_another_machine_rounds_differently(tmp_path, data, dtype, noise, monkeypatch):
    """Features that differ by the noise of their dtype are the same features, whatever their scale."""
    target = tiny_target().to(dtype)
    build(tmp_path, data, target)
    right = feature_cache.target_features

    def rounded(*arguments):
        features = right(*arguments)
        generator = torch.Generator().manual_seed(0)
        noisy = [
            states * (1 + noise * torch.randn(states.shape, generator=generator)).to(dtype)
            for states in (features.context_hidden_states, features.last_hidden_states)
        ]
        return TargetFeatures(*noisy)

    monkeypatch.setattr(feature_cache, "target_features", rounded)
    assert len(build(tmp_path, data, target)) == 7
    noise = 0.3
    with pytest.raises(ValueError, match="other hidden states"):
        build(tmp_path, data, target)


def test_cache_of_an_earlier_release_is_known_by_its_features(tmp_path, data, target):
    build(tmp_path, data, target)
    path = tmp_path / "manifest.json"
    manifest = json.loads(path.read_text())
    for name in ("weights", "config"):
        del manifest["identity"][name]
    path.write_text(json.dumps(manifest))
    assert len(build(tmp_path, data, target)) == 7
    with pytest.raises(ValueError, match="other hidden states"):
        build(tmp_path, data, altered(rms_norm_eps=1.0))


def test_features_that_are_not_finite_are_not_kept(tmp_path, data):
    target = tiny_target()
    with torch.no_grad():
        target.model.layers[1].mlp.down_proj.weight[0, 0] = float("inf")
    with pytest.raises(ValueError, match=r"must be finite to be kept, got NaN or infinity for sequence \d"):
        build(tmp_path, data, target)
    assert not list(tmp_path.glob("*.safetensors"))


def test_cache_goes_to_workers_of_a_data_loader(tmp_path, data, target):
    cache = build(tmp_path, data, target)
    first = cache[0]["last"].clone()
    assert torch.equal(pickle.loads(pickle.dumps(cache))[0]["last"], first)


def test_fingerprint_is_that_of_the_weights():
    assert target_fingerprint(tiny_target()) == target_fingerprint(tiny_target())
    assert target_fingerprint(tiny_target()) != target_fingerprint(fine_tuned())


def test_full_disk(tmp_path, data, target, monkeypatch):
    right = feature_cache.save_file

    def full(tensors, path):
        if "00002" in str(path):
            path.write_bytes(b"as much as there was room for")
            raise OSError(28, "No space left on device")
        right(tensors, path)

    with monkeypatch.context() as patch:
        patch.setattr(feature_cache, "save_file", full)
        with pytest.raises(OSError, match=r"could not write .+00002.+No space left.+Is the disk full\?.+continues"):
            build(tmp_path, data, target)
    assert not list(tmp_path.glob("*.tmp"))  # the room is given back
    counted = CountedTarget(monkeypatch)
    assert len(build(tmp_path, data, target)) == 7
    assert counted.count == 3
