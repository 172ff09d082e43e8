"""Compression and differential privacy of replies are the same across sites as in a simulation, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is an option of its own")

from fake_grid import Restarts
from flower_processes import result_of

from fedloom.config import parse_config
from fedloom.experiment import run

PRIVATE = {"clip": 0.05, "noise": 0.5, "reproducible": True}
CHOICES: dict[str, dict[str, Any]] = {
    "bf16": {"federation": {"rounds": 2, "wire": "bf16"}},
    "int8": {"federation": {"rounds": 2, "wire": "int8"}},
    "private": {
        "federation": {"rounds": 2, "participation": 0.75},
        "server": {"weights": "uniform"},
        "privacy": PRIVATE,
    },
}


@pytest.mark.parametrize("choice", CHOICES)
def test_replies_leave_a_site_as_they_leave_a_simulated_client(
    choice: str, backbone_folder: Path, tmp_path: Path
) -> None:
    sites = Restarts(tmp_path, backbone_folder)
    sites.sections |= {"method": {"name": "fedit"}, **CHOICES[choice]}
    sites.write()
    sites.serve()
    rows = {node.config.parent.name: str(node.config.parent / "rows.jsonl") for node in sites.nodes}
    run(parse_config({**sites.sections, "data": {"clients": rows}}), tmp_path / "simulated")
    assert result_of(tmp_path / "run") == result_of(tmp_path / "simulated")


def test_with_privacy_no_site_says_how_many_rows_it_has(backbone_folder: Path, tmp_path: Path) -> None:
    sites = Restarts(tmp_path, backbone_folder)
    sites.sections |= {"method": {"name": "fedit"}, **CHOICES["private"]}
    sites.write()
    notes = sites.serve()
    assert "ann is there." in notes.said
    known = (tmp_path / "run" / "sites.json").read_text()
    assert '"client": "ann"' in known
    assert "examples" not in known
    assert "rows" not in known
