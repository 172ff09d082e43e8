"""Clocks: what the server and the clustering of examples take stands in the log, and nowhere that bits are compared."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom import experiment
from fedloom.methods import METHODS, discovery
from fedloom.methods.base import Method
from fedloom.runtime import client
from fedloom.types import Replies, Reply, State
from small_world import World, outcome

NAP = 0.3


class Slow(Method):
    has_probe = True

    def probe(self, client: Any, order: Any) -> Reply:
        return Reply(client.name, {}, {"examples": client.size})

    def expected(self, order: Any, reply: Reply) -> Any:
        return {} if order.kind == "probe" else super().expected(order, reply)

    def discover(self, state: State, replies: Replies) -> State:
        time.sleep(NAP)
        return super().discover(state, replies)

    def merge(self, state: State, replies: Replies) -> State:
        time.sleep(NAP)
        return super().merge(state, replies)


def test_the_servers_work_is_timed_beside_the_exchange(tmp_path: Path) -> None:
    world = World(tmp_path)
    begun = time.perf_counter()
    world.run(Slow(), rounds=2)
    whole = time.perf_counter() - begun
    log = world.log.read()
    assert all(record["server_seconds"] >= NAP for record in log)
    assert sum(record["server_seconds"] + record["seconds"] for record in log) <= whole + 0.01
    assert "server_seconds" not in str(world.checkpoints.load(2).state.values)


def test_without_a_probe_nothing_is_timed_before_round_one(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.run(Method(), rounds=1)
    assert ["server_seconds" in record for record in world.log.read()] == [False, True]


def test_clustering_is_timed_and_changes_no_bit_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The features, made on first use, are no part of it; of the slow run all but the seconds is the same."""
    kind = METHODS["fedweave"]
    method = kind(kind.Options(warmup_steps=1, router_hidden=4, max_buckets=2))

    def run(folder: Path) -> World:
        world = World(folder)
        world.export(method, world.run(method, rounds=1))
        return world

    fast = run(tmp_path / "fast")
    bucketize, prompt_features = discovery.bucketize, client.prompt_features

    def sleepy(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.05)
        return bucketize(*args, **kwargs)

    naps = iter([2.0])

    def reading(*args: Any, **kwargs: Any) -> Any:
        time.sleep(next(naps, 0.0))
        return prompt_features(*args, **kwargs)

    monkeypatch.setattr(discovery, "bucketize", sleepy)
    monkeypatch.setattr(client, "prompt_features", reading)
    slow = run(tmp_path / "slow")
    times = [[entry["cluster_seconds"] for entry in w.log.read()[0]["clients"].values()] for w in (fast, slow)]
    assert len(times[0]) == len(times[1]) == 4
    assert all(0.05 <= seconds < 2.0 for seconds in times[1])
    assert outcome(slow.out) == outcome(fast.out)
    assert "cluster_seconds" not in json.dumps(slow.checkpoints.load(1).state.values)


def test_what_clusters_no_examples_has_no_such_time(tmp_path: Path) -> None:
    kind = METHODS["fedweave_wo_prototype_expert"]
    world = World(tmp_path)
    world.run(kind(kind.Options(warmup_steps=1, router_hidden=4)), rounds=0)
    assert not any("cluster_seconds" in entry for entry in world.log.read()[0]["clients"].values())


def test_an_accelerators_memory_stands_beside_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert experiment.peak_memory(torch.device("cpu")).keys() == {"peak_bytes"}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7 if device.index == 1 else 0)
    assert experiment.peak_memory(torch.device("cuda", 1))["peak_device_bytes"] == 7
