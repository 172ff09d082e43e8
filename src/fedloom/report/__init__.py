"""``report.html``: one self-contained page that tells a person what a run did, and the figures for a README."""

from __future__ import annotations

from pathlib import Path

from fedloom.errors import DataError
from fedloom.files import write_atomic
from fedloom.report.contents import page_contents
from fedloom.report.figures import heat_map
from fedloom.report.folder import read_run
from fedloom.report.page import template

__all__ = ["routing_figure", "write_report"]


def write_report(out: Path, *, unfinished: bool = False) -> Path:
    """Write ``out/report.html`` from what the run folder ``out`` holds; the same folder gives the same bytes.

    Args:
        out: a run folder with ``config.yaml manifest.json rounds.jsonl metrics.json``.
        unfinished: the run may still go on; the page then shows what there is without ``metrics.json``.

    Returns:
        The path of the page.

    Raises:
        DataError: a file of the run is missing or cannot be read.
    """
    html = template("report/report.html.j2").render(page_contents(read_run(out, unfinished=unfinished)))
    path = out / "report.html"
    write_atomic(path, html.encode())
    return path


def routing_figure(out: Path, path: Path) -> Path:
    """Write the task × expert heat map of a run (FedWeave, Fig. 2) as ``.svg`` or ``.png``.

    Raises:
        DataError: the run has no router or no test set, so there is nothing to draw.
    """
    matrix = read_run(out).metrics.get("routing_matrix")
    if not matrix:
        raise DataError(
            f"{out} has no routing to draw: the method has no router, or the run had no test set. "
            "Run a method with experts (fedweave) with test data."
        )
    if path.suffix not in (".svg", ".png"):
        raise DataError(f"{path}: a figure is written as .svg or .png. Name it so.")
    write_atomic(path, heat_map(matrix, path.suffix[1:]))
    return path
