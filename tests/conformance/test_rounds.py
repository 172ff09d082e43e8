"""What holds for a round of any method, whoever the clients are."""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import Recording, sends_tensors
from fedloom.backbones.load import parameter_hash
from fedloom.errors import RoundError
from fedloom.methods.base import Method
from fedloom.numerics.lowrank import delta
from fedloom.runtime.events import Observer
from fedloom.runtime.loop import Receipt, sample_cohort
from fedloom.runtime.memory import ClientMemory
from fedloom.runtime.wire import decode, decode_state, encode_order, encode_state
from fedloom.types import AdapterSpec, Client, Order, Reply, State, Tensors
from small_world import SECRET, TRAINING, Wire, outcome, same, without_seconds, world_of


class Shuffled:
    """Asks the clients in another order, and brings the answers back in a third."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.random = random.Random(3)

    def exchange(self, method: Method, orders: Sequence[Order], *rest: Any) -> list[Receipt]:
        receipts = self.inner.exchange(method, self.random.sample(orders, len(orders)), *rest)
        return self.random.sample(receipts, len(receipts))

    def committed(self, memory_versions: set[str]) -> None:
        self.inner.committed(memory_versions)


def test_the_order_of_clients_is_irrelevant(method: Method, tmp_path: Path) -> None:
    straight, shuffled = world_of(method, tmp_path / "a"), world_of(method, tmp_path / "b")
    straight.run(method)
    shuffled.run(method, transport=Shuffled(shuffled.simulator))
    assert outcome(straight.out) == outcome(shuffled.out)


def test_a_reply_does_not_depend_on_who_ran_before(method: Method, recording: Recording, tmp_path: Path) -> None:
    """Each client is asked again, alone, on a backbone that nobody used; its memory is that of the recorded run."""
    world = world_of(method, tmp_path)
    for round, orders in recording.orders.items():
        for client, order in orders.items():
            world.simulator.bench = world.fresh_bench()
            version = world.memory.write(client, round, recording.before[round][client])
            (receipt,) = world.simulator.exchange(method, [order], {client: version}, Observer())
            assert receipt.path.read_bytes() == recording.replies[round][client]


def test_backbone_hash_is_unchanged_by_a_run(method: Method, tmp_path: Path) -> None:
    world = world_of(method, tmp_path)
    before = world.bench.backbone.hash
    world.run(method)
    if method.native:  # the backbone itself is trained; its beginnings are what ``off`` computes with
        with world.bench.grafted.routing(None):
            assert parameter_hash(world.bench.backbone.model) == before
        assert same(world.bench.grafted.initial, world.fresh_bench().grafted.initial)
    else:
        assert parameter_hash(world.bench.grafted.ungraft()) == before


def weights(tensors: Tensors, spec: AdapterSpec) -> Tensors:
    """Return what a model computes with: B·A of each expert at each module, and all other tensors as they are."""
    found = {name: t for name, t in tensors.items() if not name.endswith(("lora_A", "lora_B"))}
    for name, A in tensors.items():
        if name.endswith("lora_A"):
            found[name.removesuffix(".lora_A")] = delta(A, tensors[name.removesuffix("A") + "B"], spec.scaling)
    return found


def test_zero_learning_rate_is_a_fixed_point(method: Method, tmp_path: Path) -> None:
    """Tensors stay bit by bit under the default merge; one that draws or splits factors anew keeps their product."""
    states: list[State] = []
    training = replace(TRAINING, lr=0.0, router_lr=0.0, weight_decay=0.1)
    world_of(method, tmp_path).run(method, training=training, evaluate=lambda state, _: states.append(state))
    assert len(states) == 4
    first = states[0]
    for state in states[1:]:
        assert same(weights(state.tensors, state.spec), weights(first.tensors, first.spec))
        assert type(method).merge is not Method.merge or same(state.tensors, first.tensors)


def test_training_moves_what_is_sent_and_keeps_the_rest(method: Method, recording: Recording) -> None:
    """So that the fixed point above says something."""
    first, last = recording.states[0], recording.states[recording.last]
    orders = [order for round, asked in recording.orders.items() if round for order in asked.values()]
    sent = {name for order in orders for name in order.tensors if method.sends(name, order)}
    assert bool(sent) == sends_tensors(type(method))
    before, after = first.tensors | first.kept, last.tensors | last.kept
    moved = {name for name in after if name not in before or not torch.equal(after[name], before[name])}
    assert bool(moved) == bool(sent)
    if type(method).merge is Method.merge:
        assert moved == sent & before.keys()


def test_every_client_of_a_personal_method_ends_with_a_model_of_its_own(method: Method, recording: Recording) -> None:
    """Clients that discovery put into the same clusters share one, as do those that hold the same native experts."""
    state, memories = recording.states[recording.last], recording.memories[recording.last]
    views = {client: method.personal_view(state, client, memories[client]) for client in sorted(memories)}
    for view in views.values():
        assert not same(view.tensors, recording.states[0].tensors)
    groups = state.values.get("assignment") or state.values.get("kept", {})
    clusters = {client: set(found) for client, found in groups.items()}
    for a, b in itertools.combinations(views, 2):
        share = not method.personal or (a in clusters and clusters[a] == clusters[b])
        assert same(views[a].tensors, views[b].tensors) == share


@pytest.mark.parametrize("round", [0, 1, 2])
def test_every_view_can_be_grafted(round: int, method: Method, recording: Recording) -> None:
    """Also at round 0, and for a client that was never asked: its memory is empty."""
    state, memories, bench = recording.states[round], recording.memories[round], recording.world.bench
    assembled = method.assembled(state, memories)
    assert (assembled is not None) == method.global_model
    views = [assembled] if assembled else []
    for client, memory in memories.items():
        views += [method.personal_view(state, client, known) for known in (memory, ClientMemory())]
    for view in views:
        bench.load(view.tensors, view.spec)
        assert same(bench.grafted.read(), view.tensors)


def test_private_tensors_never_reach_another_client(method: Method, tmp_path: Path) -> None:
    """Odd numbers are planted in what ann keeps; training stands still, so wherever they went they would be seen.

    No order and no other client's reply holds one of them, nor does ann's own reply where the method does not send the
    tensor. Kept optimiser moments give every method something to hide.
    """
    still = replace(TRAINING, lr=0.0, router_lr=0.0, optimizer_state="keep")
    world_of(method, tmp_path).run(method, rounds=1, training=still)
    world = world_of(method, tmp_path)
    version = world.checkpoints.load(1).memories["ann"]
    memory = world.memory.read(version)
    planted = {name: 0.0123 + 1e-5 * i for i, name in enumerate(memory.tensors) if not name.endswith("/step")}
    assert planted
    for name, number in planted.items():
        memory.tensors[name].view(-1)[0] = number
    world.memory.write("ann", int(version.removesuffix(".safetensors").rpartition("-r")[2]), memory)
    asked = 0

    def look(orders: Sequence[Order], receipts: list[Receipt]) -> list[Receipt]:
        nonlocal asked
        asked += len(orders)
        for order in orders:
            private = {n for n in planted if order.client != "ann" or not method.sends(n.partition("/")[2], order)}
            texts = [encode_order(order), *(r.path.read_bytes() for r in receipts if r.client == order.client)]
            for name in private:
                assert not any(struct.pack("<f", planted[name]) in text for text in texts), (name, order.client)
        return receipts

    world.run(method, rounds=3, training=still, transport=Wire(world.simulator, look))
    assert asked == 8


def test_nothing_private_leaves_a_client(method: Method, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_of(method, tmp_path)
    made: list[Reply] = []
    for side in ("probe", "local"):
        inner = getattr(type(method), side)

        def spy(self: Method, client: Client, order: Order, inner: Any = inner) -> Reply:
            made.append(inner(self, client, order))
            return made[-1]

        monkeypatch.setattr(type(method), side, spy)
    sent: list[bytes] = []

    def read(orders: Sequence[Order], receipts: list[Receipt]) -> list[Receipt]:
        sent.extend(r.path.read_bytes() for r in receipts)
        return receipts

    training = replace(TRAINING, optimizer_state="keep")  # then there is something private in every round
    world.run(method, rounds=2, training=training, transport=Wire(world.simulator, read))
    assert len(sent) == len(made) >= 8
    for data, reply in zip(sent, made, strict=True):
        tensors, header = decode(data)
        assert tensors.keys() == reply.send.keys()
        assert header.keys() == {"client", "round", "counts", "metrics", "values"}
        private = reply.keep.keys() | reply.keep_values.keys()
        assert not private & (tensors.keys() | header["values"].keys() | header["metrics"].keys())
        for forbidden in ("optimizer/", SECRET, SECRET.upper(), "SHOUT"):
            assert forbidden.encode() not in data
        # No value has one entry per example, and no tensor either.
        size = len(world.clients[reply.client])
        assert not any(isinstance(v, list) and len(v) == size > 2 for v in header["values"].values())


def test_reported_bytes_are_the_encoded_bytes(method: Method, tmp_path: Path) -> None:
    world = world_of(method, tmp_path)
    up: list[dict[str, int]] = []
    down: list[dict[str, int]] = []

    def measure(orders: Sequence[Order], receipts: list[Receipt]) -> list[Receipt]:
        up.append({r.client: r.path.stat().st_size for r in receipts})
        down.append({order.client: len(encode_order(order)) for order in orders})
        return receipts

    world.run(method, transport=Wire(world.simulator, measure))
    records = [record for record in world.log.read() if "clients" in record]
    assert len(records) == len(up)
    for record, received, ordered in zip(records, up, down, strict=True):
        assert {c: v["bytes_up"] for c, v in record["clients"].items()} == received
        assert {c: v["bytes_down"] for c, v in record["clients"].items()} == ordered
        assert record["bytes_up"] == sum(received.values())
        assert record["bytes_down"] == sum(ordered.values())


def test_A6_a_client_that_dies_in_a_round_is_tolerated_and_may_come_back(method: Method, tmp_path: Path) -> None:
    world = world_of(method, tmp_path)

    def lose_bob_in_round_1(orders: Sequence[Order], receipts: list[Receipt]) -> list[Receipt]:
        return [r for r in receipts if not (orders[0].round == 1 and r.client == "bob")]

    state = world.run(method, transport=Wire(world.simulator, lose_bob_in_round_1), rounds=2, min_replies=2)
    records = {record["round"]: record for record in world.log.read()}
    assert records[1]["absent"] == ["bob"]
    assert records[2]["absent"] == []
    assert "bob" in records[2]["clients"]
    assert state.round == 2


def test_A6_too_few_replies_end_the_run_with_both_numbers(method: Method, tmp_path: Path) -> None:
    world = world_of(method, tmp_path)
    world.run(method, rounds=1)
    before = outcome(tmp_path)

    def lose_all_but_ann(orders: Sequence[Order], receipts: list[Receipt]) -> list[Receipt]:
        return [r for r in receipts if r.client == "ann"]

    with pytest.raises(RoundError, match=r"1 usable replies of 4 asked; at least 2 .*Silent: \['bob', 'cyd', 'dan'\]"):
        world.run(method, rounds=2, transport=Wire(world.simulator, lose_all_but_ann), min_replies=2)
    after = outcome(tmp_path)
    assert after["log"] == before["log"]
    assert after["checkpoints"] == before["checkpoints"]


def test_A12_the_same_seed_gives_identical_runs(method: Method, tmp_path: Path) -> None:
    first, second = world_of(method, tmp_path / "a"), world_of(method, tmp_path / "b")
    first.run(method, participation=0.5)
    second.run(method, participation=0.5)
    assert outcome(first.out) == outcome(second.out)


def test_A12_another_seed_gives_other_cohorts_and_other_tensors(method: Method, tmp_path: Path) -> None:
    records, experts = [], []
    for seed in (42, 43):
        world = world_of(method, tmp_path / str(seed), seed=seed)
        state = world.run(method, participation=0.5)
        records.append([record["cohort"] for record in world.log.read() if record["round"]])
        asked = records[-1][-1][0]
        memory = world.memory.read(world.checkpoints.load(3).memories.get(asked))
        view = method.personal_view(state, asked, memory)
        found = weights(view.tensors, view.spec)
        experts.append({name: t for name, t in found.items() if name.startswith("experts/")})
    assert records[0] != records[1]
    assert all(len(cohort) == 2 for cohort in records[0] + records[1])
    assert records[0] == [sample_cohort(["ann", "bob", "cyd", "dan"], 0.5, 42, round) for round in (1, 2, 3)]
    assert not any(torch.equal(experts[0][n], experts[1][n]) for n in experts[0].keys() & experts[1].keys())


def test_states_survive_encoding(recording: Recording) -> None:
    for state in recording.states.values():
        back = decode_state(encode_state(state))
        assert same(back.tensors, state.tensors)
        assert same(back.kept, state.kept)
        assert (back.round, back.spec, back.values) == (state.round, state.spec, state.values)
        assert encode_state(back) == encode_state(state)


def test_D9_clients_with_one_and_with_two_examples_take_part(method: Method, tmp_path: Path) -> None:
    world = world_of(method, tmp_path)
    world.run(method, rounds=2)
    for record in world.log.read():
        if record["round"]:
            for client, size in (("dan", 1), ("cyd", 2)):
                entry = record["clients"][client]
                assert entry["examples"] == size
                assert entry["steps"] == TRAINING.steps
                assert entry["loss"] > 0
            assert record["quarantined"] == {}


def test_the_log_says_what_every_client_did(method: Method, tmp_path: Path) -> None:
    world = world_of(method, tmp_path)
    world.run(method, rounds=1)
    record = without_seconds(world.log.read()[-1])
    losses = {c: (v["examples"], v["loss"]) for c, v in record["clients"].items()}
    assert {c: n for c, (n, _) in losses.items()} == {"ann": 8, "bob": 5, "cyd": 2, "dan": 1}
    assert record["train_loss"] == pytest.approx(sum(n * loss for n, loss in losses.values()) / 16)
    assert record["weights"]["examples"] == 16
