# SPDX-License-Identifier: Apache-2.0
"""Batches as users meet them: outputs, streams, records, memory, and what is refused."""

from __future__ import annotations

import contextlib
import queue
import threading

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    TextIteratorStreamer,
    TextStreamer,
)

from dspark_hf import AdaptiveConfidenceCriteria, DSparkGenerateOutput, RowStreamer, collect_rounds, generate_many
from dspark_hf._compat import CACHE_KEY
from dspark_hf.decoding import packed_runner, streaming
from tests.support.closeness import assert_close
from tests.support.models import character_tokenizer, oracle_draft, random_prompt, tiny_target


@pytest.fixture(scope="module")
def pair():
    target = tiny_target("llama")
    draft = oracle_draft(target)
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    return target, draft


def batch(*lengths: int) -> dict[str, torch.Tensor]:
    longest = max(lengths)
    ids, mask = torch.zeros(2, len(lengths), longest, dtype=torch.long)
    for row, length in enumerate(lengths):
        if length:
            ids[row, longest - length :] = random_prompt(length, seed=row)[0]
            mask[row, longest - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def alone(target, length: int, seed: int, **options) -> list[int]:
    prompt = random_prompt(length, seed=seed)
    return target.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[0, length:].tolist()


# What comes back


def test_scores_and_logits_of_every_row(pair):
    target, draft = pair
    options = {"do_sample": False, "max_new_tokens": 9, "eos_token_id": alone(target, 7, 1, max_new_tokens=9)[4]}
    options |= {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    output = target.generate(**batch(4, 7), assistant_model=draft, **options)
    assert isinstance(output, DSparkGenerateOutput)
    steps = output.sequences.shape[1] - 7
    assert len(output.scores) == len(output.logits) == steps
    for row, length in enumerate((4, 7)):
        prompt = random_prompt(length, seed=row)
        plain = target.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        for step in range(steps):
            if step < len(plain.scores):
                assert_close(output.scores[step][row], plain.scores[step][0])
                assert_close(output.logits[step][row], plain.logits[step][0])
            else:
                assert not output.scores[step][row].any()  # the text has ended
    assert output.acceptance_stats.num_rounds == sum(record.request in (0, 1) for record in stats_of(output))


def stats_of(output: DSparkGenerateOutput) -> list:
    return output.acceptance_stats.rounds


def test_records_name_their_row_and_share_the_seconds(pair):
    target, draft = pair
    with collect_rounds() as stats:
        output = target.generate(**batch(3, 9, 5), assistant_model=draft, do_sample=False, max_new_tokens=12)
    for row in range(3):
        committed = sum(record.num_committed for record in stats.rounds if record.request == row)
        assert committed == 11  # the first token is the prefill's
    first = stats.rounds[:3]
    assert [record.request for record in first] == [0, 1, 2]
    assert len({record.round_s for record in first}) == 1
    assert stats.loop_efficiency < 1
    assert output.shape == (3, 21)


def test_several_answers_to_each_prompt(pair):
    target, draft = pair
    torch.manual_seed(0)
    options = {"do_sample": True, "max_new_tokens": 8, "num_return_sequences": 3, "top_k": 0}
    output = target.generate(**batch(4, 6), assistant_model=draft, **options)
    assert output.shape == (6, 14)
    assert torch.equal(output[:3, :6], batch(4, 6)["input_ids"][:1].expand(3, -1))
    assert len({tuple(row) for row in output[:3, 6:].tolist()}) > 1


def test_one_prompt_many_answers(pair):
    target, draft = pair
    prompt = random_prompt(5)
    output = target.generate(prompt, assistant_model=draft, do_sample=True, max_new_tokens=6, num_return_sequences=4)
    assert output.shape == (4, 11)


def test_rows_that_end_stop_costing(pair):
    target, draft = pair
    eos = alone(target, 3, 0, max_new_tokens=2, do_sample=False)[1]
    tokens: list[int] = []
    hook = target.model.register_forward_pre_hook(
        lambda module, args, kwargs: tokens.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    with collect_rounds() as stats:
        target.generate(**batch(3, 6), assistant_model=draft, do_sample=False, max_new_tokens=20, eos_token_id=eos)
    hook.remove()
    assert tokens[0] == 9  # both prompts, without padding
    assert sum(tokens[1:]) == stats.num_verified  # every token of a pass belongs to a record
    ended = max(i for i, record in enumerate(stats.rounds) if record.request == 0)
    assert {record.request for record in stats.rounds[ended + 2 :]} == {1}


def test_target_is_left_as_it_was(pair):
    target, draft = pair
    target.generate(**batch(3, 6), assistant_model=draft, max_new_tokens=4)
    assert target.config._attn_implementation == "sdpa"

    class Failing(LogitsProcessor):
        def __call__(self, input_ids, scores):
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        target.generate(**batch(3, 6), assistant_model=draft, max_new_tokens=4, logits_processor=[Failing()])
    assert target.config._attn_implementation == "sdpa"


def test_two_batches_at_a_time(pair):
    target, draft = pair
    found: queue.Queue = queue.Queue()

    def generate(lengths):
        output = target.generate(**batch(*lengths), assistant_model=draft, do_sample=False, max_new_tokens=15)
        found.put((lengths, output))

    threads = [threading.Thread(target=generate, args=(lengths,)) for lengths in ((3, 9), (5, 2, 4))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _ in threads:
        lengths, output = found.get_nowait()
        for row, length in enumerate(lengths):
            answer = alone(target, length, row, do_sample=False, max_new_tokens=15)
            assert output[row, max(lengths) :].tolist() == answer
    assert target.config._attn_implementation == "sdpa"


# Rules of rows


class EndsAt(StoppingCriteria):
    """Ends a text at a token."""

    def __init__(self, token: int):
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == self.token


def test_criteria_end_each_row_for_itself(pair):
    target, draft = pair
    token = alone(target, 6, 1, do_sample=False, max_new_tokens=12)[5]
    options = {"do_sample": False, "max_new_tokens": 12, "stopping_criteria": [EndsAt(token)]}
    output = target.generate(**batch(3, 6), assistant_model=draft, **options)
    for row, length in enumerate((3, 6)):
        answer = alone(target, length, row, **options)
        assert output[row, 6 : 6 + len(answer)].tolist() == answer
    assert token in output[1, 6:].tolist()


def test_stop_strings_end_each_row_for_itself(pair):
    target, draft = pair
    tokenizer = character_tokenizer()
    stop = tokenizer.decode(alone(target, 6, 1, do_sample=False, max_new_tokens=12)[4:6])
    options = {"do_sample": False, "max_new_tokens": 12, "stop_strings": stop, "tokenizer": tokenizer}
    output = target.generate(**batch(3, 6), assistant_model=draft, **options)
    for row, length in enumerate((3, 6)):
        answer = alone(target, length, row, **options)
        assert output[row, 6 : 6 + len(answer)].tolist() == answer


@pytest.mark.parametrize("copies", [1, 3])
def test_allowed_tokens_are_asked_for_by_prompt(pair, copies):
    target, draft = pair

    def tokens(**kwargs):
        """Of each row, tokens that say which number the function was given."""
        output = target.generate(
            **batch(3, 6),
            do_sample=copies > 1,
            num_return_sequences=copies,
            max_new_tokens=5,
            prefix_allowed_tokens_fn=lambda number, ids: [10 + number],
            **kwargs,
        )
        return output[:, 6:].tolist()

    found = tokens(assistant_model=draft)
    assert found == tokens()
    assert found[0] != found[-1]


@pytest.mark.parametrize("option", ["encoder_repetition_penalty", "encoder_no_repeat_ngram_size"])
def test_rules_about_the_prompt_are_about_the_own_one(pair, option):
    target, draft = pair
    options = {option: 3.0 if option == "encoder_repetition_penalty" else 1, "do_sample": False, "max_new_tokens": 8}
    output = target.generate(**batch(30, 41, 5), assistant_model=draft, **options)
    answers = generate_many(
        target, draft, [random_prompt(n, seed=i)[0] for i, n in enumerate((30, 41, 5))], 1, **options
    )
    for row, length in enumerate((30, 41, 5)):
        expected = alone(target, length, row, **options)
        assert output[row, 41:].tolist() == expected
        assert answers[row].tolist() == expected
    assert alone(target, 41, 1, **options) != alone(target, 41, 1, do_sample=False, max_new_tokens=8)


def ignored_prompts() -> list:
    """A number for all rows, or one for each, which older releases do not take."""
    numbers = torch.tensor([12, 12])
    with contextlib.suppress(ValueError):
        return [2, RepetitionPenaltyLogitsProcessor(9.0, prompt_ignore_length=numbers).prompt_ignore_length]
    return [2]


@pytest.mark.parametrize("ignored", ignored_prompts())
def test_prompts_that_a_penalty_ignores(pair, ignored):
    """A custom processor of the user's, which counts in padded rows."""
    target, draft = pair
    output = target.generate(
        **batch(5, 12),
        assistant_model=draft,
        do_sample=False,
        max_new_tokens=8,
        logits_processor=[RepetitionPenaltyLogitsProcessor(9.0, prompt_ignore_length=ignored)],
    )
    for row, length in enumerate((5, 12)):
        own = max(0, (ignored if isinstance(ignored, int) else 12) - (12 - length))
        processor = RepetitionPenaltyLogitsProcessor(9.0, prompt_ignore_length=own)
        assert output[row, 12:].tolist() == alone(
            target, length, row, do_sample=False, max_new_tokens=8, logits_processor=[processor]
        )


# Streams


def test_a_stream_for_each_row(pair):
    target, draft = pair
    tokenizer = character_tokenizer()
    streamers = [TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=30) for _ in range(2)]
    output = target.generate(
        **batch(3, 6), assistant_model=draft, do_sample=False, max_new_tokens=9, streamer=RowStreamer(streamers)
    )
    for row, streamer in enumerate(streamers):
        assert "".join(streamer) == tokenizer.decode(output[row, 6:])


def test_streams_end_after_an_error(pair):
    target, draft = pair
    streamers = [TextIteratorStreamer(character_tokenizer(), timeout=30) for _ in range(2)]
    with pytest.raises(NotImplementedError):
        target.generate(
            **batch(3, 6),
            assistant_model=draft,
            max_new_tokens=4,
            guidance_scale=2.0,
            streamer=RowStreamer(streamers),
        )
    for streamer in streamers:
        list(streamer)  # would time out


def test_too_few_streams(pair):
    target, draft = pair
    streamer = TextIteratorStreamer(character_tokenizer(), timeout=30)
    with pytest.raises(ValueError, match=r"one streamer for each of 2 rows, got 1"):
        target.generate(**batch(3, 6), assistant_model=draft, streamer=RowStreamer([streamer]))
    list(streamer)  # would time out


def test_a_row_streamer_may_be_used_again(pair):
    target, draft = pair
    streamers = [TextIteratorStreamer(character_tokenizer(), timeout=30) for _ in range(2)]
    both = RowStreamer(streamers)
    for options in ({}, {"guidance_scale": 2.0}):
        with contextlib.suppress(NotImplementedError):
            target.generate(**batch(3, 6), assistant_model=draft, max_new_tokens=4, streamer=both, **options)
        for streamer in streamers:
            list(streamer)  # would time out


# Many prompts


def test_answers_are_reported_as_they_come(pair):
    target, draft = pair
    prompts = [random_prompt(length, seed=row)[0] for row, length in enumerate((3, 9, 5, 12, 2))]
    finished, streamed = [], {}
    answers = generate_many(
        target,
        draft,
        prompts,
        max_batch=2,
        do_sample=False,
        max_new_tokens=7,
        on_tokens=lambda number, ids: streamed.setdefault(number, []).extend(ids.tolist()),
        on_finished=lambda number, answer: finished.append((number, answer.tolist())),
    )
    assert sorted(finished) == [(number, answer.tolist()) for number, answer in enumerate(answers)]
    assert streamed == {number: answer.tolist() for number, answer in enumerate(answers)}
    for row, length in enumerate((3, 9, 5, 12, 2)):
        assert answers[row].tolist() == alone(target, length, row, do_sample=False, max_new_tokens=7)


def test_places_are_given_away_at_once(pair):
    target, draft = pair
    prompts = [random_prompt(4, seed=row)[0] for row in range(6)]
    running = []
    generate_many(
        target,
        draft,
        prompts,
        max_batch=3,
        do_sample=False,
        max_new_tokens=10,
        on_finished=lambda number, answer: running.append(number),
    )
    with collect_rounds() as stats:
        generate_many(target, draft, prompts, max_batch=3, do_sample=False, max_new_tokens=10)
    order = [record.request for record in stats.rounds]
    assert order[:3] == [0, 1, 2]
    assert order.index(3) < len(order) / 2
    assert sorted(running) == list(range(6))


def test_a_first_token_may_be_the_last(pair):
    target, draft = pair
    first = alone(target, 4, 1, do_sample=False, max_new_tokens=1)[0]
    prompts = [random_prompt(4, seed=row)[0] for row in (0, 1, 1, 2)]
    options = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": first}
    answers = generate_many(target, draft, prompts, max_batch=1, **options)
    assert answers[1].tolist() == answers[2].tolist() == [first]
    for seed, answer in zip((0, 1, 1, 2), answers, strict=True):
        assert answer.tolist() == alone(target, 4, seed, **options)


def test_no_row_is_hurried_while_others_wait(pair, monkeypatch):
    """The call ends with its slowest row only once nobody takes the place of one that ends."""
    target, _ = pair
    draft = oracle_draft(target)
    seen, right = [], AdaptiveConfidenceCriteria.verify_lengths

    def spy(criterion, histories, confidence, tokens_left=None, plan=None):
        seen.append((len(histories), tokens_left))
        return right(criterion, histories, confidence, tokens_left, plan)

    monkeypatch.setattr(AdaptiveConfidenceCriteria, "verify_lengths", spy)
    draft.generation_config.num_assistant_tokens_schedule = "confidence"
    prompts = [random_prompt(4, seed=row)[0] for row in range(4)]
    answers = generate_many(target, draft, prompts, max_batch=2, do_sample=False, max_new_tokens=12)
    hurried = [tokens_left is not None for _, tokens_left in seen]
    assert hurried == sorted(hurried)
    assert len(set(hurried)) == 2
    assert all(len(left) == count and 1 <= min(left) <= max(left) <= 11 for count, left in seen if left is not None)
    for row, answer in enumerate(answers):
        assert answer.tolist() == alone(target, 4, row, do_sample=False, max_new_tokens=12)


def test_a_question_may_be_asked_while_others_wait(pair):
    target, draft = pair
    prompts = [random_prompt(4, seed=row)[0] for row in range(5)]
    asked = []

    def ask(number, answer):
        text = random_prompt(6, seed=9)
        asked.append(target.generate(text, assistant_model=draft, do_sample=False, max_new_tokens=5)[0, 6:].tolist())

    options = {"do_sample": False, "max_new_tokens": 6}
    answers = generate_many(target, draft, prompts, max_batch=2, on_finished=ask, **options)
    assert asked == [alone(target, 6, 9, do_sample=False, max_new_tokens=5)] * 5
    for row, answer in enumerate(answers):
        assert answer.tolist() == alone(target, 4, row, **options)


def test_configs_cannot_ask_for_several_answers(pair):
    target, draft = pair
    config = GenerationConfig(num_return_sequences=2, do_sample=True, max_new_tokens=4, return_dict_in_generate=True)
    answers = generate_many(target, draft, [[5, 6], [7], [8, 9]], max_batch=2, generation_config=config)
    assert [len(answer) for answer in answers] == [4, 4, 4]


@pytest.mark.parametrize(
    ("prompts", "arguments", "message"),
    [
        ([[3]], {"max_length": 9}, r"takes no `max_length`, got 9. Use `max_new_tokens`"),
        ([], {}, r"`prompts` must hold at least one prompt, got none"),
        ([[3], []], {}, r"at least one token, got none in prompt 1"),
        ([[3]], {"max_batch": 0}, r"`max_batch` must be >= 1, got 0"),
        ([[3]], {"num_return_sequences": 2}, r"takes no `num_return_sequences`, got 2"),
        ([[3]], {"return_dict_in_generate": True}, r"takes no `return_dict_in_generate`, got True"),
    ],
)
def test_many_prompts_that_are_none(pair, prompts, arguments, message):
    with pytest.raises(ValueError, match=message):
        generate_many(*pair, prompts, **arguments)


# What is refused, before any token


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"output_attentions": True, "return_dict_in_generate": True},
            NotImplementedError,
            "not attentions or hidden",
        ),
        ({"prefill_chunk_size": 4}, NotImplementedError, "got `prefill_chunk_size`"),
        ({"cache_implementation": "static"}, NotImplementedError, "got `cache_implementation`='static'"),
        ({"guidance_scale": 2.0}, NotImplementedError, "`guidance_scale` to one row at a time"),
        ({"num_beams": 2}, ValueError, "generation mode 'beam_search'"),
    ],
)
def test_options_for_one_row_only(pair, options, error, message):
    target, draft = pair
    calls = []
    hook = target.register_forward_pre_hook(lambda *_: calls.append(1))
    with pytest.raises(error, match=message):
        target.generate(**batch(3, 6), assistant_model=draft, max_new_tokens=4, **options)
    hook.remove()
    assert not calls


def test_a_filled_cache_is_refused(pair):
    target, draft = pair
    cache = DynamicCache(config=target.config)
    target(batch(3, 6)["input_ids"], **{CACHE_KEY: cache})
    longer = batch(5, 8)
    with pytest.raises(NotImplementedError, match="an empty cache, and got one of 6 tokens"):
        target.generate(**longer, assistant_model=draft, max_new_tokens=4, **{CACHE_KEY: cache})


def test_a_row_of_padding_is_refused(pair):
    target, draft = pair
    with pytest.raises(ValueError, match=r"at least one token, got row 1 without any"):
        target.generate(**batch(3, 0, 6), assistant_model=draft, max_new_tokens=4)


def test_more_than_memory_holds_is_refused(pair, monkeypatch):
    target, draft = pair
    monkeypatch.setattr(packed_runner, "_available_bytes", lambda device: 1000)
    with pytest.raises(MemoryError, match=r"2 rows with up to 6 tokens do not fit into memory .+ `max_batch`"):
        target.generate(**batch(3, 6), assistant_model=draft, max_new_tokens=4)


def test_a_split_target_is_refused(pair, monkeypatch):
    target, draft = pair
    monkeypatch.setattr(target, "hf_device_map", {"model": 0, "lm_head": "cpu"}, raising=False)
    with pytest.raises(NotImplementedError, match=r"on one device, and got one on \['0', 'cpu'\]"):
        target.generate(**batch(3, 6), assistant_model=draft, max_new_tokens=4)


def test_one_streamer_cannot_take_a_batch():
    with pytest.raises(ValueError, match=r"a streamer for each row, got one TextStreamer for 2 rows"):
        streaming.row_sink(TextStreamer(character_tokenizer()), 2)
