import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import adjusted_rand_score, silhouette_score

from fedloom.errors import AdapterError, ConfigError, FedloomError
from fedloom.numerics.cluster import CLUSTERERS, align, bucketize, signature_distance


def blobs(groups: int, each: int, dim: int = 16, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    truth = rng.permutation(np.repeat(np.arange(groups), each))
    centres = 3 * np.eye(groups, dim)
    return centres[truth] + 0.1 * rng.normal(size=(len(truth), dim)), truth


# --- bucketize


@pytest.mark.parametrize("clusterer", CLUSTERERS)
@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_separated_blobs_are_recovered(clusterer: str, groups: int, scale: float) -> None:
    rows, truth = blobs(groups, 15)
    found = bucketize(torch.from_numpy(scale * rows).float(), clusterer=clusterer)
    assert found.count == groups
    assert adjusted_rand_score(truth, found.labels) == 1.0
    assert set(found.scores) == set(range(2, 9))
    assert found.silhouette == max(found.scores.values())
    assert found.silhouette == pytest.approx(silhouette_score(rows, truth), abs=1e-6)


@pytest.mark.parametrize("clusterer", CLUSTERERS)
def test_labels_are_numbered_by_first_appearance_and_repeat(clusterer: str) -> None:
    rows, _ = blobs(3, 8)
    found = bucketize(rows, clusterer=clusterer, seed=5)
    assert found.labels.dtype == np.int64
    assert list(dict.fromkeys(found.labels.tolist())) == [0, 1, 2]
    again = bucketize(rows, clusterer=clusterer, seed=5)
    assert np.array_equal(found.labels, again.labels)
    assert found.scores == again.scores


@pytest.mark.parametrize("clusterer", CLUSTERERS)
def test_few_examples(clusterer: str) -> None:
    rows = np.array([[0.0, 0.0], [0.0, 1.0], [9.0, 0.0]])
    assert bucketize(rows[:0], clusterer=clusterer).count == 0
    for n in (1, 2):
        small = bucketize(rows[:n], clusterer=clusterer)
        assert (small.labels.tolist(), small.count, small.silhouette, small.scores) == ([0] * n, 1, None, {})
    three = bucketize(rows, clusterer=clusterer)  # only C = 2 is feasible
    assert three.labels.tolist() == [0, 0, 1]
    # s = (b − a) / max(a, b) with a = 1, b = 9 and √82; a cluster of one has s = 0 (Rousseeuw 1987).
    assert three.scores == {2: pytest.approx((8 / 9 + (82**0.5 - 1) / 82**0.5 + 0) / 3)}


def test_ten_thousand_identical_rows_are_one_bucket_at_once() -> None:
    row = torch.nn.functional.normalize(torch.randn(1, 576, generator=torch.Generator().manual_seed(0)), dim=1)
    started = time.perf_counter()
    found = bucketize(row.expand(10_000, 576))
    assert found.count == 1
    assert not found.labels.any()
    assert time.perf_counter() - started < 20


@pytest.mark.parametrize("clusterer", CLUSTERERS)
def test_rows_identical_up_to_float32_rounding_are_one_bucket(clusterer: str) -> None:
    rng = np.random.default_rng(0)
    rows = (np.ones((40, 8)) * (1 + 1e-7 * rng.normal(size=(40, 8)))).astype(np.float32)
    assert bucketize(rows, clusterer=clusterer).count == 1
    assert bucketize(np.zeros((40, 8)), clusterer=clusterer).count == 1


@pytest.mark.parametrize("clusterer", CLUSTERERS)
def test_no_more_clusters_than_distinct_rows_are_tried(clusterer: str) -> None:
    rows = np.repeat(np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, -0.0], [-1.0, 0.0]]), 10, axis=0)
    found = bucketize(rows, clusterer=clusterer)
    assert set(found.scores) <= {2, 3}  # −0.0 and 0.0 are the same
    assert found.labels.tolist() == [0] * 10 + [1] * 10 + [2] * 20


def test_smallest_count_wins_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, _ = blobs(4, 6)
    monkeypatch.setattr("fedloom.numerics.cluster.silhouette_score", lambda *_, **__: 0.5)
    assert bucketize(rows).count == 2


def test_max_buckets_bounds_the_candidates() -> None:
    rows, _ = blobs(4, 6)
    assert set(bucketize(rows, max_buckets=3).scores) == {2, 3}
    assert bucketize(rows, max_buckets=1).count == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rows_that_are_not_finite_are_named(bad: float) -> None:
    rows, _ = blobs(2, 5)
    rows[3, 2] = bad
    with pytest.raises(FedloomError, match=r"1 of 10 examples .* the first is row 3"):
        bucketize(rows)


def test_wrong_arguments() -> None:
    with pytest.raises(ConfigError, match="'kmeans'"):
        bucketize(np.zeros((3, 2)), clusterer="kmean")
    with pytest.raises(FedloomError, match="shape"):
        bucketize(np.zeros(3))


# --- signature_distance


def naive_distance(signatures: list[dict[str, torch.Tensor]]) -> np.ndarray:
    """Eq. (1) of FedWeave, pair by pair."""
    distance = np.zeros((len(signatures), len(signatures)))
    for u, a in enumerate(signatures):
        for v, b in enumerate(signatures):
            terms = []
            for name in a:
                x, y = a[name].double().flatten(), b[name].double().flatten()
                lengths = float(x.norm() * y.norm())
                terms.append(1 - (float(x @ y) / lengths if lengths > 0 else 0.0))
            distance[u, v] = 0.0 if u == v else sum(terms) / len(terms)
    return distance


def test_distance_by_hand() -> None:
    signatures = [
        {"a": torch.tensor([[1.0, 0.0]]), "b": torch.tensor([2.0])},
        {"a": torch.tensor([[0.0, 3.0]]), "b": torch.tensor([5.0])},  # cosines 0, 1
        {
            "a": torch.tensor([[-1.0, 0.0]]),
            "b": torch.tensor([-1.0]),
        },  # −1, −1 and 0, −1
    ]
    assert signature_distance(signatures).tolist() == [[0, 0.5, 2], [0.5, 0, 1.5], [2, 1.5, 0]]


def test_every_block_counts_alike_whatever_its_size_and_order() -> None:
    big, small = torch.randn(64, 8), torch.ones(1, 2)
    distance = signature_distance([{"big": big, "small": small}, {"small": -small, "big": 7 * big}])
    assert distance[0, 1] == pytest.approx(1.0)  # (0 + 2) / 2; as one long vector it would be near 0


def test_zero_block_is_at_distance_one_from_all_but_itself() -> None:
    zero, some = {"a": torch.zeros(2, 2)}, {"a": torch.ones(2, 2)}
    assert signature_distance([zero, some, zero]).tolist() == [[0, 1, 1], [1, 0, 1], [1, 1, 0]]


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 10**6), st.sampled_from([1e-20, 1.0, 1e20]))
def test_distance_against_the_naive_loop(count: int, blocks: int, seed: int, scale: float) -> None:
    g = torch.Generator().manual_seed(seed)
    signatures = [{f"l{k}": scale * torch.randn(k + 2, 3, generator=g) for k in range(blocks)} for _ in range(count)]
    distance = signature_distance(signatures)
    assert distance.dtype == np.float64
    assert np.array_equal(distance, distance.T)
    assert not np.diag(distance).any()
    assert distance.min() >= 0
    np.testing.assert_allclose(distance, naive_distance(signatures), atol=1e-12)


def test_bad_signatures_are_named() -> None:
    good = {"a": torch.ones(2)}
    with pytest.raises(AdapterError, match="missing from the second: a"):
        signature_distance([good, {"b": torch.ones(2)}])
    with pytest.raises(AdapterError, match="'a' has two shapes"):
        signature_distance([good, {"a": torch.ones(3)}])
    with pytest.raises(AdapterError, match=r"'a' .* NaN"):
        signature_distance([good, {"a": torch.tensor([1.0, float("nan")])}])
    for empty in ([], [{}]):
        with pytest.raises(FedloomError, match="at least one block"):
            signature_distance(empty)


# --- align


def grouped(groups: list[int], near: float = 0.1, far: float = 1.0) -> np.ndarray:
    labels = np.array(groups)
    distance = np.where(labels[:, None] == labels[None, :], near, far)
    np.fill_diagonal(distance, 0.0)
    return distance


@pytest.mark.parametrize("linkage", ["average", "complete", "single"])
def test_groups_are_recovered_and_numbered_by_first_appearance(linkage: str) -> None:
    found = align(grouped([3, 1, 3, 0, 1, 0, 3]), linkage=linkage)
    assert found.labels.tolist() == [0, 1, 0, 2, 1, 2, 0]
    assert found.labels.dtype == np.int64
    assert found.count == 3
    assert found.silhouette == pytest.approx(0.9)  # (1.0 − 0.1) / 1.0 for every point
    assert set(found.scores) == set(range(2, 7))


def test_average_linkage_joins_by_mean_distance() -> None:
    # Points 0, 1 and 2, 3 pair up first. Then 4 is nearer to {0, 1} on average (3.0 < 3.1), to {2, 3} by its nearest.
    upper = [[0, 1, 9, 9, 3], [0, 0, 9, 9, 3], [0, 0, 0, 1, 1.1], [0, 0, 0, 0, 5.1], [0, 0, 0, 0, 0]]
    d = np.array(upper) + np.array(upper).T
    assert align(d, max_experts=2, linkage="average").labels.tolist() == [0, 0, 1, 1, 0]
    assert align(d, max_experts=2, linkage="single").labels.tolist() == [0, 0, 1, 1, 1]


def test_float32_distances_with_a_diagonal_that_is_only_nearly_zero() -> None:
    unit = torch.nn.functional.normalize(torch.randn(12, 999, generator=torch.Generator().manual_seed(0)), dim=1)
    unit = torch.cat([unit[:4], unit[:4] + 0.01 * unit[4:8], unit[:4] + 0.01 * unit[8:]])
    unit = torch.nn.functional.normalize(unit, dim=1)
    raw = 1 - unit @ unit.T
    raw.fill_diagonal_(-1e-6)
    with pytest.raises(ValueError, match="diagonal"):
        silhouette_score(raw.double().numpy(), [0, 1, 2, 3] * 3, metric="precomputed")
    found = align(raw)
    assert found.labels.tolist() == [0, 1, 2, 3] * 3


def test_too_few_or_identical_signatures_are_one_expert() -> None:
    for size in (1, 2):
        found = align(1.0 - np.eye(size))
        assert (found.labels.tolist(), found.count, found.silhouette, found.scores) == ([0] * size, 1, None, {})
    assert align(1.0 - np.eye(3)).scores.keys() == {2}
    block = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    assert align(signature_distance([{"a": block, "b": 3 * block}] * 6)).count == 1


def test_smallest_number_of_experts_wins_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedloom.numerics.cluster.silhouette_score", lambda *_, **__: 0.5)
    assert align(grouped([0, 1, 2, 0, 1, 2])).count == 2


def test_signatures_to_experts() -> None:
    g = torch.Generator().manual_seed(1)
    patterns = [{"q": torch.randn(6, 4, generator=g), "v": torch.randn(3, 4, generator=g)} for _ in range(4)]
    truth = [0, 2, 1, 3, 3, 0, 1, 2, 2, 0]
    noisy = [
        {name: (1 + i) * (t + 0.1 * torch.randn(t.shape, generator=g)) for name, t in patterns[k].items()}
        for i, k in enumerate(truth)
    ]
    found = align(signature_distance(noisy))
    assert found.count == 4
    assert adjusted_rand_score(truth, found.labels) == 1.0


#: Points 0 and 2 are nearest, then 1 and 3; every other pair is at 1.
TWO_PAIRS = np.array([[0, 1, 0.1, 1], [1, 0, 1, 0.2], [0.1, 1, 0, 1], [1, 0.2, 1, 0]])


@pytest.mark.parametrize("linkage", ["average", "complete", "single"])
@pytest.mark.parametrize(
    ("experts", "labels", "silhouette"),
    [
        (1, [0, 0, 0, 0], None),
        (2, [0, 1, 0, 1], (0.9 + 0.8) / 2),  # (1 − 0.1) / 1 and (1 − 0.2) / 1
        (3, [0, 1, 0, 2], (2 * 0.9 + 0 + 0) / 4),  # one alone has 0 (Rousseeuw 1987)
        (4, [0, 1, 2, 3], None),
    ],
)
def test_a_given_number_of_experts_by_hand(
    linkage: str, experts: int, labels: list[int], silhouette: float | None
) -> None:
    found = align(TWO_PAIRS, linkage=linkage, max_experts=2, experts=experts)  # it is no candidate: no bound on it
    assert (found.labels.tolist(), found.count) == (labels, experts)
    assert found.labels.dtype == np.int64
    assert found.silhouette == (silhouette and pytest.approx(silhouette))
    assert found.scores == ({} if silhouette is None else {experts: found.silhouette})


def test_a_given_number_of_experts_of_equal_signatures() -> None:
    """By silhouette they are one expert; asked for two, two it is."""
    assert align(np.zeros((3, 3))).count == 1
    assert len(set(align(np.zeros((3, 3)), experts=2).labels.tolist())) == 2
    assert align(np.zeros((1, 1)), experts=1).labels.tolist() == [0]


@pytest.mark.parametrize("size", [1, 4])
def test_more_experts_than_buckets_are_refused_by_name(size: int) -> None:
    with pytest.raises(ConfigError, match=rf"method\.experts is {size + 1}, but all clients .* have {size} buckets"):
        align(TWO_PAIRS[:size, :size], experts=size + 1)


@pytest.mark.parametrize(
    "bad",
    [
        np.zeros((2, 3)),
        np.zeros((0, 0)),
        np.array([[0.0, 1.0], [2.0, 0.0]]),
        np.array([[1.0, 1.0], [1.0, 1.0]]),
        np.full((2, 2), np.nan),
        -grouped([0, 1]),
    ],
)
def test_a_matrix_that_is_not_a_distance_is_refused(bad: np.ndarray) -> None:
    with pytest.raises(FedloomError, match="Distances"):
        align(bad)


def test_ward_needs_vectors() -> None:
    with pytest.raises(ConfigError, match="ward"):
        align(grouped([0, 1, 0]), linkage="ward")
