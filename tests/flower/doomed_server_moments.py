"""The moments at which ``doomed_server`` dies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fatal_moments import Point, half_a_line
from fedloom import experiment, flower_app
from fedloom.runtime import checkpoint
from fedloom.runtime.checkpoint import CheckpointFolder
from fedloom.runtime.events import RoundLog
from fedloom.runtime.flower import FlowerTransport
from fedloom.runtime.flower_messages import ORDER


def of_round(number: int, kind: str = "fit") -> Any:
    return lambda self, method, orders, *rest: (orders[0].round, orders[0].kind) == (number, kind)


def is_order(self: FlowerTransport, content: object, node: int, kind: str) -> bool:
    return kind == ORDER


#: In the order in which a run of three sites and three rounds comes to them.
MOMENTS: dict[str, Point] = {
    "before any site is greeted": Point(FlowerTransport, "_push"),
    "after the run has a name": Point(
        flower_app, "write_json", lambda path, value: path.name == "sites.json", after=True
    ),
    "in the middle of the probe": Point(FlowerTransport, "_push", is_order, nth=2, after=True),
    "after half of round 1's orders": Point(FlowerTransport, "_push", is_order, nth=5, after=True),
    "with one reply of round 1 on disk": Point(
        FlowerTransport, "_receive", lambda self, message, client, round, *rest: round == 1, after=True
    ),
    "after round 1's replies": Point(FlowerTransport, "exchange", of_round(1), after=True),
    "in the middle of a log line": Point(RoundLog, "append", lambda self, r: r["round"] == 2, half=half_a_line),
    "between log and checkpoint": Point(CheckpointFolder, "commit", lambda self, c: c.state.round == 2),
    "before a checkpoint gets its name": Point(Path, "rename", lambda a, b: b.name == "round-000002"),
    "while an old checkpoint is deleted": Point(checkpoint.shutil, "rmtree", lambda p: p.name.startswith("round")),
    "while the model is written": Point(experiment, "write_models", after=True),
}
