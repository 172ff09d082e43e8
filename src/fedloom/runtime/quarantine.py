"""What the server checks before it lets a reply near the model."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fedloom.errors import UpdateRejected
from fedloom.types import Reply, Training

#: An update is absurd when its norm exceeds this many times the lower median of its round, or what AdamW can reach.
NORM_FACTOR = 100.0


def check_reply(reply: Reply, expected: dict[str, tuple[int, ...]]) -> None:
    """Refuse a reply whose tensors are not exactly the expected float32 ones, all finite.

    Raises:
        UpdateRejected: with the tensor named.
    """
    if missing := sorted(expected.keys() - reply.send.keys()):
        raise UpdateRejected(f"{len(missing)} tensors are missing, first {missing[0]!r}")
    if unknown := sorted(reply.send.keys() - expected.keys()):
        raise UpdateRejected(f"{len(unknown)} tensors are unknown, first {unknown[0]!r}")
    for name, tensor in reply.send.items():
        if tuple(tensor.shape) != expected[name]:
            raise UpdateRejected(f"{name!r} has shape {tuple(tensor.shape)}, expected {expected[name]}")
        if tensor.dtype != torch.float32:
            raise UpdateRejected(f"{name!r} has dtype {tensor.dtype}, expected torch.float32")
        if not torch.isfinite(tensor).all():
            raise UpdateRejected(f"{name!r} holds NaN or infinity")


def absurd_norms(norms: Sequence[float], factor: float = NORM_FACTOR) -> list[int]:
    """Return the indices whose norm exceeds ``factor`` times the lower median of the non-zero norms.

    With fewer than three replies nobody is judged by the others: a tiny update could shut out an honest one.
    """
    positive = sorted(n for n in norms if n > 0)
    if len(norms) < 3 or not positive:
        return []
    limit = factor * positive[(len(positive) - 1) // 2]
    return [i for i, n in enumerate(norms) if n > limit or not math.isfinite(n)]


def reach(training: Training, steps: int, values: int) -> float:
    """Return how far AdamW can move a vector of ``values`` numbers in ``steps`` steps, in ℓ2 norm.

    A step moves no coordinate further than lr · (1 − β₁) / √(1 − β₂) = 3.17 lr (Kingma and Ba 2015, Section 2.1).
    """
    rate = max(training.lr, training.router_lr)
    return 3.17 * rate * steps * math.sqrt(values)


def printable(reason: str, most: int) -> str:
    """Return a reason that is safe in a terminal and a log: one line, no control characters, cut."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in reason[:most])
