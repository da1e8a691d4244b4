# SPDX-License-Identifier: Apache-2.0
"""Whatever goes wrong while round times are looked for or measured, the call goes on, and nothing stays changed."""

import json
import time

import pytest
import torch
from filelock import FileLock
from huggingface_hub import constants as hub_constants

from dspark_hf import DSparkDraftModel
from dspark_hf.drafts.target_probe import _FINDINGS
from dspark_hf.profiling import automatic as profiling
from dspark_hf.profiling import profile_for, profile_path, timed_rounds
from dspark_hf.profiling.automatic import FILE_NAME, SWITCH
from tests.support.models import oracle_draft, random_draft, random_prompt, tiny_target
from tests.support.scripted import captured_log


GREEDY = {"do_sample": False, "max_new_tokens": 40}


@pytest.fixture(autouse=True)
def switched_on(tmp_path, monkeypatch):
    monkeypatch.setenv(SWITCH, "1")
    monkeypatch.setattr(hub_constants, "HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(profiling, "QUICK_REPEATS", 2)


@pytest.fixture
def pair():
    target = tiny_target()
    return target, oracle_draft(target)


def call(target, draft, **kwargs):
    """The text of a call, and what it warned of round times."""
    with captured_log("transformers.dspark_hf.profiling.automatic") as messages:
        text = target.generate(random_prompt(9), assistant_model=draft, **(GREEDY | kwargs))
    return text, messages


def assert_plain_text_and_one_warning(pair, *parts):
    target, draft = pair
    text, messages = call(target, draft)
    assert torch.equal(text, target.generate(random_prompt(9), **GREEDY))
    assert len(messages) == 1
    for part in parts:
        assert part in messages[0]


def failing_on_the_profile(target, error):
    """The target fails on the prompt of the measurement, which is 128 tokens long, and on no other."""

    def fail(module, args, kwargs):
        if kwargs["input_ids"].shape[1] >= profiling.QUICK_CONTEXT:
            torch.rand(3)  # a random stream that has moved on
            raise error

    target.register_forward_pre_hook(fail, with_kwargs=True)


ERRORS = {
    "memory": torch.OutOfMemoryError("no memory left"),
    "host memory": MemoryError("no memory left"),
    "runtime": RuntimeError("kernel missing"),
    "index": IndexError("index out of range"),
    "key": KeyError("rope"),
    "attribute": AttributeError("no such field"),
    "assertion": AssertionError("positions"),
    "stop": StopIteration("nothing left"),
    "division": ZeroDivisionError("by zero"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_a_target_that_fails_on_the_inputs_of_the_profile(pair, name):
    failing_on_the_profile(pair[0], ERRORS[name])
    assert_plain_text_and_one_warning(
        pair, "could not be measured", type(ERRORS[name]).__name__, "typical machine", SWITCH
    )


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("training", [False, True])
def test_everything_is_as_before_after_a_failure(num_rows, training):
    target, draft = tiny_target(), random_draft()
    failing_on_the_profile(target, RuntimeError("kernel missing"))
    for model in (target, draft):
        model.train(training)
        model.set_attn_implementation("sdpa")

    def state():
        return [
            (
                model.training,
                model.config._attn_implementation,
                sorted(model.state_dict()),
                [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
                sorted(name for module in model.modules() for name in vars(module) if name != _FINDINGS),
            )
            for model in (target, draft)
        ]

    before, random_before = state(), torch.get_rng_state()
    with captured_log("transformers.dspark_hf.profiling.automatic") as messages:
        assert profile_for(target, draft, 64, num_rows) is None
    assert len(messages) == 1
    assert state() == before
    assert torch.equal(torch.get_rng_state(), random_before)
    assert torch.is_grad_enabled()


def test_an_attention_that_is_replaced_by_half_is_put_back(monkeypatch):
    target, draft = tiny_target(), random_draft()
    right = type(target).set_attn_implementation

    def half(self, name):
        right(self, name)
        raise ImportError("a kernel package is missing")

    with monkeypatch.context() as patch, captured_log("transformers.dspark_hf.profiling.automatic") as messages:
        patch.setattr(type(target), "set_attn_implementation", half)
        assert profile_for(target, draft, 64, num_requests=2) is None
    assert len(messages) == 1
    assert "a kernel package is missing" in messages[0]
    assert target.config._attn_implementation == "sdpa"
    assert profile_for(target, draft, 64) is not None


def test_a_target_with_noise_of_its_own_keeps_its_random_stream(pair):
    """A measurement that succeeds moves nothing either."""
    pair[0].register_forward_pre_hook(lambda *_: (torch.rand(5), None)[1])
    before = torch.get_rng_state()
    assert profile_for(*pair, 64) is not None
    assert torch.equal(torch.get_rng_state(), before)


def test_an_interrupt_comes_through_and_leaves_no_lock(pair):
    failing_on_the_profile(pair[0], KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        profile_for(*pair, 64)
    with FileLock(profile_path(*pair).parent / "measuring.lock", timeout=0):
        pass
    assert profile_for(tiny_target(), random_draft(), 64) is not None


def test_a_config_field_that_raises(pair):
    """One that round times depend on, and that generation does not read."""

    def read(self):
        raise RuntimeError("this field is on another planet")

    config = pair[0].config
    config.__class__ = type("Odd", (type(config),), {"num_experts": property(read)})
    assert_plain_text_and_one_warning(pair, "another planet")


def test_a_set_up_that_cannot_be_told(pair, monkeypatch):
    def fail(*_):
        raise StopIteration

    monkeypatch.setattr(profiling, "setup", fail)
    assert_plain_text_and_one_warning(pair, "StopIteration")


@pytest.mark.parametrize("where", ["home is a file", "home holds a file of that name", "a folder lies there"])
def test_a_cache_folder_that_cannot_be_written(pair, tmp_path, monkeypatch, where):
    """The measurement itself is good, and used; it is only not kept."""
    target, draft = pair
    home = tmp_path / "home"
    if where == "home is a file":
        home.write_text("")
    elif where == "home holds a file of that name":
        home.mkdir()
        (home / "dspark_hf").write_text("")
    else:
        profile_path(target, draft).mkdir(parents=True)
        (profile_path(target, draft) / "taken").write_text("")
    with captured_log("transformers.dspark_hf.profiling.automatic") as messages:
        profile = profile_for(target, draft, 64)
        assert profile_for(target, draft, 64) is profile is not None
    kept = [message for message in messages if "could not be kept" in message]
    assert len(kept) == 1
    assert "HF_HOME" in kept[0]


DAMAGED = {
    "no JSON": b"{",
    "binary": b"\xff\xfe\x00",
    "a list": b"[]",
    "nested": b"[" * 100_000,
    "an endless number": b'{"format": 2, "curves": [{"context_length": 1e999}]}',
    "numbers beyond a double": json.dumps({"verify_s": [10**400, 10**401]}),
    "words for numbers": json.dumps({"verify_s": ["fast", "slow"]}),
    "nothing for curves": json.dumps({"curves": None}),
    "a number for spreads": json.dumps({"verify_spread_s": 3}),
}


@pytest.mark.parametrize("name", DAMAGED)
@pytest.mark.parametrize("where", ["draft", "cache"])
def test_a_damaged_file(pair, tmp_path, name, where):
    target, draft = pair
    draft.save_pretrained(tmp_path / "draft")
    draft = DSparkDraftModel.from_pretrained(tmp_path / "draft")
    content = DAMAGED[name]
    if isinstance(content, str):
        values = profiling.measure_profile(target, draft, (16,), num_repeats=2).to_dict()
        curve = values["curves"][0] | {"batch_tokens": [1, 5], "verify_s": [1.0, 2.0], "verify_spread_s": [[1, 2]] * 2}
        changes = json.loads(content)
        curves = changes["curves"] if "curves" in changes else [curve | changes]
        content = json.dumps(values | {"curves": curves}).encode()
    path = tmp_path / "draft" / FILE_NAME if where == "draft" else profile_path(target, draft)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    assert_plain_text_and_one_warning((target, draft), "are not used", repr(str(path)))


@pytest.mark.parametrize("clock", ["stands still", "runs backwards", "jumps"])
def test_a_clock_that_is_of_no_use(pair, monkeypatch, clock):
    now = [1e6]

    def read():
        now[0] += {"stands still": 0.0, "runs backwards": -0.5, "jumps": -3600.0 if int(now[0]) % 2 else 0.25}[clock]
        return now[0]

    monkeypatch.setattr(timed_rounds, "perf_counter", read)
    target, draft = pair
    text, messages = call(target, draft)
    assert torch.equal(text, target.generate(random_prompt(9), **GREEDY))
    assert len(messages) <= 1
    if clock != "jumps":
        assert "could not be measured" in messages[0]
        assert "must be positive" in messages[0]


def test_rounds_under_a_clock_that_runs_backwards(pair, monkeypatch):
    """The loop's own clock; what it learned before stays."""
    now = [1e6]

    def read():
        now[0] -= 0.5
        return now[0]

    monkeypatch.setenv(SWITCH, "0")
    monkeypatch.setattr(time, "perf_counter", read)
    text, _ = call(*pair)
    assert torch.equal(text, pair[0].generate(random_prompt(9), **GREEDY))


def test_a_lock_that_is_never_given_back(pair, monkeypatch):
    """By another thread, or by another process that was stopped."""
    monkeypatch.setattr(profiling, "LONGEST_WAIT_S", 0.05)
    folder = profile_path(*pair).parent
    folder.mkdir(parents=True)
    lock = FileLock(folder / "measuring.lock")
    with lock:
        assert_plain_text_and_one_warning(pair, "another measurement takes more than 0.05 s")
    monkeypatch.setattr(profiling, "LONGEST_WAIT_S", 1e6)
    assert profile_for(*pair, 64) is None, "it does not wait twice"


def test_a_draft_that_overflows_has_no_round_times(pair, monkeypatch):
    """A draft that pauses costs nothing, which would make drafting look free."""
    target, draft = pair
    with torch.no_grad():
        target.model.embed_tokens.weight.mul_(3e5)
    draft = random_draft().half()
    text, messages = call(target, draft)
    assert torch.equal(text, target.generate(random_prompt(9), **GREEDY))
    assert len(messages) == 1
    assert "the draft's numbers are not finite" in messages[0]
    assert not profile_path(target, draft).exists()
    assert profile_for(target, draft, 64, num_requests=2) is None
