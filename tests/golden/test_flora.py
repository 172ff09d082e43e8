"""FLoRA (arXiv 2409.05976) against dense algebra in float64, over two rounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from dense_world import SHAPES, SHARES, answers, assert_adds, ends, product, setup_of, total

from fedloom.methods.flora import FLoRA
from fedloom.runtime.wire import decode_state, encode_state
from fedloom.types import AdapterSpec, Reply, Setup, State, Tensors
from small_world import same

METHOD = FLoRA()
SCALING = 3.0  # alpha 6, rank 2


def after_two_rounds() -> tuple[list[State], list[Tensors]]:
    """Return the states of rounds 0, 1 and 2, and the dense sums of rounds 1 and 2 from the clients' ends."""
    states, sums = [METHOD.init(setup_of())], [{path: torch.zeros(s).double() for path, s in SHAPES.items()}]
    for round in (1, 2):
        state = replace(states[-1], round=round)
        replies = answers(METHOD, state, seed=round)
        found = ends(METHOD, state, replies)
        mean = {path: total([SHARES[c] * product(found[c], path, SCALING) for c in SHARES]) for path in SHAPES}
        sums.append({path: sums[-1][path] + mean[path] for path in SHAPES})
        states.append(METHOD.merge(state, replies))
    return states, sums[1:]


def test_a_round_starts_from_the_sum_of_all_rounds_with_a_new_lora() -> None:
    states, sums = after_two_rounds()
    assert all(not t.any() for t in states[0].tensors.values())
    for state, dense in zip(states[1:], sums, strict=True):
        view = METHOD.view(replace(state, round=state.round + 1), "d")  # also for one that never answered
        for path in SHAPES:
            found = view.tensors[f"base/{path}.delta"].double()
            torch.testing.assert_close(found, dense[path], atol=1e-5, rtol=1e-6)
            assert not view.tensors[f"experts/0/{path}.lora_B"].any()
        assert view.spec.base_delta
        assert_adds(view, dense)


def test_each_rounds_lora_is_the_same_to_all_and_another_than_before() -> None:
    state = METHOD.init(setup_of())
    loras = []
    for round in (1, 2):
        state = replace(state, round=round)
        assert same(METHOD.view(state, "a").tensors, METHOD.view(state, "b").tensors)
        assert same(METHOD.view(decode_state(encode_state(state)), "a").tensors, METHOD.view(state, "a").tensors)
        loras.append(METHOD.view(state, "a").tensors["experts/0/v.lora_A"])
    assert not torch.equal(*loras)
    assert all(0 < lora.abs().max() <= 3**-0.5 for lora in loras)  # U(±1/√in)


def test_what_is_measured_is_one_plain_lora_bitwise_equal_to_the_base() -> None:
    states, sums = after_two_rounds()
    view = METHOD.assembled(states[-1], {})
    assert view is not None
    assert view.spec == AdapterSpec(("v", "w"), rank=3, alpha=3.0, dropout=0.0)  # min(5, 3) beats min(2, 4)
    assert view.tensors["experts/0/w.lora_A"].shape == (3, 4)
    assert view.tensors["experts/0/w.lora_B"].shape == (2, 3)
    for path in SHAPES:
        found = product(view.tensors, path, 1.0)
        assert torch.equal(found, states[-1].tensors[f"base/{path}.delta"].double())
    assert_adds(view, sums[-1])


def test_the_stacks_of_the_paper_give_the_same_sum() -> None:
    """B stacked along its columns times p_k A_k stacked along its rows."""
    state = replace(METHOD.init(setup_of()), round=1)
    replies = answers(METHOD, state)
    found = ends(METHOD, state, replies)
    merged = METHOD.merge(state, replies)
    for path in SHAPES:
        B = torch.cat([found[c][f"experts/0/{path}.lora_B"] for c in SHARES], dim=1)
        A = torch.cat([SHARES[c] * found[c][f"experts/0/{path}.lora_A"] for c in SHARES], dim=0)
        torch.testing.assert_close(merged.tensors[f"base/{path}.delta"].double(), SCALING * B @ A, atol=1e-6, rtol=1e-5)


def test_two_rounds_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1, s = 2, counts 3 and 1, a layer of 2 × 1; the drawn A is 1 in round 1 and −1 in round 2.

    Round 1: A = 0, 5; B = (2, 0), (−2, 4). 2·(3/4·(0, 0) + 1/4·(−10, 20)) = (−5, 10).
    Round 2: A = 2, −1; B = (1, 1), (0, 8). 2·(3/4·(2, 2) + 1/4·(0, −8)) = (3, −1). Base: (−2, 9).
    """
    drawn = {1: 1.0, 2: -1.0}
    A, B = "experts/0/v.lora_A", "experts/0/v.lora_B"
    monkeypatch.setattr(
        "fedloom.methods.flora.new_lora",
        lambda state: {A: torch.tensor([[drawn[state.round]]]), B: torch.zeros(2, 1)},
    )
    spec = AdapterSpec(("v",), rank=1, alpha=2.0)
    state = METHOD.init(Setup(1, spec, {"v": (2, 1)}, 1, ("a", "b", "c")))
    for round, of_a, of_b, base in (
        (1, (-1.0, [2.0, 0.0]), (4.0, [-2.0, 4.0]), [-5.0, 10.0]),
        (2, (3.0, [1.0, 1.0]), (0.0, [0.0, 8.0]), [-2.0, 9.0]),
    ):
        state = replace(state, round=round)
        replies = [
            Reply(c, {A: torch.tensor([[a]]), B: torch.tensor(b)[:, None]}, {"examples": n, "experts/0": n})
            for c, n, (a, b) in (("a", 3, of_a), ("b", 1, of_b))
        ]
        state = METHOD.merge(state, replies)
        assert state.tensors["base/v.delta"].flatten().tolist() == base


def test_the_budget_is_the_trained_adapter() -> None:
    plain = AdapterSpec(("v",), rank=32)
    assert METHOD.deployed(plain, 1) == plain
