"""Tables say what the records say: marks, missing cells, the paper's numbers in their own columns, CSV for programs."""

import csv
import io

import pytest
from bench_records import TASKS, run, suite, write

from fedloom.bench import fedweave_paper as paper
from fedloom.bench.analysis_tables import analysis_tables
from fedloom.bench.costs import budget_table, cost_table
from fedloom.bench.layout import Column, Table, difference, p_words, ranks, signed, value, words
from fedloom.bench.results import Stat, load_results, per_hundred
from fedloom.bench.significance import Comparisons, Difference
from fedloom.bench.tables import capacity_notes, global_table, model_tables, seed_notes


def tables_of(results):
    return [*model_tables(results), *analysis_tables(results, Comparisons(results))]


def tables(out):
    results = load_results(out)
    return {table.name: table for table in tables_of(results)}


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
    table = tables(write(tmp_path, suite()))["table2"]
    found = csv.DictReader(io.StringIO(table.csv()))
    (got,) = (row for row in found if (row["method"], row["routing"]) == ("w/o prototype-expert", "top1"))
    assert float(got["minus FedWeave: loss"]) == pytest.approx(0.04)
    assert float(got["minus FedWeave: loss low"]) <= 0.04 + 1e-9
    assert float(got["minus FedWeave: loss p"]) == pytest.approx(2 / 2001)
    assert got["minus FedWeave, paper, Llama-3.2-3B: loss"] == "0.0336"


def test_ablations_compare_one_expert_with_one_and_the_mixture_with_the_mixture(tmp_path):
    """FedWeave 1.0 and 0.8, the ablation 1.3 and 0.7: worse by 0.3 with one expert, better by 0.1 when mixed."""
    modes = ("top1", "top2", "soft")
    runs = [run("fedweave", 42, 1.0, modes=modes, lower={"soft": 0.2})]
    runs += [run("fedweave_wo_client_router", 42, 1.3, modes=modes, lower={"soft": 0.6})]
    table = tables(write(tmp_path, runs))["table2"]
    got = {(row["method"], row["routing"]): row for row in csv.DictReader(io.StringIO(table.csv()))}
    title = "Fedweave Wo Client Router"
    assert list(got) == [("Fedweave", "top1"), ("Fedweave", "soft"), (title, "top1"), (title, "soft")]
    gaps = {key: float(got[key]["macro loss"]) - float(got["Fedweave", key[1]]["macro loss"]) for key in got}
    assert gaps == pytest.approx({("Fedweave", "top1"): 0, ("Fedweave", "soft"): 0, (title, "top1"): 0.3,
                                  (title, "soft"): -0.1})  # fmt: skip
    differences = {key: got[key]["minus FedWeave: loss"] for key in got}
    assert differences["Fedweave", "top1"] == differences["Fedweave", "soft"] == ""
    assert float(differences[title, "top1"]) == pytest.approx(0.3)
    assert float(differences[title, "soft"]) == pytest.approx(-0.1)
    paper_column = "minus FedWeave, paper, Llama-3.2-3B: loss"  # the paper prints one expert's only
    assert [got[title, mode][paper_column] for mode in ("top1", "soft")] == ["0.0428", ""]


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


def test_the_size_of_the_mixture_stands_in_the_row(tmp_path):
    """Three seeds that found 3, 4 and 4 experts; a single adapter is 1 × its rank."""
    modes = ("top1", "soft")
    runs = [run("fedweave", s, modes=modes, experts=m, rank=8) for s, m in ((42, 3), (43, 4), (44, 4))]
    runs += [run("fedweave_wo_client_router", 42, modes=modes, experts=4, rank=8), run("fedit", 42, rank=32)]
    found = tables(write(tmp_path, runs))
    got = {row[0].text: row[2] for row in found["table1"].rows}
    assert got["Fedweave"].text == "3.67 × 8"
    assert got["Fedweave"].parts == (pytest.approx(11 / 3), 8)
    assert (got["Fedit"].text, got["Fedit"].parts) == ("1 × 32", (1.0, 32))
    assert [row[2].text for row in found["table2"].rows] == [*["3.67 × 8"] * 2, *["3 × 8"] * 2, *["4 × 8"] * 2]
    budgets = {
        (r["backbone"], r["method"]): r for r in csv.DictReader(io.StringIO(budget_table(load_results(tmp_path)).csv()))
    }
    assert (budgets["tiny", "FedWeave"]["experts"], budgets["Llama-3.2-3B", "FedWeave"]["experts"]) == ("4", "4")
    assert budgets["tiny", "FedIT"]["experts found"] == "1.0"
    assert budgets["Llama-3.2-3B", "FedWeave"]["experts found"] == ""


def test_every_row_names_its_routing_and_fedweaves_mixture_is_not_ranked(tmp_path):
    runs = [run("fedweave", loss=1.0, modes=("top1", "top2", "soft"), score=None)]
    runs += [run("fedlease", loss=0.985, modes=("soft", "top1"), score=None), run("fedit", loss=1.1, score=None)]
    table = tables(write(tmp_path, runs))["table1"]
    routing = {row[0].text: row[3].text for row in table.rows}
    mixed = "Fedweave (its mixture, not ranked)"
    assert (routing["Fedweave"], routing[mixed]) == ("top1", "soft")
    assert (routing["Fedlease"], routing["Fedit"]) == ("soft", "none, one adapter")
    losses = {row[0].text: row[-5] for row in table.rows}
    assert losses[mixed].parts[0] == pytest.approx(losses["Fedweave"].parts[0] - 0.02)  # better than all, and no mark
    assert (losses[mixed].mark, losses["Fedlease"].mark, losses["Fedweave"].mark) == ("", "best", "second")


def test_personalised_rows_name_their_routing(tmp_path):
    runs = [run("fedweave", modes=("top1", "soft")), run("fedlease", modes=("soft", "top1")), run("fedit")]
    runs += [run("local", routing={}, routing_matrix={}, global_model=False, personal=True)]
    for record, _ in runs:
        record["personalised"]["routing"] = "soft" if record["label"] == "fedlease" else "top1"
    got = rows(tables(write(tmp_path, runs))["table1_personalised"])
    assert {title: row["routing"] for title, row in got.items()} == {
        "Fedweave": "top1", "Fedlease": "soft", "Fedit": "none, one adapter", "Local": "none, one adapter",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("seeds", "of_the_row", "count"),
    [
        ((1, 2, 3), 3, ""),
        ((1, 2, 3, 4), 4, ""),
        ((1, 2, 3), 4, " (n = 3)"),  # the row has a seed that the other one lacks
        ((1, 2), 2, " (n = 2)"),  # too few to say anything of other seeds
        ((7,), 1, " (n = 1)"),
        ((1, 2, 3), None, " (n = 3)"),
    ],
)
def test_a_difference_says_its_seeds_where_they_are_not_the_rows_or_too_few(seeds, of_the_row, count):
    found = Difference(-0.25, -0.5, 0.125, 0.04, seeds, (-0.25,) * len(seeds))
    entry = difference(found, of_the_row)
    assert entry.text == "−0.2500 [−0.5000, +0.1250], p = 0.040" + count
    assert entry.parts == (-0.25, -0.5, 0.125, 0.04, len(seeds))


CAPACITY = "Models of one seed differ in experts × rank"
SEEDS = "Not every row has the same seeds"


@pytest.mark.parametrize(
    ("sizes", "noted"),
    [
        ({"fedweave": [(42, 4, 8)], "fedit": [(42, 1, 32)]}, False),  # 32 = 32
        ({"fedweave": [(42, 4, 8)], "fedlease": [(42, 2, 8)]}, True),  # 32 and 16
        ({"fedweave": [(42, 4, 8), (43, 2, 8)], "fedlease": [(42, 4, 8), (43, 2, 8)]}, False),  # alike on each seed
        ({"fedweave": [(42, 4, 8)], "fedlease": [(43, 2, 8)]}, False),  # no seed has both
        ({"fedweave": [(42, 4, 8)], "fedlease": [(42, 2, None)]}, False),  # a record without a rank
        ({"fcmoe": [(42, 4, 8)], "fedavg": [(42, 1, 8)]}, False),  # experts that the backbone comes with
    ],
)
def test_unequal_capacity_is_noted(tmp_path, sizes, noted):
    runs = [
        run(label, seed, modes=("top1", "soft"), method=label, experts=experts, rank=rank)
        for label, cells in sizes.items()
        for seed, experts, rank in cells
    ]
    results = load_results(write(tmp_path, runs))
    notes = capacity_notes(results, results.settings, list(sizes))
    assert [note.startswith(CAPACITY) for note in notes] == [True] * noted
    for table in model_tables(results):
        assert any(note.startswith(CAPACITY) for note in table.notes) == noted, table.name


def test_unequal_seeds_are_noted_within_a_setting_only(tmp_path):
    runs = [run("fedweave", seed) for seed in (42, 43)] + [run("fedit", seed) for seed in (42, 43)]
    runs += [run(label, alpha=0.1) for label in ("fedweave", "fedit")]
    results = load_results(write(tmp_path / "even", runs))
    assert seed_notes(results, results.settings, ["fedweave", "fedit", "absent"]) == []
    assert not any(note.startswith(SEEDS) for table in tables_of(results) for note in table.notes)
    results = load_results(write(tmp_path / "odd", [*runs, run("fedit", 44)]))
    (note,) = seed_notes(results, results.settings, ["fedweave", "fedit"])
    assert note.startswith(SEEDS)
    assert seed_notes(results, results.settings[1:], ["fedweave", "fedit"]) == []
    assert {table.name: note in table.notes for table in model_tables(results)} == {
        "table1": True, "table1_personalised": True, "table1_tiny_alpha0.1": False,
        "table1_personalised_tiny_alpha0.1": False,
    }  # fmt: skip


def test_ablations_of_another_size_or_other_seeds_are_noted(tmp_path):
    modes = ("top1", "soft")
    runs = [run("fedweave", seed, modes=modes, experts=4, rank=8) for seed in (42, 43)]
    runs += [run("fedweave_wo_prototype_expert", 42, modes=modes, experts=2, rank=8)]
    table = tables(write(tmp_path, runs))["table2"]
    assert any(note.startswith(CAPACITY) for note in table.notes)
    assert any(note.startswith(SEEDS) for note in table.notes)
    assert table.rows[-1][-3].text.endswith("(n = 1)")


def test_runs_of_other_versions_are_counted_below_every_table(tmp_path):
    modes = ("top1", "soft")
    runs = [run("fedweave", seed, modes=modes) for seed in (42, 43)] + [run("fedit", 42)]
    runs[1][0]["source_hash"] = "t" * 64
    runs[2][0]["packages"] = {"torch": "2.10"}
    results = load_results(write(tmp_path, runs))
    source = "2 versions of fedloom's source: ssssssssssss (2 runs), tttttttttttt (1 run)."
    torch = "2 versions of torch: 2.9 (2 runs), 2.10 (1 run)."
    whole = [*tables_of(results), budget_table(results), cost_table(results)]
    assert len(whole) == 6
    for table in whole:
        notes = "\n".join(table.notes)
        of = 2 if table.name in ("table3", "table4") else 3  # only FedWeave has buckets and several routings
        if of == 3:
            assert f"The 3 runs of this table were made with {source}" in notes, table.name
            assert f"The 3 runs of this table were made with {torch}" in notes, table.name
        else:
            assert "The 2 runs of this table were made with 2 versions of fedloom's source" in notes, table.name
            assert "of torch" not in notes, table.name


def test_runs_of_one_version_have_no_such_note(tmp_path):
    results = load_results(write(tmp_path, [run("fedweave", 42), run("fedit", 42)]))
    whole = [*tables_of(results), budget_table(results), cost_table(results)]
    assert not any("versions of" in note for table in whole for note in table.notes)


@pytest.mark.parametrize(
    ("counts", "noted"),
    [
        ([{"gsm8k": 3, "mmlu": 937}, {"gsm8k": 3, "mmlu": 900}], "3 of gsm8k and 900–937 of mmlu."),
        ([{"gsm8k": 0, "mmlu": 5}, None], "5 of mmlu."),
        ([{"gsm8k": 0}, {"gsm8k": 0}], None),
        ([None, None], None),  # records from before the number
    ],
)
def test_test_rows_that_were_left_out_are_noted(tmp_path, counts, noted):
    modes = ("top1", "soft")
    labels = ("fedweave", "fedweave_wo_client_router")
    runs = [
        run(label, seed, modes=modes, test_rows_too_long=count)
        for label in labels
        for seed, count in zip((42, 43), counts, strict=True)
    ]
    shown = tables_of(load_results(write(tmp_path, runs)))
    assert [table.name for table in shown] == ["table1", "table1_personalised", "table2", "table3", "table4"]
    for table in shown:
        found = [note for note in table.notes if "left out of a run" in note]
        assert [note.partition(": ")[2] for note in found] == ([noted] if noted else []), table.name


def test_what_has_no_traffic_has_no_bytes(tmp_path):
    runs = [run("local", 42, title="Local"), run("centralised", 42, title="Centralised"), run("ffa_lora", 42)]
    table = cost_table(load_results(write(tmp_path, runs)))
    got = rows(table)
    for title in ("Local", "Centralised"):
        assert got[title]["per client and round: up"] == got[title]["per client and round: down"] == ""
    assert float(got["Ffa Lora"]["per client and round: down"]) == 2048
    assert any(note.startswith("Local and Centralised: no traffic") for note in table.notes)
    assert any("of Ffa Lora the frozen A" in note for note in table.notes)


def test_resumed_runs_do_not_count_in_the_time_with_evaluation(tmp_path):
    runs = [run("fedit", 42, seconds=100.0), run("fedit", 43, seconds=5.0, resumed=True)]
    table = cost_table(load_results(write(tmp_path, runs)))
    got = rows(table)["Fedit"]
    assert (float(got["time: with evaluation"]), got["time: with evaluation n"]) == (100.0, "1")
    assert any(note.startswith("1 run went on from a checkpoint") for note in table.notes)
    assert "(n = 1)" in table.markdown()


def test_p_is_said_to_be_at_most_a_thousandth_where_it_is():
    assert [p_words(p) for p in (2 / 2001, 0.001, 0.0012, 0.0016)] == ["p ≤ 0.001"] * 2 + ["p = 0.001", "p = 0.002"]
