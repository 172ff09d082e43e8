"""How many buckets: the largest number, the gap statistic; and standardised embeddings."""

import numpy as np
import pytest
import torch
from scipy.spatial.distance import pdist
from sklearn.cluster import AgglomerativeClustering
from sklearn.preprocessing import StandardScaler

from fedloom.errors import ConfigError
from fedloom.numerics.cluster import bucketize, gap_count, standardise


def blobs(groups: int, each: int, dim: int = 6, noise: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
    truth = np.repeat(np.arange(groups), each)
    return 3 * np.eye(groups, dim)[truth] + noise * np.random.default_rng(groups).normal(size=(len(truth), dim)), truth


def ward(rows: np.ndarray, count: int) -> np.ndarray:
    return AgglomerativeClustering(count, linkage="ward").fit_predict(rows)


def test_max_takes_the_largest_number_there_can_be() -> None:
    rows, truth = blobs(3, 10)
    found = bucketize(rows, max_buckets=6, choose="max")
    assert (found.count, set(found.scores)) == (6, {6})
    assert all(len(set(truth[found.labels == c])) == 1 for c in range(6))  # each part of one blob
    assert bucketize(rows[[0, 10, 20, 21]], choose="max").count == 3  # n − 1
    assert bucketize(rows[[0, 0, 10, 10, 10]], choose="max").count == 2  # distinct rows
    assert bucketize(rows[:2], choose="max").count == 1


def test_the_gap_statistic_finds_what_its_authors_found() -> None:
    """Their section 5: three clusters in two dimensions, found in 48 of 50 draws; one uniform cloud, in 50 of 50."""
    three = one = 0
    for seed in range(5):
        rng = np.random.default_rng(seed)
        centres = np.repeat([[0, 0], [0, 5], [5, -3]], [25, 25, 50], axis=0)
        three += bucketize(centres + rng.normal(size=(100, 2)), choose="gap", restarts=3).count == 3
        one += bucketize(rng.uniform(size=(200, 10)), choose="gap", max_buckets=4, restarts=1).count == 1
    assert three >= 4
    assert one == 5


def test_the_gap_statistic_repeats() -> None:
    rows, _ = blobs(2, 12)
    first, again = (bucketize(rows, choose="gap", restarts=3) for _ in range(2))
    assert first.count == 2
    assert np.array_equal(first.labels, again.labels)


def test_the_gap_statistic_overlooks_groups_that_are_all_equally_far_apart() -> None:
    """A known weakness: parting one of three from the other two gains less than parting a uniform cloud."""
    rows, _ = blobs(3, 12)
    assert bucketize(rows, choose="gap", restarts=3).count == 1
    assert bucketize(rows, restarts=3).count == 3


def test_gap_count_is_the_papers_formula() -> None:
    """With pairwise distances, W_k = Σ_r D_r / (2 n_r), and references turned back from the principal axes."""
    most = 6
    for noise in (0.3, 0.9, 1.2):
        rows, _ = blobs(3, 10, dim=4, noise=noise)

        def log_within(values: np.ndarray) -> np.ndarray:
            found = []
            for k in range(1, most + 1):
                labels = ward(values, k)
                # D_r counts each pair twice
                found.append(sum(2 * (pdist(values[labels == r]) ** 2).sum() / (2 * (labels == r).sum())
                                 for r in range(k)))  # fmt: skip
            return np.log(found)

        centre = rows.mean(axis=0)
        _, _, axes = np.linalg.svd(rows - centre, full_matrices=False)
        turned = (rows - centre) @ axes.T
        rng = np.random.default_rng(8)
        sets = [rng.uniform(turned.min(axis=0), turned.max(axis=0), turned.shape) @ axes + centre for _ in range(10)]
        logs = np.array([log_within(z) for z in sets])
        gap, s = logs.mean(axis=0) - log_within(rows), logs.std(axis=0) * np.sqrt(1 + 1 / 10)
        expected = next((k for k in range(1, most) if gap[k - 1] >= gap[k] - s[k]), most)
        assert gap_count(rows, most, partition=ward, rng=np.random.default_rng(8)) == expected


def test_standardise_is_scikit_learns_scaler() -> None:
    rows = torch.randn(20, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 7 + 3
    rows[:, 2] = 4.0  # no spread
    found = standardise(rows).numpy()
    expected = StandardScaler().fit_transform(rows.numpy())
    np.testing.assert_allclose(np.delete(found, 2, axis=1), np.delete(expected, 2, axis=1), atol=1e-12)
    assert (found[:, 2] == 0).all()
    assert (standardise(rows[:1]) == 0).all()


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'gapp'\. Did you mean 'gap'"):
        bucketize(blobs(2, 5)[0], choose="gapp")
