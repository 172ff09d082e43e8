"""A run that was killed and resumed ends bitwise where the straight run ends (M10), wherever it was killed."""

from __future__ import annotations

import multiprocessing
import signal
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from kill_points import KILL_TRAINING, POINTS, run_until_killed

from conftest import FEDERATED, REPRESENTATIVES
from fatal_moments import Killed, arm, by_exception
from fedloom.methods import METHODS
from small_world import outcome, tree, world_of


def finish(out: Path, name: str, participation: float) -> dict[str, Any]:
    """Run to the end, from wherever it stands, with a new process's objects; return what is left behind."""
    world = world_of(METHODS[name](), out)
    state = world.run(METHODS[name](), training=KILL_TRAINING, participation=participation)
    world.export(METHODS[name](), state)
    return outcome(out)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def run(name: str, participation: float) -> dict[str, Any]:
        found = finish(tmp_path_factory.mktemp("straight"), name, participation)
        assert [record["round"] for record in found["log"]] == [0, 1, 2, 3]
        assert found["memory"]
        assert found["model"]
        return found

    return run


#: Of the checkpoint's own steps one is enough for a method whose like tries them all.
ANY_METHOD = ["in the middle of a client", "after a client wrote its memory", "between log and checkpoint"]
WHERE = [(name, point) for name in FEDERATED for point in (POINTS if name in REPRESENTATIVES else ANY_METHOD)]


@pytest.mark.parametrize(("name", "point"), WHERE, indirect=["name"], scope="session")
def test_M10_resume_equals_the_straight_run(name: str, point: str, straight: Any, tmp_path: Path) -> None:
    participation = 0.75  # three of four clients a round
    with pytest.MonkeyPatch.context() as patch:
        arm(patch, POINTS[point], by_exception)
        with pytest.raises(Killed):
            finish(tmp_path, name, participation)
    assert finish(tmp_path, name, participation) == straight(name, participation)
    assert not [p for p in tree(tmp_path) if "partial" in p]


SIGKILLED = ["in the middle of a client", "between log and checkpoint", "while a file is written", "between two rounds"]


@pytest.mark.parametrize("name", REPRESENTATIVES, indirect=True, scope="session")
def test_M10_resume_after_sigkill_equals_the_straight_run(name: str, straight: Any, tmp_path: Path) -> None:
    """A real kill: no ``finally`` runs, no buffer is flushed."""
    context = multiprocessing.get_context("forkserver")
    # Heavy imports once for all children. (Not kill_points itself: the server does not get this process's sys.path.)
    context.set_forkserver_preload(["pytest", "transformers.models.llama.modeling_llama", "fedloom.experiment"])
    children = {}
    for point in SIGKILLED:
        out = tmp_path / point.replace(" ", "-")
        children[out] = context.Process(target=run_until_killed, args=(out, name, point, 1.0))
        children[out].start()
    for out, child in children.items():
        child.join(400)  # a busy machine imports slowly
        assert child.exitcode == -signal.SIGKILL, out.name
        assert finish(out, name, 1.0) == straight(name, 1.0), out.name


def test_M10_killed_twice(name: str, straight: Any, tmp_path: Path) -> None:
    for point in ("between two clients", "between log and checkpoint"):
        with pytest.MonkeyPatch.context() as patch:
            arm(patch, POINTS[point], by_exception)
            with pytest.raises(Killed):
                finish(tmp_path, name, 0.75)
    assert finish(tmp_path, name, 0.75) == straight(name, 0.75)


def test_M10_the_loss_goes_on_where_it_was(name: str, straight: Any, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        arm(patch, POINTS["between two rounds"], by_exception)
        with pytest.raises(Killed):
            finish(tmp_path, name, 1.0)
    finish(tmp_path, name, 1.0)
    losses = [record["train_loss"] for record in world_of(METHODS[name](), tmp_path).log.read()[1:]]
    assert losses == [record["train_loss"] for record in straight(name, 1.0)["log"][1:]]
    assert losses[2] < losses[0]


def test_a_finished_run_resumes_to_itself(name: str, straight: Any, tmp_path: Path) -> None:
    finish(tmp_path, name, 0.75)
    assert finish(tmp_path, name, 0.75) == straight(name, 0.75)
