"""Server-side means and FC-MoE's consensus projection.

Sums run in the order given and accumulate in float64, then return to the updates' own dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch

from fedloom.errors import AdapterError, FedloomError
from fedloom.numerics.tree import PIECE, pieces
from fedloom.types import Reply, Tensors, component


def _checked_weight(weight: float, whose: str) -> float:
    value = float(weight)
    if not math.isfinite(value) or value < 0:
        raise FedloomError(f"The weight of {whose} is {value}; weights must be finite and not negative.")
    return value


def _check_alike(tensor: torch.Tensor, like: torch.Tensor, what: str) -> None:
    if tensor.shape != like.shape or tensor.dtype != like.dtype:
        raise AdapterError(
            f"{what} is {tuple(tensor.shape)} {tensor.dtype}; the others are {tuple(like.shape)} {like.dtype}."
        )


def weighted_mean(updates: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Return ``Σ w_i u_i / Σ w_i`` (FedWeave eq. 4, FC-MoE eq. 4); all-zero weights give the zero tensor.

    Args:
        updates: one or more floating-point tensors of one shape and dtype.
        weights: one finite, non-negative number per update. An update of weight 0 is not read.
    """
    if len(updates) == 0 or len(updates) != len(weights):
        raise FedloomError(f"A weighted mean needs one weight per update; got {len(updates)} and {len(weights)}.")
    checked = [_checked_weight(w, f"update {i}") for i, w in enumerate(weights)]
    like = updates[0]
    if not like.is_floating_point():
        raise AdapterError(f"Updates must be floating point; got {like.dtype}.")
    for i, update in enumerate(updates):
        _check_alike(update, like, f"Update {i}")
    accumulator = torch.zeros_like(like, dtype=torch.float64)
    largest = max(checked)
    if largest == 0:
        return torch.zeros_like(like)
    relative = [w / largest for w in checked]  # the sum of huge weights must not overflow
    total = math.fsum(relative)
    for update, weight in zip(updates, relative, strict=True):
        if weight > 0:
            accumulator.add_(update.to(torch.float64), alpha=weight / total)
    return accumulator.to(like.dtype)


def consensus_direction(updates: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Return FC-MoE's consensus ``Δ̄_k = Σ_i c_{i,k} Δθ_{i,k} / Σ_j c_{j,k}`` (eq. 2), the importance-weighted mean."""
    return weighted_mean(updates, weights)


def project_conflicts(updates: Sequence[torch.Tensor], consensus: torch.Tensor) -> list[torch.Tensor]:
    """Project each update that opposes the consensus onto the consensus' normal plane (FC-MoE eq. 3).

    ``Δθ − (Δθ·Δ̄ / ‖Δ̄‖²) Δ̄`` where ``Δθ·Δ̄ < 0``; any other update is returned as it is. Inner products are float64 and
    of the whole flattened tensor. A zero consensus changes nothing. No returned update has a negative inner product.
    """
    for i, update in enumerate(updates):
        _check_alike(update, consensus, f"Update {i}")
    if consensus.numel() == 0:
        return list(updates)
    largest = float(consensus.abs().max())
    if not math.isfinite(largest):
        raise FedloomError("The consensus direction is not finite; leave out the update that holds NaN or infinity.")
    if largest == 0:
        return list(updates)
    direction = consensus.to(torch.float64).flatten() / largest  # the length of the consensus does not matter
    return [_without_opposition(update, direction) for update in updates]


def _without_opposition(update: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
    flat = update.to(torch.float64).flatten()
    inner = torch.dot(flat, direction)
    if not inner < 0:
        return update
    squared = torch.dot(direction, direction)

    def projected(target: torch.Tensor | float) -> torch.Tensor:
        return (flat - (inner - target) / squared * direction).to(update.dtype)

    result = projected(0.0)
    if torch.dot(result.to(torch.float64).flatten(), direction) < 0:
        # Rounding moves an element by at most half an eps of itself or half the smallest subnormal: aim above that.
        info = torch.finfo(update.dtype)
        rounding = 4 * info.eps * (flat.norm() + info.smallest_normal * flat.numel() ** 0.5)
        result = projected(rounding * squared.sqrt())
    return result.reshape(update.shape)


class RunningMean:
    """Weighted means of named tensors, taken in one at a time: one float64 accumulator per name, whatever the count.

    Attributes:
        weights: name → total weight so far, of every name seen, including those of weight 0.
    """

    def __init__(self) -> None:
        self.weights: dict[str, float] = {}
        self._sums: Tensors = {}
        self._likes: Tensors = {}

    def add(self, name: str, tensor: torch.Tensor, weight: float) -> None:
        """Take in one tensor. Its name's first tensor fixes shape and dtype."""
        weight = _checked_weight(weight, f"tensor {name!r}")
        if not tensor.is_floating_point():
            raise AdapterError(f"Tensor {name!r} must be floating point; got {tensor.dtype}.")
        like = self._likes.setdefault(name, torch.empty_like(tensor, device="meta"))
        _check_alike(tensor, like, f"Tensor {name!r}")
        self.weights[name] = self.weights.get(name, 0.0) + weight
        if weight > 0:
            if name not in self._sums:
                self._sums[name] = torch.zeros(tensor.shape, dtype=torch.float64, device=tensor.device)
            for total, piece in zip(self._sums[name].view(-1).split(PIECE), pieces(tensor), strict=True):
                total.add_(piece, alpha=weight)

    def add_each(self, tensors: Tensors, weight: Callable[[str], float]) -> None:
        """Take in tensors by name. The caller's loop keeps none of them alive, nor a file that they are views of."""
        for name, tensor in tensors.items():
            self.add(name, tensor, weight(name))

    def mean(self) -> Tensors:
        """Return the mean of each name, in its own dtype. A name whose weights are all zero is absent."""
        return {name: (total / self.weights[name]).to(self._likes[name].dtype) for name, total in self._sums.items()}


def weighted_mean_by_component(
    replies: Iterable[Reply], component: Callable[[str], str] = component
) -> tuple[Tensors, dict[str, float]]:
    """Average each tensor over the replies that sent it, weighted by the examples behind its component.

    FedWeave eq. 4: θ_m is weighted by n_{i,m} = ``counts["experts/<m>"]``, φ by |D_i| = ``counts["router"]``. Replies
    are read in the order given, once, one at a time.

    Returns:
        The means (a tensor whose weights are all zero is absent: the model keeps its own), and component → total weight
        over the replies that sent any of it.
    """
    running = RunningMean()
    totals: dict[str, float] = {}
    for reply in replies:
        sent: dict[str, float] = {}
        for name in reply.send:
            unit = component(name)
            if unit not in reply.counts:
                raise AdapterError(
                    f"Client {reply.client!r} sent {name!r} without a count of examples for {unit!r}; "
                    f"it counted: {', '.join(sorted(reply.counts)) or 'nothing'}."
                )
            sent[unit] = float(reply.counts[unit])
            running.add(name, reply.send[name], sent[unit])
        for unit, weight in sent.items():
            totals[unit] = totals.get(unit, 0.0) + weight
        del reply  # so that it is gone when the next is read
    return running.mean(), totals
