"""RoLoRA (arXiv 2409.02346): one factor a round, so that each round's mean is the dense mean."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from dense_world import SHAPES, SHARES, answers, assert_adds, order_of, product, setup_of, total
from quadratic_client import QuadraticClient

from fedloom.methods.rolora import RoLoRA
from fedloom.types import AdapterSpec, Reply, State
from small_world import random_tensors

METHOD = RoLoRA()
SCALING = 3.0  # alpha 6, rank 2


def test_A9_every_rounds_merge_is_the_dense_mean() -> None:
    state = METHOD.init(setup_of())
    for round in (1, 2, 3, 4):
        before = state
        state = replace(state, round=round)
        replies = answers(METHOD, state, seed=round)
        moving = "lora_B" if round in (1, 3) else "lora_A"
        assert all(name.endswith(moving) for reply in replies for name in reply.send)
        ended = {r.client: state.tensors | {n: state.tensors[n] + t for n, t in r.send.items()} for r in replies}
        state = METHOD.merge(state, replies)
        dense = {p: total([SHARES[c] * product(ended[c], p, SCALING) for c in SHARES]) for p in SHAPES}
        for path in SHAPES:
            torch.testing.assert_close(product(state.tensors, path, SCALING), dense[path], atol=1e-5, rtol=1e-6)
        assert_adds(METHOD.view(state, None), dense)
        for name, tensor in state.tensors.items():
            assert torch.equal(tensor, before.tensors[name]) != name.endswith(moving)


def test_two_rounds_by_hand() -> None:
    """Rank 1, s = 2, counts 3 and 1, A = 1. Round 1: B = (2, 0), (−2, 4) → (1, 1). Round 2: A = 3, −1 → 2."""
    A, B = "experts/0/v.lora_A", "experts/0/v.lora_B"
    spec = AdapterSpec(("v",), rank=1, alpha=2.0)
    state = State(1, {A: torch.tensor([[1.0]]), B: torch.zeros(2, 1)}, spec)
    counts = {"a": {"examples": 3, "experts/0": 3}, "b": {"examples": 1, "experts/0": 1}}
    sent = {"a": torch.tensor([[2.0], [0.0]]), "b": torch.tensor([[-2.0], [4.0]])}
    state = METHOD.merge(state, [Reply(c, {B: sent[c]}, counts[c]) for c in counts])
    assert (state.tensors[A].tolist(), state.tensors[B].tolist()) == ([[1.0]], [[1.0], [1.0]])
    sent = {"a": torch.tensor([[2.0]]), "b": torch.tensor([[-2.0]])}
    state = METHOD.merge(replace(state, round=2), [Reply(c, {A: sent[c]}, counts[c]) for c in counts])
    assert (state.tensors[A].tolist(), state.tensors[B].tolist()) == ([[2.0]], [[1.0], [1.0]])


@pytest.mark.parametrize(("round", "factor"), [(1, "lora_B"), (2, "lora_A"), (3, "lora_B")])
def test_a_client_trains_and_sends_the_rounds_factor(round: int, factor: str) -> None:
    state = replace(METHOD.init(setup_of()), round=round)
    target = random_tensors(state.tensors, seed=2)
    order = order_of(METHOD, state, "a")
    client = QuadraticClient("a", 7, target)
    reply = METHOD.local(client, order)
    assert reply.send.keys() == {name for name in state.tensors if name.endswith(factor)}
    way = 1 - (1 - order.training.lr) ** order.training.steps
    for name, tensor in client.read().items():
        share = way if name.endswith(factor) else 0.0
        torch.testing.assert_close(tensor, state.tensors[name] + share * (target[name] - state.tensors[name]))
