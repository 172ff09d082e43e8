"""Arithmetic on ``Tensors`` (flat name → tensor)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from fedloom.errors import AdapterError
from fedloom.types import Tensors, component

_SHOWN = 5


def _names(names: set[str]) -> str:
    listed = ", ".join(sorted(names)[:_SHOWN])
    return listed + (f", … ({len(names)} in all)" if len(names) > _SHOWN else "")


def assert_same_keys(a: Tensors, b: Tensors) -> None:
    """Raise an AdapterError naming the tensors that only one side has, or whose shapes differ (no broadcasting)."""
    if a.keys() != b.keys():
        problems = []
        if a.keys() - b.keys():
            problems.append(f"missing from the second: {_names(a.keys() - b.keys())}")
        if b.keys() - a.keys():
            problems.append(f"missing from the first: {_names(b.keys() - a.keys())}")
        raise AdapterError(f"Two sets of tensors must have the same names; {'; '.join(problems)}.")
    for name, tensor in a.items():
        if tensor.shape != b[name].shape:
            raise AdapterError(f"Tensor {name!r} has two shapes: {tuple(tensor.shape)} and {tuple(b[name].shape)}.")


def by_component(tensors: Tensors) -> dict[str, Tensors]:
    """Return the tensors of each component, in the order of their first names."""
    found: dict[str, Tensors] = {}
    for name, tensor in tensors.items():
        found.setdefault(component(name), {})[name] = tensor
    return found


def subtract(a: Tensors, b: Tensors) -> Tensors:
    """Return ``a − b``, name by name."""
    assert_same_keys(a, b)
    return {name: tensor - b[name] for name, tensor in a.items()}


def add(a: Tensors, b: Tensors) -> Tensors:
    """Return ``a + b``, name by name."""
    assert_same_keys(a, b)
    return {name: tensor + b[name] for name, tensor in a.items()}


#: Elements that are widened to float64 at a time: a core's cache holds them, so memory is read once and not written.
PIECE = 1 << 17


def norm(tensors: Tensors) -> float:
    """Return the ℓ2 norm of all tensors as one vector, accumulated in float64 (not a sum of per-tensor norms)."""
    return math.hypot(*(math.sqrt(sum(float(x @ x) for x in pieces(t))) for t in tensors.values()))


def dot(a: Tensors, b: Tensors) -> float:
    """Return a · b, of all tensors as one vector, in float64."""
    assert_same_keys(a, b)
    pairs = (zip(pieces(tensor), pieces(b[name]), strict=True) for name, tensor in a.items())
    return math.fsum(float(x @ y) for pair in pairs for x, y in pair)


def dot_and_norm(a: Tensors, b: Tensors) -> tuple[float, float]:
    """Return a · b, of all tensors as one vector, and ‖a‖, both in float64, reading ``a`` once."""
    assert_same_keys(a, b)
    products, sizes = [], []
    for name, tensor in a.items():
        squares = []
        for x, y in zip(pieces(tensor), pieces(b[name]), strict=True):
            products.append(float(x @ y))
            squares.append(float(x @ x))
        sizes.append(math.sqrt(sum(squares)))
    return math.fsum(products), math.hypot(*sizes)


def pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a tensor's elements in order, as flat float64 tensors of at most ``PIECE`` elements."""
    return (piece.to(torch.float64) for piece in tensor.detach().reshape(-1).split(PIECE))


def place(tensors: Tensors, path: str) -> Tensors:
    """Return the tensors under a path: ``x`` → ``<path>/x``."""
    return {f"{path}/{name}": tensor for name, tensor in tensors.items()}


def take(tensors: Tensors, path: str) -> Tensors:
    """Undo ``place``: the tensors under a path (``own`` is not above ``owner/x``), without it."""
    return {name.removeprefix(f"{path}/"): t for name, t in tensors.items() if name.startswith(f"{path}/")}
