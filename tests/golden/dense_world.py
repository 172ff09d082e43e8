"""A server's side in miniature, and its dense algebra: two layers that are not square, clients of unequal weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from fedloom.adapters.inject import graft
from fedloom.methods.base import Method
from fedloom.types import AdapterSpec, Order, Reply, Setup, State, Tensors, Training, View

#: One layer taller than wide, one wider than tall.
SHAPES = {"v": (5, 3), "w": (2, 4)}
#: ``d`` exists and never answers.
CLIENTS = ("a", "b", "c", "d")
COUNTS = {"a": 7, "b": 2, "c": 1}
SHARES = {client: count / 10 for client, count in COUNTS.items()}
LEARNING = Training(steps=3)


def setup_of(rank: int = 2, alpha: float = 6.0) -> Setup:
    spec = AdapterSpec(tuple(SHAPES), rank=rank, alpha=alpha, dropout=0.0)
    return Setup(seed=5, spec=spec, shapes=SHAPES, hidden_size=4, clients=CLIENTS)


def order_of(method: Method, state: State, client: str) -> Order:
    view = method.view(state, client)
    return Order("fit", client, state.round, view.tensors, view.spec, LEARNING, view.values)


def answers(method: Method, state: State, seed: int = 1) -> list[Reply]:
    """Return what clients reply that moved every tensor that they send at random."""
    source = torch.Generator().manual_seed(seed)
    found = []
    for client, count in COUNTS.items():
        order = order_of(method, state, client)
        send = {n: torch.randn(t.shape, generator=source) for n, t in order.tensors.items() if method.sends(n, order)}
        reply = Reply(client, send, {"examples": count, "experts/0": count})
        assert method.expected(order, reply) == {name: tuple(t.shape) for name, t in send.items()}
        found.append(reply)
    return found


def ends(method: Method, state: State, replies: list[Reply]) -> dict[str, Tensors]:
    """Return client → the tensors that it ended the round with, in float64."""
    found = {}
    for reply in replies:
        start = method.view(state, reply.client).tensors
        found[reply.client] = {n: t.double() + reply.send[n].double() for n, t in start.items() if n in reply.send}
    return found


def product(tensors: Mapping[str, Tensor], path: str, scaling: float, expert: int = 0) -> Tensor:
    """Return what an expert adds to the weight of ``path``, entry by entry in float64."""
    A, B = (tensors[f"experts/{expert}/{path}.lora_{factor}"].double() for factor in "AB")
    return scaling * torch.einsum("or,ri->oi", B, A)


def total(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).sum(0)


class Two(nn.Module):
    """The two layers, each with its own input."""

    def __init__(self) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(3)
        for path, (out, width) in SHAPES.items():
            layer = nn.Linear(width, out, bias=False)
            layer.weight = nn.Parameter(torch.randn(out, width, generator=source))
            setattr(self, path, layer)


def assert_adds(view: View, dense: Mapping[str, Tensor]) -> None:
    """Check that a model carrying ``view`` computes x (W + dense)ᵀ at both layers."""
    model = Two()
    weights = {path: cast(nn.Linear, getattr(model, path)).weight.detach().double() for path in SHAPES}
    grafted = graft(model, view.spec)
    grafted.load(view.tensors)
    grafted.eval()
    for path, (_, width) in SHAPES.items():
        x = torch.randn(2, 3, width, generator=torch.Generator().manual_seed(4))
        found = getattr(model, path)(x).double()
        torch.testing.assert_close(found, x.double() @ (weights[path] + dense[path]).T, atol=2e-5, rtol=1e-5)
