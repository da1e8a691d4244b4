# SPDX-License-Identifier: Apache-2.0
"""`dspark-hf prepare` and `dspark-hf train`: from prompts to a draft that is used, and errors in words."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file

from dspark_hf import DSparkDraftModel
from dspark_hf.default_pair import ensure_default_target
from tests.integration.test_training_resume import target_without_mask
from tests.support.commands import read, run, write
from tests.support.models import rewrite
from tests.support.server import good, serving
from tests.support.training import word_tokenizer, words


TRAIN = ["--report_to", "none", "--use_cpu", "--disable_tqdm", "true", "--save_strategy", "no", "--num_anchors", "6"]
DRAFT = ["--draft_num_layers", "1", "--block_size", "3", "--num_taps", "2", "--markov_rank", "8"]


def succeed(*arguments):
    result = run(*arguments)
    assert result.exit_code == 0, result.output + str(result.exception)
    return result


def refuse(*arguments, match):
    """Exit status 2, one message on standard error, no traceback."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output + repr(result.exception)
    assert isinstance(result.exception, SystemExit)
    assert result.stderr.startswith("Error: ") or result.stderr.splitlines()[-1].startswith("Error: "), result.stderr
    assert re.search(match, result.stderr), result.stderr
    assert "Traceback" not in result.output
    return result.stderr


def figures_of(output):
    return json.loads(output[output.index('{\n  "eval_loss"') :])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A target in a folder."""
    folder = tmp_path_factory.mktemp("targets") / "tiny-chat"
    target = target_without_mask()
    target.generation_config.eos_token_id = list(range(80, 92))
    target.save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def without_generation_prompt(tmp_path_factory, tiny):
    folder = tmp_path_factory.mktemp("targets") / "no-generation-prompt"
    target_without_mask().save_pretrained(folder)
    template = "{% for m in messages %}<bos> {{ m['content'] }} <eos> {% endfor %}"
    word_tokenizer(template=template).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def answers(tmp_path_factory, tiny):
    folder = tmp_path_factory.mktemp("answers")
    prompts = write(folder / "prompts.jsonl", *({"prompt": words(10 + i, 11 + i)} for i in range(8)))
    arguments = ("--max-new-tokens", 14, "--rows", 3, "--dtype", "float32")
    result = succeed("prepare", "--target", tiny, "--prompts", prompts, "-o", folder / "answers.jsonl", *arguments)
    assert "8 rows added to" in result.stdout
    return folder / "answers.jsonl"


def train(tiny, answers, output, *more):
    return run("train", "--target", tiny, "--data", answers, "--output_dir", output, *TRAIN, *DRAFT, *more)


def test_prepare_writes_answers_and_goes_on(tmp_path, tiny, answers):
    rows = read(answers)
    assert len(rows) == 8
    assert {"key", "messages", "prompt_ids", "answer_ids", "finish_reason", "source"} == set(rows[0])
    prompts = write(tmp_path / "p.jsonl", {"prompt": words(10, 11)}, {"prompt": words(30)}, {"prompt": words(31)})
    arguments = ("--target", tiny, "--prompts", prompts, "-o", tmp_path / "a.jsonl", "--max-new-tokens", 5)
    assert "2 rows added" in succeed("prepare", *arguments, "--limit", 2).stdout
    assert "1 rows added" in succeed("prepare", *arguments).stdout
    assert "0 rows added" in succeed("prepare", *arguments).stdout


def test_prepare_with_prompts_of_the_target(tmp_path, tiny):
    arguments = ("--target", tiny, "--self-prompts", 4, "-o", tmp_path / "a.jsonl", "--max-new-tokens", 5)
    assert "4 rows added" in succeed("prepare", *arguments, "--self-prompt-start", words(40) + " ").stdout
    prompts = read(tmp_path / "a.prompts.jsonl")
    assert all(row["messages"][0]["content"].startswith("w40 ") for row in prompts)


def test_train_writes_a_draft_and_prints_its_figures(tmp_path, tiny, answers):
    result = train(tiny, answers, tmp_path / "draft", "--max_steps", 2)
    assert result.exit_code == 0, result.output + repr(result.exception)
    figures = figures_of(result.stdout)
    assert figures["eval_accepted_length"] >= 1
    saved = json.loads((tmp_path / "draft" / "held_out.json").read_text())
    assert saved["eval_loss"] == figures["eval_loss"]
    config = DSparkDraftModel.from_pretrained(tmp_path / "draft").config
    assert (config.block_size, config.markov_rank, config.num_hidden_layers) == (3, 8, 1)
    assert config.target_name_or_path == str(tiny)
    question = ("generate", words(10, 11), "--target", tiny, "--max-new-tokens", 8, "--dtype", "float32")
    with_draft = succeed(*question, "--draft", tmp_path / "draft")
    assert with_draft.stdout.strip()
    assert "accepted length" in with_draft.stderr


def test_train_goes_on_after_an_interruption(tmp_path, tiny, answers):
    saving = ("--save_strategy", "steps", "--save_steps", 1)
    assert train(tiny, answers, tmp_path, "--max_steps", 2, *saving).exit_code == 0
    assert train(tiny, answers, tmp_path, "--max_steps", 4, *saving).exit_code == 0
    state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["global_step"] == 4
    created = [path.stat().st_mtime_ns for path in sorted(tmp_path.glob("checkpoint-*/trainer_state.json"))]
    assert created == sorted(created)
    refuse(
        *("train", "--target", tiny, "--data", answers, "--output_dir", tmp_path, *TRAIN, *DRAFT),
        *("--markov_rank", 4),
        match=r"holds a run with other settings: \{'markov_rank': 8\}, got \{'markov_rank': 4\}",
    )


def test_ablations_are_options(tmp_path, tiny, answers):
    for name, options, kind in (
        ("dflash", ("--markov_rank", 0, "--confidence_head", "false"), type(None)),
        ("gated", ("--markov_head_type", "gated", "--loss_decay", 2.0), "GatedMarkovHead"),
        ("reduced", ("--draft_vocab_size", 16, "--train_lm_head", "true", "--bigram_start", "false"), "MarkovHead"),
    ):
        result = train(tiny, answers, tmp_path / name, "--max_steps", 1, *options)
        assert result.exit_code == 0, result.output + repr(result.exception)
        draft = DSparkDraftModel.from_pretrained(tmp_path / name)
        assert type(draft.markov_head).__name__ == (kind if isinstance(kind, str) else "NoneType")


def test_confidence_head_without_a_sequential_one_reads_the_slot_alone(tmp_path, tiny, answers):
    result = train(tiny, answers, tmp_path, "--max_steps", 1, "--markov_rank", 0)
    assert result.exit_code == 0, result.output + repr(result.exception)
    assert DSparkDraftModel.from_pretrained(tmp_path).config.confidence_head_with_markov is False


def test_answers_of_a_server_are_trained_on(tmp_path, tiny, monkeypatch):
    """Text comes back, and training encodes it with the target's template."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    prompts = write(tmp_path / "p.jsonl", *({"prompt": words(10 + i)} for i in range(6)))
    with serving(lambda number, body: good(number, body, text=words(40, 41, 42 + number, 43))) as server:
        arguments = ("--server", server.url, "--target", "served", "--prompts", prompts, "-o", tmp_path / "a.jsonl")
        assert "6 rows added" in succeed("prepare", *arguments, "--concurrency", 2).stdout
        assert "0 rows added" in succeed("prepare", *arguments).stdout
    result = train(tiny, tmp_path / "a.jsonl", tmp_path / "draft", "--max_steps", 1, "--enable_thinking", "false")
    assert result.exit_code == 0, result.output + repr(result.exception)
    assert DSparkDraftModel.from_pretrained(tmp_path / "draft").config.training_info["enable_thinking"] is False


# Errors


def test_empty_data(tmp_path, tiny):
    empty = write(tmp_path / "empty.jsonl")
    refuse(
        *("train", "--target", tiny, "--data", empty, "--output_dir", tmp_path, *TRAIN), match=r"empty\.jsonl has no"
    )
    refuse("prepare", "--target", tiny, "--prompts", empty, "-o", tmp_path / "a.jsonl", match=r"empty\.jsonl has no")
    missing = tmp_path / "missing.jsonl"
    refuse("train", "--target", tiny, "--data", missing, "--output_dir", tmp_path, *TRAIN, match=r"missing\.jsonl")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [{"role": "user", "content": "w7"}]}, r"rows\.jsonl:1: The row has no answer: .+`dspark-hf"),
        ('{"messages": [', r"rows\.jsonl:1: each line must be one JSON object"),
        ({"prompt_ids": [5], "answer_ids": "w7"}, r"rows\.jsonl:1: `answer_ids` must be a list of at least one token"),
    ],
)
def test_rows_that_are_no_answers(tmp_path, tiny, row, message):
    """Alone they are an error; others are trained on without them."""
    data = write(tmp_path / "rows.jsonl", row)
    refuse("train", "--target", tiny, "--data", data, "--output_dir", tmp_path / "out", *TRAIN, match=message)
    assert not (tmp_path / "out" / "model.safetensors").exists()
    good = [{"prompt_ids": [5], "answer_ids": [6, 7, 8 + i, 9, 10]} for i in range(3)]
    result = train(tiny, write(data, row, *good), tmp_path / "out", "--max_steps", 1)
    assert result.exit_code == 0, result.output + repr(result.exception)
    assert DSparkDraftModel.from_pretrained(tmp_path / "out").config.training_info["num_sequences"] == 2


def test_row_of_another_target(tmp_path, tiny):
    data = write(tmp_path / "rows.jsonl", *[{"prompt_ids": [5], "answer_ids": [6, 7, 500]}] * 2)
    message = "below the target's vocabulary of 97, got 500"
    refuse("train", "--target", tiny, "--data", data, "--output_dir", tmp_path / "out", *TRAIN, match=message)


def test_options_that_are_not_given_are_not_sent(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    prompts = write(tmp_path / "p.jsonl", {"prompt": "hello"})
    with serving(good) as server:
        asked = ("prepare", "--server", server.url, "--target", "served", "--prompts", prompts)
        succeed(*asked, "-o", tmp_path / "a.jsonl")
        succeed(*asked, "-o", tmp_path / "b.jsonl", "--top-k", 5, "--temperature", 0, "--api-key", "secret")
    (_, plain), (_, chosen) = server.seen
    assert set(plain) == {"model", "messages", "max_tokens"}
    assert set(chosen) == {"model", "messages", "max_tokens", "top_k", "temperature"}
    assert server.headers[1]["Authorization"] == "Bearer secret"


def test_refusals_of_a_server(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")

    def reply(number, body):
        refused = body["messages"][0]["content"] == "long"
        return (400, {"error": {"message": "4096 tokens at most"}}) if refused else good(number, body)

    prompts = write(tmp_path / "p.jsonl", {"prompt": "long"}, {"prompt": "a"}, {"prompt": "b"})
    with serving(reply) as server:
        asked = ("prepare", "--server", server.url, "--target", "m", "--prompts", prompts, "-o", tmp_path / "a.jsonl")
        assert "2 rows added" in succeed(*asked).stdout
        assert "0 rows added" in succeed(*asked).stdout
        assert len(server.seen) == 4  # one of them a short prompt: is it the prompt or the arguments?
        assert "0 rows added" in succeed(*asked, "--ask-refused").stdout
    with serving(good) as server:
        asked = ("prepare", "--server", server.url, "--target", "m", "--prompts", prompts, "-o", tmp_path / "a.jsonl")
        assert "1 rows added" in succeed(*asked, "--ask-refused").stdout
    assert {row["messages"][0]["content"] for row in read(tmp_path / "a.jsonl")} == {"long", "a", "b"}


def test_template_without_a_generation_prompt(tmp_path, without_generation_prompt):
    message = r"\.jsonl:1: The chat template ignores `add_generation_prompt`.+Use a template with a generation prompt"
    prompts = write(tmp_path / "p.jsonl", {"prompt": words(10)})
    target = ("--target", without_generation_prompt)
    refuse("prepare", *target, "--prompts", prompts, "-o", tmp_path / "a.jsonl", match=message)
    turns = [{"role": "user", "content": words(10)}, {"role": "assistant", "content": words(11, 12)}]
    data = write(tmp_path / "d.jsonl", {"messages": turns}, {"messages": turns})
    refuse("train", *target, "--data", data, "--output_dir", tmp_path / "out", *TRAIN, match=message)


def test_settings_that_do_not_match(tmp_path, tiny):
    prompts = write(tmp_path / "p.jsonl", {"prompt": words(10)})
    arguments = ("prepare", "--target", tiny, "--prompts", prompts, "-o", tmp_path / "a.jsonl")
    succeed(*arguments, "--max-new-tokens", 4)
    content = (tmp_path / "a.jsonl").read_bytes()
    refuse(*arguments, "--max-new-tokens", 5, match=r"made with other settings \(sampling\).+choose another output")
    refuse(*arguments, "--max-new-tokens", 4, "--no-thinking", match=r"other settings \(enable_thinking\)")
    assert (tmp_path / "a.jsonl").read_bytes() == content


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--block_size", 0), "`block_size` must be >= 1"),
        (("--markov_head_type", "tree"), "`markov_head_type` must be one of"),
        (("--draft_vocab_size", 96), "`draft_vocab_size` must not exceed the"),
        (("--held_out", 1.5), "`held_out` must lie in"),
        (("--max_length", 3), "No sequence has an answer of at least 2 tokens within 3"),
        (("--num_anchors", 0), "`num_anchors` must be >= 1, got 0"),
        (("--no_such_option", 1), "no_such_option"),
    ],
)
def test_options_out_of_range(tmp_path, tiny, answers, arguments, message):
    refuse(
        *("train", "--target", tiny, "--data", answers, "--output_dir", tmp_path, *TRAIN, *DRAFT, *arguments),
        match=message,
    )


@pytest.mark.parametrize("name", ["neftune_noise_alpha", "label_smoothing_factor"])
def test_options_that_a_draft_cannot_follow(tmp_path, tiny, answers, name):
    output = tmp_path / "out"
    arguments = ("--target", tiny, "--data", answers, "--output_dir", output, *TRAIN, *DRAFT, f"--{name}", 0.5)
    refuse("train", *arguments, match=rf"`{name}` cannot be used to train a draft, got 0\.5: .+ Leave it unset\.")
    assert not output.exists()


def test_diverged_training_leaves_its_last_checkpoint(tmp_path, tiny, answers):
    """Exit status 2, also of the same command again; nothing that is not finite is left."""
    arguments = ("--target", tiny, "--data", answers, "--output_dir", tmp_path, *TRAIN, *DRAFT, "--max_steps", 9)
    diverging = ("--learning_rate", 1e30, "--warmup_steps", 0, "--save_strategy", "steps", "--save_steps", 1)
    messages = [refuse("train", *arguments, *diverging, match="must have finite figures, got loss") for _ in range(2)]
    newest = max(tmp_path.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    assert all(f"the last checkpoint before is {newest}." in message for message in messages)
    for path in tmp_path.rglob("*.safetensors"):
        assert all(tensor.isfinite().all() for tensor in load_file(path).values())
    assert not (tmp_path / "held_out.json").exists()
    assert not (tmp_path / "model.safetensors").exists()


def test_target_with_a_broken_weight(tmp_path, tiny, answers):
    folder = tmp_path / "broken"
    shutil.copytree(tiny, folder)
    rewrite(folder, lambda tensors: tensors["model.layers.2.self_attn.k_proj.weight"].fill_(float("nan")))
    output = tmp_path / "out"
    arguments = ("--target", folder, "--data", answers, "--output_dir", output, *TRAIN, *DRAFT)
    match = "The target must have finite weights, got NaN or infinity in `model.layers.2.self_attn.k_proj.weight`"
    refuse("train", *arguments, "--feature_cache", tmp_path / "cache", match=match)
    assert not output.exists()
    assert not (tmp_path / "cache").exists()


def test_prepare_without_prompts_or_target(tmp_path, tiny):
    output = tmp_path / "a.jsonl"
    refuse("prepare", "--target", tiny, "-o", output, match="There are no prompts. Pass `--prompts`, `--dataset`")
    prompts = write(tmp_path / "p.jsonl", {"prompt": words(10)})
    server = ("--server", "http://server.invalid/v1")
    refuse("prepare", *server, "--prompts", prompts, "-o", output, match="`--server` needs `--target`")
    own = ("--self-prompts", 3)
    refuse("prepare", *server, "--target", "name", *own, "-o", output, match="`--self-prompts` needs the target on")
    refuse("prepare", "--target", tiny, "--prompts", prompts, "-o", output, "--top-p", 0, match="`top_p` must lie in")


def test_train_needs_data(tmp_path, tiny):
    result = run("train", "--target", tiny, "--output_dir", tmp_path)
    assert result.exit_code == 2
    assert "--data" in result.stderr


# On the default target


def test_default_target_from_prompts_to_a_draft(tmp_path):
    """Six answers and two steps: seconds, but with the real tokenizer, template and mask token."""
    questions = (
        "What is 2 + 3?",
        "Name a fruit.",
        "Say hello.",
        "Who wrote Hamlet?",
        "Count to five.",
        "Define rain.",
    )
    prompts = write(tmp_path / "prompts.jsonl", *({"prompt": question} for question in questions))
    answers, output = tmp_path / "answers.jsonl", tmp_path / "draft"
    sampling = ("--max-new-tokens", 16, "--rows", 6, "--seed", 3)
    assert "6 rows added" in succeed("prepare", "--prompts", prompts, "-o", answers, *sampling).stdout
    for row in read(answers):
        assert row["answer_ids"][-1] == 2 or len(row["answer_ids"]) == 16
        assert row["prompt_ids"][0] == 1
    result = run(
        *("train", "--data", answers, "--output_dir", output, *TRAIN, *DRAFT),
        *("--max_steps", 2, "--per_device_train_batch_size", 2, "--target_layer_start", "true"),
    )
    assert result.exit_code == 0, result.output + repr(result.exception)
    assert 1 <= figures_of(result.stdout)["eval_accepted_length"] <= 4
    draft = DSparkDraftModel.from_pretrained(output, dtype=torch.bfloat16)
    assert draft.config.vocab_size == 49152
    assert draft.config.mask_token_id == 3  # <repo_name>
    assert draft.config.training_info["num_sequences"] == 5
    arguments = ("--target", ensure_default_target(), "--draft", output, "--max-new-tokens", 8)
    assert "accepted length" in succeed("generate", "What is 2 + 3?", *arguments).stderr
