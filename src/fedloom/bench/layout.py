"""A table as plain data, and as Markdown and CSV. The report renders the same object."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from fedloom.bench.results import Stat
from fedloom.bench.significance import LEAST_SEEDS, Difference
from fedloom.report.wording import MISSING, number, plural, visible

K = TypeVar("K", bound=Hashable)
Number = float | int | str | None
#: What a cell of a kind holds in a CSV file, as endings of the column's name.
SINGLE: tuple[str, ...] = ("",)
STAT = ("", "sd", "n")
DIFFERENCE = ("", "low", "high", "p", "n")


@dataclass(frozen=True)
class Column:
    """A column; columns beside each other with one ``group`` share a heading."""

    head: str
    kind: tuple[str, ...] = SINGLE
    group: str = ""

    @property
    def name(self) -> str:
        return f"{self.group} {self.head}".strip()


@dataclass(frozen=True)
class Entry:
    """A cell: what a person reads, what a CSV file holds (one number per part of its column), and its rank."""

    text: str
    parts: tuple[Number, ...]
    mark: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of entries under columns; ``name`` is the file's."""

    name: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Entry]]
    notes: Sequence[str] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        for row in self.rows:
            for column, entry in zip(self.columns, row, strict=True):
                if len(column.kind) != len(entry.parts):
                    raise ValueError(f"{self.name}: {column.name} takes {column.kind}, not {entry.parts}")

    def is_text(self, index: int) -> bool:
        """Return whether a column holds words, which stand at the left; numbers stand at the right."""
        return any(isinstance(row[index].parts[0], str) for row in self.rows)

    @property
    def groups(self) -> list[tuple[str, int]]:
        """Return (heading, columns below it), from left to right."""
        found: list[tuple[str, int]] = []
        for column in self.columns:
            if found and found[-1][0] == column.group:
                found[-1] = (column.group, found[-1][1] + 1)
            else:
                found.append((column.group, 1))
        return found

    def markdown(self) -> str:
        """Render for a README: best bold, second underlined."""
        wrap = {"best": "**{}**", "second": "<u>{}</u>", "": "{}"}
        lines = [f"**{_plain(self.title)}**", ""]
        lines.append("| " + " | ".join(_plain(c.name) for c in self.columns) + " |")
        lines.append("| " + " | ".join("---" if self.is_text(i) else "---:" for i in range(len(self.columns))) + " |")
        lines += ["| " + " | ".join(wrap[e.mark].format(_plain(e.text)) for e in row) + " |" for row in self.rows]
        return "\n".join([*lines, "", *(f"- {_plain(note)}" for note in self.notes)]).rstrip() + "\n"

    def csv(self) -> str:
        """Render for programs: full precision, a column for each part, nothing where nothing was measured."""
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow([f"{c.name} {part}".strip() for c in self.columns for part in c.kind])
        for row in self.rows:
            writer.writerow(["" if p is None else p for entry in row for p in entry.parts])
        return buffer.getvalue()


def _plain(text: str) -> str:
    """Return text that Markdown takes as it is: no markup, no end of cell."""
    text = visible(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return "".join("\\" + c if c in "\\|*_`[]" else c for c in text)


def words(text: str) -> Entry:
    return Entry(text, (text,))


def value(found: float | int | None, show: Callable[[float], str] = number) -> Entry:
    """Return one number without spread."""
    return Entry(MISSING if found is None else show(found), (found,))


def stat(found: Stat, seeds: int, show: Callable[[float], str] = number) -> Entry:
    """Return mean ± standard deviation; with n where it is not that of the row."""
    if found.mean is None:
        return Entry(MISSING, (None, None, 0))
    if found.lost:
        return Entry(f"not finite in {found.lost} of {plural(found.n, 'seed')}", (found.mean, None, found.n))
    text = show(found.mean) + (f" ± {show(found.sd)}" if found.sd is not None else "")
    return Entry(text + (f" (n = {found.n})" if found.n != seeds else ""), (found.mean, found.sd, found.n))


def difference(found: Difference | None, seeds: int | None = None) -> Entry:
    """Return a difference with its 95 % interval and p; with n where its seeds are not the row's or are too few."""
    if found is None:
        return Entry(MISSING, (None, None, None, None, 0))
    text = f"{signed(found.estimate)} [{signed(found.low)}, {signed(found.high)}], {p_words(found.p)}"
    if len(found.seeds) != seeds or len(found.seeds) < LEAST_SEEDS:
        text += f" (n = {len(found.seeds)})"
    return Entry(text, (found.estimate, found.low, found.high, found.p, len(found.seeds)))


def signed(found: float, digits: int = 4) -> str:
    """Format with a sign; what rounds to 0, or is not finite, has none."""
    if not math.isfinite(found):
        return number(found)
    found = round(found, digits)
    return number(abs(found) if found == 0 else found, digits) if found <= 0 else "+" + number(found, digits)


def p_words(p: float | None) -> str:
    if p is None:
        return f"p = {MISSING}"
    return "p ≤ 0.001" if p <= 0.001 else f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"


def ranks(values: Mapping[K, float | None], *, lowest: bool, digits: int = 4) -> dict[K, str]:
    """Return ``best`` and ``second`` by key. What prints alike ranks alike: two bests leave no second."""
    printed = {key: round(v, digits) for key, v in values.items() if v is not None and math.isfinite(v)}
    order = sorted(printed.values(), reverse=not lowest)
    if len(order) < 2 or order[0] == order[-1]:
        return {}
    places = {key: order.index(v) for key, v in printed.items()}
    return {key: ("best", "second")[place] for key, place in places.items() if place < 2}


def marks(stats: Mapping[K, Stat], *, lowest: bool) -> dict[K, str]:
    """Return ``best`` and ``second`` by key, among those that have the most seeds, and the same ones.

    Where as many seeds are not the same, those that most keys have count.
    """
    counts = Counter(found.seeds for found in stats.values() if found.n)
    most = max(counts, key=lambda seeds: (len(seeds), counts[seeds]), default=())
    return ranks({key: found.mean for key, found in stats.items() if found.n and found.seeds == most}, lowest=lowest)


def marked(entry: Entry, mark: str) -> Entry:
    return replace(entry, mark=mark)
