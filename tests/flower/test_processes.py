"""Across real processes on loopback, over TLS with node keys: a SuperLink, three nodes, Flower's own command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is an option of its own")

from flower_processes import PATIENCE, SITES, Sites, write_node

from fedloom.config import parse_config
from fedloom.experiment import run
from small_world import save_backbone, tree, without_seconds

pytestmark = pytest.mark.timeout(2 * PATIENCE)

SECTIONS: dict[str, Any] = {
    "seed": 42,
    "adapter": {"rank": 2, "alpha": 6.0, "dropout": 0.05},
    "federation": {"rounds": 2, "min_replies": 2},
    "training": {"steps": 3, "batch_size": 2, "lr": 0.01, "router_lr": 0.005},
    "evaluation": {"generate": False},
}
WAITS = {"expected": 3, "wait": PATIENCE, "deadline": PATIENCE}


@pytest.fixture(scope="module")
def backbones(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Native or not → backbone."""
    return {native: save_backbone(tmp_path_factory.mktemp("backbone"), native=native) for native in (False, True)}


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory, backbones: dict[bool, Path]) -> Iterator[Sites]:
    with Sites(tmp_path_factory.mktemp("sites")) as found:
        found.start_superlink()
        found.register(*SITES)
        for name in SITES:
            found.start_node(name, write_node(found.home / name, name, backbones[False]))
        yield found


def simulated(out: Path, sites: Sites, **sections: Any) -> Path:
    data = {"clients": {name: str(sites.home / name / "rows.jsonl") for name in SITES}}
    run(parse_config({**SECTIONS, **sections, "data": data}), out)
    return out


def result_of(out: Path) -> dict[str, Any]:
    """Return states, log and model; checkpoints also name the configuration, which differs in where rows are."""
    log = [without_seconds(json.loads(line)) for line in (out / "rounds.jsonl").read_text().splitlines()]
    states = {name: data for name, data in tree(out / "checkpoints").items() if name.endswith("state.safetensors")}
    return {"log": log, "states": states, "model": tree(out / "model")}


METHODS: dict[str, dict[str, Any]] = {
    "fedit": {},
    "fedweave": {"warmup_steps": 2},
    "fcmoe": {},
}


@pytest.mark.parametrize("name", METHODS)
def test_processes_give_bitwise_the_simulators_model(
    name: str, sites: Sites, backbones: dict[bool, Path], tmp_path: Path
) -> None:
    native = name == "fcmoe"
    sections: dict[str, Any] = {
        "method": {"name": name, **METHODS[name]},
        "backbone": {"name": str(backbones[native]), "threads": 1},
    }
    if native:
        sections["adapter"] = {"native": "full"}
    for site in SITES:
        write_node(sites.home / site, site, backbones[native])
    there = sites.configure(f"run-{name}", **{**SECTIONS, "sites": WAITS, **sections})
    sites.run(there)
    assert result_of(there) == result_of(simulated(tmp_path / "simulated", sites, **sections))
