"""A run that diverged is said to have, and no verdict is made of it: a number that is none lies on no side of 0."""

import math

import numpy as np
import pytest
from bench_records import run, write

from fedloom.bench.figures import all_figures
from fedloom.bench.layout import difference, p_words, signed, stat
from fedloom.bench.outputs import write_outputs
from fedloom.bench.reading import Claim, reading, said_of, sentence
from fedloom.bench.results import Stat, load_results
from fedloom.bench.significance import Comparisons, Difference, paired_bootstrap
from fedloom.bench.tables import global_table

NAN, INF = math.nan, math.inf


def test_the_mean_of_the_survivors_is_not_the_mean():
    found = Stat.of([1.4, NAN, 1.5])
    assert (found.n, found.lost, found.sd) == (3, 1, None)
    assert math.isnan(found.mean)
    assert stat(found, 3).text == "not finite in 1 of 3 seeds"
    assert stat(Stat.of([INF]), 1).text == "not finite in 1 of 1 seed"
    assert math.isnan(Stat.of([INF, -INF]).mean)
    assert stat(Stat.of([1.0, None]), 2).text == "1.0000 (n = 1)"  # not measured is another thing


@pytest.mark.parametrize("lost", [NAN, INF, -INF])
def test_a_loss_that_is_no_number_has_no_p(lost):
    a = {seed: {"t": np.array([[3.0, 2.0], [1.0, 1.0]])} for seed in (1, 2, 3)}
    b = {seed: {"t": np.array([[lost if seed == 3 else 3.1, 2.0], [1.0, 1.0]])} for seed in (1, 2, 3)}
    found = paired_bootstrap(a, b)
    assert (found.p, found.joint_p, found.over_seeds, found.distinguishable) == (None, None, None, False)
    assert all(math.isnan(edge) for edge in (found.low, found.high))
    assert found.each[:2] == pytest.approx((-0.1 / 3, -0.1 / 3))
    assert difference(found, 3).text == "not finite [not finite, not finite], p = –"
    assert difference(found, 3).parts[3] is None


def test_resamples_without_a_supervised_token_leave_no_interval():
    """One of three rows has tokens, so (2/3)³ = 30 % of the resamples have none; the estimate is −0.0001 / 2."""
    a, b = ({42: {"t": np.array([[nll, 2.0], [0.0, 0.0], [0.0, 0.0]])}} for nll in (3.0, 3.0001))
    found = paired_bootstrap(a, b)
    assert found.estimate == pytest.approx(-0.00005)
    assert found.p is None
    assert difference(found, 1).text == "−0.0001 [not finite, not finite], p = – (n = 1)"


def test_wording():
    assert [signed(v) for v in (NAN, INF, -INF)] == ["not finite"] * 3
    assert p_words(None) == "p = –"
    lost = Difference(NAN, NAN, NAN, None, (1, 2, 3), (-0.1, -0.1, NAN))
    said = sentence(Claim("A", "B", "loss", lost, after=" Paper: 1."))
    assert said == (
        "A minus B in macro loss: not finite; not every resample of the test rows is finite, so there is no interval, "
        "no p and no verdict. Paper: 1."
    )
    clear = Difference(-0.02, -0.03, -0.01, 0.01, (1, 2, 3), (-0.02, -0.02, -0.02))
    (first, second), = said_of([[Claim("A", "B", "loss", lost), Claim("A", "C", "loss", clear)]])  # fmt: skip
    assert "Holm" not in first
    assert "Holm for 1 comparisons p = 0.010" in second


def test_a_diverged_run_in_a_whole_report(tmp_path):
    """FedIT's seed 44 has no finite loss: no mean, no rank, no bar, no verdict, and it is named everywhere."""
    runs = [run(label, seed, loss) for label, loss in (("fedweave", 1.0), ("fedit", 2.0)) for seed in (42, 43, 44)]
    record, examples = runs[-1]
    record["routing"]["top1"]["loss"] |= {"gsm8k": NAN, "macro": NAN}
    record["curve"][-1][1] = NAN
    examples["top1"]["each_loss"]["gsm8k"][0][0] = NAN
    results = load_results(write(tmp_path, runs))
    table = global_table(results, results.settings[0])
    losses = {row[0].text: row[-5] for row in table.rows}
    assert losses["Fedit"].text == "not finite in 1 of 3 seeds"
    assert {losses[title].mark for title in ("Fedweave", "Fedit")} == {""}
    (section,) = reading(results, Comparisons(results))
    loss, score = section.sentences
    assert loss.startswith("Fedweave minus Fedit in macro loss: not finite;")
    assert "p =" not in loss
    assert "not distinguishable" in score
    figures = {p.name: p.text for p in all_figures(results)}
    assert all("without Fedit (lacks one or is not finite)" in figures[x] for x in ("table1_loss", "loss_curves"))
    write_outputs(tmp_path, "Diverged")
