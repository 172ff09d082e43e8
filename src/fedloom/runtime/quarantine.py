"""What the server checks before it lets a reply near the model."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fedloom.errors import UpdateRejected
from fedloom.types import Reply, Training

#: An update is absurd when its norm exceeds this many times the lower median of its round.
NORM_FACTOR = 100.0

#: What AdamW can move a coordinate by in one step, in units of its rate; see ``reach``.
STEP = 0.1 / math.sqrt(0.001 * (1 - 0.9**2 / 0.999))

#: Rounding may lengthen an update: to int8 by ‖e‖ ≤ √256 · max / 254 ≤ 0.063 ‖u‖ in each block of 256 values, where the
#: rest of earlier rounds is sent along by (1 + 0.063) / (1 − 0.063) = 1.135.
ROUNDING = 1.15

#: A reason may quote what a client sent, which may be long.
MAX_REASON = 500


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


def reach(training: Training, steps: float, values: int, start: float = 0.0) -> float:
    """Return how far AdamW can move a vector of ``values`` numbers in ``steps`` steps, in ℓ2 norm.

    Whatever the gradients, m_t = (1 − β₁) Σ β₁^k g_{t−k} and v_t = (1 − β₂) Σ β₂^k g²_{t−k} give, by Cauchy and
    Schwarz, |m_t| / √v_t ≤ (1 − β₁) / √((1 − β₂) (1 − β₁² / β₂)) = 7.27 in each coordinate, also of moments that were
    kept, and the correction √(1 − β₂^t) / (1 − β₁^t) is below 1. (The 3.16 of Kingma and Ba 2015, Section 2.1, is that
    of one gradient after zeros.) So it holds for any part of a model as for the whole. Decay adds, over all steps, no
    more than lr · weight_decay · ‖θ_0‖ for each: θ_s = (1 − lr · weight_decay)^s θ_0 − steps, each shrunk.

    Args:
        training: rates and decay.
        steps: number of steps; the bound is linear in it.
        values: how many numbers move.
        start: ℓ2 norm from which they start, for the decay.
    """
    rate = max(training.lr, training.router_lr)
    return rate * steps * (STEP * math.sqrt(values) + training.weight_decay * start)


def printable(reason: str, most: int = MAX_REASON) -> str:
    """Return a reason that is safe in a terminal and a log: one line, no control characters, cut."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in reason[:most])
