"""FedWeave without prototype experts (arXiv 2607.26618, Table 2): the whole client is the unit of everything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.adapters.state import initial_tensors
from fedloom.data.tokenize import Encoded
from fedloom.errors import UpdateRejected
from fedloom.methods.fedweave import FedWeave
from fedloom.methods.fedweave_wo_prototype_expert import FedWeaveWithoutPrototypeExpert, WholeClientOptions
from fedloom.runtime import client as runtime_client
from fedloom.runtime.client import draw_batches
from fedloom.runtime.memory import ClientMemory
from fedloom.types import AdapterSpec, Order, Reply, State, Training
from small_world import SPEC, World, examples, random_tensors
from straight_loop import StraightLoop, largest_difference

METHOD = FedWeaveWithoutPrototypeExpert()
TRAINING = Training(steps=4, batch_size=3, lr=2e-3, router_lr=1e-3, clip=1.0, weight_decay=0.01)


def test_it_is_fedweave_but_for_the_unit() -> None:
    own = {name for name in vars(FedWeaveWithoutPrototypeExpert) if callable(getattr(METHOD, name))}
    assert {name for name in own if not name.startswith("__")} == {"Options", "buckets"}
    assert isinstance(METHOD, FedWeave)
    for nothing_to_choose in ("max_buckets", "by_length", "clusterer"):
        with pytest.raises(ValueError, match=nothing_to_choose):
            WholeClientOptions(**{nothing_to_choose: 1})


def test_one_warm_up_on_all_examples_of_the_client(tmp_path: Path) -> None:
    """Its steps are those of the whole client, though its examples are of two patterns."""
    world = World(tmp_path, clients={"ann": examples("sums", 5) + examples("shout", 4)})
    assert FedWeave().probe(world.client("ann", round=0), _probe(world)).values == {"sizes": [5, 4]}
    reply = METHOD.probe(world.client("ann", round=0), _probe(world))
    assert reply.values == {"sizes": [9]}
    assert reply.keep_values == {"buckets": [0] * 9}
    assert METHOD.expected(_probe(world), reply).keys() == reply.send.keys()
    with pytest.raises(UpdateRejected, match="1 to 1 bucket sizes"):
        METHOD.expected(_probe(world), Reply("ann", {}, {"examples": 9}, values={"sizes": [5, 4]}))


def _probe(world: World) -> Order:
    return Order("probe", "ann", 0, FedWeave().init(world.setup).tensors, SPEC, TRAINING)


def test_an_expert_is_weighted_by_whole_clients() -> None:
    """Two layers' worth in one: clients i, j in cluster 0, k in 1; l is absent. B is 2 × 1, so not square.

    θ_0: |D_i| = 7, |D_j| = 1 → (7·2 + 1·10)/8 = 3.    θ_1: 5.    φ: (7·2 + 1·10 + 2·(−2))/10 = 2.
    """
    B = "q_proj.lora_B"
    spec = AdapterSpec(("q_proj",), rank=1, alpha=6.0, experts=2, router_hidden=1)
    start = {f"experts/{m}/{B}": torch.tensor([[10.0 * m], [0.5]]) for m in (0, 1)} | {"router/0.bias": torch.ones(1)}
    values = {"assignment": {"i": [0], "j": [0], "k": [1], "l": [1]}, "sizes": {"i": [7], "j": [1], "k": [2], "l": [9]}}
    state = State(1, start, spec, values)

    def reply(client: str, expert: float, router: float) -> Reply:
        view = METHOD.view(state, client)
        order = Order("fit", client, 1, view.tensors, view.spec, TRAINING, view.values)
        (m,), (size,) = values["assignment"][client], values["sizes"][client]
        send = {f"experts/{m}/{B}": torch.full((2, 1), expert), "router/0.bias": torch.tensor([router])}
        found = Reply(client, send, {"examples": size, "router": size, f"experts/{m}": size})
        assert METHOD.expected(order, found).keys() == send.keys()
        return found

    end = METHOD.merge(state, [reply("i", 2.0, 2.0), reply("j", 10.0, 10.0), reply("k", 5.0, -2.0)]).tensors
    assert end[f"experts/0/{B}"].flatten().tolist() == [3.0, 3.5]
    assert end[f"experts/1/{B}"].flatten().tolist() == [15.0, 5.5]
    assert end["router/0.bias"].tolist() == [3.0]


def test_local_steps_draw_from_the_whole_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A straight loop on batches of both patterns, experts and router under the full mixture; one expert is sent."""
    world = World(tmp_path, clients={"ann": examples("sums", 5) + examples("shout", 4)})
    spec = replace(SPEC, experts=3, router_hidden=6, dropout=0.0)
    start = random_tensors(initial_tensors(spec, world.setup.shapes, 32, torch.Generator()))
    order = Order("fit", "ann", 1, start, spec, TRAINING, {"assignment": [1], "sizes": [9]})
    batches: list[list[Encoded]] = []

    def record(*args: Any, **named: Any) -> list[list[int]]:
        drawn = draw_batches(*args, **named)
        batches.extend([world.clients["ann"].encoded[i] for i in batch] for batch in drawn)
        return drawn

    monkeypatch.setattr(runtime_client, "draw_batches", record)
    reply = METHOD.local(world.client("ann", memory=ClientMemory(values={"buckets": [0] * 9})), order)
    assert any(len({e.index < 5 for e in batch}) == 2 for batch in batches)  # mixed
    assert sorted(e.index for batch in batches[:3] for e in batch) == list(range(9))  # one pass
    features = world.clients["ann"].features(world.bench)
    loop = StraightLoop(start, spec, TRAINING)
    for batch in batches:
        loop.step(batch, [features[e.index] for e in batch])
    mine = ("experts/1/", "router/")
    expected = {n: loop.read()[n] - t.double() for n, t in start.items() if n.startswith(mine)}
    assert largest_difference(reply.send, expected) < 1e-6
    assert reply.counts == {"examples": 9, "router": 9, "experts/1": 9}
