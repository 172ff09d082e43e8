"""The paired bootstrap against algebra, against scipy, and on data whose truth is known."""

import numpy as np
import pytest
from bench_records import run, suite, write
from scipy import stats

from fedloom.bench.results import load_results
from fedloom.bench.significance import (
    Comparisons,
    Difference,
    holm,
    macro_resamples,
    paired_bootstrap,
    paired_t,
    t_quantile,
    t_tails,
)
from fedloom.errors import DataError


def scores(values):
    values = np.asarray(values, np.float64)
    return np.stack([values, np.ones(len(values))], axis=1)


def test_a_constant_difference_has_no_spread():
    rng = np.random.default_rng(1)
    tokens = rng.integers(1, 20, 50).astype(float)
    nll = tokens * rng.random(50)
    a = {42: {"t": np.stack([nll, tokens], axis=1)}}
    b = {42: {"t": np.stack([nll + 0.25 * tokens, tokens], axis=1)}}  # 0.25 more for every token
    found = paired_bootstrap(a, b)
    assert (found.estimate, found.low, found.high) == pytest.approx((-0.25, -0.25, -0.25))
    assert found.p == pytest.approx(2 / 2001)
    assert not found.distinguishable  # one seed says nothing of others
    three = paired_bootstrap(dict.fromkeys((1, 2, 3), a[42]), dict.fromkeys((1, 2, 3), b[42]))
    assert three.distinguishable


def test_a_method_does_not_differ_from_itself():
    a = {42: {"t": scores([0, 1, 1, 0.5])}}
    found = paired_bootstrap(a, a)
    assert (found.estimate, found.low, found.high, found.p) == (0, 0, 0, 1)
    assert not found.distinguishable


def test_estimate_is_the_macro_ratio_by_hand():
    a = {42: {"x": np.array([[2.0, 1], [4.0, 3]]), "y": np.array([[5.0, 10]])}}  # 6/4 and 1/2: macro 1
    b = {42: {"x": np.array([[1.0, 1], [1.0, 3]]), "y": np.array([[1.0, 10]])}}  # 2/4 and 1/10: macro 0.3
    assert paired_bootstrap(a, b).estimate == pytest.approx(0.7)


def test_interval_of_one_mean_is_scipys():
    rng = np.random.default_rng(2)
    a, b = rng.normal(0.3, 1, 200), rng.normal(0, 1, 200)
    found = paired_bootstrap({1: {"t": scores(a)}}, {1: {"t": scores(b)}}, resamples=20_000)
    theirs = stats.bootstrap(
        (a - b,), np.mean, n_resamples=20_000, method="percentile", rng=np.random.default_rng(3)
    ).confidence_interval
    # Monte Carlo error of a 2.5 % quantile of 20,000 draws is about 0.02 standard errors: 0.1 × 0.02
    assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high), abs=0.008)


def test_interval_is_stratified_by_task_and_seed():
    """The macro mean of independent strata has variance Σ σ²_st / n_st / (tasks · seeds)²."""
    rng = np.random.default_rng(4)
    sizes = {"x": 100, "y": 400}
    a = {s: {t: scores(rng.normal(0, 1 if t == "x" else 3, n)) for t, n in sizes.items()} for s in (1, 2, 3)}
    b = {s: {t: scores(np.zeros(n)) for t, n in sizes.items()} for s in (1, 2, 3)}
    found = paired_bootstrap(a, b, resamples=8000)
    variance = sum(a[s][t][:, 0].var() / n for s in a for t, n in sizes.items()) / (2 * 3) ** 2
    assert found.high - found.low == pytest.approx(2 * 1.96 * variance**0.5, rel=0.03)


def test_pairing_removes_what_both_share():
    rng = np.random.default_rng(5)
    hard = rng.normal(0, 10, 300)
    a, b = hard + 0.5 + rng.normal(0, 0.1, 300), hard
    found = paired_bootstrap({1: {"t": scores(a)}}, {1: {"t": scores(b)}})
    assert 0.45 < found.low < found.high < 0.55


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    covered, trials = 0, 300
    for trial in range(trials):
        rng = np.random.default_rng([6, trial])
        a, b = {1: {"t": scores(rng.normal(0.2, 1, 80))}}, {1: {"t": scores(np.zeros(80))}}
        found = paired_bootstrap(a, b, resamples=500)
        covered += found.low <= 0.2 <= found.high
    assert 0.91 <= covered / trials <= 0.98  # 0.95 ± 3 standard errors of 300 trials, less the bootstrap's small bias


def test_only_common_seeds_count_and_signs_are_counted():
    a = {1: {"t": scores([1, 1])}, 2: {"t": scores([0, 0])}, 3: {"t": scores([9, 9])}}
    b = {1: {"t": scores([0, 0])}, 2: {"t": scores([0.5, 0.5])}, 4: {"t": scores([9, 9])}}
    found = paired_bootstrap(a, b)
    assert (found.seeds, found.estimate, found.each) == ((1, 2), 0.25, (1.0, -0.5))
    assert paired_bootstrap({1: a[1]}, {2: b[2]}) is None


def test_the_same_input_gives_the_same_numbers_whatever_ran_before():
    a, b = {1: {"t": scores(range(20))}}, {1: {"t": scores(range(1, 40, 2))}}
    first = paired_bootstrap(a, b)
    macro_resamples({"other": scores(range(7))}, 9)
    assert paired_bootstrap(a, b) == first


def test_other_rows_are_refused():
    with pytest.raises(DataError, match="task t: the two methods were not tested on the same rows"):
        paired_bootstrap({1: {"t": scores([1, 2])}}, {1: {"t": scores([1, 2, 3])}})
    with pytest.raises(DataError, match="same rows"):
        paired_bootstrap({1: {"t": np.array([[1.0, 2]])}}, {1: {"t": np.array([[1.0, 3]])}})
    with pytest.raises(DataError, match="no pairs"):
        paired_bootstrap({1: {"t": scores([1])}}, {1: {"u": scores([1])}})


def test_comparisons_of_a_benchmark_are_those_of_its_examples(tmp_path):
    results = load_results(write(tmp_path, suite()))
    comparisons, main = Comparisons(results), results.settings[0]
    found = comparisons.labels(main, "fedweave", "fedlease", "loss")
    assert (found.estimate, found.seeds) == (pytest.approx(-0.05), (42, 43, 44))
    assert found.each == pytest.approx((-0.05, -0.05, -0.05))
    soft = comparisons.modes(main, "fedweave", "soft", "top1", "loss")
    assert soft.estimate == pytest.approx(-0.02)
    assert comparisons.labels(main, "fedweave", "local", "loss") is None


def test_without_examples_there_is_no_comparison(tmp_path):
    results = load_results(write(tmp_path, [run("fedweave"), run("fedit")], examples=False))
    assert Comparisons(results).labels(results.settings[0], "fedweave", "fedit", "loss") is None


@pytest.mark.parametrize("freedom", range(1, 12))
def test_students_t_is_scipys(freedom):
    for t in (0.0, 0.1, 1.0, 2.5, 7.0):
        assert t_tails(t, freedom) == pytest.approx(2 * stats.t.sf(t, freedom), abs=1e-12)
    assert t_quantile(0.05, freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-9)


def test_the_interval_over_seeds_is_that_of_the_paired_t_test():
    found, theirs = paired_t((1.0, 2.0, 4.0)), stats.ttest_1samp([1.0, 2.0, 4.0], 0)
    interval = theirs.confidence_interval(0.95)
    assert (found.low, found.high, found.p) == pytest.approx((interval.low, interval.high, theirs.pvalue))
    assert (paired_t((0.5, 0.5)).low, paired_t((0.5, 0.5)).p) == (0.5, 0.0)
    assert paired_t((0.0, 0.0)).p == 1.0


def test_only_what_both_intervals_tell_apart_is_distinguishable():
    narrow = {"estimate": 0.2, "low": 0.1, "high": 0.3, "p": 0.001}
    assert Difference(**narrow, seeds=(1, 2, 3), each=(0.19, 0.2, 0.21)).distinguishable
    assert not Difference(**narrow, seeds=(1, 2, 3), each=(0.5, 0.2, -0.1)).distinguishable  # the seeds disagree
    assert not Difference(**narrow, seeds=(1, 2), each=(0.2, 0.2)).distinguishable  # too few of them
    wide = narrow | {"low": -0.1, "p": 0.3}
    assert not Difference(**wide, seeds=(1, 2, 3), each=(0.19, 0.2, 0.21)).distinguishable
    assert Difference(**wide, seeds=(1, 2, 3), each=(0.19, 0.2, 0.21)).joint_p == 0.3
    assert Difference(**narrow, seeds=(1, 2), each=(0.2, 0.2)).joint_p is None


def test_holms_adjustment_by_hand():
    """Sorted 0.005, 0.01, 0.03, 0.04 times 4, 3, 2, 1; none below the one before it."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []
