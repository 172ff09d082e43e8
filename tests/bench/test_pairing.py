"""Means side by side are of the same seeds: in figures, in marks, and in the rows that differences are from."""

import csv
import io

from bench_records import run, write
from test_fcmoe_outputs import native

from fedloom.bench.analysis_tables import granularity_table
from fedloom.bench.fcmoe_figures import ablation_bars, accuracy_curves, fcmoe_figures, local_bars
from fedloom.bench.fcmoe_tables import ablation_table, fcmoe_tables, rounds_to_target, targets
from fedloom.bench.figures import all_figures, loss_bars
from fedloom.bench.layout import marks
from fedloom.bench.pairing import Paired, below, paired, paired_curves, shared_seeds
from fedloom.bench.results import Stat, load_results
from fedloom.bench.significance import Comparisons

NAN = float("nan")
#: FC-MoE is the worse of the two on either seed that both have, and the better over all that each has.
SIGNS = {"fcmoe": {42: 0.5, 43: 0.4, 44: 0.9}, "fcmoe_wo_projection": {42: 0.54, 43: 0.46}}


def signs(folder):
    runs = [native(label, seed, v, home=v) for label, seeds in SIGNS.items() for seed, v in seeds.items()]
    return load_results(write(folder, runs))


def rows(table):
    return {row["method"]: row for row in csv.DictReader(io.StringIO(table.csv()))}


def test_the_seeds_that_most_have_with_the_main_method_among_them():
    assert shared_seeds({"a": (1, 2, 3), "b": (1, 2), "c": (2, 3)}) == (2,)
    assert shared_seeds({"a": (1, 2, 3), "b": (1, 2), "c": (4,)}) == (1, 2)
    assert shared_seeds({"a": (4,), "b": (1, 2), "c": (1, 2)}) == (1, 2)
    assert shared_seeds({"a": (4,), "b": (1, 2), "c": (1, 2)}, main="a") == (4,)
    assert shared_seeds({"a": (), "b": (1, 2)}, main="a") == (1, 2)
    assert shared_seeds({"a": (1,), "b": (2, 3)}) == (2, 3)  # groups of one: more seeds
    assert shared_seeds({}) == ()


def test_means_are_over_shared_seeds_and_the_rest_is_named():
    stats = {
        "a": Stat.by({1: 1.0, 2: 3.0, 3: 8.0}), "b": Stat.by({2: 5.0, 1: 4.0}), "c": Stat.by({3: 0.0}),
        "d": Stat.by({1: 1.0, 2: NAN}), "e": Stat.by({1: None}),
    }  # fmt: skip
    pairs = paired(stats, "a")
    assert pairs == Paired((1, 2), {"a": Stat((1.0, 3.0), (1, 2)), "b": Stat((4.0, 5.0), (1, 2))}, ("c", "d"))
    assert below(str.upper, [("", pairs)]) == (
        "Over the seeds that all shown have: seeds 1 and 2, without C and D (lacks one or is not finite)."
    )


def test_mean_curves_are_over_shared_seeds_and_rounds_that_all_of_them_have():
    curves = {
        "a": {1: [[0, 1.0], [5, 2.0]], 2: [[0, 3.0], [3, 9.0], [5, 6.0]], 3: [[0, 9.0], [5, 9.0]]},
        "b": {1: [[0, 2.0], [5, 0.0]], 2: [[0, 2.0], [5, None], [6, 1.0]]},  # one round in common: no line
        "c": {1: [[0, 2.0], [5, NAN]], 2: []},
        "d": {1: [], 2: []},
    }
    assert paired_curves(curves, "a") == Paired((1, 2), {"a": [(0, 2.0), (5, 4.0)]}, ("c",))


def test_figures_do_not_turn_the_sign_of_the_paired_difference(tmp_path):
    """On seeds 42 and 43 FC-MoE has 0.45 and the ablation 0.5; over three seeds FC-MoE has 0.6."""
    results = signs(tmp_path)
    (setting,) = results.settings
    picture = ablation_bars(results, setting)
    assert picture.text == (
        "FC-MoE w/o projection 0.500; FC-MoE 0.450. Over the seeds that all shown have: seeds 42 and 43."
    )
    assert all(f">{value}<" in picture.svg.decode() for value in ("0.450", "0.500"))
    assert ">0.600<" not in picture.svg.decode()


def test_one_global_model_is_drawn_once_whatever_seeds_its_two_methods_have(tmp_path):
    """PFL-MoE's global model is FedAvg's: 0.6 on seed 42, though FedAvg's mean over its seeds is 0.5."""
    runs = [native("fedavg_moe", 42, 0.6), native("fedavg_moe", 43, 0.4), native("fcmoe", 42, 0.5)]
    runs += [native("fcmoe", 43, 0.5), native("fedmoe", 42, 0.6), native("fedmoe", 44, 0.1)]
    results = load_results(write(tmp_path, runs))
    (setting,) = results.settings
    text = accuracy_curves(results, setting).text
    assert text.startswith("FedAvg 0.300 → 0.600; FedMoE 0.300 → 0.600; FC-MoE 0.250 → 0.500. ")
    assert text.endswith("Over the seeds that all shown have: seed 42.")
    assert all("seed 42." in p.text and "FedMoE" in p.text for p in all_figures(results))
    homes = local_bars(results, [setting]).text
    assert homes.startswith("FedAvg: 0.60 at α = 0.1; FedMoE: 0.60 at α = 0.1; FC-MoE: 0.60 at α = 0.1. ")


def test_a_label_without_the_main_methods_seeds_is_left_out_and_named(tmp_path):
    runs = [run("fedweave", 42, 1.0), run("fedit", 42, 2.0), run("fedlease", 43, 9.0, title="FedLEASE")]
    runs += [run("fedit", 43, 9.0), run("ffa_lora", 43, 9.0, title="FFA")]
    for record, _ in runs:
        record["routing"]["top1"]["loss"]["macro"] = {"fedweave": 1.0, "fedit": 2.0}.get(record["label"], 9.0)
    results = load_results(write(tmp_path, runs))
    assert loss_bars(results, results.settings[0]).text == (
        "Fedweave 1.000; Fedit 2.000. Over the seeds that all shown have: seed 42, without FedLEASE and FFA (lacks one "
        "or is not finite)."
    )


def test_the_main_row_stands_with_the_ablations_seeds_too(tmp_path):
    results = signs(tmp_path / "native")
    found = rows(ablation_table(results, Comparisons(results)))
    assert float(found["FC-MoE"]["test accuracy"]) == (0.5 + 0.4 + 0.9) / 3
    fewer = found["FC-MoE (seeds 42 and 43 only)"]
    assert (fewer["seeds"], float(fewer["test accuracy"]), float(fewer["local accuracy"])) == ("2", 0.45, 0.45)
    runs = [run("fedweave", seed, loss, modes=("top1", "soft")) for seed, loss in ((42, 1.0), (43, 2.0), (44, 3.0))]
    runs += [run("fedweave_wo_client_router", seed, 1.0, modes=("top1", "soft")) for seed in (42, 43)]
    for record, _ in runs:
        for mode, below_ in (("top1", 0.0), ("soft", 0.25)):
            record["routing"][mode]["loss"]["macro"] = record["seed"] - 41 - below_
    results = load_results(write(tmp_path / "lora", runs))
    table = granularity_table(results, Comparisons(results))
    assert [(row[0].text, row[3].text, row[5].parts[0]) for row in table.rows] == [
        ("Fedweave", "top1", 2.0), ("Fedweave", "soft", 1.75),
        ("Fedweave (seeds 42 and 43 only)", "top1", 1.5), ("Fedweave (seeds 42 and 43 only)", "soft", 1.25),
        ("Fedweave Wo Client Router", "top1", 1.5), ("Fedweave Wo Client Router", "soft", 1.25),
    ]  # fmt: skip


def test_marks_compare_rows_of_the_same_seeds():
    stats = {"a": Stat.by({42: 1.0, 44: 1.0}), "b": Stat.by({43: 2.0, 44: 2.0}), "c": Stat.by({42: 3.0, 43: 3.0})}
    assert marks(stats, lowest=True) == {}  # three means over three sets of two seeds
    stats["d"] = Stat.by({43: 4.0, 44: 4.0})
    assert marks(stats, lowest=True) == {"b": "best", "d": "second"}
    stats["e"] = Stat.by({42: 9.0, 43: 9.0, 44: 9.0})
    assert marks(stats, lowest=True) == {}  # one row has the most seeds
    assert marks({"a": Stat.by({1: 2.0}), "b": Stat.by({1: 1.0}), "c": Stat.by({1: NAN})}, lowest=False) == {
        "a": "best", "b": "second",
    }  # fmt: skip


def converging(folder):
    """FedAvg ends at 0.8 on seed 42 (target 0.76), falls on 43, and on 44 ends above its start by less than 5 %."""
    runs = [
        native("fedavg_moe", 42, 0.8, curve=[[0, 0.5], [5, 0.7], [10, 0.8]]),
        native("fedavg_moe", 43, 0.5, curve=[[0, 0.6], [5, 0.5], [10, 0.5]]),
        native("fedavg_moe", 44, 0.7, curve=[[0, 0.69], [5, 0.6], [10, 0.7]]),
        native("fedavg_moe", 45, 0.6, curve=[[0, 0.3], [5, 0.57], [10, 0.6]]),
        native("fcmoe", 42, 0.9, curve=[[0, 0.9], [5, 0.76], [10, 0.9]]),  # round 0 does not count
        native("fcmoe", 43, 0.9, curve=[[0, 0.6], [5, 0.8], [10, 0.9]]),
        native("fcmoe", 45, 0.9, curve=[[0, 0.3], [5, 0.3], [10, 0.6]]),
        native("fedmoe", 42, 0.4, curve=[[0, 0.9], [5, 0.4], [10, 0.4]]),
        native("fedmoe", 45, 0.6, curve=[[0, 0.3], [5, 0.3], [10, 0.6]]),
    ]
    return load_results(write(folder, runs))


def test_the_model_before_training_has_not_converged(tmp_path):
    results = converging(tmp_path)
    (setting,) = results.settings
    assert targets(results, setting) == {42: 0.95 * 0.8, 45: 0.95 * 0.6}
    assert rounds_to_target(results, setting, "fedavg_moe") == {42: 10, 45: 5}
    assert rounds_to_target(results, setting, "fcmoe") == {42: 5, 45: 10}
    assert rounds_to_target(results, setting, "fedmoe") == {42: None, 45: 10}
    table = {t.name: t for t in fcmoe_tables(results, Comparisons(results))}["fcmoe_fig3a"]
    found = rows(table)
    assert (found["FC-MoE"]["seeds"], found["FC-MoE"]["rounds"]) == ("2", "7.5")
    assert (found["FedMoE"]["seeds that reach it"], found["FedMoE"]["rounds"]) == ("1", "10.0")
    notes = " ".join(table.notes)
    assert "No target for seeds 43 and 44 of switch-base-16, task = ag_news, α = 0.1: there 95% of FedAvg" in notes
    assert "Bold is best" in notes


def test_a_bar_of_rounds_stands_where_every_seed_gets_there(tmp_path):
    """FedMoE reaches the target on one of two seeds: a mean of that one would be another seed's than the others'."""
    picture = {p.name: p for p in fcmoe_figures(converging(tmp_path))}["fcmoe_fig3a_rounds"]
    assert picture.text.startswith("FedAvg: 7.5 at α = 0.1; FedMoE: 1 of 2 at α = 0.1; FC-MoE: 7.5 at α = 0.1. ")
    drawn = picture.svg.decode()
    assert all(f">{words}<" in drawn for words in ("7.5", "1 of 2", "FedMoE (n = 2)"))
    assert ">7.5 (n" not in drawn
    assert "No target for seeds 43 and 44" in picture.text
