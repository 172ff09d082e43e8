"""Centralised training: all rows as one client's, in plain PyTorch and float64, with everyone's steps."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from fedloom.config import TrainingConfig, parse_config
from fedloom.errors import ConfigError
from fedloom.methods.centralised import Centralised
from fedloom.numerics.seeding import generator
from fedloom.runtime.client import Rows, draw_batches
from fedloom.runtime.loop import cohort_size, sample_cohort
from fedloom.workload import POOLED, Data, pool
from small_world import SPEC, TRAINING, World, client_rows, rows
from straight_loop import StraightLoop, largest_difference


def test_pooled_rows_are_all_rows_in_client_order() -> None:
    clients = {name: rows(found) for name, found in client_rows().items()} | {"eve": Rows([])}
    labels = {name: [f"{name}-{i}" for i in range(len(found))] for name, found in clients.items()}
    sizes = {name: len(found) for name, found in clients.items() if len(found)}
    rest: dict[str, Any] = {field.name: {} for field in fields(Data)}
    data = Data(**(rest | {"clients": clients, "labels": labels, "sizes": sizes}))
    pooled = pool(data)
    assert [e for r in clients.values() for e in r.encoded] == pooled.clients[POOLED].encoded
    assert [label for found in labels.values() for label in found] == pooled.labels[POOLED]
    assert pooled.clients.keys() == {POOLED}
    assert pooled.sizes == {"ann": 8, "bob": 5, "cyd": 2, "dan": 1}  # the clients of the personalised protocol
    steps = TrainingConfig(steps=3).ordered(steps_factor=len(pooled.sizes)).steps
    assert steps == 12


def test_a_pass_over_all_rows_is_not_a_pass_over_a_cohorts() -> None:
    training = {"epochs": 1, "steps": 1000}
    plain = {"method": {"name": "centralised"}, "data": {"clients": {"ann": "ann.jsonl"}}, "training": training}
    parse_config(plain)
    with pytest.raises(ConfigError, match=r"go over everyone's rows each round.*set participation to 1"):
        parse_config(plain | {"federation": {"participation": 0.25}})


@pytest.mark.parametrize(("clients", "share", "size"), [(20, 0.25, 5), (5, 0.5, 3), (4, 0.1, 1), (7, 1.0, 7)])
def test_the_size_of_a_cohort(clients: int, share: float, size: int) -> None:
    """Halves count up; a pooled run takes the steps of so many clients."""
    assert cohort_size(clients, share) == size
    assert len(sample_cohort([f"c{i}" for i in range(clients)], share, 42, 1)) == size


def test_rounds_are_a_straight_loop_over_all_rows(tmp_path: Path) -> None:
    spec, training = replace(SPEC, dropout=0.0), replace(TRAINING, steps=12)
    everything = [example for found in client_rows().values() for example in found]
    world = World(tmp_path, clients={POOLED: everything}, spec=spec)
    state = world.run(Centralised(), rounds=2, training=training)
    tensors, pooled = Centralised().init(world.setup).tensors, world.clients[POOLED]
    for round in (1, 2):
        loop = StraightLoop(tensors, spec, training)
        source = generator(world.setup.seed, "batches", "fit", POOLED, round)
        drawn = draw_batches([range(len(pooled))] * 12, pooled.lengths, training.batch_size, source)
        assert sorted(i for batch in drawn[:8] for i in batch) == list(range(16))  # each row once before any twice
        for batch in drawn:
            loop.step([pooled.encoded[i] for i in batch], [pooled.features(world.bench)[i] for i in batch])
        tensors = loop.read()
    assert largest_difference(state.tensors, tensors) < 1e-3
