"""LoRA-FAIR (arXiv 2411.14961) against dense algebra in float64 and a least-squares solver."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dense_world import SHAPES, SHARES, answers, assert_adds, ends, product, setup_of, total
from pydantic import ValidationError

from fedloom.methods.fedit import FedIT
from fedloom.methods.lora_fair import LoRAFair, LoRAFairOptions
from fedloom.types import AdapterSpec, Reply, State, Tensors
from small_world import random_tensors

SCALING = 3.0  # alpha 6, rank 2


def method(ridge: float) -> LoRAFair:
    return LoRAFair(LoRAFairOptions(ridge=ridge))


def start() -> State:
    state = LoRAFair().init(setup_of())
    return State(1, random_tensors(state.tensors, scale=1.0), state.spec, state.values)


def means(state: State, replies: list[Reply], path: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return Ā, B̄ and W of a layer, unscaled, from where the clients ended."""
    found = ends(LoRAFair(), state, replies)
    A, B = (total([SHARES[c] * found[c][f"experts/0/{path}.lora_{f}"] for c in SHARES]) for f in "AB")
    return A, B, total([SHARES[c] * product(found[c], path, 1.0) for c in SHARES])


@pytest.mark.parametrize("ridge", [0.01, 0.5])
def test_B_is_the_ridge_regression_of_the_dense_mean(ridge: float) -> None:
    """min ‖W − (B̄ + ΔB) Ā‖² + λ‖ΔB‖² is least squares with √λ I below Āᵀ and zeros below the target."""
    state = start()
    replies = answers(LoRAFair(), state)
    merged = method(ridge).merge(state, replies)
    for path in SHAPES:
        A, B, W = means(state, replies, path)
        design = np.vstack([A.T.numpy(), np.sqrt(ridge) * np.eye(2)])
        target = np.vstack([(W - B @ A).T.numpy(), np.zeros((2, SHAPES[path][0]))])
        correction = np.linalg.lstsq(design, target, rcond=None)[0].T
        found_A, found_B = (merged.tensors[f"experts/0/{path}.lora_{f}"].double() for f in "AB")
        torch.testing.assert_close(found_A, A, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(found_B, B + torch.from_numpy(correction), atol=1e-5, rtol=1e-5)


def test_the_bias_of_averaging_shrinks_to_what_the_row_space_of_A_misses() -> None:
    state = start()
    replies = answers(LoRAFair(), state)
    fedit, fair, near = (m.merge(state, replies).tensors for m in (FedIT(), LoRAFair(), method(1e-9)))
    for path in SHAPES:
        A, _, W = means(state, replies, path)
        missed = [float((W - product(tensors, path, 1.0)).norm()) for tensors in (fedit, fair, near)]
        outside = W @ (torch.eye(A.shape[1]).double() - torch.linalg.pinv(A) @ A)
        assert missed[0] > missed[1] >= missed[2] - 1e-6
        assert missed[2] == pytest.approx(float(outside.norm()), abs=1e-4)


def test_a_heavy_ridge_is_fedit() -> None:
    state = start()
    replies = answers(LoRAFair(), state)
    heavy, fedit = method(1e9).merge(state, replies).tensors, FedIT().merge(state, replies).tensors
    assert all(torch.allclose(heavy[name], tensor, atol=1e-6) for name, tensor in fedit.items())


def test_two_clients_by_hand() -> None:
    """Rank 1, s = 2, counts 3 and 1, λ = 1/2: A = 1, 5 → 2; B = (2, 0), (−2, 4) → (1, 1).

    W = 3/4·(2, 0) + 1/4·(−10, 20) = (−1, 5); W − B̄ Ā = (−3, 3); ΔB = (−3, 3)·2 / (4 + 1/2) = (−4/3, 4/3).
    """
    A, B = "experts/0/v.lora_A", "experts/0/v.lora_B"
    state = State(1, {A: torch.tensor([[1.0]]), B: torch.zeros(2, 1)}, AdapterSpec(("v",), rank=1, alpha=2.0))
    replies = [
        Reply("a", {A: torch.tensor([[0.0]]), B: torch.tensor([[2.0], [0.0]])}, {"examples": 3, "experts/0": 3}),
        Reply("b", {A: torch.tensor([[4.0]]), B: torch.tensor([[-2.0], [4.0]])}, {"examples": 1, "experts/0": 1}),
    ]
    merged = method(0.5).merge(state, replies)
    assert merged.tensors[A].tolist() == [[2.0]]
    assert merged.tensors[B].flatten().tolist() == pytest.approx([1 - 4 / 3, 1 + 4 / 3])


def test_the_merged_lora_in_a_model() -> None:
    state = start()
    merged = LoRAFair().merge(state, answers(LoRAFair(), state))
    view = LoRAFair().assembled(merged, {})
    assert view is not None
    dense: Tensors = {path: product(merged.tensors, path, SCALING) for path in SHAPES}
    assert_adds(view, dense)


def test_a_ridge_of_zero_is_refused() -> None:
    with pytest.raises(ValidationError, match="greater than 0"):
        LoRAFairOptions(ridge=0)
