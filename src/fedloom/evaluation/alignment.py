"""How well discovered clusters match reference labels (FedWeave Appendix A, eq. 9-11). Labels are used here only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from fedloom.errors import DataError

Labels = Sequence[Hashable] | np.ndarray[Any, Any]


def _contingency(labels: Labels, reference: Labels) -> np.ndarray[Any, Any]:
    """Return n_rk = |ω_r ∩ y_k|, (R, K) int64."""
    if len(labels) != len(reference) or len(labels) == 0:
        raise DataError(f"Needs as many labels as references, at least one; got {len(labels)} and {len(reference)}.")
    _, rows = np.unique(np.asarray(labels), return_inverse=True)
    _, columns = np.unique(np.asarray(reference), return_inverse=True)
    table = np.zeros((rows.max() + 1, columns.max() + 1), np.int64)
    np.add.at(table, (rows, columns), 1)
    return table


def purity(labels: Labels, reference: Labels) -> float:
    """Return the fraction that carries its cluster's dominant reference label: Σ_r max_k n_rk / n (eq. 9)."""
    table = _contingency(labels, reference)
    return float(table.max(axis=1).sum() / table.sum())


def nmi(labels: Labels, reference: Labels) -> float:
    """Return 2·I(Ω;Y) / (H(Ω) + H(Y)) (eq. 10). Two partitions of a single cluster each agree: 1."""
    joint = _contingency(labels, reference) / len(labels)
    p, q = joint.sum(axis=1), joint.sum(axis=0)
    if len(p) == 1 and len(q) == 1:
        return 1.0
    seen = joint > 0
    information = float((joint[seen] * np.log(joint[seen] / np.outer(p, q)[seen])).sum())
    entropies = -float((p * np.log(p)).sum() + (q * np.log(q)).sum())
    return max(0.0, 2 * information / entropies)


def ari(labels: Labels, reference: Labels) -> float:
    """Return the adjusted Rand index (eq. 11). Where chance leaves no room (0/0) the partitions are identical: 1."""
    table = _contingency(labels, reference)

    def pairs(counts: np.ndarray[Any, Any]) -> int:
        return int((counts * (counts - 1) // 2).sum())

    together, in_clusters, in_classes = pairs(table), pairs(table.sum(axis=1)), pairs(table.sum(axis=0))
    every = pairs(table.sum().reshape(1))
    # Numerator and denominator times 2·C(n,2), in exact integers.
    numerator = 2 * (together * every - in_clusters * in_classes)
    denominator = (in_clusters + in_classes) * every - 2 * in_clusters * in_classes
    return 1.0 if denominator == 0 else numerator / denominator


def _all_three(labels: Labels, reference: Labels) -> dict[str, float]:
    return {"purity": purity(labels, reference), "nmi": nmi(labels, reference), "ari": ari(labels, reference)}


def alignment_report(
    buckets: Mapping[str, Sequence[int]],
    tasks: Mapping[str, Sequence[str]],
    experts: Mapping[str, Sequence[int]],
) -> dict[str, dict[str, float]]:
    """Return purity, NMI and ARI of local buckets and of the global alignment (FedWeave Table 3).

    Args:
        buckets: client → bucket of each example.
        tasks: client → reference task of each example.
        experts: client → expert a(i, c) of each bucket c.

    Returns:
        ``local``: mean over clients of their own scores, weighted by examples. ``global``: every example's expert
        against its task. ``prototypes``: every bucket's expert against its dominant task (ties: first by name).
    """
    if not buckets.keys() == tasks.keys() == experts.keys():
        raise DataError("Buckets, tasks and experts must be given for the same clients.")
    clients = [client for client in sorted(buckets) if len(buckets[client]) > 0]
    scores = [_all_three(buckets[client], tasks[client]) for client in clients]
    sizes = [len(buckets[client]) for client in clients]
    assigned: list[int] = []
    reference: list[str] = []
    prototype_expert: list[int] = []
    prototype_task: list[str] = []
    for client in clients:
        assigned += [experts[client][c] for c in buckets[client]]
        reference += tasks[client]
        for c in sorted(set(buckets[client])):
            inside = Counter(task for b, task in zip(buckets[client], tasks[client], strict=True) if b == c)
            prototype_expert.append(experts[client][c])
            prototype_task.append(min(inside, key=lambda task: (-inside[task], task)))
    return {
        "local": {
            key: sum(size * score[key] for size, score in zip(sizes, scores, strict=True)) / sum(sizes)
            for key in ("purity", "nmi", "ari")
        },
        "global": _all_three(assigned, reference),
        "prototypes": _all_three(prototype_expert, prototype_task),
    }
