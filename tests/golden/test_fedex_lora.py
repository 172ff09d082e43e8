"""FedEx-LoRA (arXiv 2410.09432) against dense algebra in float64, over two rounds."""

from __future__ import annotations

from dataclasses import replace

import torch
from dense_world import SHAPES, SHARES, answers, assert_adds, ends, product, setup_of, total

from fedloom.methods.fedex_lora import FedExLoRA
from fedloom.types import AdapterSpec, Reply, State, Tensors

METHOD = FedExLoRA()
SCALING = 3.0  # alpha 6, rank 2


def after_two_rounds() -> tuple[list[State], list[Tensors]]:
    """Return the states of rounds 0, 1 and 2, and after each what the whole model adds, from the clients' ends.

    A client ends with base + s B_k A_k; the exact average of the models is base + s Σ p_k B_k A_k.
    """
    states, whole = [METHOD.init(setup_of())], [{path: torch.zeros(s).double() for path, s in SHAPES.items()}]
    base = dict(whole[0])
    for round in (1, 2):
        state = replace(states[-1], round=round)
        replies = answers(METHOD, state, seed=round)
        found = ends(METHOD, state, replies)
        mean = {path: total([SHARES[c] * product(found[c], path, SCALING) for c in SHARES]) for path in SHAPES}
        whole.append({path: base[path] + mean[path] for path in SHAPES})
        averaged = {n: total([SHARES[c] * found[c][n] for c in SHARES]) for n in found["a"]}
        base = {path: whole[-1][path] - product(averaged, path, SCALING) for path in SHAPES}
        states.append(METHOD.merge(state, replies))
    return states, whole


def test_factors_and_base_together_are_the_exact_average() -> None:
    states, whole = after_two_rounds()
    for state, dense in zip(states, whole, strict=True):
        for path in SHAPES:
            found = state.tensors[f"base/{path}.delta"].double() + product(state.tensors, path, SCALING)
            torch.testing.assert_close(found, dense[path], atol=1e-5, rtol=1e-6)
        assert_adds(METHOD.view(state, "d"), dense)  # what the next round starts from


def test_the_factors_are_fedits() -> None:
    state = replace(METHOD.init(setup_of()), round=1)
    replies = answers(METHOD, state)
    found = ends(METHOD, state, replies)
    merged = METHOD.merge(state, replies)
    for name in found["a"]:
        mean = total([SHARES[c] * found[c][name] for c in SHARES])
        torch.testing.assert_close(merged.tensors[name].double(), mean, atol=1e-6, rtol=1e-6)
    assert all(merged.tensors[f"base/{path}.delta"].norm() > 0.1 for path in SHAPES)


def test_what_is_measured_is_one_plain_lora() -> None:
    states, whole = after_two_rounds()
    for state, dense in zip(states, whole, strict=True):
        view = METHOD.assembled(state, {})
        assert view is not None
        assert view.spec == AdapterSpec(("v", "w"), rank=3, alpha=3.0, dropout=0.0)
        assert_adds(view, dense)


def test_two_rounds_by_hand() -> None:
    """Rank 1, s = 2, counts 3 and 1, a layer of 2 × 1, A = 1 at first.

    Round 1: A = 1, 5 → 2; B = (2, 0), (−2, 4) → (1, 1). Σ p B A = 3/4·(2, 0) + 1/4·(−10, 20) = (−1, 5), B̄ Ā = (2, 2).
    Residual 2·(−3, 3) = (−6, 6).
    Round 2: A = 2, 6 → 3; B = (1, 1), (5, −3) → (2, 0). Σ p B A = 3/4·(2, 2) + 1/4·(30, −18) = (9, −3),
    B̄ Ā = (6, 0). Residual 2·(3, −3) = (6, −6), base (0, 0); whole (12, 0) = (−6, 6) + 2·(9, −3).
    """
    A, B, base = "experts/0/v.lora_A", "experts/0/v.lora_B", "base/v.delta"
    spec = AdapterSpec(("v",), rank=1, alpha=2.0, base_delta=True)
    state = State(1, {A: torch.tensor([[1.0]]), B: torch.zeros(2, 1), base: torch.zeros(2, 1)}, spec)

    def round(state: State, of_a: tuple[float, list[float]], of_b: tuple[float, list[float]]) -> State:
        replies = [
            Reply(c, {A: torch.tensor([[a]]), B: torch.tensor(b)[:, None]}, {"examples": n, "experts/0": n})
            for c, n, (a, b) in (("a", 3, of_a), ("b", 1, of_b))
        ]
        return METHOD.merge(state, replies)

    state = round(state, (0.0, [2.0, 0.0]), (4.0, [-2.0, 4.0]))
    assert state.tensors[base].flatten().tolist() == [-6.0, 6.0]
    state = round(state, (0.0, [0.0, 0.0]), (4.0, [4.0, -4.0]))
    assert state.tensors[A].tolist() == [[3.0]]
    assert state.tensors[B].flatten().tolist() == [2.0, 0.0]
    assert state.tensors[base].flatten().tolist() == [0.0, 0.0]
    view = METHOD.assembled(state, {})
    assert view is not None
    assert (view.spec.scaling * view.tensors[B] @ view.tensors[A]).flatten().tolist() == [12.0, 0.0]


def test_the_base_is_neither_trained_nor_sent_up() -> None:
    state = replace(METHOD.init(setup_of()), round=1)
    assert all(not name.startswith("base/") for reply in answers(METHOD, state) for name in reply.send)


def test_the_budget_is_the_trained_adapter() -> None:
    plain = AdapterSpec(("v",), rank=32)
    assert METHOD.deployed(plain, 1) == plain
