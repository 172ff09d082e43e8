"""Is a difference more than the luck of the test examples, and of the seeds? Two intervals, and both must say so.

Over test rows: a paired bootstrap, stratified by task and seed. B. Efron and R. Tibshirani, "An Introduction to the
Bootstrap" (1993): percentile interval (ch. 13). Both methods answer the same rows, so every resample draws the same
rows for both. It covers the draw of test examples, for models as they were trained with these seeds.

Over seeds: Student's t on the paired differences of the seeds, with n − 1 degrees of freedom, from three seeds on. It
covers the draw of data, clients and training. Test rows that several seeds draw from one pool count as independent over
test rows (a record does not say which row is which), which makes that interval somewhat too narrow. S. Holm, "A simple
sequentially rejective multiple test procedure" (1979) adjusts for the number of comparisons.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
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
#: Fewer seeds say nothing of other seeds.
LEAST_SEEDS = 3


@dataclass(frozen=True)
class Spread:
    """Student's paired t over seeds: 95 % interval of the mean difference, and its two-sided p."""

    low: float
    high: float
    p: float


@dataclass(frozen=True)
class Difference:
    """A − B.

    Attributes:
        estimate: mean over seeds of the macro difference on all examples.
        low, high: 95 % percentile interval over test rows.
        p: two-sided, over test rows; (1 + resamples on the lesser side of 0) / (1 + resamples), doubled, at most 1.
            None, and the interval not a number, where any resample is not finite.
        seeds: the seeds that both have.
        each: the difference of each seed.
    """

    estimate: float
    low: float
    high: float
    p: float | None
    seeds: tuple[int, ...]
    each: tuple[float, ...]

    @property
    def over_seeds(self) -> Spread | None:
        """The interval over seeds; None where there are too few of them or one is not finite."""
        enough = len(self.each) >= LEAST_SEEDS and all(math.isfinite(d) for d in self.each)
        return paired_t(self.each) if enough else None

    @property
    def distinguishable(self) -> bool:
        """Whether both intervals leave 0 out; never with too few seeds or without a p."""
        spread = self.over_seeds
        if spread is None or self.p is None:
            return False
        return (self.low > 0 and spread.low > 0) or (self.high < 0 and spread.high < 0)

    @property
    def joint_p(self) -> float | None:
        """The larger p of both tests: what it takes that both reject. None where one of them has none."""
        return None if self.p is None or self.over_seeds is None else max(self.p, self.over_seeds.p)


def paired_t(each: Sequence[float]) -> Spread:
    """Return Student's interval and p for the mean of the seeds' differences (n,), n ≥ 2; n − 1 degrees of freedom."""
    n, mean = len(each), math.fsum(each) / len(each)
    error = math.sqrt(math.fsum((d - mean) ** 2 for d in each) / (n - 1) / n)
    if error < ROUNDING:
        return Spread(mean, mean, 1.0 if abs(mean) < ROUNDING else 0.0)
    reach = error * t_quantile(0.05, n - 1)
    return Spread(mean - reach, mean + reach, t_tails(mean / error, n - 1))


def t_tails(t: float, freedom: int) -> float:
    """Return P(|T| ≥ |t|) of Student's t (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4: whole degrees of freedom)."""
    angle = math.atan2(abs(t), math.sqrt(freedom))
    cosine = math.cos(angle)
    term = total = cosine if freedom % 2 else 1.0
    for k in range(3 if freedom % 2 else 2, freedom - 1, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    if freedom % 2 == 0:
        return 1 - math.sin(angle) * total
    return 1 - 2 / math.pi * (angle + (math.sin(angle) * total if freedom > 1 else 0.0))


def t_quantile(tails: float, freedom: int) -> float:
    """Return t with P(|T| ≥ t) = ``tails``, by bisection."""
    low, high = 0.0, 1.0
    while t_tails(high, freedom) > tails:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if t_tails(middle, freedom) > tails else (low, middle)
    return (low + high) / 2


def holm(ps: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p values, in the order given."""
    adjusted, worst = [0.0] * len(ps), 0.0
    for rank, index in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        worst = max(worst, min(1.0, (len(ps) - rank) * ps[index]))
        adjusted[index] = worst
    return adjusted


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
        weights, total = _weights(seed, task, len(terms), resamples, base), terms.sum(axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            sums = weights.astype(np.float64) @ terms
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
    if not np.isfinite(drawn).all():  # NaN is on no side of 0, which would look like a small p
        return Difference(estimate, math.nan, math.nan, None, tuple(seeds), tuple(each))
    drawn = np.where(np.abs(drawn) < ROUNDING, 0.0, drawn)
    low, high = np.percentile(drawn, [2.5, 97.5])
    lesser = min(int((drawn <= 0).sum()), int((drawn >= 0).sum()))
    p = min(1.0, 2 * (1 + lesser) / (1 + len(drawn)))
    return Difference(estimate, float(low), float(high), p, tuple(seeds), tuple(each))


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

    def labels(
        self, setting: Setting, a: str, b: str, metric: str, mode_a: str | None = None, mode_b: str | None = None
    ) -> Difference | None:
        """Compare two labels, each with its first routing or the one given; None where examples are not on file."""
        theirs = {cell.seed: cell for cell in self.results.of(setting, b)}
        pairs = {}
        for ours in self.results.of(setting, a):
            if (other := theirs.get(ours.seed)) is not None:
                pairs[ours.seed] = ((ours, mode_a or ours.mode), (other, mode_b or other.mode))
        return self._difference(pairs, metric)

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
