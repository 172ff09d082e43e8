"""Tables and figures of methods for native experts: by hand from made-up records, and absent from other suites."""

import csv
import io
import re

import pytest
from bench_records import run, suite, write
from PIL import Image

from fedloom.bench import fcmoe_paper
from fedloom.bench.fcmoe_figures import fcmoe_figures
from fedloom.bench.fcmoe_tables import fcmoe_tables, rounds_to_target
from fedloom.bench.outputs import write_outputs
from fedloom.bench.reading import reading
from fedloom.bench.results import load_results
from fedloom.bench.significance import Comparisons
from fedloom.personalised import _summary

LABELS = {
    "fedavg_moe": "FedAvg",
    "fedmoe": "FedMoE",
    "fcmoe": "FC-MoE",
    "fcmoe_wo_projection": "FC-MoE w/o projection",
    "fcmoe_wo_retention": "FC-MoE w/o retention",
    "fcmoe_wo_importance": "FC-MoE w/o importance",
}


def native(label, seed=42, accuracy=0.5, alpha=0.1, task="ag_news", curve=None, home=0.6):
    """Return (record, examples) of one cell whose accuracy, precision and recall a test gives."""
    method = "fcmoe" if label.startswith("fcmoe") else label
    found, examples = run(label, seed, 1.0, alpha=alpha, score=accuracy, tasks=(task,), title=LABELS[label])
    found["routing"]["top1"]["classes"] = {
        task: {"labels": ["a", "b"], "accuracy": accuracy, "precision": accuracy + 0.1, "recall": accuracy - 0.1}
    }
    found["routing"]["top1"]["score"] = {task: accuracy, "macro": accuracy}
    found["personalised"]["score"] = {"mean": home, "weighted_mean": home, "spread": 0.1, "worst": home - 0.2}
    found["personalised"]["clients"] = {f"c{i}": {"score": home + 0.2 * i} for i in (-1, 0, 1)}
    curve = curve or [[r, accuracy * (1 - 0.5 ** (r + 1))] for r in range(6)] + [[6, accuracy]]
    found |= {"cell": f"{label}_{task}_a{alpha}_s{seed}", "method": method, "backbone": "switch-base-16"}
    conflicts = [[r, alpha / r, 0.1 * r, 1.0 + alpha] for r in range(1, 7)] if method == "fcmoe" else []
    found |= {"tasks": task, "score_curve": curve, "conflict": conflicts, "personal": method == "fcmoe"}
    return found, examples


def native_suite():
    runs = []
    for seed in (42, 43):
        up = 0.01 * (seed - 42)
        for alpha in (0.1, 0.5):
            for index, label in enumerate(("fedavg_moe", "fedmoe", "fcmoe")):
                runs.append(native(label, seed, 0.5 + 0.1 * index + up, alpha))
        for index, label in enumerate(LABELS):
            if label.startswith("fcmoe_"):
                runs.append(native(label, seed, 0.6 + 0.01 * index + up, home=0.5))
    return runs


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return load_results(write(tmp_path_factory.mktemp("native"), native_suite()))


@pytest.fixture(scope="module")
def tables(results):
    return {table.name: table for table in fcmoe_tables(results, Comparisons(results))}


def rows(table):
    return list(csv.DictReader(io.StringIO(table.csv())))


def test_table_one_by_hand_with_the_papers_numbers_apart(tables):
    found = {(row["α"], row["method"]): row for row in rows(tables["fcmoe_table1_ag_news"])}
    assert [method for _, method in found][:3] == ["FedAvg", "FedMoE", "FC-MoE"]  # no ablation, FC-MoE last
    ours = found["0.1", "FC-MoE"]
    assert float(ours["accuracy"]) == pytest.approx((0.7 + 0.71) / 2)
    assert float(ours["accuracy sd"]) == pytest.approx(0.01 / 2**0.5)
    assert float(ours["precision"]) == pytest.approx(0.805)
    assert float(ours["recall"]) == pytest.approx(0.605)
    assert (ours["paper: accuracy"], ours["paper: precision"], ours["paper: recall"]) == ("0.8359", "0.8617", "0.836")
    assert found["0.5", "FedAvg"]["paper: recall"] == "0.8739"
    assert ours["minus FC-MoE: accuracy"] == ""
    assert found["0.1", "FedAvg"]["minus FC-MoE: accuracy n"] == "2"
    assert "**0.7050 ± 0.0071**" in tables["fcmoe_table1_ag_news"].markdown()
    absent = found["0.5", "PFL-MoE (paper only)"]
    assert (absent["accuracy"], absent["accuracy n"], absent["paper: accuracy"]) == ("", "0", "0.9041")
    notes = " ".join(tables["fcmoe_table1_ag_news"].notes)
    assert "PFL-MoE's global model is FedAvg's" in notes
    assert "A client of FedMoE holds and trains 50% of the experts" in notes


def test_table_two_has_the_ablations_in_the_papers_order(tables):
    found = rows(tables["fcmoe_table2"])
    assert [row["method"] for row in found] == [
        "FC-MoE w/o projection", "FC-MoE w/o retention", "FC-MoE w/o importance", "FC-MoE",
    ]  # fmt: skip
    assert [row["paper: test accuracy"] for row in found] == ["0.7849", "0.8068", "0.8264", "0.8359"]
    assert [row["paper: local accuracy"] for row in found] == ["0.5574", "0.6108", "0.6459", "0.6732"]
    assert [float(row["local accuracy"]) for row in found] == pytest.approx([0.5, 0.5, 0.5, 0.6])
    assert all(row["α"] == "0.1" for row in found)


def test_rounds_to_the_target_by_hand(tmp_path):
    """FedAvg ends at 0.8, so the target is 0.76; its own curve is there at round 10, the others' at 5, and never."""
    runs = [
        native("fedavg_moe", 42, 0.8, curve=[[0, 0.2], [5, 0.7], [10, 0.77], [15, 0.8]]),
        native("fcmoe", 42, 0.9, curve=[[0, 0.2], [5, 0.76], [10, 0.7], [15, 0.9]]),
        native("fedmoe", 42, 0.7, curve=[[0, 0.2], [5, 0.5], [10, 0.6], [15, 0.7]]),
        native("fcmoe", 43, 0.9, curve=[[0, 0.2], [15, 0.9]]),  # no FedAvg of this seed, so no target
    ]
    results = load_results(write(tmp_path, runs))
    (setting,) = results.settings
    assert rounds_to_target(results, setting, "fedavg_moe") == {42: 10}
    assert rounds_to_target(results, setting, "fcmoe") == {42: 5}
    assert rounds_to_target(results, setting, "fedmoe") == {42: None}
    table = {t.name: t for t in fcmoe_tables(results, Comparisons(results))}["fcmoe_fig3a"]
    found = {row["method"]: row for row in rows(table)}
    assert found["FC-MoE"]["target accuracy"] == "0.76"
    assert (found["FedMoE"]["seeds that reach it"], found["FedMoE"]["rounds"]) == ("0", "")
    assert (found["FC-MoE"]["seeds"], found["FC-MoE"]["rounds"]) == ("1", "5.0")


def test_local_accuracy_and_conflict(tables):
    found = {(row["α"], row["method"]): row for row in rows(tables["fcmoe_local"])}
    assert found["0.1", "FC-MoE"]["client's model"] == "its own"
    assert found["0.1", "FedAvg"]["client's model"] == "the shared one"
    assert float(found["0.1", "FC-MoE"]["local accuracy: worst client"]) == pytest.approx(0.4)
    # three clients 0.2 apart: squares 0.04 + 0 + 0.04 over n − 1 = 2; the records' own number is another one
    assert float(found["0.1", "FC-MoE"]["local accuracy: spread over clients"]) == pytest.approx(0.2)
    assert any("1 + λ(Δ·Θ)/‖Θ‖²" in note for note in tables["fcmoe_local"].notes)
    conflict = {(row["α"], row["method"]): row for row in rows(tables["fcmoe_conflict"])}
    harmonic = sum(1 / r for r in range(1, 7)) / 6
    assert float(conflict["0.5", "FC-MoE"]["in conflict"]) == pytest.approx(0.5 * harmonic)
    assert float(conflict["0.1", "FC-MoE"]["length"]) == pytest.approx(1.1)
    assert ("0.1", "FedAvg") not in conflict


def test_a_new_records_spread_is_that_of_a_sample_too():
    clients = {"a": {"score": 0.2}, "b": {"score": 0.4}, "c": {"score": 0.6}}
    sizes = dict.fromkeys(clients, 1)
    assert _summary(clients, sizes, "score", min)["spread"] == pytest.approx(0.2)
    assert _summary({"a": {"score": 0.2}}, sizes, "score", min)["spread"] == 0.0


def test_tasks_are_settings_of_their_own(tmp_path):
    runs = [native(label, task=task) for label in ("fedavg_moe", "fcmoe") for task in ("ag_news", "mmlu")]
    results = load_results(write(tmp_path, runs))
    texts = [s.text for s in results.settings]
    assert texts == [f"switch-base-16, task = {task}, α = 0.1" for task in ("ag_news", "mmlu")]
    names = {table.name: table for table in fcmoe_tables(results, Comparisons(results))}
    assert rows(names["fcmoe_table1_mmlu"])[1]["paper: accuracy"] == "0.3764"
    assert rows(names["fcmoe_table1_mmlu"])[2]["paper: accuracy"] == "0.3325"  # PFL-MoE, the paper's alone
    assert [row["task"] for row in rows(names["fcmoe_local"])] == ["ag_news", "ag_news", "mmlu", "mmlu"]


@pytest.mark.filterwarnings("error:constrained_layout not applied")  # no place left for bars and curves
def test_every_figure_is_drawn(results):
    figures = {picture.name: picture for picture in fcmoe_figures(results)}
    slug = "switch-base-16_ag-news_alpha0.1"
    assert sorted(figures) == sorted(
        [
            "fcmoe_fig3a_rounds",
            "fcmoe_fig3b_local",
            "fcmoe_conflict",
            f"fcmoe_accuracy_{slug}",
            f"fcmoe_accuracy_{slug.replace('0.1', '0.5')}",
            f"fcmoe_fig4_ablations_{slug}",
        ]
    )
    assert all(Image.open(io.BytesIO(p.png)).width >= 600 for p in figures.values())
    assert "FC-MoE: 0.60 at α = 0.1, 0.60 at α = 0.5" in figures["fcmoe_fig3b_local"].text


def test_the_whole_report_of_a_native_suite(tmp_path):
    out = write(tmp_path, native_suite())
    names = {path.relative_to(out).as_posix() for path in write_outputs(out, "Native")}
    assert {"tables/fcmoe_table1_ag_news.md", "tables/table1.md", "figures/fcmoe_conflict.png"} <= names
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "FC-MoE against each baseline" in page
    assert "FedWeave" not in re.sub(r"data:image/svg\+xml;base64,[^\"]+", "", page)
    found = load_results(out)
    said = [s for section in reading(found, Comparisons(found)) for s in section.sentences]
    assert any("FC-MoE w/o projection" in s for s in said)


def test_other_suites_have_none_of_it(tmp_path):
    results = load_results(write(tmp_path, suite()))
    assert fcmoe_tables(results, Comparisons(results)) == []
    assert fcmoe_figures(results) == []
    assert results.main == "fedweave"


def test_the_papers_tables_are_complete():
    """The paper's text, read again: the order of its rows and what it says of them in words."""
    for task in ("ag_news", "mmlu"):
        for alpha in (0.1, 0.5, 1.0):
            accuracies = [fcmoe_paper.GLOBAL[task][label][alpha][0] for label in fcmoe_paper.GLOBAL[task]]
            assert accuracies == sorted(accuracies)
        assert fcmoe_paper.ABLATION[task]["fcmoe"][0] == fcmoe_paper.GLOBAL[task]["fcmoe"][0.1][0]


UNEVEN = "Not every row has the same seeds"


def test_tables_say_where_rows_have_other_seeds(tmp_path, tables):
    assert not any(note.startswith(UNEVEN) for table in tables.values() for note in table.notes)
    labels = ("fedavg_moe", "fcmoe", "fcmoe_wo_projection")
    runs = [native(label, seed) for label in labels for seed in (42, 43) if (label, seed) != ("fcmoe", 43)]
    results = load_results(write(tmp_path, runs))
    found = {table.name: table.notes for table in fcmoe_tables(results, Comparisons(results))}
    names = {"fcmoe_table1_ag_news", "fcmoe_table2", "fcmoe_local", "fcmoe_fig3a", "fcmoe_conflict"}
    assert {name for name, notes in found.items() if any(note.startswith(UNEVEN) for note in notes)} == names


def test_rounds_are_of_seeds_with_a_target(tmp_path):
    """FedAvg has seed 42 alone, so no row of the rounds to its accuracy has another."""
    runs = [native("fedavg_moe"), native("fcmoe", 42), native("fcmoe", 43)]
    results = load_results(write(tmp_path, runs))
    found = {table.name: table.notes for table in fcmoe_tables(results, Comparisons(results))}
    noted = {name: any(note.startswith(UNEVEN) for note in notes) for name, notes in found.items()}
    assert (noted["fcmoe_fig3a"], noted["fcmoe_local"]) == (False, True)


def test_figures_say_of_how_many_seeds_they_are(tmp_path):
    """Two seeds at α = 0.1, one at 0.5; the ablation has one, and so Figure 4."""
    runs = [native("fedavg_moe", seed, alpha=alpha) for alpha in (0.1, 0.5) for seed in (42, 43)]
    runs += [native("fcmoe", 42), native("fcmoe", 43), native("fcmoe", 42, alpha=0.5), native("fcmoe_wo_projection")]
    drawn = {p.name: p.svg.decode() for p in fcmoe_figures(load_results(write(tmp_path, runs)))}
    slug = "switch-base-16_ag-news_alpha"
    bars = drawn["fcmoe_fig3b_local"]
    assert all(f">{words}<" in bars for words in ("FedAvg (n = 1–2)", "FC-MoE (n = 1–2)", "0.60"))
    assert "0.60 (n" not in bars
    assert ">Over the seeds that all shown have: α = 0.1: seeds 42 and 43; α = 0.5: seed 42.<" in bars
    ablations = drawn[f"fcmoe_fig4_ablations_{slug}0.1"]
    assert ablations.count(">FC-MoE (n = 1)<") == 2  # bars and curve
    assert ">FC-MoE w/o projection (n = 1)<" in ablations
    ends = {alpha: drawn[f"fcmoe_accuracy_{slug}{alpha}"] for alpha in (0.1, 0.5)}
    for alpha, n in ((0.1, 2), (0.5, 1)):
        assert all(f">{title} (n = {n})<" in ends[alpha] for title in ("FedAvg", "FC-MoE"))
    assert all(f">α = {words}<" in drawn["fcmoe_conflict"] for words in ("0.1 (n = 1)", "0.5 (n = 1)"))
