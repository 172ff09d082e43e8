"""Means, settings and what is refused."""

import json
import math
import statistics

import pytest
from bench_records import run, suite, write

from fedloom.bench.results import Stat, load_results, mixture_notes
from fedloom.errors import DataError


def test_mean_and_standard_deviation_are_those_of_a_sample():
    found = Stat.of([1.0, None, 2.0, 4.0])
    assert found.n == 3
    assert found.mean == pytest.approx(7 / 3)
    # by hand: deviations −4/3, −1/3, 5/3; squares sum to 42/9; over n − 1 = 2
    assert found.sd == pytest.approx(math.sqrt(42 / 9 / 2))
    assert found.sd == pytest.approx(statistics.stdev([1, 2, 4]))


def test_one_seed_has_no_deviation_and_none_has_no_mean():
    assert (Stat.of([3.0]).mean, Stat.of([3.0]).sd) == (3.0, None)
    assert (Stat.of([None]).mean, Stat.of([]).sd, Stat.of([]).n) == (None, None, 0)


def test_main_setting_is_the_papers_alpha_and_comes_first(tmp_path):
    results = load_results(write(tmp_path, [run("fedit", alpha=0.1), run("fedit", 43, alpha=0.1), run("fedit")]))
    assert [s.get("alpha") for s in results.settings] == [0.3, 0.1]
    assert results.settings[0].text == "tiny, α = 0.3"
    assert results.settings[1].slug == "tiny_alpha0.1"


def test_without_the_papers_alpha_the_fullest_setting_is_main(tmp_path):
    runs = [run("fedit", alpha=0.1), run("fedit", alpha=0.5), run("fedweave", alpha=0.5)]
    assert load_results(write(tmp_path, runs)).settings[0].get("alpha") == 0.5


def test_ablations_and_variants_are_not_compared_but_stand_alone_where_there_is_nothing_else(tmp_path):
    results = load_results(write(tmp_path / "all", suite()))
    main = results.settings[0]
    assert results.compared(main) == ["fedweave", "fedit", "fedlease", "ffa_lora", "local", "centralised"]
    results = load_results(write(tmp_path / "one", [run("fedweave_spectral")]))
    assert results.compared(results.settings[0]) == ["fedweave_spectral"]


def test_the_later_line_of_a_cell_counts(tmp_path):
    results = load_results(write(tmp_path, [run("fedit", loss=1.0), run("fedit", loss=2.0)]))
    (cell,) = results.cells
    assert cell.measured("loss") > 1.5


def test_two_cells_of_one_label_setting_and_seed_are_refused(tmp_path):
    one, other = run("fedit"), run("fedit")
    other[0]["cell"] = "another"
    with pytest.raises(DataError, match=r"fedit_a0\.3_s42 and another are the same label"):
        load_results(write(tmp_path, [one, other]))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot read .*results.jsonl.*Run the benchmark first"),
        ("", "holds no result"),
        ('{"cell": "a"', "line 1 is damaged"),
        ("[1]\n", "line 1 is no JSON object"),
        (json.dumps({"cell": "a", "seed": 1}), "line 1, lacks backbone, label, method, title"),
    ],
)
def test_damaged_files_are_named(tmp_path, content, said):
    if content is not None:
        (tmp_path / "results.jsonl").write_text(content)
    with pytest.raises(DataError, match=said):
        load_results(tmp_path)


def noted(tmp_path, *changes):
    """Return the notes of FedIT's runs with seeds 42, 43, …, each changed so; ``None`` takes a key out."""
    runs = [run("fedit", 42 + i) for i in range(len(changes))]
    for (record, _), change in zip(runs, changes, strict=True):
        record.update({key: value for key, value in change.items() if value is not None})
        for key in [key for key, value in change.items() if value is None]:
            del record[key]
    return mixture_notes(load_results(write(tmp_path, runs)).cells)


def test_a_run_that_two_versions_made_counts_under_both(tmp_path):
    """Older records have ``source_hash`` only."""
    (note,) = noted(tmp_path, {}, {"source_hashes": ["a" * 64, "s" * 64]}, {"source_hashes": ["s" * 64]})
    assert note == (
        "The 3 runs of this table were made with 2 versions of fedloom's source: ssssssssssss (3 runs), "
        "aaaaaaaaaaaa (1 run); 1 run by more than one, resumed."
    )
    assert noted(tmp_path, {}, {"source_hashes": ["s" * 64]}) == []


def test_other_weights_under_one_backbones_name_are_noted(tmp_path):
    (note,) = noted(tmp_path, {}, {"backbone_hash": "x" * 64}, {})
    assert note == (
        "The 3 runs of this table on tiny had 2 versions of its weights: bbbbbbbbbbbb (2 runs), xxxxxxxxxxxx (1 run)."
    )
    assert noted(tmp_path, {}, {"backbone_hash": "x" * 64, "backbone": "tiny-switch"}) == []
    (note,) = noted(tmp_path, {}, {"backbone_hash": None})
    assert note.endswith("bbbbbbbbbbbb (1 run), unknown (1 run).")


def test_other_rows_in_one_setting_and_seed_are_noted(tmp_path):
    one, other = {"rows": "r" * 64, "test_rows": "t" * 64}, {"rows": "r" * 64, "test_rows": "u" * 64}
    assert noted(tmp_path, one, other) == []  # other seeds draw other rows
    (note,) = noted(tmp_path, one, other | {"seed": 42, "label": "fedprox"})
    assert note == "Runs of tiny, α = 0.3, seed 42, were measured on 2 different sets of rows."
    assert noted(tmp_path, one, {"seed": 42, "label": "fedprox"}) == []  # an older record does not say
    pooled = one | {"rows": "p" * 64, "seed": 42, "label": "centralised", "method": "centralised"}
    assert noted(tmp_path, one, pooled) == []  # the same rows in one list
