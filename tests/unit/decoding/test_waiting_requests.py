# SPDX-License-Identifier: Apache-2.0
"""Which prompts start, and when they are taken."""

import inspect
from types import SimpleNamespace

import torch

from dspark_hf.decoding.drafter import Drafter
from dspark_hf.decoding.no_draft import NoDraft
from dspark_hf.decoding.waiting_requests import WaitingRequests


def prompts(count, taken=None):
    for number in range(count):
        if taken is not None:
            taken.append(number)
        yield number, torch.tensor([[number]])


def numbers(found):
    return [number for number, _ in found]


def test_prompts_start_in_their_order_as_places_become_free():
    queue = WaitingRequests(prompts(7), 3)
    assert numbers(queue.take(0)) == [0, 1, 2]
    assert numbers(queue.take(3)) == []
    assert numbers(queue.take(2)) == [3]
    assert numbers(queue.take(1)) == [4, 5]
    assert queue.others_wait
    assert numbers(queue.take(0)) == [6]
    assert not queue.others_wait
    assert numbers(queue.take(0)) == []


def test_one_prompt_is_taken_ahead_where_it_matters_whether_others_wait():
    taken = []
    queue = WaitingRequests(prompts(9, taken), 3)
    queue.take(0)
    assert taken == [0, 1, 2]
    assert queue.others_wait
    assert queue.others_wait
    assert taken == [0, 1, 2, 3]
    assert numbers(queue.take(2)) == [3]
    assert taken == [0, 1, 2, 3]


def test_of_many_places_several_are_filled_at_once():
    queue = WaitingRequests(prompts(100), 36)
    assert numbers(queue.take(0)) == list(range(36))
    assert [numbers(queue.take(running)) for running in (35, 34, 33)] == [[], [], [36, 37, 38]]
    assert len(queue.take(0)) == 36


def test_the_drafter_that_never_drafts_is_a_drafter():
    members = {name for name in vars(Drafter) if not name.startswith("_")}
    assert members >= {"propose", "read", "observe"}
    assert all(hasattr(NoDraft, name) for name in members)
    for name, method in inspect.getmembers(Drafter, inspect.isfunction):
        if not name.startswith("_"):
            inspect.signature(getattr(NoDraft(), name)).bind(*list(inspect.signature(method).parameters)[1:])


def test_nothing_is_proposed():
    texts = [torch.tensor([[1, 2, 3]]), torch.tensor([[4]])]
    found = NoDraft().propose([SimpleNamespace(input_ids=text) for text in texts], others_wait=True)
    assert [(own.token_ids.shape, own.draft_logits, own.drafted) for own in found] == [((1, 0), None, False)] * 2
