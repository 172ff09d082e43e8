"""What the repository holds of finished benchmarks is what its own records say: drawn again, counted again."""

import csv
import io
import math
import re
import shutil
from pathlib import Path

import pytest

from fedloom.bench.outputs import write_outputs
from fedloom.bench.results import load_results
from fedloom.bench.suite import load_suite

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
SUITES = sorted(path.parents[1] for path in EXPERIMENTS.glob("*/results/results.jsonl"))
AGAIN = "draw them again with `fedloom bench SUITE --out RESULTS`"


@pytest.fixture(scope="module", params=SUITES, ids=lambda folder: folder.name)
def drawn(request, tmp_path_factory):
    """Return a suite's folder, a fresh folder with what its records give, and what was written there."""
    folder, out = request.param, tmp_path_factory.mktemp(request.param.name)
    shutil.copy(folder / "results/results.jsonl", out)
    shutil.copytree(folder / "results/examples", out / "examples")
    suite, _ = load_suite(folder / "suite.yaml")
    written = write_outputs(out, suite.title, suite.notes)
    return folder, out, {path.relative_to(out) for path in written}


def test_there_are_suites_to_look_at():
    assert {"tiny-paper", "fcmoe-tiny"} <= {folder.name for folder in SUITES}


def test_the_same_files_and_no_others(drawn):
    folder, _, written = drawn
    found = {p.relative_to(folder / "results") for kind in ("tables", "figures") for p in
             (folder / "results" / kind).iterdir()}  # fmt: skip
    assert found == {path for path in written if path.name != "report.html"}, AGAIN


def test_tables_are_those_of_the_records(drawn):
    folder, out, written = drawn
    for path in sorted(written):
        committed, fresh = folder / "results" / path, out / path
        if path.suffix == ".md":
            assert committed.read_text("utf-8") == fresh.read_text("utf-8"), f"{committed}: {AGAIN}"
        elif path.suffix == ".csv":
            assert same_numbers(committed.read_text("utf-8"), fresh.read_text("utf-8")), f"{committed}: {AGAIN}"


def test_the_page_says_what_the_records_say(drawn):
    """But for the pictures in it, which differ between versions of matplotlib."""
    folder, out, _ = drawn
    committed, fresh = ((p / "report.html").read_text("utf-8") for p in (folder / "results", out))
    assert without_pictures(committed) == without_pictures(fresh), AGAIN


def test_records_and_readme_agree_with_the_suite(drawn):
    folder, _, _ = drawn
    _, cells = load_suite(folder / "suite.yaml")
    records = {cell.record["cell"]: cell.record for cell in load_results(folder / "results").cells}
    hashes = {cell.name: cell.config_hash for cell in cells}
    assert {name: record["config_hash"] for name, record in records.items()} == {n: hashes.get(n) for n in records}
    assert {path.stem for path in (folder / "results/examples").glob("*.json")} == records.keys()
    readme = (folder / "README.md").read_text("utf-8")
    said = re.findall(r"(\d+) of (\d+) cells", readme)
    assert said == [(str(len(records)), str(len(cells)))] * len(said)
    assert said, f"{folder}/README.md does not say how many cells are finished"


def without_pictures(page):
    return re.sub(r"data:image/[a-z+]+;base64,[A-Za-z0-9+/=]+", "picture", page)


def same_numbers(a, b):
    """Return whether two CSV files agree, numbers but for the last bits, which are the processor's."""
    a, b = (list(csv.reader(io.StringIO(text))) for text in (a, b))
    return [len(row) for row in a] == [len(row) for row in b] and all(
        same(x, y) for left, right in zip(a, b, strict=True) for x, y in zip(left, right, strict=True)
    )


def same(a, b):
    try:
        return math.isclose(float(a), float(b), rel_tol=1e-9, abs_tol=1e-12)
    except ValueError:
        return a == b


def test_numbers_agree_but_for_the_last_bits():
    assert same_numbers("a,b\n1.0,x\n", "a,b\n1.0000000000001,x\n")
    for other in ("a,b\n1.001,x\n", "a,b\n1.0,y\n", "a,b\n1.0,\n", "a,b\n"):
        assert not same_numbers("a,b\n1.0,x\n", other)
