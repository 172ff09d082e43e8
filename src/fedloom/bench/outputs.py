"""From ``results.jsonl`` to tables, figures and one page; works on whatever part of a benchmark is done."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedloom.bench.analysis_tables import analysis_tables
from fedloom.bench.costs import budget_table, cost_table
from fedloom.bench.fcmoe_figures import fcmoe_figures
from fedloom.bench.fcmoe_tables import fcmoe_tables
from fedloom.bench.figures import all_figures
from fedloom.bench.reading import reading
from fedloom.bench.report import render
from fedloom.bench.results import load_results
from fedloom.bench.significance import Comparisons
from fedloom.bench.tables import model_tables
from fedloom.files import write_atomic


def write_outputs(out: Path, suite_title: str, notes: Sequence[str] = ()) -> list[Path]:
    """Write ``tables/*.md *.csv``, ``figures/*.svg *.png`` and ``report.html`` into a benchmark's folder.

    Args:
        out: a folder with ``results.jsonl`` and ``examples/``.
        suite_title: heading of the page.
        notes: what a reader must know of the suite, one paragraph each.

    Returns:
        What was written; the same results give the same bytes.

    Raises:
        DataError: the results are missing, damaged or inconsistent.
    """
    results = load_results(out)
    comparisons = Comparisons(results)
    tables = [*fcmoe_tables(results, comparisons), *model_tables(results), *analysis_tables(results, comparisons)]
    tables += [budget_table(results), cost_table(results)]
    pictures = [*fcmoe_figures(results), *all_figures(results)]
    page = render(suite_title, notes, results, tables, pictures, reading(results, comparisons))
    files: dict[Path, bytes] = {}
    for table in tables:
        files[out / "tables" / f"{table.name}.md"] = table.markdown().encode()
        files[out / "tables" / f"{table.name}.csv"] = table.csv().encode()
    for picture in pictures:
        files[out / "figures" / f"{picture.name}.svg"] = picture.svg
        files[out / "figures" / f"{picture.name}.png"] = picture.png
    files[out / "report.html"] = page.encode()
    for path, data in files.items():
        write_atomic(path, data)
    return list(files)
