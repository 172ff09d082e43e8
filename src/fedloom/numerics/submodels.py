"""Which native experts a client holds, and what becomes of them: pure functions for FedMoE (arXiv 2408.11304).

*Shares* are p_ij, layer path → the share of a client's tokens that goes to each expert; *kept* are component names.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

from fedloom.types import Tensors

Shares = dict[str, list[float]]


def split(unit: str) -> tuple[str, int]:
    """Return the layer path and the index of an expert: ``experts/<path>.<e>``."""
    path, _, expert = unit.removeprefix("experts/").rpartition(".")
    return path, int(expert)


def shares_of(activations: Mapping[str, int]) -> Shares:
    """Return p_ij from the tokens of every expert, in order; a layer without a token counts its experts alike."""
    counts: dict[str, dict[int, int]] = {}
    for unit, tokens in activations.items():
        path, expert = split(unit)
        counts.setdefault(path, {})[expert] = tokens
    shares: Shares = {}
    for path, by_expert in sorted(counts.items()):
        total = sum(by_expert.values())
        shares[path] = [by_expert[e] / total if total else 1 / len(by_expert) for e in sorted(by_expert)]
    return shares


def ranked(p: Sequence[float]) -> list[int]:
    """Return experts by share, highest first; of equals the lower index."""
    return sorted(range(len(p)), key=lambda e: (-p[e], e))


def fewest(shares: Shares, theta: float) -> list[str]:
    """Return per layer the fewest experts whose shares reach θ together, highest first, at least one."""
    kept = []
    for path, p in shares.items():
        order = ranked(p)
        reached = list(accumulate(p[e] for e in order))
        count = next((n for n, mass in enumerate(reached, 1) if mass >= theta), len(p))
        kept += [f"experts/{path}.{e}" for e in sorted(order[:count])]
    return kept


def choose(shares: Shares, budget: int) -> tuple[list[str], float]:
    """Return the experts of the largest θ at which ``budget`` holds them, and that θ.

    What ``fewest`` gives changes only at partial sums of ranked shares, so the binary search runs over these. One
    expert per layer is the least, whatever the budget; then θ may be 0.
    """
    sums = {mass for p in shares.values() for mass in accumulate(p[e] for e in ranked(p))}
    thetas = sorted({0.0, *sums})
    place = bisect_right(thetas, budget, key=lambda theta: len(fewest(shares, theta)))
    theta = thetas[max(place - 1, 0)]
    return fewest(shares, theta), theta


def similarity(a: Shares, b: Shares) -> float:
    """Return the cosine of two clients' flattened shares."""
    dot = sum(x * y for path in a for x, y in zip(a[path], b[path], strict=True))
    norms = [math.sqrt(sum(x * x for p in s.values() for x in p)) for s in (a, b)]
    return dot / (norms[0] * norms[1])


def neighbours(client: str, shares: Mapping[str, Shares], count: int) -> dict[str, float]:
    """Return the ``count`` most similar other clients → similarity; of equals the first by name."""
    found = {other: similarity(shares[client], p) for other, p in sorted(shares.items()) if other != client}
    return dict(sorted(found.items(), key=lambda pair: -pair[1])[:count])


def adjusted(
    client: str, kept: Mapping[str, Collection[str]], shares: Mapping[str, Shares], count: int, budget: int
) -> list[str]:
    """Return a client's experts after looking at its neighbours.

    With n their mean number of experts minus its own: n > 0 adds the n experts that it lacks with the highest
    similarity-weighted share among the neighbours, as far as the budget goes; n < 0 removes the |n| with the lowest.
    Every layer keeps one.
    """
    near, own = neighbours(client, shares, count), set(kept[client])
    weight = sum(near.values())
    if not near or weight <= 0:
        return sorted(own)
    n = round(sum(len(kept[other]) for other in near) / len(near)) - len(own)
    mean = {
        f"experts/{path}.{e}": sum(s * shares[other][path][e] for other, s in near.items()) / weight
        for path, p in shares[client].items()
        for e in range(len(p))
    }
    order = sorted(mean, key=lambda unit: (-mean[unit], unit))
    if n > 0:
        lacking = [unit for unit in order if unit not in own]
        return sorted(own | set(lacking[: max(0, min(n, budget - len(own)))]))
    for unit in [u for u in reversed(order) if u in own]:
        alone = sum(split(other)[0] == split(unit)[0] for other in own) == 1
        if n < 0 and not alone:
            own.remove(unit)
            n += 1
    return sorted(own)


def stalled(history: Sequence[float], patience: int) -> bool:
    """Return whether the last ``patience`` losses are all no better than the best before them."""
    return 0 < patience < len(history) and min(history[-patience:]) >= min(history[:-patience])


def router_rows(name: str, units: Collection[str]) -> list[int]:
    """Return the rows of a router's parameter, ``router/<path>.…`` (E, …), that belong to the experts ``units``."""
    return sorted(split(unit)[1] for unit in units if name.startswith(f"router/{split(unit)[0]}."))


def parts(update: Tensors, units: Collection[str]) -> Tensors:
    """Return what of an update is averaged by itself: of a router's (E, …) the rows of ``units``, all else whole."""
    rows = {name: router_rows(name, units) for name in update if name.startswith("router/")}
    whole = {name: tensor for name, tensor in update.items() if name not in rows}
    return whole | {f"{name}#{row}": update[name][row] for name, found in rows.items() for row in found}


def with_parts(tensors: Tensors, means: Tensors) -> Tensors:
    """Return ``tensors`` with the mean updates of ``parts`` added."""
    found = dict(tensors)
    for part, update in means.items():
        name, _, row = part.partition("#")
        moved = found[name].clone()
        (moved[int(row)] if row else moved).add_(update)
        found[name] = moved
    return found
