import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score
from sklearn.metrics.cluster import contingency_matrix

from fedloom.errors import DataError
from fedloom.evaluation.alignment import alignment_report, ari, nmi, purity

PAIRS = st.lists(st.tuples(st.integers(0, 4), st.sampled_from("abcd")), min_size=1, max_size=60)


def test_a_table_worked_by_hand() -> None:
    # Manning et al. 2008, "Introduction to Information Retrieval", Fig. 16.4: clusters x5 o1 | x1 o4 d1 | x2 d3.
    labels = [0] * 6 + [1] * 6 + [2] * 5
    reference = list("xxxxxo") + list("xooood") + list("xxddd")
    assert purity(labels, reference) == pytest.approx(12 / 17)  # (5 + 4 + 3) / 17; the book prints 0.71
    # The book prints NMI 0.36 and counts pairs: 20 together in both, 40 in clusters, 44 in classes, of 136.
    assert nmi(labels, reference) == pytest.approx(0.36, abs=0.005)
    assert ari(labels, reference) == pytest.approx((20 - 40 * 44 / 136) / ((40 + 44) / 2 - 40 * 44 / 136))


@given(PAIRS)
def test_against_scikit_learn(pairs: list[tuple[int, str]]) -> None:
    labels, reference = zip(*pairs)
    classes_by_clusters = contingency_matrix(reference, labels)
    assert purity(labels, reference) == pytest.approx(classes_by_clusters.max(axis=0).sum() / len(pairs))
    assert ari(labels, reference) == pytest.approx(adjusted_rand_score(reference, labels), abs=1e-12)
    assert nmi(labels, reference) == pytest.approx(normalized_mutual_info_score(reference, labels), abs=1e-9)


def test_perfect_and_degenerate_partitions() -> None:
    for metric in (purity, nmi, ari):
        assert metric([2, 2, 0, 1], list("bbac")) == pytest.approx(1.0)
        assert metric([0, 0, 0], list("aaa")) == 1.0
        assert metric([0], ["a"]) == 1.0
        assert metric([0, 1, 2], list("abc")) == pytest.approx(1.0)
    assert purity([0, 0, 0, 0], list("aaab")) == 0.75
    assert nmi([0, 0, 0, 0], list("aabb")) == 0.0
    assert ari([0, 0, 0, 0], list("aabb")) == 0.0


def test_large_counts_do_not_overflow() -> None:
    labels = np.repeat([0, 1], 200_000)
    assert ari(labels, labels) == 1.0


@pytest.mark.parametrize("metric", [purity, nmi, ari])
def test_nothing_to_compare_is_an_error(metric: object) -> None:
    with pytest.raises(DataError, match="0 and 0"):
        metric([], [])  # type: ignore[operator]
    with pytest.raises(DataError, match="2 and 1"):
        metric([0, 1], ["a"])  # type: ignore[operator]


def test_report_of_two_clients_by_hand() -> None:
    report = alignment_report(
        buckets={"a": [0, 0, 0, 1], "b": [0, 0], "empty": []},
        tasks={"a": ["x", "x", "y", "y"], "b": ["y", "y"], "empty": []},
        experts={"a": [0, 1], "b": [1], "empty": []},
    )
    assert report["local"]["purity"] == pytest.approx((4 * 0.75 + 2 * 1.0) / 6)
    assert report["local"]["ari"] == pytest.approx((4 * adjusted_rand_score([0, 0, 1, 1], [0, 0, 0, 1]) + 2 * 1.0) / 6)
    # Experts of the examples: 0 0 0 1 1 1 against x x y y y y.
    assert report["global"]["purity"] == pytest.approx(5 / 6)
    assert report["global"]["nmi"] == pytest.approx(
        normalized_mutual_info_score([0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1])
    )
    # Buckets a0 (mostly x), a1 (y), b0 (y) sit in experts 0, 1, 1.
    assert report["prototypes"] == pytest.approx({"purity": 1.0, "nmi": 1.0, "ari": 1.0})


def test_report_needs_the_same_clients() -> None:
    with pytest.raises(DataError, match="same clients"):
        alignment_report({"a": [0]}, {"b": ["x"]}, {"a": [0]})
