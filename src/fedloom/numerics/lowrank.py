"""Between LoRA pairs and the dense matrices that they stand for."""

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


def truncate(dense: torch.Tensor, rank: int, scaling: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A (rank, in) and B (out, rank) whose ``delta`` is the best approximation of ``dense`` (Eckart–Young).

    A = Vᵀ and B = U Σ / scaling (FlexLoRA, arXiv 2402.11505), directions by falling singular value, so that the first k
    of them are the best approximation of rank k. Signs are fixed (each row of A has its largest entry positive). Where
    the rank exceeds what the matrix has, rows and columns of zeros fill up. Computed in float64.

    Args:
        dense: (out, in).
        rank: rank of the pair.
        scaling: the LoRA scaling, not zero.
    """
    U, S, Vt = torch.linalg.svd(dense.double(), full_matrices=False)
    k = min(rank, len(S))
    U, S, Vt = U[:, :k], S[:k], Vt[:k]
    sign = torch.gather(Vt, 1, Vt.abs().argmax(1, keepdim=True)).sign()  # (k, 1)
    A = torch.zeros(rank, dense.shape[1], dtype=torch.float64)
    B = torch.zeros(dense.shape[0], rank, dtype=torch.float64)
    A[:k], B[:, :k] = Vt * sign, U * S * sign.T / scaling
    return A.to(dense.dtype), B.to(dense.dtype)
