"""Suites expand to the cells they say, each a checked configuration with a name of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from fedloom.bench.suite import combinations, load_suite, merged
from fedloom.errors import ConfigError

BASE: dict[str, Any] = {
    "data": {"benchmark": {"tasks": ["gsm8k"], "root": "rows", "clients": 4}},
    "training": {"steps": 3},
}
SUITE: dict[str, Any] = {
    "name": "mine",
    "title": "Mine",
    "base": BASE,
    "methods": {
        "fedit": {"method": {"name": "fedit"}},
        "slow": {"title": "FedIT, slow", "method": {"name": "fedit"}, "training": {"lr": 1e-5}},
    },
    "grid": [{"methods": ["fedit", "slow"], "seeds": [1, 2], "vary": {"data.benchmark.alpha": [0.1, 0.5]}}],
}


def written(folder: Path, **changes: Any) -> Path:
    path = folder / "suite.yaml"
    path.write_text(yaml.safe_dump(SUITE | changes))
    return path


def test_cells_in_the_order_of_the_grid(tmp_path: Path) -> None:
    suite, cells = load_suite(written(tmp_path))
    assert suite.title == "Mine"
    assert [c.name for c in cells] == [
        "fedit_alpha0.1_s1",
        "fedit_alpha0.1_s2",
        "fedit_alpha0.5_s1",
        "fedit_alpha0.5_s2",
        "slow_alpha0.1_s1",
        "slow_alpha0.1_s2",
        "slow_alpha0.5_s1",
        "slow_alpha0.5_s2",
    ]
    last = cells[-1]
    assert (last.title, last.config.seed, last.config.training.lr, last.config.training.steps) == (
        "FedIT, slow",
        2,
        1e-5,
        3,
    )
    assert last.config.data.benchmark is not None
    assert last.config.data.benchmark.alpha == 0.5
    assert last.config.data.benchmark.root == str(tmp_path / "rows")
    assert cells[0].title == "FedIT"


def test_the_hash_of_a_configuration_follows_what_it_says_and_not_where_rows_lie(tmp_path: Path) -> None:
    here, there = tmp_path / "a", tmp_path / "b"
    for folder in (here, there):
        folder.mkdir()
    one = [c.config_hash for c in load_suite(written(here))[1]]
    assert one == [c.config_hash for c in load_suite(written(there))[1]]
    assert len(set(one)) == len(one)
    explicit = SUITE["base"] | {"training": {"steps": 3, "batch_size": 8, "clip": 1.0}}  # defaults, written out
    assert one == [c.config_hash for c in load_suite(written(here, base=explicit))[1]]
    other = SUITE["base"] | {"training": {"steps": 4}}
    assert not set(one) & {c.config_hash for c in load_suite(written(here, base=other))[1]}


def test_combinations_and_overlays() -> None:
    assert combinations({}) == [{}]
    assert combinations({"a": [1, 2], "b": [3, 4]}) == [
        {"a": 1, "b": 3},
        {"a": 1, "b": 4},
        {"a": 2, "b": 3},
        {"a": 2, "b": 4},
    ]
    over = merged({"a": {"x": 1, "y": 2}, "b": 1}, {"a": {"y": 3}, "b": {"z": 1}})
    assert over == {"a": {"x": 1, "y": 3}, "b": {"z": 1}}


def varied(folder: Path, *blocks: dict[str, list[Any]], **benchmark: Any) -> Path:
    """Return a suite of FedIT with a block of the grid per ``vary``; the first with seed 1, the second with 2, …"""
    base = BASE | {"data": {"benchmark": BASE["data"]["benchmark"] | benchmark}}
    grid = [{"methods": ["fedit"], "seeds": [i], "vary": vary} for i, vary in enumerate(blocks, start=1)]
    return written(folder, base=base, grid=grid)


def test_what_results_do_not_keep_apart_cannot_be_varied(tmp_path: Path) -> None:
    """Tables would hold one row for both; with one seed they could not be made at all."""
    said = "differ in training.lr.*a label of its own"
    with pytest.raises(ConfigError, match=f"fedit_lr0.0001_s1 and fedit_lr0.01_s1 {said}"):
        load_suite(varied(tmp_path, {"training.lr": [1e-4, 1e-2]}))
    with pytest.raises(ConfigError, match=f"fedit_lr0.0001_s1 and fedit_lr0.01_s2 {said}"):
        load_suite(varied(tmp_path, {"training.lr": [1e-4]}, {"training.lr": [1e-2]}))
    assert len(load_suite(varied(tmp_path, {"training.lr": [1e-2]}, {"training.lr": [1e-2]}))[1]) == 2


def test_a_key_may_follow_an_axis(tmp_path: Path) -> None:
    """Tasks are an axis under label skew only, as records hold them."""
    blocks = [
        {"data.benchmark.tasks": [[task]], "data.max_length": [length]} for task, length in (("a", 64), ("b", 128))
    ]
    _, cells = load_suite(varied(tmp_path, *blocks, skew="label"))
    assert [(c.axes["tasks"], c.config.data.max_length) for c in cells] == [("a", 64), ("b", 128)]
    with pytest.raises(ConfigError, match=r"differ in data\.benchmark\.tasks, data\.max_length"):
        load_suite(varied(tmp_path, *blocks))


def test_one_run_under_two_names_is_refused(tmp_path: Path) -> None:
    grid = [{"methods": ["fedit"], "seeds": [1], "vary": v} for v in ({}, {"data.benchmark.alpha": [0.3]})]
    with pytest.raises(ConfigError, match=r"fedit_s1 and fedit_alpha0\.3_s1 are the same run"):
        load_suite(written(tmp_path, grid=grid))


def test_the_suites_of_the_repository_can_be_read() -> None:
    paths = sorted((Path(__file__).parents[2] / "experiments").glob("*/suite.yaml"))
    assert len(paths) >= 5
    for path in paths:
        load_suite(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grid": [{"methods": ["fedi"], "seeds": [1]}]}, r"the grid names 'fedi'\. Did you mean 'fedit'"),
        ({"grid": [{"methods": ["fedit"], "seeds": [1, 1]}]}, "has the cell fedit_s1 twice"),
        ({"grdi": []}, r"unknown key 'grdi'\. Did you mean 'grid'"),
        ({"methods": {"fedit": {"method": {"name": "fedot"}}}}, r"\(fedit\): unknown method 'fedot'"),
        ({"base": BASE | {"trainig": {}}}, r"unknown key 'trainig'\. Did you mean 'training'"),
        ({"grid": [{"methods": ["fedit"], "seeds": [1], "vary": {"seed.x": [1]}}]}, "'seed' is not a section"),
        ({"grid": []}, "'grid' is"),
        ({"name": "a b"}, "'name' is 'a b'"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    base = {"seed": 1} | SUITE["base"]
    with pytest.raises(ConfigError, match=message):
        load_suite(written(tmp_path, **({"base": base} | changes)))
