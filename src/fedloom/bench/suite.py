"""A suite: one base configuration, labelled methods, and a grid of cells over settings and seeds."""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedloom.config import Config, explained, parse_config
from fedloom.config_file import read_yaml
from fedloom.errors import ConfigError, nearest
from fedloom.types import Plain

#: Short names for what a cell may vary; they stand in cell names and result columns.
AXES = {
    "data.benchmark.tasks": "",
    "data.benchmark.alpha": "alpha",
    "data.synthetic.mixing": "mixing",
    "data.synthetic.separability": "separability",
    "data.synthetic.drift": "drift",
    "backbone.name": "backbone",
}


class Block(BaseModel):
    """A rectangle of the grid: every label × every seed × every combination of ``vary``."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    methods: list[str] = Field(min_length=1)
    seeds: list[int] = Field(min_length=1)
    vary: dict[str, list[Any]] = Field(default_factory=dict)


class Suite(BaseModel):
    """See ``load_suite``."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    title: str
    notes: list[str] = Field(default_factory=list)
    base: dict[str, Any]
    methods: dict[str, dict[str, Any]] = Field(min_length=1)
    grid: list[Block] = Field(min_length=1)


@dataclass(frozen=True)
class Cell:
    """One run of a suite.

    Attributes:
        name: folder and id, ``<label>_<axis><value>…_s<seed>``.
        label: key in the suite's ``methods``.
        title: what tables call it.
        config: complete configuration.
    """

    name: str
    label: str
    title: str
    config: Config

    @property
    def config_hash(self) -> str:
        """sha256 of what the configuration says beyond defaults, without where its data lie on this machine.

        So a later version that has more options, or another folder of rows, finds its finished cells again.
        """
        plain = self.config.model_dump(exclude_defaults=True)
        plain["data"].get("benchmark", {}).pop("root", None)
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()

    @property
    def axes(self) -> dict[str, Plain]:
        """What a record keeps of the setting beside the backbone (``results.AXES``); null where it does not apply."""
        benchmark, synthetic = self.config.data.benchmark, self.config.data.synthetic
        return {
            "alpha": benchmark.alpha if benchmark else None,
            "tasks": "+".join(benchmark.tasks) if benchmark and benchmark.skew == "label" else None,
            "mixing": synthetic.mixing if synthetic else None,
            "separability": synthetic.separability if synthetic else None,
            "drift": synthetic.drift if synthetic else None,
        }


def load_suite(path: Path) -> tuple[Suite, list[Cell]]:
    """Read a suite and expand its cells, in the order of the grid; each is checked as a configuration.

    Keys: ``base`` (a run's configuration without method and seed), ``methods`` (label → overrides of the base, with the
    ``method`` section and optionally a ``title``), ``grid`` (blocks of ``methods``, ``seeds`` and ``vary``, which
    maps dotted keys to values). Relative data paths are relative to the suite's folder.

    Raises:
        ConfigError: the file or a cell's configuration is wrong, a label is unknown, two cells have one name, or cells
            differ in what results do not keep apart.
    """
    try:
        suite = Suite.model_validate(read_yaml(path))
    except ValidationError as error:
        raise explained(error, Suite, (), str(path)) from error
    cells: list[Cell] = []
    for block in suite.grid:
        for label in block.methods:
            if label not in suite.methods:
                raise ConfigError(f"{path}: the grid names {label!r}.{nearest(label, suite.methods)}")
            for setting in combinations(block.vary):
                cells += [make_cell(suite, label, setting, seed, path) for seed in block.seeds]
    names = [cell.name for cell in cells]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{path}: the grid has the cell {twice[0]} twice.")
    _refuse_hidden_differences(cells, path)
    return suite, cells


def _refuse_hidden_differences(cells: Sequence[Cell], path: Path) -> None:
    """Refuse cells that results would take for seeds of one row, though more than the seed, or not even that, differs.

    What differs together with an axis, as a length with the tasks, is kept apart by the axis.
    """
    rows: dict[tuple[Plain, ...], Cell] = {}
    runs: dict[tuple[Plain, ...], Cell] = {}
    for cell in cells:
        row = (cell.label, cell.config.backbone.name, *cell.axes.values())
        first = rows.setdefault(row, cell)
        one, other = (flat(c.config.model_dump(exclude={"seed"})) for c in (first, cell))
        if keys := sorted(key for key in one | other if one.get(key) != other.get(key)):
            raise ConfigError(
                f"{path}: {first.name} and {cell.name} differ in {', '.join(keys)}. Results keep apart labels, "
                f"backbones, {', '.join(cell.axes)} (tasks under label skew only), so tables would take both for seeds "
                "of one row. Give each value a label of its own under 'methods'."
            )
        twin = runs.setdefault((*row, cell.config.seed), cell)
        if twin is not cell:
            raise ConfigError(
                f"{path}: {twin.name} and {cell.name} are the same run. Take one of them out of the grid."
            )


def flat(plain: Mapping[str, Plain], above: str = "") -> dict[str, Plain]:
    """Return dotted key → value of nested mappings; an empty one has no keys."""
    found: dict[str, Plain] = {}
    for key, value in plain.items():
        found |= flat(value, f"{above}{key}.") if isinstance(value, Mapping) else {f"{above}{key}": value}
    return found


def selected(cells: Sequence[Cell], only: Sequence[str], path: Path) -> list[Cell]:
    """Return the cells whose names start with one of ``only``; all where it is empty.

    Raises:
        ConfigError: it fits no cell.
    """
    found = [cell for cell in cells if cell.name.startswith(tuple(only))] if only else list(cells)
    if not found:
        names = nearest(only[0], [cell.name for cell in cells])
        raise ConfigError(f"--only {' '.join(only)} fits no cell of {path}.{names} --dry-run lists all.")
    return found


def combinations(vary: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    """Return every choice of one value per key; the last key changes fastest."""
    found: list[dict[str, Any]] = [{}]
    for key, values in vary.items():
        found = [{**chosen, key: value} for chosen in found for value in values]
    return found


def make_cell(suite: Suite, label: str, setting: Mapping[str, Any], seed: int, path: Path) -> Cell:
    """Lay the label's overrides and the setting over the base."""
    overrides = dict(suite.methods[label])
    title = overrides.pop("title", None)
    plain = merged(copy.deepcopy(suite.base), overrides)
    for key, value in setting.items():
        place(plain, key, value, path)
    plain["seed"] = seed
    config = parse_config(plain, where=f"{path} ({label})", base=path.parent)
    axes = [f"{AXES.get(key, key.rpartition('.')[2])}{_short(value)}" for key, value in setting.items()]
    name = "_".join([label, *axes, f"s{seed}"])
    return Cell(name, label, title or config.build_method().title, config)


def merged(base: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with the mappings of ``overrides`` laid over it, key by key."""
    for key, value in overrides.items():
        both = isinstance(value, Mapping) and isinstance(base.get(key), dict)
        base[key] = merged(base[key], value) if both else copy.deepcopy(value)
    return base


def place(plain: dict[str, Any], key: str, value: Any, path: Path) -> None:
    """Set a dotted key."""
    *sections, last = key.split(".")
    for section in sections:
        plain = plain.setdefault(section, {})
        if not isinstance(plain, dict):
            raise ConfigError(f"{path}: 'vary' names {key!r}, but {section!r} is not a section.")
    plain[last] = value


def _short(value: Any) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "-", str(value)).strip("-.") or "x"
