"""FlexLoRA (arXiv 2402.11505) against dense algebra in float64 and numpy's singular values, with unlike ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from dense_world import SHAPES, SHARES, answers, assert_adds, ends, order_of, product, setup_of, total
from pydantic import ValidationError

from fedloom.methods.flexlora import FlexLoRA, FlexLoRAOptions
from fedloom.runtime.wire import decode_reply
from fedloom.types import AdapterSpec, Reply, State, Tensors
from small_world import Wire, World, random_tensors

RANKS = [1, 3, 2]  # a: 1, b: 3, c: 2, d: 1 again
ALPHA = 6.0
METHOD = FlexLoRA(FlexLoRAOptions(ranks=RANKS))


def start() -> State:
    state = METHOD.init(setup_of(alpha=ALPHA))
    return State(1, random_tensors(state.tensors, scale=1.0), state.spec, state.values)


def dense_mean(state: State, replies: list[Reply]) -> Tensors:
    after = ends(METHOD, state, replies)
    rank = dict(zip("abc", RANKS, strict=True))
    return {path: total([SHARES[c] * product(after[c], path, ALPHA / rank[c]) for c in SHARES]) for path in SHAPES}


def test_clients_get_their_ranks_in_name_order() -> None:
    state = METHOD.init(setup_of(alpha=ALPHA))
    assert state.spec.rank == 3
    assert {client: METHOD.view(state, client).spec.rank for client in "abcd"} == {"a": 1, "b": 3, "c": 2, "d": 1}
    assert {name: tuple(t.shape) for name, t in METHOD.view(state, "c").tensors.items()} == {
        "experts/0/v.lora_A": (2, 3),
        "experts/0/v.lora_B": (5, 2),
        "experts/0/w.lora_A": (2, 4),
        "experts/0/w.lora_B": (2, 2),
    }
    alike = FlexLoRA().init(setup_of(rank=2))
    assert [FlexLoRA().view(alike, client).spec.rank for client in "abcd"] == [2, 2, 2, 2]


def test_a_client_starts_from_the_first_directions_of_the_mean_unscaled() -> None:
    """Its scaling is alpha / r_k, so B is multiplied by r_k / r: the product of the kept directions stays."""
    state = start()
    for client, rank in zip("abc", RANKS, strict=True):
        view = METHOD.view(state, client)
        for path in SHAPES:
            A, B = (state.tensors[f"experts/0/{path}.lora_{factor}"].double() for factor in "AB")
            directions = total([ALPHA / 3 * torch.outer(B[:, j], A[j]) for j in range(rank)])
            torch.testing.assert_close(product(view.tensors, path, view.spec.scaling), directions, atol=1e-6, rtol=1e-6)


def test_the_merge_is_the_dense_mean_where_the_rank_allows_it() -> None:
    """Rank 3 holds any 5 × 3 and any 2 × 4 matrix."""
    state = start()
    replies = answers(METHOD, state)
    dense = dense_mean(state, replies)
    merged = METHOD.merge(state, replies)
    for path in SHAPES:
        torch.testing.assert_close(product(merged.tensors, path, ALPHA / 3), dense[path], atol=1e-5, rtol=1e-5)
    view = METHOD.assembled(merged, {})
    assert view is not None
    assert_adds(view, dense)
    # A's rows are orthonormal; w has two directions, so its third is empty.
    A, B = merged.tensors["experts/0/v.lora_A"], merged.tensors["experts/0/v.lora_B"]
    torch.testing.assert_close(A @ A.T, torch.eye(3), atol=1e-6, rtol=0.0)
    norms = np.linalg.svd(dense["v"].numpy(), compute_uv=False) / (ALPHA / 3)
    assert B.norm(dim=0).tolist() == pytest.approx(norms.tolist(), rel=1e-5)
    assert not merged.tensors["experts/0/w.lora_B"][:, 2].any()


def test_every_client_goes_on_from_the_nearest_matrix_of_its_rank() -> None:
    """Eckart–Young: the distance to the dense mean is the norm of the singular values left out."""
    state = start()
    replies = answers(METHOD, state)
    dense, merged = dense_mean(state, replies), METHOD.merge(state, replies)
    for client, rank in {"a": 1, "b": 3, "c": 2, "d": 1}.items():
        view = METHOD.view(merged, client)
        for path in SHAPES:
            left_out = np.linalg.svd(dense[path].numpy(), compute_uv=False)[rank:]
            missed = dense[path] - product(view.tensors, path, ALPHA / rank)
            assert float(missed.norm()) == pytest.approx(float(np.linalg.norm(left_out)), abs=1e-5)


def test_two_clients_by_hand() -> None:
    """alpha 4, ranks 2 and 1, so s = 2 and 4; counts 3 and 1.

    a: A = (1 0 0; 0 1 0), B = diag(2, 1), so ΔW = [[4, 0, 0], [0, 2, 0]]. b: A = (0 0 1), B = (0, 1), so ΔW is 4 at
    row 1, column 2.
    Mean: 3/4 · [[4, 0, 0], [0, 2, 0]] + 1/4 · [[0, 0, 0], [0, 0, 4]] = [[3, 0, 0], [0, 1.5, 1]].
    Singular values 3 and √(1.5² + 1²) = √3.25, so b gets [[3, 0, 0], [0, 0, 0]].
    """
    method = FlexLoRA(FlexLoRAOptions(ranks=[2, 1]))
    A, B = "experts/0/v.lora_A", "experts/0/v.lora_B"
    spec = AdapterSpec(("v",), rank=2, alpha=4.0)
    zero = {A: torch.zeros(2, 3), B: torch.zeros(2, 2)}
    state = State(1, zero, spec, {"ranks": {"a": 2, "b": 1}})
    of_a = {A: torch.eye(2, 3), B: torch.diag(torch.tensor([2.0, 1.0]))}
    of_b = {A: torch.tensor([[0.0, 0.0, 1.0]]), B: torch.tensor([[0.0], [1.0]])}
    replies = [
        Reply("a", of_a, {"examples": 3, "experts/0": 3}),
        Reply("b", of_b, {"examples": 1, "experts/0": 1}),
    ]
    merged = method.merge(state, replies)
    found = 2.0 * merged.tensors[B] @ merged.tensors[A]
    torch.testing.assert_close(found, torch.tensor([[3.0, 0.0, 0.0], [0.0, 1.5, 1.0]]))
    view = method.view(merged, "b")
    assert view.tensors[A].abs().tolist() == [[1.0, 0.0, 0.0]]
    torch.testing.assert_close(4.0 * view.tensors[B] @ view.tensors[A], torch.tensor([[3.0, 0, 0], [0, 0, 0]]))


def test_a_zero_mean_leaves_the_factors() -> None:
    state = METHOD.init(setup_of())
    zero = [Reply(r.client, {n: 0 * t for n, t in r.send.items()}, r.counts) for r in answers(METHOD, state)]
    merged = METHOD.merge(state, zero)
    assert all(torch.equal(merged.tensors[name], tensor) for name, tensor in state.tensors.items())


def test_a_reply_of_another_clients_rank_is_not_what_is_expected() -> None:
    state = start()
    small, large = (order_of(METHOD, state, client) for client in "ab")
    reply = Reply("a", {}, {"examples": 7, "experts/0": 7})
    assert METHOD.expected(small, reply)["experts/0/v.lora_A"] == (1, 3)
    assert METHOD.expected(large, reply)["experts/0/v.lora_A"] == (3, 3)


def test_unlike_ranks_train_together(tmp_path: Path) -> None:
    world = World(tmp_path)
    sent = {}

    def read(orders: object, receipts: list) -> list:
        sent.update({r.client: decode_reply(r.path.read_bytes(), r.client, 2) for r in receipts})
        return receipts

    rounds = FlexLoRA(FlexLoRAOptions(ranks=[1, 4, 2]))
    world.run(rounds, rounds=1)
    state = world.run(rounds, rounds=2, transport=Wire(world.simulator, read))
    ranks = {c: {t.shape[0] for n, t in r.send.items() if n.endswith("lora_A")} for c, r in sent.items()}
    assert ranks == {"ann": {1}, "bob": {4}, "cyd": {2}, "dan": {1}}
    assert state.spec.rank == 4
    assert world.log.read()[-1]["quarantined"] == {}


def test_the_budget_is_that_of_the_largest_rank() -> None:
    plain = AdapterSpec(("v",), rank=32)
    assert METHOD.deployed(plain, 1).rank == 3
    assert FlexLoRA().deployed(plain, 1).rank == 32


def test_a_rank_below_one_is_refused() -> None:
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        FlexLoRAOptions(ranks=[4, 0])
