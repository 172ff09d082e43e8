"""The Gaussian mechanism on ``Tensors``: a bound on one vector's length, and noise in proportion to it.

Clipping: H. B. McMahan, D. Ramage, K. Talwar, L. Zhang, "Learning differentially private recurrent language models",
arXiv 1710.06963 (2018), Algorithm 1.
"""

from __future__ import annotations

import math

import torch

from fedloom.numerics.tree import norm
from fedloom.types import Tensors


def clip(tensors: Tensors, bound: float) -> Tensors:
    """Return all tensors, as one vector, scaled down to ℓ2 norm ``bound`` if it is longer, else as they are."""
    length = norm(tensors)
    if not length > bound:
        return tensors
    return {name: tensor * (bound / length) for name, tensor in tensors.items()}


def stretched(groups: list[Tensors], length: float) -> list[Tensors]:
    """Scale each group to the same norm, so that all together have norm ``length``; a zero group stays zero."""
    each = length / math.sqrt(max(1, len(groups)))
    found = []
    for group in groups:
        size = norm(group)
        found.append({name: tensor * (each / size) for name, tensor in group.items()} if size > 0 else group)
    return found


def gaussian(like: Tensors, deviation: float, source: torch.Generator) -> Tensors:
    """Return independent normal draws of mean 0 and ``deviation``, float64, for each name in order of the names."""
    return {
        name: deviation * torch.randn(like[name].shape, generator=source, dtype=torch.float64) for name in sorted(like)
    }
