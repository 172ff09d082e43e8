"""FFA-LoRA (arXiv 2403.12313): with one frozen A for all, the mean of B is the mean of the dense updates."""

from __future__ import annotations

from dataclasses import replace

import torch
from dense_world import SHAPES, SHARES, answers, assert_adds, order_of, product, setup_of, total
from quadratic_client import QuadraticClient

from fedloom.methods.ffa_lora import FFALoRA
from fedloom.types import AdapterSpec, Reply, State
from small_world import random_tensors

METHOD = FFALoRA()
SCALING = 3.0  # alpha 6, rank 2


def test_A9_the_merge_is_the_dense_mean_over_two_rounds() -> None:
    state = METHOD.init(setup_of())
    drawn = {name: tensor.clone() for name, tensor in state.tensors.items() if name.endswith("lora_A")}
    for round in (1, 2):
        state = replace(state, round=round)
        replies = answers(METHOD, state, seed=round)
        assert all(name.endswith("lora_B") for reply in replies for name in reply.send)
        ended = {r.client: state.tensors | {n: state.tensors[n] + t for n, t in r.send.items()} for r in replies}
        state = METHOD.merge(state, replies)
        dense = {p: total([SHARES[c] * product(ended[c], p, SCALING) for c in SHARES]) for p in SHAPES}
        for path in SHAPES:
            torch.testing.assert_close(product(state.tensors, path, SCALING), dense[path], atol=1e-6, rtol=1e-6)
            assert dense[path].abs().max() > 0.1
        assert_adds(METHOD.view(state, None), dense)
        assert all(torch.equal(state.tensors[name], A) for name, A in drawn.items())
        assert all(torch.equal(METHOD.view(state, client).tensors[n], A) for client in "ad" for n, A in drawn.items())


def test_by_hand() -> None:
    """Rank 1, s = 2, A = 5, counts 3 and 1, B = (2, 0) and (−2, 4): B = (1, 1), s B A = (10, 10)."""
    A, B = "experts/0/v.lora_A", "experts/0/v.lora_B"
    spec = AdapterSpec(("v",), rank=1, alpha=2.0)
    state = State(1, {A: torch.tensor([[5.0]]), B: torch.zeros(2, 1)}, spec)
    merged = METHOD.merge(
        state,
        [
            Reply("a", {B: torch.tensor([[2.0], [0.0]])}, {"examples": 3, "experts/0": 3}),
            Reply("b", {B: torch.tensor([[-2.0], [4.0]])}, {"examples": 1, "experts/0": 1}),
        ],
    )
    assert merged.tensors[A].tolist() == [[5.0]]
    assert merged.tensors[B].tolist() == [[1.0], [1.0]]


def test_a_client_trains_and_sends_B_alone() -> None:
    state = replace(METHOD.init(setup_of()), round=1)
    target = random_tensors(state.tensors, seed=2)
    order = order_of(METHOD, state, "a")
    reply = METHOD.local(QuadraticClient("a", 7, target), order)
    assert reply.send.keys() == {n for n in state.tensors if n.endswith("lora_B")}
    assert reply.counts == {"examples": 7, "experts/0": 7}
    left = (1 - order.training.lr) ** order.training.steps  # of the way from 0 to the target
    for name, update in reply.send.items():
        torch.testing.assert_close(update, (1 - left) * target[name])
