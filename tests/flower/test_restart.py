"""The server ended at any moment and started again: the same run, on the real ServerApp's code and real ClientApps.

``test_processes`` does it to processes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is an option of its own")

from doomed_server_moments import of_round
from fake_grid import Grid, Restarts
from flower_processes import result_of

from fatal_moments import Killed, Point, fatal, half_a_line
from fedloom import experiment, flower_app
from fedloom.config import parse_config
from fedloom.experiment import run
from fedloom.runtime import checkpoint
from fedloom.runtime.checkpoint import CheckpointFolder
from fedloom.runtime.events import RoundLog
from fedloom.runtime.flower import FlowerTransport

#: Of four sites and three rounds. Message 1 to 4 are hellos, 5 to 8 the probe.
POINTS: dict[str, Point] = {
    "before any site is greeted": Point(Grid, "push_messages", nth=1),
    "while sites introduce themselves": Point(Grid, "push_messages", nth=3, after=True),
    "before the run has a name": Point(flower_app, "write_json", lambda path, value: path.name == "sites.json"),
    "after the run has a name": Point(
        flower_app, "write_json", lambda path, value: path.name == "sites.json", after=True
    ),
    "in the middle of the probe": Point(Grid, "push_messages", nth=6, after=True),
    "after the probe's replies": Point(FlowerTransport, "exchange", of_round(0, "probe"), after=True),
    "before a round's orders": Point(FlowerTransport, "exchange", of_round(2)),
    "after half of a round's orders": Point(Grid, "push_messages", nth=13, after=True),
    "with one reply of a round on disk": Point(
        FlowerTransport, "_receive", lambda self, message, client, round, *rest: round == 2, after=True
    ),
    "after a round's replies": Point(FlowerTransport, "exchange", of_round(2), after=True),
    "in the middle of a log line": Point(RoundLog, "append", lambda self, r: r["round"] == 2, half=half_a_line),
    "between log and checkpoint": Point(CheckpointFolder, "commit", lambda self, c: c.state.round == 2),
    "before a checkpoint gets its name": Point(Path, "rename", lambda a, b: b.name == "round-000002"),
    "while an old checkpoint is deleted": Point(checkpoint.shutil, "rmtree", lambda p: p.name.startswith("round")),
    "after the last round": Point(CheckpointFolder, "commit", lambda self, c: c.state.round == 3, after=True),
    "while the model is written": Point(experiment, "write_models", after=True),
    "before the report": Point(experiment, "write_report"),
}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, backbone_folder: Path) -> dict[str, Any]:
    """What a run leaves behind that nothing stopped; it is what a simulation leaves behind."""
    restarts = Restarts(tmp_path_factory.mktemp("straight"), backbone_folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "peak_memory", lambda device: {"peak_bytes": 7, "peak_device_bytes": 5})
        restarts.serve()
        rows = {node.config.parent.name: str(node.config.parent / "rows.jsonl") for node in restarts.nodes}
        config = parse_config({**restarts.sections, "data": {"clients": rows}})
        simulated = run(config, restarts.home / "simulated")
    served = json.loads((restarts.home / "run" / "metrics.json").read_text("utf-8"))
    assert served.keys() == simulated.keys()
    assert (served["peak_bytes"], served["peak_device_bytes"]) == (7, 5)
    assert result_of(restarts.home / "run") == result_of(restarts.home / "simulated")
    found = restarts.result()
    assert all(found["memories"].values())
    return found


@pytest.mark.parametrize("point", POINTS)
def test_a_server_that_starts_again_ends_with_the_same_bits(
    point: str, straight: dict[str, Any], backbone_folder: Path, tmp_path: Path
) -> None:
    restarts = Restarts(tmp_path, backbone_folder)
    with fatal(POINTS[point]), pytest.raises(Killed):
        restarts.serve()
    restarts.serve()
    assert restarts.result() == straight


def test_a_server_may_end_again_and_again(straight: dict[str, Any], backbone_folder: Path, tmp_path: Path) -> None:
    restarts = Restarts(tmp_path, backbone_folder)
    for point in ("in the middle of the probe", "after a round's replies", "after a round's replies"):
        with fatal(POINTS[point]), pytest.raises(Killed):
            restarts.serve()
    restarts.serve()
    assert restarts.result() == straight
    before = restarts.result()
    restarts.serve()  # a finished run asks nobody for anything and stays as it is
    assert restarts.result() == before
