# SPDX-License-Identifier: Apache-2.0
"""`dspark-hf eval` on tiny models: every drafter, recorded as it was, resumed where it broke off, refused in words."""

import json
import re
import sys

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file
from transformers import (
    GenerationConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
)
from typer.testing import CliRunner

from dspark_hf import collect_rounds
from dspark_hf.cli import app
from dspark_hf.cli import evaluate as evaluating
from dspark_hf.evaluation.drafters import check_names, load_drafters, parse_drafter
from dspark_hf.evaluation.evaluate import RUNS_FILE, evaluate, num_answers, settings_for, warm_up, weights_fingerprint
from dspark_hf.evaluation.summary import summarize_runs
from dspark_hf.evaluation.tasks import load_tasks
from dspark_hf.evaluation.timed import Observer
from tests.support.eagle3 import oracle_eagle3
from tests.support.models import MASK_TOKEN_ID, VOCAB_SIZE, oracle_draft, random_draft, spread_confidence, tiny_target
from tests.support.scripted import letter_tokenizer, lively_target


NUM_NEW = 16
LIBRARY_OWN = "Passing `generation_config` together with"  # what transformers' assisted generation says of itself


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, target):
    """Everything that an evaluation reads: target, draft, small model, DFlash model, questions."""
    root = tmp_path_factory.mktemp("evaluation")
    target.save_pretrained(root / "target")
    letter_tokenizer().save_pretrained(root / "target")
    spread_confidence(oracle_draft(target)).save_pretrained(root / "draft")
    oracle_eagle3(target).save_pretrained(root / "eagle3")
    tiny_target(seed=1).save_pretrained(root / "small")
    torch.manual_seed(6)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 64, "block_size": 4}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "mask_token_id": MASK_TOKEN_ID}
    dflash = MuseGlimmerAssistantConfig(**sizes, **ids, target_layer_ids=[0, 2])
    MuseGlimmerAssistantModel(dflash).save_pretrained(root / "dflash")
    rows = [{"turns": ["Hello there", "And now?"]}, {"turns": ["abcabcabc"]}]
    (root / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


@pytest.fixture(scope="module")
def tasks(folder):
    return load_tasks([str(folder / "chat.jsonl")])


def prepare(target, folder, tasks, *texts, **options):
    """Tokenizer, drafters and settings."""
    tokenizer = letter_tokenizer()
    named = check_names([parse_drafter(text.format(folder=folder)) for text in texts])
    drafters = load_drafters(named, target, tokenizer)
    settings = settings_for(target, tokenizer, tasks, drafters, **({"max_new_tokens": NUM_NEW} | options))
    return tokenizer, warm_up(target, tokenizer, tasks, drafters, settings), settings


OURS = "draft:{folder}/draft,num_assistant_tokens_schedule=constant"
EVERY_KIND = ("prompt-lookup", "ours=" + OURS, "eagle3=draft:{folder}/eagle3", "small=assistant:{folder}/small")
EVERY_KIND += ("theirs=dflash:{folder}/dflash",)


@pytest.fixture
def said(no_deprecated_calls):
    """What transformers announced in the test; its own assisted generation does in every call."""
    yield no_deprecated_calls
    no_deprecated_calls[:] = [message for message in no_deprecated_calls if LIBRARY_OWN not in message]


# What is recorded


@pytest.fixture(scope="module")
def evaluated(target, folder, tasks, tmp_path_factory):
    tokenizer, drafters, settings = prepare(target, folder, tasks, *EVERY_KIND, "mtp")
    runs = evaluate(target, tokenizer, tasks, drafters, settings, tmp_path_factory.mktemp("runs"))
    return runs, drafters, settings


def test_every_kind_answers_every_turn(evaluated, tasks, said):
    runs, drafters, settings = evaluated
    active = [entry.name for entry in drafters if entry.refusal is None]
    assert active == ["plain", "prompt-lookup", "ours", "eagle3", "small", "theirs"]
    assert len(runs) == len({run.key for run in runs}) == len(active) * num_answers(tasks, settings) == 6 * 2 * 3
    assert "no layers for multi-token prediction" in drafters[-1].refusal


def test_greedy_texts_are_plain_generations(evaluated):
    runs, drafters, settings = evaluated
    texts = {(run.index, run.turn, run.drafter): run.token_ids for run in runs if run.decoding == "greedy"}
    for (index, turn, _), text in texts.items():
        assert text == texts[index, turn, "plain"]
        assert len(text) == NUM_NEW


def test_every_drafter_sees_the_same_conversation(evaluated, target, tasks):
    runs, _, _ = evaluated
    for decoding in ("greedy", "temperature 1"):
        second = {run.num_prompt_tokens for run in runs if run.decoding == decoding and run.turn == 1}
        assert len(second) == 1
        (plain,) = [r for r in runs if (r.decoding, r.index, r.turn, r.drafter) == (decoding, 0, 0, "plain")]
        answer = letter_tokenizer().decode(plain.token_ids, skip_special_tokens=True)
        text = "\n\n".join(["Hello there", answer, "And now?"])
        assert second == {len(letter_tokenizer()(text)["input_ids"])}


def test_rounds_account_for_every_token(evaluated):
    for run in evaluated[0]:
        assert len(run.rounds) == len(run.blocks) - 1
        assert [record.num_committed for record in run.rounds] == [len(block) for block in run.blocks[1:]]
        assert len(run.token_ids) <= NUM_NEW
        assert 0 < run.times_s[0] <= run.times_s[-1] <= run.seconds
        assert sorted(run.times_s) == list(run.times_s)
    lengths = {
        name: [r.stats.accepted_length for r in evaluated[0] if r.drafter == name] for name in ("plain", "ours")
    }
    assert set(lengths["plain"]) == {1.0}
    assert min(lengths["ours"]) > 1


@pytest.mark.parametrize("do_sample", [False, True])
def test_rounds_seen_from_outside_are_those_that_were_recorded(do_sample, folder, target):
    draft = spread_confidence(oracle_draft(target))
    inputs = letter_tokenizer()("Hello there", return_tensors="pt")["input_ids"]
    with collect_rounds() as stats, Observer(target) as seen:
        output = target.generate(
            inputs, assistant_model=draft, do_sample=do_sample, max_new_tokens=48, streamer=seen, top_k=0
        )
    assert [token for block in seen.blocks for token in block] == output[0, inputs.shape[1] :].tolist()
    assert len({record.num_accepted for record in stats.rounds}) > 2
    names = ("anchor_id", "token_ids", "num_accepted", "bonus_token", "num_committed")
    for ours, theirs in zip(seen.rounds, stats.rounds, strict=True):
        assert [getattr(ours, name) for name in names] == [getattr(theirs, name) for name in names]


def test_an_assistant_that_is_the_target_is_always_right(target, folder, tasks, tmp_path, said):
    tokenizer, drafters, settings = prepare(
        target,
        folder,
        tasks,
        "same=assistant:{folder}/target,num_assistant_tokens=3,assistant_confidence_threshold=0,"
        "num_assistant_tokens_schedule=constant",
        temperatures=[0.0],
    )
    runs = evaluate(target, tokenizer, tasks, drafters, settings, tmp_path)
    rounds = [record for run in runs if run.drafter == "same" for record in run.rounds]
    assert {record.num_accepted for record in rounds if record.verify_length == 3} == {3}
    assert max(record.num_committed for record in rounds) == 4  # three drafts and the bonus token


def test_prompt_lookup_knows_a_text_that_repeats(evaluated):
    rounds = [
        r for run in evaluated[0] if (run.drafter, run.decoding) == ("prompt-lookup", "greedy") for r in run.rounds
    ]
    sent = [record for record in rounds if record.verify_length]
    assert sent
    for record in sent:
        assert record.num_accepted <= record.verify_length <= 10


def test_an_assistants_knobs_do_not_learn_from_run_to_run(target, folder, tasks, said):
    # transformers' "heuristic" schedule writes a new number of drafts into the assistant's config.
    _, (_, small), settings = prepare(
        target,
        folder,
        tasks,
        "small=assistant:{folder}/small,num_assistant_tokens=2,num_assistant_tokens_schedule=heuristic",
    )
    assert small.assistant.generation_config.num_assistant_tokens != 2  # it has been through the warm-up
    assert small.knobs.num_assistant_tokens == 2


def test_what_generate_refuses_is_the_drafters_remark(folder, tasks, tmp_path, said):
    other = lively_target("gemma3")  # of the same sizes, but DFlash's layer 9 does not exist
    torch.manual_seed(6)
    model = MuseGlimmerAssistantModel.from_pretrained(folder / "dflash")
    model.config.target_layer_ids = [0, 9]
    model.save_pretrained(tmp_path / "dflash")
    _, drafters, _ = prepare(other, tmp_path, tasks, "theirs=dflash:{folder}/dflash", "prompt-lookup")
    plain, theirs, lookup = drafters
    assert plain.refusal is lookup.refusal is None
    assert theirs.refusal


@pytest.fixture
def mtp_target(tmp_path, monkeypatch):
    """A tiny target with one layer for multi-token prediction in its checkpoint, a copy of its last layer."""
    # Which layers of a checkpoint these are, transformers knows by the numbers of released models.
    monkeypatch.setattr(Glm4MoeForCausalLM, "_keys_to_ignore_on_load_unexpected", {r"model\.layers\.2.*"})
    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCAB_SIZE}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
    config = Glm4MoeConfig(**sizes, **experts, num_mtp_layers=1, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(0)
    Glm4MoeForCausalLM(config).save_pretrained(tmp_path / "target")
    weights = load_file(tmp_path / "target" / "model.safetensors")
    own = {"enorm": torch.ones(32), "hnorm": torch.ones(32), "shared_head.norm": torch.ones(32)}
    own["eh_proj"] = torch.randn(32, 64) / 10
    last = {name: tensor.clone() for name, tensor in weights.items() if ".layers.1." in name}
    weights |= {name.replace(".layers.1.", ".layers.2."): tensor for name, tensor in last.items()}
    weights |= {f"model.layers.2.{name}.weight": tensor for name, tensor in own.items()}
    save_file(weights, tmp_path / "target" / "model.safetensors", metadata={"format": "pt"})
    target = Glm4MoeForCausalLM.from_pretrained(tmp_path / "target").eval()
    target.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1)
    return target


def test_multi_token_prediction_where_the_target_has_it(mtp_target, folder, tasks, tmp_path):
    tokenizer, drafters, settings = prepare(mtp_target, folder, tasks, "mtp", temperatures=[0.0])
    assert drafters[1].refusal is None
    assert "loads the layers again in every call" in drafters[1].note
    runs = evaluate(mtp_target, tokenizer, tasks, drafters, settings, tmp_path / "runs")
    plain, mtp = ([run for run in runs if run.drafter == name] for name in ("plain", "mtp"))
    assert [run.token_ids for run in mtp] == [run.token_ids for run in plain]
    assert {record.verify_length for run in mtp for record in run.rounds[:-2]} == {1}


# Interrupted, and resumed


class Stop(Exception):
    pass


def stop_after(count):
    calls = []

    def on_progress():
        calls.append(1)
        if len(calls) == count:
            raise Stop

    return on_progress


def lines(path):
    return (path / RUNS_FILE).read_text(encoding="utf-8").splitlines()


def test_an_interrupted_evaluation_goes_on(target, folder, tasks, tmp_path):
    tokenizer, drafters, settings = prepare(target, folder, tasks, "prompt-lookup", "ours=" + OURS)
    arguments = (target, tokenizer, tasks, drafters, settings, tmp_path)
    with pytest.raises(Stop):
        evaluate(*arguments, on_progress=stop_after(7))
    done = lines(tmp_path)
    assert len(done) == 7
    with (tmp_path / RUNS_FILE).open("a", encoding="utf-8") as file:
        file.write(done[0][:40])  # killed in the middle of a line
    calls = []
    runs = evaluate(*arguments, on_progress=lambda: calls.append(1))
    assert lines(tmp_path)[:7] == done  # not made again, and the half line is gone
    assert len(lines(tmp_path)) == len(runs) == len(calls) == 3 * num_answers(tasks, settings)
    assert evaluate(*arguments) == runs
    assert summarize_runs(runs, settings, tasks, drafters).figures


def test_a_resumed_evaluation_draws_the_same_texts(target, folder, tasks, tmp_path):
    tokenizer, drafters, settings = prepare(target, folder, tasks, "ours=" + OURS)
    whole = evaluate(target, tokenizer, tasks, drafters, settings, tmp_path / "whole")
    arguments = (target, tokenizer, tasks, drafters, settings, tmp_path / "parts")
    for count in (3, 4):
        with pytest.raises(Stop):
            evaluate(*arguments, on_progress=stop_after(count))
    texts = {run.key: run.token_ids for run in whole}
    assert {run.key: run.token_ids for run in evaluate(*arguments)} == texts
    sampled = [text for key, text in texts.items() if "temperature 1" in key]
    assert len(set(sampled)) > 3


def test_a_folder_of_other_settings_is_refused(target, folder, tasks, tmp_path):
    tokenizer, drafters, settings = prepare(target, folder, tasks, "prompt-lookup", temperatures=[0.0])
    evaluate(target, tokenizer, tasks, drafters, settings, tmp_path)
    before = lines(tmp_path)
    for changed in ({"seed": 1}, {"max_new_tokens": 9}, {"temperatures": [1.0]}, {"top_p": 0.5}):
        options = {"max_new_tokens": NUM_NEW, "temperatures": [0.0]} | changed
        other = settings_for(target, tokenizer, tasks, drafters, **options)
        with pytest.raises(ValueError, match=rf"other settings \({next(iter(changed))}\).*choose another output"):
            evaluate(target, tokenizer, tasks, drafters, other, tmp_path)
    assert lines(tmp_path) == before


def test_a_draft_that_was_trained_further_is_refused(target, folder, tasks, tmp_path):
    tokenizer, drafters, settings = prepare(target, folder, tasks, "ours=" + OURS, temperatures=[0.0])
    evaluate(target, tokenizer, tasks, drafters, settings, tmp_path)
    with torch.no_grad():
        drafters[1].assistant.norm.weight.mul_(1.01)
    other = settings_for(target, tokenizer, tasks, drafters, temperatures=[0.0], max_new_tokens=NUM_NEW)
    assert other.weights["target"] == settings.weights["target"]
    with pytest.raises(ValueError, match=r"other settings \(weights\)"):
        evaluate(target, tokenizer, tasks, drafters, other, tmp_path)


@pytest.mark.parametrize("changed", ["calibration", "knob"])
def test_a_draft_that_was_set_otherwise_is_refused(changed, target, tasks, tmp_path):
    draft = spread_confidence(oracle_draft(target))
    draft.save_pretrained(tmp_path / "draft")
    tokenizer, drafters, settings = prepare(target, tmp_path, tasks, "draft:{folder}/draft", temperatures=[0.0])
    evaluate(target, tokenizer, tasks, drafters, settings, tmp_path)
    assert prepare(target, tmp_path, tasks, "draft:{folder}/draft", temperatures=[0.0])[2] == settings
    if changed == "calibration":
        draft.config.confidence_temperatures = [1.0, 1.0, 1.0, 1.5]
    else:
        draft.generation_config.num_assistant_tokens = 2
    draft.save_pretrained(tmp_path / "draft")
    _, drafters, other = prepare(target, tmp_path, tasks, "draft:{folder}/draft", temperatures=[0.0])
    with pytest.raises(ValueError, match=r"other settings \(weights\)"):
        evaluate(target, tokenizer, tasks, drafters, other, tmp_path)


def test_what_tells_two_models_apart():
    draft = random_draft()
    first = weights_fingerprint(draft, draft.generation_config)
    draft.config.name_or_path = "another/folder"
    assert weights_fingerprint(draft, draft.generation_config) == first
    draft.rotary_emb.inv_freq[-1] *= 1.01
    assert weights_fingerprint(draft, draft.generation_config) != first


def test_a_broken_line_is_named(target, folder, tasks, tmp_path):
    tokenizer, drafters, settings = prepare(target, folder, tasks, "prompt-lookup", temperatures=[0.0])
    evaluate(target, tokenizer, tasks, drafters, settings, tmp_path)
    whole = lines(tmp_path)
    for broken in (whole[1][:50], '{"text": "of something else"}'):
        (tmp_path / RUNS_FILE).write_text("\n".join([whole[0], broken, *whole[2:], ""]), encoding="utf-8")
        with pytest.raises(ValueError, match=r"runs\.jsonl has a line that is no recorded run .* Remove the line"):
            evaluate(target, tokenizer, tasks, drafters, settings, tmp_path)
    (tmp_path / RUNS_FILE).write_text("\n".join([whole[0], *whole[2:], ""]), encoding="utf-8")
    evaluate(target, tokenizer, tasks, drafters, settings, tmp_path)
    assert sorted(json.loads(line)["key"] for line in lines(tmp_path)) == sorted(json.loads(w)["key"] for w in whole)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 1}, "`max_new_tokens` must be >= 2"),
        ({"temperatures": []}, "`temperatures` must be different numbers >= 0"),
        ({"temperatures": [-1.0]}, "`temperatures` must be different numbers >= 0"),
        ({"temperatures": [1.0, 1.0]}, "`temperatures` must be different numbers >= 0"),
        ({"top_p": 0.0}, r"`top_p` must lie in \(0, 1\]"),
    ],
)
def test_settings_out_of_range(options, message, target, folder, tasks):
    with pytest.raises(ValueError, match=message):
        prepare(target, folder, tasks, "prompt-lookup", **options)


# The command


def run(*arguments):
    return CliRunner().invoke(app, ["eval", *map(str, arguments)], env={"COLUMNS": "160"})


def refuse(*arguments, match):
    result = run(*arguments)
    assert result.exit_code == 2, result.output + repr(result.exception)
    assert isinstance(result.exception, SystemExit)
    assert re.search(match, result.stderr), result.stderr
    assert "Traceback" not in result.output


def pair(folder):
    return ["--target", folder / "target", "--draft", folder / "draft", "--dtype", "float32"]


def short(folder, output):
    return [folder / "chat.jsonl", *pair(folder), "--max-new-tokens", 12, "--output", output]


def test_the_command_writes_a_report(folder, tmp_path):
    result = run(*short(folder, tmp_path), "--drafter", "mtp", "--tensorboard", tmp_path / "logs")
    assert result.exit_code == 0, result.output + repr(result.exception)
    for name in ("runs.jsonl", "report.json", "summary.csv", "prompts.csv", "report.html", "logs"):
        assert (tmp_path / name).exists()
    assert re.search(r"chat \(2\) +draft all slots +\d\.\d\d +\d\.\d\d", result.stdout)
    assert re.search(r"all slots, greedy, speed-up: first 8 tokens \d\.\d\d, too few questions to say", result.stdout)
    assert "mtp does not apply: Qwen3ForCausalLM has no layers" in result.stderr
    assert str(tmp_path / "report.html") in result.stderr
    found = json.loads((tmp_path / "report.json").read_text())
    assert [entry["name"] for entry in found["drafters"]] == [
        "plain",
        "prompt-lookup",
        "draft",
        "draft without copies",
        "draft all slots",
        "mtp",
    ]
    assert {entry["num_different"] for entry in found["figures"] if entry["decoding"] == "greedy"} == {0}
    assert found["confidence"]
    before = lines(tmp_path)
    again = run(*short(folder, tmp_path), "--drafter", "mtp", "--json")
    assert json.loads(again.stdout) == found
    assert lines(tmp_path) == before


def test_an_interruption_says_how_to_go_on(folder, tmp_path, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluating, "evaluate", interrupted)
    result = run(*short(folder, tmp_path))
    assert result.exit_code == 130
    assert "the same command goes on" in result.stderr


def test_two_at_a_time_are_refused(folder, tmp_path):
    with FileLock(tmp_path / evaluating.LOCK_FILE):
        refuse(*short(folder, tmp_path), match="another is writing")


def test_bad_input_is_named_before_anything_is_loaded(folder, tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    out = ["--output", tmp_path / "out"]
    refuse("gsm9k", *pair(folder), *out, match="There is no task 'gsm9k'")
    refuse("no[/b]such", *pair(folder), *out, match=r"There is no task 'no\[/b\]such'")
    refuse(tmp_path / "empty.jsonl", *pair(folder), *out, match="at least one prompt, got none")
    refuse(tmp_path / "none.jsonl", *pair(folder), *out, match="must exist")
    refuse("--target", folder / "target", *out, match="name `--draft`")
    refuse("--draft", folder / "draft", *out, match="`--draft` needs `--target`")
    refuse("--target", folder / "target", "--drafter", "draft", *out, match="fits the default target only")
    refuse("--drafter", "eagle", *out, match="with a KIND of")
    refuse("--temperatures", "0;1", *out, match="numbers with commas")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("library", ["datasets", "jinja2"])
def test_a_missing_extra_is_told_by_its_name(library, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    refuse("gsm8k", "--output", tmp_path / "out", match=r'pip install "dspark-hf\[eval\]"')
