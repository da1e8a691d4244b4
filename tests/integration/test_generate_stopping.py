# SPDX-License-Identifier: Apache-2.0
"""Generation ends token by token where plain generation ends, also inside a block; and a consumer can end it."""

import threading
import time

import pytest
import torch
from transformers import (
    DynamicCache,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

import dspark_hf
from tests.support.scripted import (
    NUM_NEW,
    StreamerSpy,
    assert_same_cache,
    generate,
    letter_tokenizer,
    lively_target,
    num_accepted,
    scripted_draft,
    text_of,
    with_cache,
)


class Recorder(StoppingCriteria):
    """Ends at a length; keeps what it was asked."""

    def __init__(self, length=10**6):
        self.length = length
        self.texts = []
        self.num_scores = []

    def __call__(self, input_ids, scores, **kwargs):
        self.texts.append(input_ids[0].tolist())
        self.num_scores.append(None if scores is None else len(scores))
        done = input_ids.shape[1] >= self.length
        return torch.full((input_ids.shape[0],), done, dtype=torch.bool)


@pytest.mark.parametrize("place", range(11, 22))
@pytest.mark.parametrize("num_letters", [1, 2])
def test_stop_string_at_every_place_of_a_block(target, prompt, plain, draft, place, num_letters):
    tokenizer = letter_tokenizer()
    word = tokenizer.decode(plain[0, place : place + num_letters], skip_special_tokens=True)
    stop = {"stop_strings": [word, "<never>"], "tokenizer": tokenizer}
    expected = generate(target, prompt, **stop)
    assert expected.shape[1] <= place + num_letters
    assert torch.equal(generate(target, prompt, draft, **stop), expected)


@pytest.mark.parametrize("length", range(12, 22))
def test_custom_criterion_at_every_place_of_a_block(target, prompt, plain, draft, length):
    expected_cache, cache = DynamicCache(config=target.config), DynamicCache(config=target.config)
    generate(target, prompt, stopping_criteria=[Recorder(length)], **with_cache(expected_cache))
    with dspark_hf.collect_rounds() as stats:
        text = generate(target, prompt, draft, stopping_criteria=[Recorder(length)], **with_cache(cache))
    assert torch.equal(text, plain[:, :length])
    assert text[0, 12:].tolist() == text_of(stats)
    assert_same_cache(cache, expected_cache)


def test_criteria_see_each_token_as_in_plain_generation(target, prompt, draft):
    expected, recorder = Recorder(), Recorder()
    generate(target, prompt, stopping_criteria=[expected])
    generate(target, prompt, draft, stopping_criteria=StoppingCriteriaList([recorder]))
    assert recorder.texts == expected.texts
    assert recorder.num_scores == expected.num_scores


def test_criteria_see_the_scores_so_far(target, prompt, draft):
    wanted = {"return_dict_in_generate": True, "output_scores": True}
    expected, recorder = Recorder(), Recorder()
    generate(target, prompt, stopping_criteria=[expected], **wanted)
    generate(target, prompt, draft, stopping_criteria=[recorder], **wanted)
    assert recorder.num_scores == expected.num_scores == list(range(1, NUM_NEW + 1))


def test_max_time_of_zero_ends_after_the_first_token(target, prompt, plain, draft):
    assert torch.equal(generate(target, prompt, draft, max_time=0.0), plain[:, :12])


def test_a_consumer_ends_the_thread_within_one_round(target, prompt, draft):
    stop, first_round = threading.Event(), threading.Event()

    class Cancelled(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((input_ids.shape[0],), stop.is_set(), dtype=torch.bool)

    class Streamer(StreamerSpy):
        def put(self, value):
            super().put(value)
            if len(self.puts) == 3:  # the prompt, the prefill's token, a first round
                first_round.set()
                stop.wait(timeout=30)

    streamer = Streamer()
    thread = threading.Thread(
        target=generate,
        args=(target, prompt, draft),
        kwargs={"max_new_tokens": 400, "stopping_criteria": [Cancelled()], "streamer": streamer},
    )
    thread.start()
    assert first_round.wait(timeout=30)
    stop.set()
    start = time.perf_counter()
    thread.join(timeout=30)
    assert not thread.is_alive()
    assert time.perf_counter() - start < 10
    assert len(streamer.puts) == 4  # one round more
    assert len(streamer.puts[3]) == 1  # and of it one token
    assert streamer.num_ends == 1


@pytest.mark.parametrize("kind", ["qwen3", "mistral"])
@pytest.mark.parametrize("length", [12, 13, 14, 17])
def test_an_exception_leaves_no_drafts_in_the_users_cache(kind, length, prompt):
    # As plain generation leaves it: every token but the last, so that the chat can go on.
    class Abort(Recorder):
        def __call__(self, input_ids, scores, **kwargs):
            if input_ids.shape[1] == length:
                raise KeyboardInterrupt
            return super().__call__(input_ids, scores, **kwargs)

    target = lively_target(kind)
    plain = generate(target, prompt)
    draft = scripted_draft(target, plain)
    expected_cache, cache = DynamicCache(config=target.config), DynamicCache(config=target.config)
    with pytest.raises(KeyboardInterrupt):
        generate(target, prompt, stopping_criteria=[Abort()], **with_cache(expected_cache))
    with pytest.raises(KeyboardInterrupt):
        generate(target, prompt, draft, stopping_criteria=[Abort()], **with_cache(cache))
    assert not any(getattr(layer, "record_past", False) for layer in cache.layers)
    assert expected_cache.get_seq_length() == length - 1
    # Tokens of the round that broke off may be missing, drafts may not be left.
    assert cache.get_seq_length() <= length - 1
    text = target.generate(plain[:, :length], do_sample=False, max_new_tokens=4, **with_cache(cache))
    assert torch.equal(text, plain[:, : length + 4])


@pytest.mark.parametrize("kind", ["qwen3", "mistral"])
def test_a_consumer_that_raises_leaves_a_cache_to_go_on_from(kind, prompt):
    class Gone(StreamerSpy):
        def put(self, value):
            super().put(value)
            if len(self.puts) == 4:
                raise BrokenPipeError

    target, streamer = lively_target(kind), Gone()
    plain = generate(target, prompt)
    cache = DynamicCache(config=target.config)
    with pytest.raises(BrokenPipeError):
        generate(target, prompt, scripted_draft(target, plain), streamer=streamer, **with_cache(cache))
    length = sum(len(put) for put in streamer.puts)
    assert cache.get_seq_length() == length - 1
    assert not any(getattr(layer, "record_past", False) for layer in cache.layers)
    text = generate(target, plain[:, :length], max_new_tokens=4, **with_cache(cache))
    assert torch.equal(text, plain[:, : length + 4])


PROCESSORS = {
    "repetition_penalty": {"repetition_penalty": 1.5},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[3], [5, 6], [9]]},
    "suppress_tokens": {"suppress_tokens": list(range(30, 60))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(0, 30))},
    "sequence_bias": {"sequence_bias": [[[7], 6.0], [[8, 9], 6.0]]},
    "min_new_tokens": {"min_new_tokens": 12, "eos_token_id": list(range(0, 60))},
    "min_length": {"min_length": 20, "eos_token_id": list(range(0, 60))},
    "forced_bos_token_id": {"forced_bos_token_id": 5},
    "forced_eos_token_id": {"forced_eos_token_id": 95, "eos_token_id": 95},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": 95},
    "guidance_scale": {"guidance_scale": 1.5},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": lambda batch_id, ids: list(range(len(ids) % 7, 97, 3))},
    "renormalize_logits": {"renormalize_logits": True, "repetition_penalty": 1.3},
    "remove_invalid_values": {"remove_invalid_values": True},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.5},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=4.0, seeding_scheme="selfhash")},
    # It has a state of its own that every call advances.
    "synthid": {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[654, 400, 836], ngram_len=3)},
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_logits_processors(target, prompt, name):
    expected = generate(target, prompt, **PROCESSORS[name])
    with dspark_hf.collect_rounds() as stats:
        text = generate(target, prompt, scripted_draft(target, expected), **PROCESSORS[name])
    assert torch.equal(text, expected)
    assert text[0, 12:].tolist() == text_of(stats)
    assert sum(num_accepted(stats)) > 0


def test_custom_processor_is_called_once_per_token_on_its_own_prefix(target, prompt, draft):
    calls = {None: [], "draft": []}

    def run(key, assistant):
        def processor(input_ids, scores):
            calls[key].append(input_ids[0].tolist())
            return scores

        return generate(target, prompt, assistant, logits_processor=[processor])

    assert torch.equal(run("draft", draft), run(None, None))
    assert calls["draft"] == calls[None]
