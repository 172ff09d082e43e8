"""What a benchmark measured: its cells, grouped by setting, and means over seeds."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedloom.errors import DataError
from fedloom.methods import METHODS
from fedloom.report.wording import plural
from fedloom.types import Plain

#: The method that all others are compared with, and what stands for it without one of its parts (FedWeave, Table 2).
MAIN = "fedweave"
#: The same where a backbone's own experts are trained; its ablations are labels of its own method.
NATIVE_MAIN = "fcmoe"
ABLATIONS = ("fedweave_wo_prototype_expert", "fedweave_wo_client_router")
#: What a suite may vary beside backbone, method and seed; a record holds null where it does not apply.
AXES = {"tasks": "task", "alpha": "α", "mixing": "mixing", "separability": "separability", "drift": "drift"}


@dataclass(frozen=True)
class Stat:
    """Mean and sample standard deviation (n − 1) over seeds; no deviation for one value, nothing for none.

    A value that is not finite makes the mean not a number: the mean of the others would hide that a run diverged.
    """

    values: tuple[float, ...] = ()
    #: Of each value, in the same order; empty where nobody asks.
    seeds: tuple[int, ...] = ()

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Stat:
        return cls(tuple(float(v) for v in values if v is not None))

    @classmethod
    def by(cls, values: Mapping[int, float | None]) -> Stat:
        """Return the same, given seed → value."""
        known = {seed: float(v) for seed, v in sorted(values.items()) if v is not None}
        return cls(tuple(known.values()), tuple(known))

    def over(self, seeds: Sequence[int]) -> Stat | None:
        """Return the same over these seeds; None where one of them was not measured."""
        known = dict(zip(self.seeds, self.values, strict=True))
        return Stat.by({seed: known[seed] for seed in seeds}) if seeds and known.keys() >= set(seeds) else None

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def lost(self) -> int:
        """How many values are not finite."""
        return sum(not math.isfinite(v) for v in self.values)

    @property
    def mean(self) -> float | None:
        if self.lost:
            return math.nan
        return math.fsum(self.values) / self.n if self.values else None

    @property
    def sd(self) -> float | None:
        if self.n < 2 or self.lost:
            return None
        mean = math.fsum(self.values) / self.n
        return math.sqrt(math.fsum((v - mean) ** 2 for v in self.values) / (self.n - 1))


@dataclass(frozen=True)
class Setting:
    """What cells must share to be compared: the backbone and every axis, as (name, value)."""

    backbone: str
    axes: tuple[tuple[str, Plain], ...]

    def get(self, axis: str) -> Plain:
        return dict(self.axes).get(axis)

    def differs(self, other: Setting) -> set[str]:
        """Return the axes, or ``backbone``, in which two settings differ."""
        ours, theirs = ({"backbone": s.backbone, **dict(s.axes)} for s in (self, other))
        return {name for name in ours | theirs if ours.get(name) != theirs.get(name)}

    @property
    def text(self) -> str:
        return ", ".join([self.backbone, *(f"{AXES[name]} = {value}" for name, value in self.axes)])

    @property
    def slug(self) -> str:
        """A part of a file name."""
        parts = [self.backbone, *(v if isinstance(v, str) else f"{name}{v}" for name, v in self.axes)]
        return "_".join(re.sub(r"[^A-Za-z0-9.-]+", "-", part).strip("-.") or "x" for part in parts)


@dataclass(frozen=True)
class Cell:
    """One run: its record, and numbers per test example (mode → ``each_loss``, ``each``), empty where not on file."""

    record: Mapping[str, Plain]
    examples: Mapping[str, Plain] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return self.record["label"]

    @property
    def seed(self) -> int:
        return self.record["seed"]

    @property
    def setting(self) -> Setting:
        axes = ((name, self.record.get(name)) for name in AXES)
        return Setting(self.record["backbone"], tuple((name, value) for name, value in axes if value is not None))

    @property
    def mode(self) -> str | None:
        """The first routing mode, which tables use unless they compare modes; None without a global model."""
        return next(iter(self.record.get("routing") or {}), None)

    def measured(self, metric: str, task: str = "macro", mode: str | None = None) -> float | None:
        """Return a loss or score of the global model; None where it was not measured."""
        found = (self.record.get("routing") or {}).get(mode or self.mode) or {}
        return (found.get(metric) or {}).get(task)

    def get(self, *path: str) -> Any:
        """Follow keys into the record; None where one is missing."""
        found: Any = self.record
        for key in path:
            found = found.get(key) if isinstance(found, Mapping) else None
        return found


@dataclass(frozen=True)
class Results:
    """All cells of a benchmark, in the order of the file."""

    cells: tuple[Cell, ...]

    @property
    def settings(self) -> list[Setting]:
        """Return all settings, the main one first: α = 0.3 as in the paper, then that with the most cells."""
        counts: dict[Setting, int] = {}
        for cell in self.cells:
            counts[cell.setting] = counts.get(cell.setting, 0) + 1
        main = min(counts, key=lambda s: (s.get("alpha") != 0.3, -counts[s]), default=None)
        return sorted(counts, key=lambda s: s != main)

    def labels(self, setting: Setting | None = None) -> list[str]:
        """Return the labels of a setting, or of all, in order of appearance."""
        return list(dict.fromkeys(c.label for c in self.cells if setting is None or c.setting == setting))

    @property
    def main(self) -> str:
        """The label that all others are compared with."""
        labels = self.labels()
        return NATIVE_MAIN if NATIVE_MAIN in labels and MAIN not in labels else MAIN

    def compared(self, setting: Setting) -> list[str]:
        """Return the labels of the main comparison, without ablations and variants, unless that is all."""
        labels = self.labels(setting)
        return [label for label in labels if not self.is_variant(label)] or labels

    def is_variant(self, label: str) -> bool:
        method = self.method(label)
        return label in ABLATIONS or (method in (MAIN, NATIVE_MAIN) and label != method)

    def is_pooled(self, label: str) -> bool:
        """Return whether a label is no federation at all, a reference that takes part in no ranking."""
        method = METHODS.get(self.method(label))
        return method is not None and method.pooled

    def is_native(self, label: str) -> bool:
        """Return whether a label trains experts that the backbone comes with."""
        method = METHODS.get(self.method(label))
        return method is not None and method.native

    def of(self, setting: Setting, label: str) -> list[Cell]:
        """Return the cells of a label, by seed."""
        return sorted((c for c in self.cells if c.setting == setting and c.label == label), key=lambda c: c.seed)

    def stat(self, setting: Setting, label: str, get: Callable[[Cell], float | None]) -> Stat:
        return Stat.by({cell.seed: get(cell) for cell in self.of(setting, label)})

    def only(self, setting: Setting, label: str, seeds: Collection[int]) -> Results:
        """Return the same, but of a label in a setting these seeds alone."""
        return Results(tuple(c for c in self.cells if c.label != label or c.setting != setting or c.seed in seeds))

    def among(self, setting: Setting, labels: Iterable[str]) -> list[Cell]:
        """Return the cells of some labels, label by label."""
        return [cell for label in labels for cell in self.of(setting, label)]

    def first(self, label: str) -> Cell:
        return next(c for c in self.cells if c.label == label)

    def title(self, label: str) -> str:
        return str(self.first(label).record["title"])

    def method(self, label: str) -> str:
        return str(self.first(label).record["method"])

    def has_global_model(self, label: str) -> bool:
        return any(c.mode is not None for c in self.cells if c.label == label)

    def tasks(self, setting: Setting) -> list[str]:
        """Return the test tasks in order of appearance."""
        found: dict[str, None] = {}
        for cell in self.cells:
            if cell.setting == setting:
                found |= dict.fromkeys(cell.get("routing", cell.mode or "", "loss") or {})
                found |= dict.fromkeys(cell.get("before", "loss_backbone") or {})
        return [task for task in found if task != "macro"]

    def modes(self, setting: Setting, label: str) -> list[str]:
        """Return the routing modes that were measured."""
        return list(dict.fromkeys(m for c in self.of(setting, label) for m in c.get("routing") or {}))


def per_hundred(cell: Cell, mode: str, what: str) -> float | None:
    """Return seconds per 100 test examples of generation or loss; None where either number is not on file."""
    seconds = cell.get("routing", mode, f"{what}_seconds")
    each = (cell.examples.get(mode) or {}).get("each" if what == "generation" else "each_loss") or {}
    count = sum(len(rows) for rows in each.values())
    return 100 * seconds / count if seconds is not None and count else None


def mixture_notes(cells: Sequence[Cell]) -> list[str]:
    """Return notes for a table whose cells differ in version: of the source, packages, backbones or rows; else nothing.

    A run that was resumed under another version of the source counts under both.
    """
    made_by = [c.record.get("source_hashes") or [c.record.get("source_hash") or "unknown"] for c in cells]
    sources = _counted(str(source)[:12] for hashes in made_by for source in hashes)
    start = f"The {len(cells)} runs of this table were made with"
    notes = []
    if len(sources) > 1:
        resumed = sum(len(hashes) > 1 for hashes in made_by)
        several = f"; {plural(resumed, 'run')} by more than one, resumed" if resumed else ""
        notes.append(f"{start} {len(sources)} versions of fedloom's source: {_runs(sources)}{several}.")
    found = [{"python": cell.record.get("python"), **(cell.record.get("packages") or {})} for cell in cells]
    for name in sorted({name for versions in found for name in versions}):
        versions = _counted(str(packages.get(name) or "unknown") for packages in found)
        if len(versions) > 1:
            notes.append(f"{start} {len(versions)} versions of {name}: {_runs(versions)}.")
    return [*notes, *_backbone_notes(cells), *_row_notes(cells)]


def _backbone_notes(cells: Sequence[Cell]) -> list[str]:
    by_name: dict[str, list[str]] = {}
    for cell in cells:
        weights = str(cell.record.get("backbone_hash") or "unknown")[:12]
        by_name.setdefault(cell.record["backbone"], []).append(weights)
    return [
        f"The {len(hashes)} runs of this table on {name} had {len(set(hashes))} versions of its weights: "
        f"{_runs(_counted(hashes))}."
        for name, hashes in by_name.items()
        if len(set(hashes)) > 1
    ]


def _row_notes(cells: Sequence[Cell]) -> list[str]:
    """Say where runs of one setting and seed had other rows, as far as is on record; pooled rows stand in one list."""
    notes = []
    for key, had in (("rows", "trained"), ("test_rows", "measured")):
        found: dict[tuple[Setting, int, bool], set[str]] = {}
        for cell in cells:
            method = METHODS.get(cell.record["method"])
            pooled = method is not None and method.pooled
            if (rows := cell.record.get(key)) is not None:
                found.setdefault((cell.setting, cell.seed, pooled), set()).add(rows)
        notes += [
            f"Runs of {setting.text}, seed {seed}, were {had} on {len(hashes)} different sets of rows."
            for (setting, seed, _), hashes in found.items()
            if len(hashes) > 1
        ]
    return notes


def _counted(names: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(names).items(), key=lambda pair: (-pair[1], pair[0])))


def _runs(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({plural(count, 'run')})" for name, count in counts.items())


def load_results(out: Path) -> Results:
    """Read ``results.jsonl`` and the per-example files beside it; of a cell that stands twice, the later line counts.

    Raises:
        DataError: a file is missing or damaged, or two cells are of one label, setting and seed.
    """
    path = out / "results.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}. Run the benchmark first.") from error
    records: dict[str, Mapping[str, Plain]] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            record = _parsed(line, f"{path}, line {number}")
            if missing := sorted({"cell", "label", "title", "method", "seed", "backbone"} - record.keys()):
                raise DataError(f"{path}, line {number}, lacks {', '.join(missing)}. Remove it and run with --resume.")
            records[record["cell"]] = record
    if not records:
        raise DataError(f"{path} holds no result. Run the benchmark with --resume.")
    cells = tuple(Cell(record, _examples(out / "examples" / f"{name}.json")) for name, record in records.items())
    _refuse_twins(cells, path)
    return Results(cells)


def _parsed(text: str, where: str) -> Mapping[str, Plain]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise DataError(f"{where} is damaged: {error}. Remove it and run with --resume.") from error
    if not isinstance(found, dict):
        raise DataError(f"{where} is no JSON object. Remove it and run with --resume.")
    return found


def _examples(path: Path) -> Mapping[str, Plain]:
    return _parsed(path.read_text(encoding="utf-8"), str(path)) if path.exists() else {}


def _refuse_twins(cells: Sequence[Cell], path: Path) -> None:
    seen: dict[tuple[Any, ...], str] = {}
    for cell in cells:
        key = (cell.label, cell.setting, cell.seed)
        if key in seen:
            raise DataError(
                f"{path}: {seen[key]} and {cell.record['cell']} are the same label, setting and seed, "
                f"so their mean would count one twice. Give one of them another label or another folder."
            )
        seen[key] = str(cell.record["cell"])
