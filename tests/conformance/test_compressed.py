"""Compressed replies: every method runs with them, and a run that was killed ends where the straight one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kill_points import POINTS

from fatal_moments import Killed, arm, by_exception
from fedloom.methods import METHODS
from fedloom.methods.base import Method
from fedloom.runtime.leaving import Leaving
from small_world import World, outcome, world_of


def go(out: Path, method: Method, **more: Any) -> World:
    found = world_of(method, out)
    found.simulator.leaving = Leaving("int8", feedback=method.summed)
    found.run(method, wire="int8", **more)
    return found


def test_every_method_runs_compressed(method: Method, tmp_path: Path) -> None:
    records = go(tmp_path, method, rounds=1).log.read()
    assert not any(record.get("quarantined") for record in records)


@pytest.mark.parametrize("name", ["fedit", "fedweave"], indirect=True, scope="session")
def test_M10_with_residuals_resume_equals_the_straight_run(name: str, tmp_path: Path) -> None:
    go(tmp_path / "straight", METHODS[name](), participation=0.75)
    with pytest.MonkeyPatch.context() as patch:
        arm(patch, POINTS["after a client wrote its memory"], by_exception)
        with pytest.raises(Killed):
            go(tmp_path / "killed", METHODS[name](), participation=0.75)
    go(tmp_path / "killed", METHODS[name](), participation=0.75)
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "straight")
    assert any("residual" in str(content[:4000]) for content in outcome(tmp_path / "killed")["memory"].values())
