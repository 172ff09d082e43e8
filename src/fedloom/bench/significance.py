"""Is a difference more than the luck of the test examples? A paired bootstrap, stratified by task and seed.

B. Efron and R. Tibshirani, "An Introduction to the Bootstrap" (1993): percentile interval (ch. 13). Both methods answer
the same rows, so every resample draws the same rows for both. What it covers is the draw of test examples, for models
as they were trained with these seeds; the spread between seeds stands beside it as the standard deviation.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from fedloom.bench.results import Cell, Results, Setting
from fedloom.errors import DataError

Array = np.ndarray[Any, Any]
#: Task → (n, 2): numerator and denominator of each example. A loss is (summed negative log-likelihood, supervised
#: tokens), a score is (score, 1): both metrics are then Σ numerator / Σ denominator.
Strata = Mapping[str, Array]

RESAMPLES = 2000
SEED = 20260
#: Differences below this are rounding of float64 sums, so equal predictions give exactly 0.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Difference:
    """A − B.

    Attributes:
        estimate: mean over seeds of the macro difference on all examples.
        low, high: 95 % percentile interval.
        p: two-sided; (1 + resamples on the lesser side of 0) / (1 + resamples), doubled, at most 1.
        seeds: the seeds that both have.
        agreeing: how many of them have a difference of the estimate's sign.
    """

    estimate: float
    low: float
    high: float
    p: float
    seeds: tuple[int, ...]
    agreeing: int

    @property
    def distinguishable(self) -> bool:
        """Whether the interval leaves 0 out."""
        return self.low > 0 or self.high < 0


@lru_cache(maxsize=64)
def _weights(seed: int, task: str, n: int, resamples: int, base: int) -> Array:
    """Return how often each resample draws each of ``n`` examples, (resamples, n); the same for every method."""
    generator = np.random.default_rng([base, seed, zlib.crc32(task.encode()), n])
    drawn = generator.integers(n, size=(resamples, n)) + n * np.arange(resamples)[:, None]
    return np.bincount(drawn.ravel(), minlength=resamples * n).reshape(resamples, n).astype(np.uint16)


def macro_resamples(strata: Strata, seed: int, resamples: int = RESAMPLES, base: int = SEED) -> tuple[float, Array]:
    """Return the macro mean over tasks of Σ numerator / Σ denominator, as measured and in every resample, (resamples,).

    A resample without a single denominator (only possible where examples have no supervised token) is not a number
    and makes the interval so.
    """
    whole, drawn = 0.0, np.zeros(resamples)
    for task, terms in strata.items():
        sums = _weights(seed, task, len(terms), resamples, base).astype(np.float64) @ terms
        total = terms.sum(axis=0)
        whole += float(total[0] / total[1]) / len(strata)
        drawn += sums[:, 0] / sums[:, 1] / len(strata)
    return whole, drawn


def paired_bootstrap(
    a: Mapping[int, Strata], b: Mapping[int, Strata], resamples: int = RESAMPLES, base: int = SEED
) -> Difference | None:
    """Compare two methods over the seeds that both have.

    Args:
        a, b: seed → task → (n, 2), see ``Strata``.
        resamples: how many.
        base: seed of the generator; the same input gives the same numbers.

    Returns:
        A − B; None without a common seed.

    Raises:
        DataError: the two were not measured on the same rows.
    """
    seeds = sorted(a.keys() & b.keys())
    for seed in seeds:
        _require_pairs(a[seed], b[seed], seed)
    pairs = [
        (macro_resamples(a[seed], seed, resamples, base), macro_resamples(b[seed], seed, resamples, base))
        for seed in seeds
    ]
    return summary(seeds, [(x - y, xs - ys) for (x, xs), (y, ys) in pairs]) if seeds else None


def summary(seeds: list[int], differences: list[tuple[float, Array]]) -> Difference:
    """Return estimate, interval and p from (difference, resampled differences) of every seed."""
    each = [whole for whole, _ in differences]
    estimate = float(np.mean(each))
    drawn = np.mean([resampled for _, resampled in differences], axis=0)
    drawn = np.where(np.abs(drawn) < ROUNDING, 0.0, drawn)
    low, high = np.percentile(drawn, [2.5, 97.5])
    lesser = min(int((drawn <= 0).sum()), int((drawn >= 0).sum()))
    p = min(1.0, 2 * (1 + lesser) / (1 + len(drawn)))
    agreeing = sum(bool(np.sign(e) == np.sign(estimate)) for e in each)
    return Difference(estimate, float(low), float(high), p, tuple(seeds), agreeing)


def _require_pairs(a: Strata, b: Strata, seed: int) -> None:
    if a.keys() != b.keys():
        raise DataError(f"seed {seed}: one method was tested on {sorted(a)}, the other on {sorted(b)}; no pairs.")
    for task in a:
        if len(a[task]) != len(b[task]) or not np.array_equal(a[task][:, 1], b[task][:, 1]):
            raise DataError(
                f"seed {seed}, task {task}: the two methods were not tested on the same rows "
                f"({len(a[task])} and {len(b[task])}, or other token counts). Run one of them again."
            )


class Comparisons:
    """Differences between the cells of a benchmark; resamples are made once per cell, mode and metric."""

    def __init__(self, results: Results) -> None:
        self.results = results
        self._made: dict[tuple[str, str, str], tuple[float, Array]] = {}

    def labels(self, setting: Setting, a: str, b: str, metric: str) -> Difference | None:
        """Compare two labels, each with its first routing mode; None where examples are not on file."""
        theirs = {cell.seed: cell for cell in self.results.of(setting, b)}
        return self._difference(
            {
                c.seed: ((c, c.mode), (theirs[c.seed], theirs[c.seed].mode))
                for c in self.results.of(setting, a)
                if c.seed in theirs
            },
            metric,
        )

    def modes(self, setting: Setting, label: str, a: str, b: str, metric: str) -> Difference | None:
        """Compare two routing modes of the same models."""
        return self._difference({c.seed: ((c, a), (c, b)) for c in self.results.of(setting, label)}, metric)

    def _difference(
        self, pairs: Mapping[int, tuple[tuple[Cell, str | None], tuple[Cell, str | None]]], metric: str
    ) -> Difference | None:
        found = []
        for seed, ((cell_a, mode_a), (cell_b, mode_b)) in sorted(pairs.items()):
            a, b = strata(cell_a, mode_a, metric), strata(cell_b, mode_b, metric)
            if a and b:
                _require_pairs(a, b, seed)
                one, other = self._resampled(cell_a, mode_a, metric, a), self._resampled(cell_b, mode_b, metric, b)
                found.append((seed, (one[0] - other[0], one[1] - other[1])))
        return summary([seed for seed, _ in found], [d for _, d in found]) if found else None

    def _resampled(self, cell: Cell, mode: str | None, metric: str, terms: Strata) -> tuple[float, Array]:
        key = (str(cell.record["cell"]), str(mode), metric)
        if key not in self._made:
            self._made[key] = macro_resamples(terms, cell.seed)
        return self._made[key]


def strata(cell: Cell, mode: str | None, metric: str) -> dict[str, Array]:
    """Return the per-example terms of a cell; empty where they are not on file."""
    found = cell.examples.get(mode or "") or {}
    if metric == "loss":
        terms = {task: np.asarray(rows, np.float64) for task, rows in (found.get("each_loss") or {}).items()}
    else:
        terms = {
            task: np.stack([np.asarray(scores, np.float64), np.ones(len(scores))], axis=1)
            for task, scores in (found.get("each") or {}).items()
        }
    return {task: rows for task, rows in terms.items() if len(rows) and rows[:, 1].sum() > 0}
