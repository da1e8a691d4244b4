# SPDX-License-Identifier: Apache-2.0
"""Streamers get the text of plain generation, in blocks, and are always told that it ended."""

import contextlib
import threading

import pytest
import torch
from transformers import DynamicCache, TextIteratorStreamer, TextStreamer

from dspark_hf import RowStreamer
from dspark_hf.decoding.stream_end import ended_on_failure
from tests.support.models import random_draft
from tests.support.scripted import (
    NUM_NEW,
    ForwardCounter,
    StreamerSpy,
    generate,
    letter_tokenizer,
    with_cache,
)


@pytest.fixture(scope="module")
def tokenizer():
    return letter_tokenizer()


def test_blocks_arrive_as_they_are_committed(target, prompt, plain, draft):
    spy = StreamerSpy()
    generate(target, prompt, draft, streamer=spy)
    # Nothing, then two drafts and the target's token per round; the last round is the target's token alone.
    assert [len(put) for put in spy.puts] == [11, 1, 1, 3, 3, 3, 3, 3, 1]
    assert sum(spy.puts, []) == plain[0].tolist()
    assert spy.num_ends == 1


def test_text_streamer_prints_the_text_of_plain_generation(target, tokenizer, prompt, draft, capsys):
    for skip_prompt in (False, True):
        generate(target, prompt, streamer=TextStreamer(tokenizer, skip_prompt=skip_prompt))
        expected = capsys.readouterr().out
        generate(target, prompt, draft, streamer=TextStreamer(tokenizer, skip_prompt=skip_prompt))
        assert capsys.readouterr().out == expected
        assert len(expected) > NUM_NEW


def test_iterator_gives_the_text_of_plain_generation(target, tokenizer, prompt, plain, draft):
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=10)
    thread = threading.Thread(target=generate, args=(target, prompt, draft), kwargs={"streamer": streamer})
    thread.start()
    pieces = list(streamer)
    thread.join(timeout=30)
    assert not thread.is_alive()
    assert "".join(pieces) == tokenizer.decode(plain[0, 11:])


def test_stop_inside_a_block_ends_the_stream_there(target, tokenizer, prompt, plain, draft):
    spy = StreamerSpy()
    text = generate(target, prompt, draft, streamer=spy, eos_token_id=int(plain[0, 14]))
    assert sum(spy.puts, []) == text[0].tolist()
    assert text.shape[1] <= 15


def run_in_thread(target, tokenizer, *args, **kwargs):
    """The pieces that a consumer gets and the error that the producer ended with."""
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=10)
    errors = []

    def produce():
        try:
            generate(target, *args, streamer=streamer, **kwargs)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=produce)
    thread.start()
    pieces = list(streamer)  # raises queue.Empty after the timeout where nobody says that it ended
    thread.join(timeout=30)
    assert not thread.is_alive()
    return "".join(pieces), errors


@pytest.mark.parametrize("num_forwards", [1, 3])
def test_iterator_ends_when_the_target_fails(target, tokenizer, prompt, plain, draft, num_forwards):
    class OutOfMemory(Exception):
        pass

    with ForwardCounter(target) as forwards:

        def fail(module, args, kwargs):
            if forwards.count >= num_forwards:
                raise OutOfMemory

        handle = target.register_forward_pre_hook(fail, with_kwargs=True)
        text, errors = run_in_thread(target, tokenizer, prompt, draft)
        handle.remove()
    assert [type(error) for error in errors] == [OutOfMemory]
    expected = {1: "", 3: tokenizer.decode(plain[0, 11:13])}
    assert text == expected[num_forwards]


def test_iterator_ends_when_a_criterion_fails(target, tokenizer, prompt, plain, draft):
    def criterion(input_ids, scores, **kwargs):
        if input_ids.shape[1] == 15:
            raise RuntimeError("broken criterion")
        return torch.tensor([False])

    text, errors = run_in_thread(target, tokenizer, prompt, draft, stopping_criteria=[criterion])
    assert [str(error) for error in errors] == ["broken criterion"]
    assert tokenizer.decode(plain[0, 11:]).startswith(text)


def test_iterator_ends_when_the_draft_fails(target, tokenizer, prompt, draft, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("broken draft")

    monkeypatch.setattr(draft, "forward", fail)
    text, errors = run_in_thread(target, tokenizer, prompt, draft)
    assert [str(error) for error in errors] == ["broken draft"]
    assert len(text) == 1  # the prefill's token


def test_iterator_ends_when_the_call_is_refused_after_the_prompt(target, tokenizer, prompt, draft):
    cache = DynamicCache(config=target.config)
    cache.__class__ = type("Uncroppable", (DynamicCache,), {"is_croppable": property(lambda self: False)})
    text, errors = run_in_thread(target, tokenizer, prompt, draft, **with_cache(cache))
    assert text == ""
    assert [type(error) for error in errors] == [ValueError]


def test_a_streamer_that_fails_is_not_hidden(target, prompt, draft):
    class Broken(StreamerSpy):
        def put(self, value):
            super().put(value)
            if len(self.puts) == 3:
                raise BrokenPipeError("consumer is gone")

    spy = Broken()
    with pytest.raises(BrokenPipeError, match="consumer is gone"):
        generate(target, prompt, draft, streamer=spy)
    assert spy.num_ends == 1


REFUSALS = {
    "a wrong knob": {"num_assistant_tokens": 99},
    "beam search": {"num_beams": 2},
    "no cache": {"use_cache": False},
    "an unknown argument": {"no_such_argument": 1},
    "a wrong config": {"temperature": -1.0, "do_sample": True},
    "a prompt that is too long": {"max_length": 5, "max_new_tokens": None},
    "an unknown cache": {"cache_implementation": "no_such_cache"},
    "a mask of three dimensions": {"attention_mask": torch.ones(1, 1, 11)},
}


@pytest.mark.parametrize("name", REFUSALS)
def test_iterator_ends_when_the_call_is_refused(target, tokenizer, prompt, draft, name):
    text, errors = run_in_thread(target, tokenizer, prompt, draft, **REFUSALS[name])
    assert (text, len(errors)) == ("", 1)
    spy = StreamerSpy()
    with pytest.raises(type(errors[0])):
        generate(target, prompt, draft, streamer=spy, **REFUSALS[name])
    assert spy.num_ends == 1


def test_a_draft_of_another_target_ends_the_stream(target, prompt):
    spy = StreamerSpy()
    with pytest.raises(ValueError, match="same `hidden_size`"):
        generate(target, prompt, random_draft(hidden_size=64), streamer=spy)
    assert spy.num_ends == 1


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"guidance_scale": 2.0}])
def test_rows_of_a_refused_batch_end_once(target, prompt, options):
    """Before the prompts are streamed, after it, and where nothing is refused."""
    spies = [StreamerSpy(), StreamerSpy()]
    streamer = RowStreamer(spies)
    for uses in (1, 2):
        with contextlib.nullcontext() if not options else pytest.raises((ValueError, NotImplementedError)):
            generate(target, prompt.expand(2, -1), random_draft(), streamer=streamer, **options)
        assert [spy.num_ends for spy in spies] == [uses, uses]


@pytest.mark.parametrize("position", [0, 1])
def test_a_row_whose_end_fails_does_not_keep_the_others_waiting(target, prompt, position):
    class Broken(StreamerSpy):
        def end(self):
            super().end()
            raise BrokenPipeError("consumer is gone")

    spies = [StreamerSpy(), StreamerSpy()]
    spies[position] = Broken()
    with pytest.raises(ValueError, match="generation mode"):
        generate(target, prompt.expand(2, -1), random_draft(), streamer=RowStreamer(spies), num_beams=2)
    assert [spy.num_ends for spy in spies] == [1, 1]
    with pytest.raises(BrokenPipeError):
        generate(target, prompt.expand(2, -1), random_draft(), streamer=RowStreamer(spies))
    assert [spy.num_ends for spy in spies] == [2, 2]


@pytest.mark.parametrize("options", [{"num_beams": 2}, {"stopping_criteria": [lambda *_, **__: 1 / 0]}, {}])
def test_an_end_that_fails_hides_no_error_and_is_not_repeated(target, prompt, draft, options):
    class Broken(StreamerSpy):
        def end(self):
            super().end()
            raise BrokenPipeError("consumer is gone")

    spy = Broken()
    expected = (ValueError, ZeroDivisionError) if options else BrokenPipeError
    with pytest.raises(expected):
        generate(target, prompt, draft, streamer=spy, **options)
    assert spy.num_ends == 1


def test_a_keyboard_interrupt_ends_the_stream(target, prompt, draft, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(target), "_prepare_cache_for_generation", interrupted)
    spy = StreamerSpy()
    with pytest.raises(KeyboardInterrupt):
        generate(target, prompt, draft, streamer=spy)
    assert spy.num_ends == 1


def test_positional_arguments_are_seen(target, prompt, draft):
    """`assistant_model` and `streamer` are the seventh and the eighth."""
    spy = StreamerSpy()
    with pytest.raises(ValueError, match="num_assistant_tokens"):
        target.generate(prompt, None, None, None, None, None, draft, spy, num_assistant_tokens=99)
    assert spy.num_ends == 1


def test_a_recipe_that_generates_ends_the_stream_once(target, prompt, draft):
    """A call within the call, with the same streamer: as custom recipes from the Hub make them."""
    spy = StreamerSpy()
    with pytest.raises(ValueError, match="num_assistant_tokens"), ended_on_failure(spy):
        generate(target, prompt, draft, streamer=spy, num_assistant_tokens=99)
    assert spy.num_ends == 1
    with ended_on_failure(spy):
        generate(target, prompt, draft, streamer=spy)
    assert spy.num_ends == 2


def test_plain_calls_are_left_alone(target, prompt):
    spy = StreamerSpy()
    with pytest.raises(ValueError, match="no_such_argument"):
        generate(target, prompt, streamer=spy, no_such_argument=1)
    assert spy.num_ends == 0, "as in transformers"


def test_streamer_and_statistics_of_a_sampled_call(target, tokenizer, prompt, draft):
    spy = StreamerSpy()
    torch.manual_seed(0)
    text = generate(target, prompt, draft, do_sample=True, streamer=spy)
    assert sum(spy.puts, []) == text[0].tolist()
