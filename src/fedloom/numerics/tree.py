"""Arithmetic on ``Tensors`` (flat name → tensor)."""

from __future__ import annotations

import math

import torch

from fedloom.errors import AdapterError
from fedloom.types import Tensors

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


def subtract(a: Tensors, b: Tensors) -> Tensors:
    """Return ``a − b``, name by name."""
    assert_same_keys(a, b)
    return {name: tensor - b[name] for name, tensor in a.items()}


def add(a: Tensors, b: Tensors) -> Tensors:
    """Return ``a + b``, name by name."""
    assert_same_keys(a, b)
    return {name: tensor + b[name] for name, tensor in a.items()}


def norm(tensors: Tensors) -> float:
    """Return the ℓ2 norm of all tensors as one vector, accumulated in float64 (not a sum of per-tensor norms)."""
    return math.hypot(*(float(torch.linalg.vector_norm(t, dtype=torch.float64)) for t in tensors.values()))


def dot(a: Tensors, b: Tensors) -> float:
    """Return the inner product of all tensors as one vector, in float64."""
    assert_same_keys(a, b)
    flat = ((t.to(torch.float64).flatten(), b[name].to(torch.float64).flatten()) for name, t in a.items())
    return math.fsum(float(torch.dot(x, y)) for x, y in flat)


def place(tensors: Tensors, path: str) -> Tensors:
    """Return the tensors under a path: ``x`` → ``<path>/x``."""
    return {f"{path}/{name}": tensor for name, tensor in tensors.items()}


def take(tensors: Tensors, path: str) -> Tensors:
    """Undo ``place``: the tensors under a path (``own`` is not above ``owner/x``), without it."""
    return {name.removeprefix(f"{path}/"): t for name, t in tensors.items() if name.startswith(f"{path}/")}
