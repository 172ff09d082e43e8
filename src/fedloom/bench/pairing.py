"""A figure sets means over the same seeds side by side; else the seeds' difference would look like the methods'."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from fedloom.bench.results import Results, Setting, Stat
from fedloom.report.wording import listed

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
Points = list[tuple[int, float]]


@dataclass(frozen=True)
class Paired(Generic[K, V]):
    """What is drawn, all of it over ``seeds``, and what was left out: it lacks one of them or is not finite there."""

    seeds: tuple[int, ...]
    shown: dict[K, V]
    left: tuple[K, ...]


def shared_seeds(seeds: Mapping[K, Collection[int]], main: K | None = None) -> tuple[int, ...]:
    """Return the seeds that as many keys as possible have in common, ``main`` among them if it has any.

    Of groups of equal size that with more seeds in common counts, then that with the lowest.
    """
    possible = sorted((main is not None and seeds.get(main)) or {seed for found in seeds.values() for seed in found})
    groups = [[set(found) for found in seeds.values() if seed in found] for seed in possible]
    best = max(groups, key=lambda group: (len(group), len(set.intersection(*group))), default=None)
    return tuple(sorted(set.intersection(*best))) if best else ()


def paired(stats: Mapping[K, Stat], main: K | None = None) -> Paired[K, Stat]:
    """Return statistics over the seeds that they share; what was never measured is neither shown nor left out."""
    known = {key: found for key, found in stats.items() if found.n}
    finite = {key: found for key, found in known.items() if not found.lost}
    seeds = shared_seeds({key: found.seeds for key, found in finite.items()}, main)
    shown = {key: over for key, found in finite.items() if (over := found.over(seeds)) is not None}
    return Paired(seeds, shown, tuple(key for key in known if key not in shown))


def paired_curves(
    curves: Mapping[K, Mapping[int, Sequence[Sequence[float | None]]]], main: K | None = None
) -> Paired[K, Points]:
    """Return mean curves over the seeds that they share.

    Args:
        curves: key → seed → (round, value), where an empty curve was not measured.
        main: see ``shared_seeds``.

    Returns:
        (round, mean) at each round that all the seeds of a key have, of keys with more than one such round.
    """
    known: dict[K, dict[int, Sequence[Sequence[float | None]]]] = {}
    for key, by_seed in curves.items():
        if found := {seed: curve for seed, curve in by_seed.items() if curve}:
            known[key] = found
    finite = {
        key: by_seed
        for key, by_seed in known.items()
        if all(value is None or math.isfinite(value) for curve in by_seed.values() for _, value in curve)
    }
    seeds = shared_seeds({key: by_seed.keys() for key, by_seed in finite.items()}, main)
    drawn = {key: _mean([by_seed[s] for s in seeds]) for key, by_seed in finite.items() if by_seed.keys() >= set(seeds)}
    left = tuple(key for key in known if key not in drawn)
    return Paired(seeds, {key: points for key, points in drawn.items() if len(points) > 1}, left)


def curves_of(
    results: Results, setting: Setting, labels: Sequence[str], key: str
) -> dict[str, dict[int, list[list[float | None]]]]:
    """Return label → seed → the record's curve ``key``."""
    return {label: {c.seed: c.get(key) or [] for c in results.of(setting, label)} for label in labels}


def _mean(curves: Sequence[Sequence[Sequence[float | None]]]) -> Points:
    """Return the mean over curves at each round that all of them have."""
    by_round: dict[int, list[float]] = {}
    for curve in curves:
        for at, value in curve:
            if at is not None and value is not None:
                by_round.setdefault(int(at), []).append(value)
    return [(at, math.fsum(v) / len(v)) for at, v in sorted(by_round.items()) if len(v) == len(curves)]


def seed_words(seeds: Sequence[int]) -> str:
    """``seed 42``, ``seeds 42 and 43``."""
    return f"seed{'s' * (len(seeds) != 1)} {listed([str(seed) for seed in seeds])}"


def below(title: Callable[[K], str], parts: Sequence[tuple[str, Paired[K, V]]]) -> str:
    """Say below a figure of which seeds its parts are, and what was left out of them; parts that agree say it once.

    Args:
        title: name of a key.
        parts: (name of a part, as ``α = 0.1``; what is drawn there).
    """
    said = [(name, _said(title, part)) for name, part in parts]
    same = len({text for _, text in said}) == 1
    whole = said[0][1] if same else "; ".join(f"{name}: {text}" for name, text in said)
    return f"Over the seeds that all shown have: {whole}."


def _said(title: Callable[[K], str], part: Paired[K, V]) -> str:
    left = listed([title(key) for key in part.left])
    return seed_words(part.seeds) + (f", without {left} (lacks one or is not finite)" if left else "")
