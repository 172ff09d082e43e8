"""Prototype discovery: buckets inside a client, and their alignment across clients (FedWeave Stage 1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from sklearn.cluster import AgglomerativeClustering, KMeans, SpectralClustering
from sklearn.metrics import silhouette_score
from sklearn.mixture import GaussianMixture
from threadpoolctl import threadpool_limits

from fedloom.errors import AdapterError, ConfigError, FedloomError, nearest
from fedloom.numerics.seeding import derive_seed, numpy_generator
from fedloom.numerics.tree import assert_same_keys

Array = np.ndarray[Any, Any]

CHOICES = ("silhouette", "max", "gap")
CLUSTERERS = ("kmeans", "spectral", "agglomerative", "gaussian_mixture")
LINKAGES = ("average", "complete", "single")

#: The matrices here are small: more threads only wait for each other, and on a busy machine that is 50 times slower.
_one_thread = threadpool_limits.wrap(limits=1)

#: Embeddings of one and the same text differ by this much (relative) when batches are padded differently.
_SAME_ROWS = 1e-5
#: A larger count must beat a smaller one by more than rounding.
_BETTER = 1e-9


@dataclass(frozen=True)
class Buckets:
    """A client's buckets.

    Attributes:
        labels: bucket of each example, (n,) int64, numbered by first appearance.
        count: number of buckets C.
        silhouette: mean silhouette of the chosen partition; None for a single bucket.
        scores: candidate C → mean silhouette, of every candidate tried.
    """

    labels: Array
    count: int
    silhouette: float | None = None
    scores: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Alignment:
    """Buckets of all clients matched to global experts.

    Attributes:
        labels: expert of each signature, (P,) int64, numbered by first appearance.
        count: number of experts M*.
        silhouette: mean silhouette of the chosen partition; None for a single expert.
        scores: candidate M → mean silhouette, of every candidate tried.
    """

    labels: Array
    count: int
    silhouette: float | None = None
    scores: dict[int, float] = field(default_factory=dict)


@_one_thread
def bucketize(
    embeddings: torch.Tensor | Array,
    *,
    clusterer: str = "kmeans",
    min_buckets: int = 2,
    max_buckets: int = 8,
    restarts: int = 10,
    choose: str = "silhouette",
    seed: int = 0,
) -> Buckets:
    """Partition a client's examples into buckets, C ∈ {2..min(max_buckets, n−1)} by highest mean Euclidean silhouette.

    The smallest C wins ties. One bucket if n is too small for any candidate or all rows are the same; none if n = 0.
    A candidate with more clusters than distinct rows, or of which the clusterer leaves a cluster empty, is left out.

    Two other ways to choose C, which the paper has not: ``max`` takes the largest candidate (the alignment of buckets
    may merge what belongs together); ``gap`` is ``gap_count``, which may find a single bucket.

    The paper names the clusterers (Table 3) but not their settings. Ours do not depend on the scale of the embeddings:
    spectral uses an RBF kernel with γ = 1 / total variance; agglomerative is Ward; gaussian_mixture has diagonal
    covariances (full ones cannot be estimated with n < d) regularised by 1e-3 of the mean variance.

    Args:
        embeddings: (n, d), ℓ2-normalised by the caller if it wants cosine geometry.
        clusterer: ``kmeans``, ``spectral``, ``agglomerative`` or ``gaussian_mixture``.
        min_buckets: smallest C, beside the one bucket of rows that cannot be parted.
        max_buckets: largest C.
        restarts: initialisations of k-means and of the mixture.
        choose: ``silhouette``, ``max`` or ``gap``.
        seed: names the random stream.
    """
    if choose not in CHOICES:
        raise ConfigError(f"Unknown choice of the number of buckets {choose!r}.{nearest(choose, CHOICES)}")
    if clusterer not in CLUSTERERS:
        raise ConfigError(f"Unknown clusterer {clusterer!r}.{nearest(clusterer, CLUSTERERS)}")
    rows = _float64(embeddings)
    if rows.ndim != 2:
        raise FedloomError(f"Embeddings must be (examples, features); got shape {rows.shape}.")
    bad = np.flatnonzero(~np.isfinite(rows).all(axis=1))
    if bad.size:
        raise FedloomError(
            f"Embeddings of {bad.size} of {len(rows)} examples hold NaN or infinity; the first is row {bad[0]}."
        )
    if len(rows) == 0:
        return Buckets(np.zeros(0, np.int64), 0)
    if _all_same(rows):
        return Buckets(np.zeros(len(rows), np.int64), 1)
    distinct = len({row.tobytes() for row in rows + 0.0})  # + 0.0 turns −0.0 into 0.0
    candidates = range(max(2, min_buckets), min(max_buckets, len(rows) - 1, distinct) + 1)
    if choose == "max":
        candidates = candidates[-1:]
    elif choose == "gap" and candidates:
        best = gap_count(
            rows,
            candidates[-1],
            partition=lambda values, count: _cluster(values, clusterer, count, restarts, seed),
            rng=numpy_generator(seed, "gap"),
        )
        if best == 1:
            return Buckets(np.zeros(len(rows), np.int64), 1)
        candidates = range(max(best, min_buckets), max(best, min_buckets) + 1)
    labels, silhouette, scores = _best_partition(
        candidates,
        partition=lambda count: _cluster(rows, clusterer, count, restarts, seed),
        score=lambda labels: silhouette_score(rows, labels, metric="euclidean"),
        n=len(rows),
    )
    return Buckets(labels, int(labels.max()) + 1, silhouette, scores)


def standardise(embeddings: torch.Tensor) -> torch.Tensor:
    """Return rows (n, d) whose every coordinate has mean 0 and variance 1; a coordinate without spread becomes 0."""
    centred = embeddings - embeddings.mean(dim=0)
    spread = embeddings.std(dim=0, correction=0)
    return torch.where(spread > _SAME_ROWS * embeddings.abs().amax(dim=0), centred / spread, 0.0)


def gap_count(
    rows: Array,
    most: int,
    *,
    partition: Callable[[Array, int], Array],
    rng: np.random.Generator,
    references: int = 10,
) -> int:
    """Return the smallest k with Gap(k) ≥ Gap(k+1) − s_{k+1}, at most ``most`` (Tibshirani, Walther and Hastie 2001).

    Gap(k) = mean over references of log W_k − log W_k of the rows, W_k the sum of squares within clusters; a reference
    is uniform over the box along the rows' principal axes (their choice b); s_k = sd_k √(1 + 1/references).

    Args:
        rows: (n, d).
        most: largest k.
        partition: (rows, k) → labels, for k ≥ 2.
        rng: draws the references.
        references: number of reference sets.
    """
    left, singular, _ = np.linalg.svd(rows - rows.mean(axis=0), full_matrices=False)
    axes = left * singular  # distances are the same along principal axes
    low, high = axes.min(axis=0), axes.max(axis=0)

    def log_within(values: Array) -> Array:
        return np.log([_within(values, partition(values, k) if k > 1 else None) for k in range(1, most + 1)])

    expected = np.stack([log_within(rng.uniform(low, high, axes.shape)) for _ in range(references)])
    gap = expected.mean(axis=0) - log_within(axes)
    spread = expected.std(axis=0) * np.sqrt(1 + 1 / references)
    enough = np.flatnonzero(gap[:-1] >= gap[1:] - spread[1:])
    return int(enough[0]) + 1 if enough.size else most


def _within(rows: Array, labels: Array | None) -> float:
    """Return the sum of squared distances to the own cluster's mean, at least the smallest positive number."""
    groups = [rows] if labels is None else [rows[labels == c] for c in np.unique(labels)]
    total = sum(float(((group - group.mean(axis=0)) ** 2).sum()) for group in groups)
    return max(total, float(np.finfo(np.float64).tiny))


@_one_thread
def signature_distance(signatures: Sequence[Mapping[str, torch.Tensor]]) -> Array:
    """Return d(u,v) = mean over B blocks of 1 − cos(s_u, s_v) (FedWeave eq. 1), (P, P) float64.

    Symmetric, not negative, zero on the diagonal. A zero block has no direction: its cosine with any other is 0.

    Args:
        signatures: one per bucket: block name → LoRA B factor. Every block counts alike, whatever its size.
    """
    if not signatures or not signatures[0]:
        raise FedloomError("Signatures are needed to align buckets, with at least one block each; got none.")
    first = dict(signatures[0])
    for signature in signatures[1:]:
        assert_same_keys(first, dict(signature))
    cosines = np.zeros((len(signatures), len(signatures)))
    for name in first:
        block = np.stack([_float64(signature[name]).ravel() for signature in signatures])
        if not np.isfinite(block).all():
            raise AdapterError(f"Block {name!r} of a signature holds NaN or infinity.")
        lengths = np.linalg.norm(block, axis=1, keepdims=True)
        unit = np.divide(block, lengths, out=np.zeros_like(block), where=lengths > 0)
        cosines += unit @ unit.T
    return _clean(1.0 - cosines / len(first))


@_one_thread
def align(
    distance: torch.Tensor | Array, *, linkage: str = "average", max_experts: int = 8, experts: int | None = None
) -> Alignment:
    """Group buckets of all clients into experts: agglomerative, M ∈ {2..min(max_experts, P−1)} by highest silhouette.

    The smallest M wins ties. One expert if P is too small for any candidate or all distances are zero.

    Args:
        distance: (P, P), symmetric with a zero diagonal up to float32 rounding.
        linkage: ``average`` (our default: the paper names none), ``complete`` or ``single``.
        max_experts: largest M.
        experts: M itself, in place of a choice by silhouette.
    """
    if linkage not in LINKAGES:
        raise ConfigError(f"Unknown linkage {linkage!r} for a distance matrix.{nearest(linkage, LINKAGES)}")
    raw = _float64(distance)
    if raw.ndim != 2 or raw.shape[0] != raw.shape[1] or raw.shape[0] == 0:
        raise FedloomError(f"Distances between P signatures must be (P, P), P ≥ 1; got shape {raw.shape}.")
    if not np.isfinite(raw).all():
        raise FedloomError("Distances between signatures hold NaN or infinity.")
    tolerance = 1e-5 * max(1.0, float(np.abs(raw).max()))
    if np.abs(raw - raw.T).max() > tolerance or np.abs(np.diag(raw)).max() > tolerance or raw.min() < -tolerance:
        raise FedloomError("Distances between signatures must be symmetric and not negative, with a zero diagonal.")
    clean = _clean(raw)
    if experts is not None:
        return _so_many(clean, experts, linkage)
    if clean.max() <= np.finfo(np.float64).eps * len(clean):
        return Alignment(np.zeros(len(clean), np.int64), 1)
    labels, silhouette, scores = _best_partition(
        range(2, min(max_experts, len(clean) - 1) + 1),
        partition=lambda count: _agglomerate(clean, count, linkage),
        score=lambda labels: silhouette_score(clean, labels, metric="precomputed"),
        n=len(clean),
    )
    if silhouette is not None and silhouette <= _BETTER:
        # Equally distant signatures (all B zero, say) have no structure, and any labels would be arbitrary.
        return Alignment(np.zeros(len(clean), np.int64), 1, None, scores)
    return Alignment(labels, int(labels.max()) + 1, silhouette, scores)


def _so_many(clean: Array, experts: int, linkage: str) -> Alignment:
    """Group into a given number of experts."""
    if experts > len(clean):
        raise ConfigError(
            f"method.experts is {experts}, but all clients together have {len(clean)} buckets. Ask for as many at most."
        )
    labels = _agglomerate(clean, experts, linkage) if experts > 1 else np.zeros(len(clean), np.int64)
    scored = 1 < experts < len(clean)  # a silhouette needs two groups, and one with two members
    silhouette = float(silhouette_score(clean, labels, metric="precomputed")) if scored else None
    scores = {} if silhouette is None else {experts: silhouette}
    return Alignment(_by_first_appearance(labels), experts, silhouette, scores)


def _agglomerate(clean: Array, count: int, linkage: str) -> Array:
    model = AgglomerativeClustering(count, metric="precomputed", linkage=linkage)
    return np.asarray(model.fit_predict(clean), np.int64)


def _best_partition(
    candidates: range, *, partition: Callable[[int], Array], score: Callable[[Array], float], n: int
) -> tuple[Array, float | None, dict[int, float]]:
    """Return labels (n,), silhouette and all scores of the best candidate count, the smallest on ties."""
    best, silhouette = np.zeros(n, np.int64), None
    scores: dict[int, float] = {}
    for count in candidates:
        labels = _by_first_appearance(partition(count))
        if labels.max() + 1 != count:
            continue
        scores[count] = float(score(labels))
        if silhouette is None or scores[count] > silhouette + _BETTER:
            best, silhouette = labels, scores[count]
    return best, silhouette, scores


def _cluster(rows: Array, clusterer: str, count: int, restarts: int, seed: int) -> Array:
    state = derive_seed(seed, "bucketize", clusterer, count) % 2**32
    variance = rows.var(axis=0)
    match clusterer:
        case "kmeans":
            model = KMeans(count, n_init=restarts, random_state=state)
        case "spectral":
            model = SpectralClustering(count, gamma=1.0 / variance.sum(), n_init=restarts, random_state=state)
        case "agglomerative":
            model = AgglomerativeClustering(count, linkage="ward")
        case _:
            model = GaussianMixture(
                count, covariance_type="diag", reg_covar=1e-3 * variance.mean(), n_init=restarts, random_state=state
            )
    return np.asarray(model.fit_predict(rows))


def _by_first_appearance(labels: Array) -> Array:
    """Renumber labels 0, 1, … in the order in which they first appear."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[inverse].astype(np.int64)


def _all_same(rows: Array) -> bool:
    spread = np.linalg.norm(rows - rows.mean(axis=0), axis=1).max()
    return bool(spread <= _SAME_ROWS * np.linalg.norm(rows, axis=1).max())


def _clean(distance: Array) -> Array:
    """Symmetrise, clip at 0 and zero the diagonal: scikit-learn refuses a diagonal that is only nearly 0."""
    clean: Array = np.maximum((distance + distance.T) / 2, 0.0)
    np.fill_diagonal(clean, 0.0)
    return clean


def _float64(values: torch.Tensor | Array) -> Array:
    if isinstance(values, torch.Tensor):
        values = values.detach().to("cpu", torch.float64).numpy()
    return np.asarray(values, dtype=np.float64)
