"""Local training: each client's adapter is what it gets alone, in plain PyTorch and float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fedloom.methods.local import Local
from fedloom.numerics.seeding import generator
from fedloom.numerics.tree import take
from fedloom.runtime.client import draw_batches
from small_world import SPEC, TRAINING, World
from straight_loop import StraightLoop, largest_difference


@pytest.mark.parametrize("client", ["ann", "dan"])
def test_rounds_alone_are_a_straight_loop(client: str, tmp_path: Path) -> None:
    """A round's optimiser is new, its adapter is not; nobody else's rows matter."""
    spec = replace(SPEC, dropout=0.0)
    world = World(tmp_path, spec=spec)
    state = world.run(Local(), rounds=2)
    tensors, rows = Local().init(world.setup).tensors, world.clients[client]
    assert state.tensors.keys() == tensors.keys()
    for round in (1, 2):
        loop = StraightLoop(tensors, spec, TRAINING)
        pools = [range(len(rows))] * TRAINING.steps
        source = generator(world.setup.seed, "batches", "fit", client, round)
        for batch in draw_batches(pools, rows.lengths, TRAINING.batch_size, source):
            loop.step([rows.encoded[i] for i in batch], [rows.features(world.bench)[i] for i in batch])
        tensors = loop.read()
    memory = world.memory.read(world.checkpoints.load(2).memories[client])
    assert largest_difference(take(memory.tensors, "own"), tensors) < 1e-4
    assert largest_difference(Local().personal_view(state, client, memory).tensors, tensors) < 1e-4
    assert largest_difference(state.tensors, tensors) > 1e-2


def test_nothing_is_sent_and_the_server_learns_nothing(tmp_path: Path) -> None:
    world = World(tmp_path)
    state = world.run(Local(), rounds=1)
    assert largest_difference(state.tensors, Local().init(world.setup).tensors) == 0
    assert Local().assembled(state, {}) is None
    (record,) = (r for r in world.log.read() if r["round"] == 1)
    assert record["weights"] == {"examples": 16}
    assert all(entry["bytes_up"] < 600 for entry in record["clients"].values())  # a header, no tensor
