# SPDX-License-Identifier: Apache-2.0

import json
import re

import pytest
import torch

from dspark_hf import DSparkConfig, DSparkDraftModel, collect_rounds
from dspark_hf.common.prompts import Prompt
from dspark_hf.evaluation import calibrate as calibrate_job
from dspark_hf.evaluation.calibrate import (
    calibrate,
    check_can_save,
    collect_full_blocks,
    num_calibration_answers,
    save_calibration,
)
from dspark_hf.scheduling.calibration import acceptance_prior, fit_temperatures
from dspark_hf.scheduling.observations import ConfidenceObservations
from tests.support.closeness import assert_close
from tests.support.models import character_tokenizer, oracle_draft, spread_confidence, tiny_target


# Letters are ids 0 to 51, none of which ends a text.
PROMPTS = [Prompt("letters", text) for text in ("abcdef", "ghijkl", "mnopqr", "stuvwx", "yzABCD", "EFGHIJ")]
LENGTH = 72
FIELDS = calibrate_job.CALIBRATION_FIELDS


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture
def draft(target):
    return spread_confidence(oracle_draft(target))


@pytest.fixture(scope="module")
def answered(target):
    """Rounds of each prompt, of a draft of which every slot is sent."""
    draft = spread_confidence(oracle_draft(target))
    draft.generation_config.num_assistant_tokens = 1  # must not count
    return [collect(target, draft, [prompt]) for prompt in PROMPTS]


def run(target, draft, prompts=PROMPTS, **arguments):
    return calibrate(
        target, draft, character_tokenizer(), prompts, **({"max_new_tokens": LENGTH, "raw": True} | arguments)
    )


def collect(target, draft, prompts, **arguments):
    answers = collect_full_blocks(
        target, draft, character_tokenizer(), prompts, **({"max_new_tokens": LENGTH, "raw": True} | arguments)
    )
    return answers.rounds


def observe(*answers) -> ConfidenceObservations:
    return ConfidenceObservations.from_rounds([record for rounds in answers for record in rounds], 4)


def fields_of(config) -> dict:
    return {name: getattr(config, name) for name in FIELDS}


def test_every_slot_is_sent_and_judged(answered):
    for rounds in answered:
        assert {record.verify_length for record in rounds[:-4]} == {4}
        assert sum(record.num_committed for record in rounds) == LENGTH - 1
    assert {record.num_accepted for rounds in answered for record in rounds} == {0, 1, 2, 3, 4}


def test_temperatures_are_fitted_to_one_half_and_judged_on_the_other(target, draft, answered):
    calls = []
    report = run(target, draft, on_progress=lambda: calls.append(1))
    fit, check = observe(*answered[::2]), observe(*answered[1::2])
    assert draft.config.confidence_temperatures == list(report.temperatures) == list(fit_temperatures(fit))
    assert list(fit_temperatures(check)) != list(report.temperatures)
    assert (report.num_rounds, report.num_check_rounds) == (fit.num_rounds, check.num_rounds)
    assert report.conditional_acceptance == fit.conditional_acceptance
    assert draft.config.acceptance_prior == list(acceptance_prior(observe(*answered)))
    assert len(calls) == num_calibration_answers(PROMPTS) == 6


def test_what_was_done_is_written_down(target, draft):
    knobs = draft.generation_config
    knobs.num_assistant_tokens, knobs.assistant_confidence_threshold = 2, 0.75
    report = run(target, draft, prompts_name="letters.txt")
    assert draft.generation_config is knobs  # put back
    assert (knobs.num_assistant_tokens, knobs.assistant_confidence_threshold) == (2, 0.75)
    assert knobs.num_assistant_tokens_schedule is None
    info = draft.config.calibration_info
    assert info["num_rounds"] == report.num_rounds + report.num_check_rounds
    assert {name: info[name] for name in ("prompts", "num_prompts", "max_new_tokens", "decoding", "dtype")} == {
        "prompts": "letters.txt",
        "num_prompts": 6,
        "max_new_tokens": LENGTH,
        "decoding": "greedy",
        "dtype": "float32",
    }
    assert set(info["versions"]) == {"dspark_hf", "transformers", "torch"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", info["date"])
    json.dumps(info)


def test_an_overconfident_head_is_toned_down(target, draft):
    with torch.no_grad():
        draft.confidence_head.proj.weight.zero_()
        draft.confidence_head.proj.bias.fill_(4.0)  # 0.98 of every slot
    report = run(target, draft)
    assert all(temperature > 1 for temperature in report.temperatures[:2])
    assert report.mean_error_before > 0.3
    assert report.mean_error_after < report.mean_error_before / 2


def test_the_next_call_uses_the_temperatures(target, draft, answered):
    draft.config.confidence_temperatures = [0.5, 2.0, 1.0, 4.0]
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    inputs = character_tokenizer()(PROMPTS[0].text, return_tensors="pt")
    with collect_rounds() as stats:
        target.generate(
            inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            assistant_model=draft,
            do_sample=False,
            max_new_tokens=LENGTH,
        )
    ours = [record.confidence for record in stats.rounds if record.verify_length == 4]
    expected = torch.sigmoid(observe(answered[0]).confidence_logits / torch.tensor([0.5, 2.0, 1.0, 4.0]))
    assert_close(torch.tensor(ours), expected)


def test_calibrating_again_starts_from_the_head_itself(target, draft, answered):
    draft.config.confidence_temperatures = [0.5, 2.0, 1.0, 4.0]
    again = collect(target, draft, PROMPTS[:1])
    assert [record.confidence for record in again] == [record.confidence for record in answered[0]]
    assert draft.config.confidence_temperatures == [0.5, 2.0, 1.0, 4.0]


def test_nothing_changes_where_the_work_breaks_off(target, draft):
    knobs, draft.config.confidence_temperatures = draft.generation_config, [1.5, 1.0, 1.0, 1.0]

    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(target, draft, on_progress=stop)
    assert draft.generation_config is knobs
    assert fields_of(draft.config) == dict(zip(FIELDS, ([1.5, 1.0, 1.0, 1.0], None, None, None), strict=True))


def test_too_few_rounds_change_nothing(target, draft):
    with pytest.raises(ValueError, match="at least 30 full blocks"):
        run(target, draft, max_new_tokens=12)
    assert fields_of(draft.config) == dict.fromkeys(FIELDS)


# Prompts and answers


def test_halves_are_taken_domain_by_domain():
    """In the order of the file, all of math would be fitted to and all of code checked on."""
    prompts = [Prompt(domain, str(i)) for i in range(3) for domain in ("math", "code")]
    fit, check = calibrate_job._split([*prompts, prompts[0]], None)
    assert [prompt.domain for prompt in fit] == ["code", "code", "math"]
    assert [prompt.domain for prompt in check] == ["code", "math", "math"]
    assert not set(fit) & set(check)
    assert {*fit, *check} == set(prompts)


def test_prompts_to_check_on_are_not_fitted_to(target, draft, answered):
    report = run(target, draft, prompts=PROMPTS, check_prompts=PROMPTS[4:])
    assert report.num_rounds == observe(*answered[:4]).num_rounds
    assert report.num_check_rounds == observe(*answered[4:]).num_rounds
    assert num_calibration_answers(PROMPTS, PROMPTS[4:], num_answers=3) == 18


def test_sampled_answers(target, draft):
    torch.manual_seed(0)
    sampled = {"do_sample": True, "temperature": 0.7, "top_k": 0}
    rounds = collect(target, draft, PROMPTS[:1], num_answers=2, generate_arguments=sampled)
    assert sum(record.num_committed for record in rounds) == 2 * (LENGTH - 1)
    run(target, draft, PROMPTS[:2], num_answers=3, generate_arguments=sampled)
    assert draft.config.calibration_info["decoding"] == "sampled, temperature 0.7, top_k 0"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": PROMPTS[:1]}, "one prompt to fit to and another one to check on, got 1 and 0"),
        ({"prompts": [PROMPTS[0]] * 5}, "got 1 and 0"),
        ({"check_prompts": PROMPTS}, "got 0 and 6"),
        ({"max_new_tokens": 5}, "`max_new_tokens` must be >= 6, or no block of 4 drafts is sent in full, got 5"),
        ({"num_answers": 0}, "`num_answers` must be >= 1, got 0"),
        ({"num_answers": 2}, "Greedy answers to the same prompt are all the same, got `num_answers` 2"),
    ],
)
def test_what_cannot_work_is_refused_before_it_starts(target, draft, arguments, message):
    calls = []
    with pytest.raises(ValueError, match=message):
        run(target, draft, on_progress=lambda: calls.append(1), **arguments)
    assert calls == []


def test_shortest_answers_have_one_full_block(target, draft):
    rounds = collect(target, draft, PROMPTS[:1], max_new_tokens=6)
    assert [record.verify_length for record in rounds][:1] == [4]


def test_a_draft_without_a_confidence_head_is_refused(target):
    draft = oracle_draft(target, enable_confidence_head=False)
    with pytest.raises(ValueError, match=r"needs a confidence head.*only the acceptance .*acceptance_prior"):
        run(target, draft)


# On disk


@pytest.fixture
def stored(target, draft, tmp_path):
    """A draft loaded from a folder, in another dtype than it is stored in, and calibrated."""
    draft.save_pretrained(tmp_path / "draft")
    loaded = DSparkDraftModel.from_pretrained(tmp_path / "draft", dtype=torch.bfloat16)
    loaded.config.confidence_temperatures = [0.5, 2.0, 1.0, 4.0]
    loaded.config.acceptance_prior = [0.5, 0.25, 0.0, 1.0]
    loaded.config.copy_prior = [0.25, 0.5, 0.5, 0.75, 0.75, 0.75, 1.0]
    loaded.config.calibration_info = {"num_rounds": 100}
    return loaded


def test_only_these_fields_of_the_own_config_are_replaced(stored, tmp_path):
    folder = tmp_path / "draft"
    contents = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert save_calibration(stored) == folder
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert sorted(after) == sorted(contents)
    assert [name for name in after if after[name] != contents[name]] == ["config.json"]
    old, new = json.loads(contents["config.json"]), json.loads(after["config.json"])
    assert {name for name in new if new[name] != old.get(name)} == set(FIELDS)
    assert new["dtype"] == "float32"
    assert fields_of(DSparkDraftModel.from_pretrained(folder).config) == fields_of(stored.config)


def test_a_copy_is_a_whole_draft(stored, tmp_path):
    before = (tmp_path / "draft" / "config.json").read_bytes()
    assert save_calibration(stored, tmp_path / "copy") == tmp_path / "copy"
    assert (tmp_path / "draft" / "config.json").read_bytes() == before
    copy = DSparkDraftModel.from_pretrained(tmp_path / "copy")
    assert fields_of(copy.config) == fields_of(stored.config)
    assert_close(copy.state_dict(), stored.state_dict(), factor=0)


def test_output_in_the_own_folder_leaves_the_weights(stored, tmp_path):
    weights = (tmp_path / "draft" / "model.safetensors").read_bytes()
    save_calibration(stored, tmp_path / "draft")
    assert (tmp_path / "draft" / "model.safetensors").read_bytes() == weights
    assert DSparkConfig.from_pretrained(tmp_path / "draft").confidence_temperatures == [0.5, 2.0, 1.0, 4.0]


def test_without_a_folder_of_its_own_an_output_is_needed(target, draft, tmp_path):
    with pytest.raises(ValueError, match="must be on this machine .* got ''. Pass an output folder"):
        check_can_save(draft)
    assert check_can_save(draft, tmp_path) is None
    draft.config.confidence_temperatures = [1.0, 1.0, 2.0, 1.0]
    save_calibration(draft, tmp_path / "copy")
    assert DSparkConfig.from_pretrained(tmp_path / "copy").confidence_temperatures == [1.0, 1.0, 2.0, 1.0]


def test_a_folder_in_a_foreign_layout_is_not_written_to(stored, tmp_path):
    path = tmp_path / "draft" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "qwen3"}))
    before = path.read_bytes()
    with pytest.raises(ValueError, match="in this package's layout"):
        save_calibration(stored)
    assert path.read_bytes() == before


def test_an_uncalibrated_draft_is_not_saved(draft, tmp_path):
    with pytest.raises(RuntimeError, match="Call `calibrate` first"):
        save_calibration(draft, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
