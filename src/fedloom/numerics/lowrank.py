"""The dense matrix that a LoRA pair stands for."""

from __future__ import annotations

import torch

from fedloom.errors import AdapterError


def delta(A: torch.Tensor, B: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return ``scaling · B·A``, (out, in), for A (r, in) and B (out, r). The only place where B·A is formed."""
    if A.ndim != 2 or B.ndim != 2 or A.shape[0] != B.shape[1]:
        raise AdapterError(
            f"LoRA factors must be A (rank, in) and B (out, rank); got A {tuple(A.shape)}, B {tuple(B.shape)}."
        )
    return scaling * (B @ A)
