"""FedIT (arXiv 2305.05644) against dense algebra in float64, on a layer that is not square, with scaling ≠ 1 (A9)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fedloom.adapters.inject import graft
from fedloom.methods.base import Method
from fedloom.methods.fedit import FedIT
from fedloom.numerics.lowrank import delta
from fedloom.types import AdapterSpec, Reply, Setup, State, Tensors

OUT, IN = 5, 3
COUNTS = [7, 2, 1]


def make_state(rank: int, alpha: float) -> State:
    spec = AdapterSpec(("v",), rank=rank, alpha=alpha, dropout=0.0)
    setup = Setup(seed=5, spec=spec, shapes={"v": (OUT, IN)}, hidden_size=IN, clients=("a", "b", "c"))
    return FedIT().init(setup)


def ends(state: State, moves: Callable[[str], bool]) -> list[Tensors]:
    """Return where three clients end: random steps from the server's factors."""
    source = torch.Generator().manual_seed(1)
    found = []
    for _ in COUNTS:
        drawn = {name: torch.randn(t.shape, generator=source) for name, t in sorted(state.tensors.items())}
        found.append({n: t + drawn[n] if moves(n) else t.clone() for n, t in state.tensors.items()})
    return found


def merged(state: State, clients: list[Tensors]) -> Tensors:
    replies = [
        Reply(f"c{i}", {n: t - state.tensors[n] for n, t in end.items()}, {"examples": count, "experts/0": count})
        for i, (end, count) in enumerate(zip(clients, COUNTS, strict=True))
    ]
    return FedIT().merge(state, replies).tensors


def dense(tensors: Tensors, scaling: float) -> Tensor:
    """Return what the adapter adds to the weight, entry by entry in float64."""
    A, B = tensors["experts/0/v.lora_A"].double(), tensors["experts/0/v.lora_B"].double()
    return scaling * torch.einsum("or,ri->oi", B, A)


def total(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).sum(0)


RANKS = [(4, 16.0), (16, 16.0), (4, 8.0), (16, 32.0)]  # fixed alpha, and alpha = 2r


def test_the_initial_adapter_adds_nothing() -> None:
    state = make_state(4, 16.0)
    assert state.tensors["experts/0/v.lora_A"].shape == (4, IN)
    assert state.tensors["experts/0/v.lora_B"].shape == (OUT, 4)
    assert not dense(state.tensors, 4.0).any()
    assert state.spec.scaling == 4.0


@pytest.mark.parametrize(("rank", "alpha"), RANKS)
def test_A9_with_a_common_A_the_merge_is_the_dense_mean(rank: int, alpha: float) -> None:
    state = make_state(rank, alpha)
    clients = ends(state, lambda name: name.endswith("lora_B"))
    scaling = alpha / rank
    expected = total([n / 10 * dense(end, scaling) for n, end in zip(COUNTS, clients, strict=True)])
    found = dense(merged(state, clients), scaling)
    assert torch.allclose(found, expected, atol=1e-6)
    assert found.abs().max() > 0.1


@pytest.mark.parametrize(("rank", "alpha"), RANKS)
def test_A9_with_both_factors_the_merge_misses_the_dense_mean_by_the_covariance(rank: int, alpha: float) -> None:
    """Σ w s B A − s B̄ Ā = s Σ w (B − B̄)(A − Ā): the bias of averaging factors, exactly."""
    state = make_state(rank, alpha)
    clients = ends(state, lambda name: True)
    scaling = alpha / rank
    shares = [n / 10 for n in COUNTS]
    mean = {n: total([w * end[n].double() for w, end in zip(shares, clients, strict=True)]) for n in state.tensors}
    found = merged(state, clients)
    assert all(torch.allclose(found[n].double(), t, atol=1e-6) for n, t in mean.items())

    exact = total([w * dense(end, scaling) for w, end in zip(shares, clients, strict=True)])
    apart = [{n: t.double() - mean[n] for n, t in end.items()} for end in clients]
    covariance = total([w * dense(difference, scaling) for w, difference in zip(shares, apart, strict=True)])
    bias = exact - dense(found, scaling)
    assert torch.allclose(bias, covariance, atol=1e-5)
    assert bias.norm() > 0.1 * exact.norm()


def test_two_clients_by_hand() -> None:
    """Rank 1, s = 2, counts 3, 1: A = 1, 5 → 2; B = (2, 0), (−2, 4) → (1, 1). Dense mean (−2, 10), factors (4, 4)."""
    spec = AdapterSpec(("v",), rank=1, alpha=2.0)
    A, B = "experts/0/v.lora_A", "experts/0/v.lora_B"
    state = State(1, {A: torch.tensor([[1.0]]), B: torch.zeros(2, 1)}, spec)
    replies = [
        Reply("a", {A: torch.tensor([[0.0]]), B: torch.tensor([[2.0], [0.0]])}, {"examples": 3, "experts/0": 3}),
        Reply("b", {A: torch.tensor([[4.0]]), B: torch.tensor([[-2.0], [4.0]])}, {"examples": 1, "experts/0": 1}),
    ]
    found = FedIT().merge(state, replies).tensors
    assert found[A].tolist() == [[2.0]]
    assert found[B].tolist() == [[1.0], [1.0]]
    assert delta(found[A], found[B], spec.scaling).tolist() == [[4.0], [4.0]]
    one, two = 2 * 1 * torch.tensor([[2.0], [0.0]]), 2 * 5 * torch.tensor([[-2.0], [4.0]])
    assert (0.75 * one + 0.25 * two).tolist() == [[-2.0], [10.0]]


@pytest.mark.parametrize(("rank", "alpha"), RANKS)
def test_A9_the_grafted_layer_adds_exactly_that(rank: int, alpha: float) -> None:
    state = make_state(rank, alpha)
    tensors = merged(state, ends(state, lambda name: True))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.v = nn.Linear(IN, OUT, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.v(x)

    torch.manual_seed(0)
    model = Model()
    weight = model.v.weight.detach().double().clone()
    grafted = graft(model, state.spec)
    grafted.load(tensors)
    grafted.eval()
    x = torch.randn(2, 4, IN)
    expected = x.double() @ (weight + dense(tensors, alpha / rank)).T
    assert torch.allclose(model(x).double(), expected, atol=1e-4)


def test_fedit_is_the_class_of_defaults() -> None:
    own = {name for name in vars(FedIT) if callable(getattr(FedIT, name)) and not name.startswith("__")}
    assert own == set()
    assert FedIT.__mro__[1] is Method
