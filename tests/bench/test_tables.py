"""Tables say what the records say: marks, missing cells, the paper's numbers in their own columns, CSV for programs."""

import csv
import io

import pytest
from bench_records import TASKS, run, suite, write

from fedloom.bench import paper
from fedloom.bench.costs import budget_table, cost_table
from fedloom.bench.layout import Column, Table, ranks, signed, value, words
from fedloom.bench.results import Stat, load_results
from fedloom.bench.significance import Comparisons
from fedloom.bench.tables import all_tables, global_table, per_hundred


def tables(out):
    results = load_results(out)
    return {table.name: table for table in all_tables(results, Comparisons(results))}


def rows(table):
    """Return the rows of a table's CSV by method."""
    return {row["method"]: row for row in csv.DictReader(io.StringIO(table.csv()))}


def test_best_and_second_and_ties():
    assert ranks({"a": 1.0, "b": 2.0, "c": 3.0}, lowest=True) == {"a": "best", "b": "second"}
    assert ranks({"a": 1.0, "b": 2.0, "c": 3.0}, lowest=False) == {"c": "best", "b": "second"}
    assert ranks({"a": 1.00001, "b": 1.00002, "c": 3.0}, lowest=True) == {"a": "best", "b": "best"}
    assert ranks({"a": 1.0, "b": 2.0, "c": 2.00001}, lowest=True) == {"a": "best", "b": "second", "c": "second"}
    assert ranks({"a": 1.0, "b": None}, lowest=True) == {}
    assert ranks({"a": 1.0, "b": 1.0}, lowest=True) == {}


def test_signed_numbers_have_true_signs_and_zero_has_none():
    assert [signed(v) for v in (0.12345, -0.5, 0.00001, -0.00001)] == ["+0.1235", "−0.5000", "0.0000", "0.0000"]


def test_global_table_by_hand(tmp_path):
    runs = [run(label, seed) for label in ("fedweave", "fedit") for seed in (42, 43)]
    losses = iter([1.0, 1.2, 1.3, 1.3])
    for record, _ in runs:
        loss = next(losses)
        record["routing"]["top1"]["loss"] = {"gsm8k": loss, "arc": loss + 1, "macro": loss + 0.5}
    table = tables(write(tmp_path, runs))["table1"]
    ours = rows(table)["Fedweave"]
    assert float(ours["gsm8k loss"]) == pytest.approx(1.1)
    assert float(ours["gsm8k loss sd"]) == pytest.approx(0.02**0.5)
    assert ours["gsm8k loss n"] == "2"
    assert "| Fedweave | 2 |" in table.markdown()
    assert "**1.1000 ± 0.1414**" in table.markdown()
    assert "<u>1.3000 ± 0.0000</u>" in table.markdown()


def test_csv_gives_back_full_precision(tmp_path):
    runs = [run("fedit", 42, 1.1), run("fedit", 43, 1.3)]
    got = rows(tables(write(tmp_path, runs))["table1"])["Fedit"]
    found = Stat.of(record["routing"]["top1"]["loss"]["macro"] for record, _ in runs)
    assert (float(got["macro loss"]), float(got["macro loss sd"]), got["macro loss n"]) == (found.mean, found.sd, "2")


def test_paper_numbers_stand_in_columns_of_their_own_and_only_at_its_alpha(tmp_path):
    found = tables(write(tmp_path, suite()))
    got = rows(found["table1"])
    assert got["FedWeave"]["paper, Llama-3.2-3B: macro score"] == "0.5872"
    assert got["FedWeave"]["paper, Gemma-2-2B: macro loss"] == "0.6954"
    assert got["FedIT"]["paper, Llama-3.2-3B: macro score"] == ""
    best = got["best baseline of the paper (the text does not name it)"]
    assert (best["paper, Llama-3.2-3B: macro loss"], best["macro loss"], best["macro loss n"]) == ("0.7496", "", "0")
    assert not [c for c in found["table1_tiny_alpha0.1"].columns if "paper" in c.group]


def test_paper_numbers_agree_with_each_other():
    """The text prints FedWeave's macro score in three places, and the ablations' gaps at α = 0.3 as FedLEASE's."""
    main = paper.MACRO["fedweave", paper.LLAMA, "score"].value
    assert main == paper.ROUTING["top1", "score"].value == paper.CLUSTERER["kmeans", "score"].value
    assert 1 - paper.ROUTING["top1", "ms"].value / paper.ROUTING["soft", "ms"].value == pytest.approx(0.324, abs=5e-4)
    assert paper.ROUTING["top2", "score"].value - main == pytest.approx(0.0018)


def test_pooled_data_and_the_backbone_are_shown_but_not_ranked(tmp_path):
    table = tables(write(tmp_path, suite()))["table1"]
    marks = {row[0].text: row[-5].mark for row in table.rows}  # macro loss, before four columns of the paper
    assert marks["Centralised (pooled data, not ranked)"] == ""
    assert (marks["FedWeave"], marks["FedLEASE"]) == ("best", "second")
    assert float(rows(table)["backbone alone (not ranked)"]["macro loss"]) == 2.5


def test_methods_without_a_global_model_stand_in_a_line_below(tmp_path):
    found = tables(write(tmp_path, suite()))
    assert "Local only" not in [row[0].text for row in found["table1"].rows]
    assert any(note.startswith("Local only has no global model") for note in found["table1"].notes)
    got = rows(found["table1_personalised"])["Local only"]
    assert got["client's model"] == "its own"
    assert float(got["loss worst client"]) == pytest.approx(1.2)


def test_rows_with_fewer_seeds_are_not_ranked_and_missing_cells_are_dashes(tmp_path):
    runs = [run("fedweave", 42, 1.0), run("fedweave", 43, 1.0, score=None), run("fedlease", 42, 0.5, score=None)]
    runs += [run("fedit", 42, 1.1), run("fedit", 43, 1.2)]
    table = tables(write(tmp_path, runs))["table1"]
    by_title = {row[0].text: row for row in table.rows}
    loss = {title: row[-5] for title, row in by_title.items()}
    assert (loss["Fedweave"].mark, loss["Fedit"].mark, loss["Fedlease"].mark) == ("best", "second", "")
    assert by_title["Fedlease"][-6].text == "–"
    assert by_title["Fedweave"][-6].text.endswith("(n = 1)")
    assert any("same seeds" in note for note in table.notes)


def test_ablations_against_fedweave_with_intervals(tmp_path):
    got = rows(tables(write(tmp_path, suite()))["table2"])["w/o prototype-expert"]
    assert float(got["minus FedWeave: loss"]) == pytest.approx(0.04)
    assert float(got["minus FedWeave: loss low"]) <= 0.04 + 1e-9
    assert float(got["minus FedWeave: loss p"]) == pytest.approx(2 / 2001)
    assert got["minus FedWeave, paper, Llama-3.2-3B: loss"] == "0.0336"


def test_discovery_table_holds_every_variant_of_fedweave(tmp_path):
    got = rows(tables(write(tmp_path, suite()))["table3"])
    assert {"FedWeave", "FedWeave, spectral"} <= got.keys()
    ours = next(r for r in csv.DictReader(io.StringIO(tables(tmp_path)["table3"].csv())) if r["method"] == "FedWeave")
    assert (float(ours["local purity"]), float(ours["global NMI"]), float(ours["experts"])) == pytest.approx(
        (0.9, 0.8, 3)
    )
    assert got["FedWeave, spectral"]["paper, Llama-3.2-3B: global purity"] == "0.9499"


def test_routing_table_counts_seconds_per_hundred_examples(tmp_path):
    out = write(tmp_path, [run("fedweave", modes=("top1", "soft"), n=40)])
    cell = load_results(out).cells[0]
    assert per_hundred(cell, "top1", "generation") == pytest.approx(100 * 8.0 / (40 * len(TASKS)))
    assert per_hundred(cell, "soft", "loss") == pytest.approx(100 * 3.0 / (40 * len(TASKS)))
    got = list(csv.DictReader(io.StringIO(tables(out)["table4"].csv())))
    assert [r["routing"] for r in got] == ["top1", "soft"]
    assert got[1]["paper, Llama-3.2-3B: latency, ms"] == "3177"
    assert float(got[1]["minus top1: loss"]) == pytest.approx(-0.01)


def test_budgets_are_the_papers(tmp_path):
    results = load_results(write(tmp_path, [run("fedweave"), run("fedit"), run("nobody")]))
    table = budget_table(results)
    got = {(r["backbone"], r["method"]): r for r in csv.DictReader(io.StringIO(table.csv()))}
    ours = got["Llama-3.2-3B", "FedWeave"]
    # Appendix B: 10.75M scalars, 9.18M of them LoRA; a signature has 917,504 values
    assert (ours["total"], ours["LoRA"], ours["signature, values"]) == ("10750468", "9175040", "917504")
    assert round(int(ours["total"]) / 1e6, 2) == float(ours["paper: total"]) / 1e6
    assert ("tiny", "FedIT") in got
    assert any("no registered method: nobody" in note for note in table.notes)


def test_costs_are_those_of_the_records(tmp_path):
    results = load_results(write(tmp_path, [run("fedweave", s, modes=("top1", "soft")) for s in (42, 44)]))
    got = rows(cost_table(results))["Fedweave"]
    assert float(got["per client and round: up"]) == 1024
    assert float(got["warm-up steps / local steps"]) == pytest.approx(0.2)
    assert (float(got["time: training"]), float(got["time: training sd"])) == pytest.approx((83, 2**0.5))
    assert float(got["paper, four buckets: warm-up share"]) == 0.2


def test_markdown_takes_names_as_they_are():
    table = Table("t", "a|b <i>", [Column("m_1"), Column("n")], [[words("x|y*_<script>\n"), value(1.5)]])
    text = table.markdown()
    assert "**a\\|b &lt;i&gt;**" in text
    assert "| x\\|y\\*\\_&lt;script&gt;\ufffd | 1.5000 |" in text
    assert "| --- | ---: |" in text


def test_a_row_that_does_not_fit_its_columns_is_refused():
    with pytest.raises(ValueError, match="zip"):
        Table("t", "t", [Column("a"), Column("b")], [[words("x")]])


def test_no_global_table_without_a_global_model(tmp_path):
    results = load_results(write(tmp_path, [run("local", routing={}, routing_matrix={}, global_model=False)]))
    assert global_table(results, results.settings[0]) is None
