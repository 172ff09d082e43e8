"""Moments of a run at which a machine may die, for ``fatal_moments.arm``: by an exception or by SIGKILL."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from fatal_moments import Point, arm, half_a_line
from fedloom import files
from fedloom.methods import METHODS
from fedloom.runtime import checkpoint
from fedloom.runtime.checkpoint import CheckpointFolder
from fedloom.runtime.client import LocalClient
from fedloom.runtime.events import Observer, RoundLog
from fedloom.runtime.memory import MemoryFolder
from fedloom.runtime.simulate import Simulator
from small_world import TRAINING, world_of


def _half_pruned(folder: Path) -> None:
    (folder / "checkpoint.json").unlink()


#: Round 2 of 3 unless the name says otherwise.
POINTS: dict[str, Point] = {
    "in the first exchange": Point(Simulator, "_ask", nth=2),
    "between two clients": Point(Simulator, "_ask", lambda self, method, order, *rest: order.round == 2, nth=2),
    "in the middle of a client": Point(LocalClient, "fit", lambda self, *args, **kwargs: self.round == 2, nth=2),
    "after a client wrote its memory": Point(MemoryFolder, "write", lambda self, c, round, m: round == 2, after=True),
    "before the log": Point(RoundLog, "append", lambda self, record: record["round"] == 2),
    "in the middle of a log line": Point(RoundLog, "append", lambda self, r: r["round"] == 2, half=half_a_line),
    "between log and checkpoint": Point(CheckpointFolder, "commit", lambda self, c: c.state.round == 2),
    "while a file is written": Point(files.os, "replace", lambda a, b: Path(b).name == "state.safetensors", nth=3),
    "between the checkpoint's files": Point(checkpoint, "write_json", nth=3),
    "before the checkpoint gets its name": Point(Path, "rename", lambda a, b: b.name == "round-000002"),
    "after the checkpoint got its name": Point(checkpoint, "sync_folder", nth=3),
    "while an old checkpoint is deleted": Point(
        checkpoint.shutil, "rmtree", lambda p: p.name.startswith("round"), half=_half_pruned
    ),
    "before old memories are deleted": Point(MemoryFolder, "forget_all_but", nth=3),
    "between two rounds": Point(Observer, "round", lambda self, record: record["round"] == 2, after=True),
    "after the first checkpoint": Point(Observer, "round", lambda self, record: record["round"] == 0),
    "after the last round": Point(Observer, "round", lambda self, record: record["round"] == 3, after=True),
}


def by_sigkill() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def run_until_killed(out: Path, name: str, point: str, participation: float) -> None:
    """Body of a child process that does not come back."""
    import torch

    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        arm(patch, POINTS[point], by_sigkill)
        method = METHODS[name]()
        world_of(method, out).run(method, training=KILL_TRAINING, participation=participation)


#: With kept optimiser state every client has a memory in every round, whatever the method.
KILL_TRAINING = replace(TRAINING, optimizer_state="keep")
