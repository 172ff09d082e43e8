"""``report.html`` of a benchmark: one self-contained page with every table and figure, and what the numbers say."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from fedloom.bench.figures import Picture
from fedloom.bench.layout import Table
from fedloom.bench.reading import Section
from fedloom.bench.results import Cell, Results
from fedloom.bench.significance import LEAST_SEEDS, RESAMPLES
from fedloom.report.page import template
from fedloom.report.wording import MISSING


def render(
    title: str,
    notes: Sequence[str],
    results: Results,
    tables: Sequence[Table],
    pictures: Sequence[Picture],
    sections: Sequence[Section],
) -> str:
    """Return the page; the same results give the same bytes."""
    return template("bench/report.html.j2").render(
        title=title,
        notes=notes,
        cells=len(results.cells),
        labels=len(results.labels()),
        seeds=", ".join(str(seed) for seed in sorted({c.seed for c in results.cells})),
        settings=[setting.text for setting in results.settings],
        resamples=RESAMPLES,
        least_seeds=LEAST_SEEDS,
        sections=sections,
        tables=[_table(table) for table in tables],
        pictures=[_picture(picture) for picture in pictures],
        runs=[_run(cell) for cell in results.cells],
        commands=list(dict.fromkeys(str(c.record["command"]) for c in results.cells if c.record.get("command"))),
    )


def _table(table: Table) -> dict[str, Any]:
    text = [table.is_text(index) for index in range(len(table.columns))]
    return {
        "name": table.name,
        "title": table.title,
        "grouped": any(column.group for column in table.columns),
        "groups": table.groups,
        "columns": [{"head": column.head, "text": t} for column, t in zip(table.columns, text, strict=True)],
        "rows": table.rows,
        "notes": table.notes,
    }


def _picture(picture: Picture) -> dict[str, str]:
    encoded = base64.b64encode(picture.svg).decode()
    return {
        "name": picture.name,
        "title": picture.title,
        "text": picture.text,
        "uri": f"data:image/svg+xml;base64,{encoded}",
    }


def _run(cell: Cell) -> dict[str, Any]:
    record = cell.record
    keys = ("fedloom", "config_hash", "source_hash", "backbone_hash")
    return {key: str(record.get(key) or MISSING) for key in keys} | {
        "cell": record["cell"],
        "seed": cell.seed,
        "machine": _machine(record.get("machine") or {}),
        "seconds": record.get("seconds"),
        "resumed": bool(record.get("resumed")),
    }


def _machine(machine: Mapping[str, Any]) -> str:
    """Return the accelerator, or the processor, and the threads."""
    named = [str(machine[key]) for key in ("gpu", "processor") if machine.get(key)][:1]
    threads = [f"{machine['threads']} threads"] if machine.get("threads") else []
    return ", ".join([*named, *threads]) or MISSING
