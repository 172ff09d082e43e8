"""Conflicts between clients' updates of one expert: FC-MoE's projection (arXiv 2606.15625) from inner products."""

from __future__ import annotations

from fedloom.numerics.tree import by_component, dot, norm
from fedloom.types import Replies, Tensors

Weights = dict[str, dict[str, float]]  # client → component → what it counts
Sizes = dict[str, dict[str, float]]  # client → expert → norm of the update

#: A consensus this much shorter than the updates behind it is their rounding, and has no direction: the expert stays.
NO_CONSENSUS = 1e-6


def experts_of(tensors: Tensors) -> dict[str, Tensors]:
    """Return the tensors of each expert, by component."""
    return by_component({name: tensor for name, tensor in tensors.items() if name.startswith("experts/")})


def sizes_of(tensors: Tensors) -> dict[str, float]:
    """Return the norm of each expert, by component."""
    return {unit: norm(update) for unit, update in experts_of(tensors).items()}


def conflicts(consensus: Tensors, weights: Weights, sizes: Sizes, replies: Replies) -> dict[str, dict[str, float]]:
    """Return for each expert how its clients' updates stand to their weighted mean, Δ̄ = Σ c_i Δ_i / C.

    With a_i = Δ_i·Δ̄, Eq. 3 and 4 of FC-MoE give Σ c_i proj(Δ_i) / C = Δ̄ · (1 + Σ_{a_i<0} c_i |a_i| / (C ‖Δ̄‖²)): the
    projection makes the mean longer, which needs inner products only.

    Args:
        consensus: Δ̄ of every expert of positive weight, and any other tensors.
        weights: client → component → c_i.
        sizes: client → expert → ‖Δ_i‖, of who made the consensus.
        replies: read once, one at a time.

    Returns:
        Expert → ``clients``; ``conflicting``, the share with a negative cosine; ``cosine``, their mean; ``removed``,
        the weighted norm of what the projection takes away; ``length``, the factor by which it lengthens Δ̄.
    """
    directions = experts_of(consensus)
    found: dict[str, list[tuple[float, float, float]]] = {}  # unit → (weight, inner product, norm) of each client
    for reply in replies:
        updates = experts_of(reply.send)
        for unit in updates:
            if unit in directions:
                inner = dot(updates[unit], {name: directions[unit][name] for name in updates[unit]})
                counted = weights[reply.client][unit], inner, sizes[reply.client][unit]
                found.setdefault(unit, []).append(counted)
        del reply, updates  # so that it is gone when the next is read
    log = {}
    for unit, clients in found.items():
        length, total = norm(directions[unit]), sum(weight for weight, _, _ in clients)
        opposed = sum(weight * -inner for weight, inner, _ in clients if inner < 0) / total
        if length <= NO_CONSENSUS * sum(weight * size for weight, _, size in clients) / total:
            length = 0.0
        cosines = [inner / (length * size) for _, inner, size in clients if length * size > 0]
        log[unit] = {
            "clients": len(clients),
            "conflicting": sum(inner < 0 for _, inner, _ in clients) / len(clients),
            "cosine": sum(cosines) / len(cosines) if cosines else 0.0,
            "removed": opposed / length if length > 0 else 0.0,
            "length": 1.0 + opposed / length**2 if length > 0 else 0.0,
        }
    return log
