"""Late joiners in the rounds: who is asked, who is drawn, what is recorded, who is turned away."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.methods import METHODS
from fedloom.methods.base import Method
from fedloom.methods.flexlora import FlexLoRA, FlexLoRAOptions
from fedloom.methods.protection import Privacy, SecureAggregation
from fedloom.methods.scaffold import Scaffold
from fedloom.runtime.events import Observer
from fedloom.runtime.loop import Receipt
from fedloom.types import Order, Setup, State
from small_world import SPEC, World, examples, outcome, random_tensors, same, world_of

FIRST = ("ann", "bob", "cyd")


class Notes(Observer):
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, message: str) -> None:
        self.said.append(message)


class Asked:
    """The simulator, and what it was asked; ``spoil`` may rewrite a receipt's file."""

    def __init__(self, inner: Any, spoil: Callable[[Order, Receipt], None] = lambda order, receipt: None) -> None:
        self.inner, self.spoil = inner, spoil
        self.orders: list[Order] = []

    def exchange(
        self, method: Method, orders: Sequence[Order], memories: dict[str, str], observer: Any
    ) -> list[Receipt]:
        self.orders += orders
        receipts: list[Receipt] = self.inner.exchange(method, orders, memories, observer)
        for order, receipt in zip(orders, receipts, strict=True):
            self.spoil(order, receipt)
        return receipts

    def committed(self, memory_versions: set[str]) -> None:
        self.inner.committed(memory_versions)


def three(method: Method, out: Path) -> World:
    """Return a world in which dan is not there at the start."""
    world = world_of(method, out)
    world.setup = replace(world.setup, clients=FIRST)
    return world


def dan_from(call: int) -> Callable[[Collection[str]], Sequence[str]]:
    """Name dan, unless he is known, from the given call on: call 1 is at the end of round 0."""
    calls = 0

    def newcomers(known: Collection[str]) -> list[str]:
        nonlocal calls
        calls += 1
        return [] if "dan" in known or calls < call else ["dan"]

    return newcomers


def test_the_probe_is_the_one_of_the_start(tmp_path: Path) -> None:
    """A joiner is asked what all were asked before round 1, trained from then on, and never probed again."""
    method = METHODS["fedweave"]()
    world = three(method, tmp_path)
    transport = Asked(world.simulator)
    world.run(method, transport=transport, newcomers=dan_from(2))
    probes = {order.client: order for order in transport.orders if order.kind == "probe"}
    assert list(probes) == ["ann", "bob", "cyd", "dan"]
    assert [(o.round, o.spec) for o in probes.values()] == [(0, SPEC)] * 4
    assert same(probes["dan"].tensors, probes["ann"].tensors)
    trained = [(order.round, order.client) for order in transport.orders if order.kind == "fit"]
    assert trained == [(1, c) for c in FIRST] + [(r, c) for r in (2, 3) for c in (*FIRST, "dan")]
    records = world.log.read()
    assert [record.get("joined", {}).keys() for record in records] == [set(), {"dan"}, set(), set()]
    state = world.checkpoints.load(3).state
    found = records[1]["joined"]["dan"]
    assert found["experts"] == state.values["assignment"]["dan"]
    assert [order.values for order in transport.orders if order.client == "dan"][1:] == [
        {"assignment": found["experts"], "sizes": [1]}
    ] * 2
    assert found["bytes_up"] > 1000
    assert records[1]["bytes_up"] == found["bytes_up"] + sum(c["bytes_up"] for c in records[1]["clients"].values())
    assert [world.checkpoints.load(r).joined for r in (2, 3)] == [("dan",)] * 2


def test_a_joiner_of_a_pattern_gets_the_expert_of_that_pattern(tmp_path: Path) -> None:
    """At the start ann and cyd shout and bob and dan do sums; then come yan, who does sums, and zoe, who shouts."""
    shout, sums = ("ann", "cyd", "zoe"), ("bob", "dan", "yan")
    rows = {c: (p, 10 * i) for p, names in (("shout", shout), ("sums", sums)) for i, c in enumerate(names)}
    clients = {name: examples(pattern, 6, start) for name, (pattern, start) in rows.items()}
    method = METHODS["fedweave_wo_prototype_expert"]()
    world = world_of(method, tmp_path, clients=clients)
    world.setup = replace(world.setup, clients=("ann", "bob", "cyd", "dan"))
    state = world.run(method, rounds=1, newcomers=lambda known: sorted({"yan", "zoe"} - set(known)))
    experts = {client: m for client, (m,) in state.values["assignment"].items()}
    assert not {experts[c] for c in shout} & {experts[c] for c in sums}
    assert experts["zoe"] in {experts["ann"], experts["cyd"]}
    assert experts["yan"] in {experts["bob"], experts["dan"]}


@pytest.mark.parametrize("name", ["fedweave", "fedit"])
def test_a_resumed_run_draws_the_same_cohorts_and_ends_with_the_same_bits(name: str, tmp_path: Path) -> None:
    method = METHODS[name]()
    kwargs: dict[str, Any] = {"rounds": 4, "participation": 0.5}
    straight = three(method, tmp_path / "a")
    straight.run(method, newcomers=dan_from(1), **kwargs)
    drawn = [record.get("cohort", []) for record in straight.log.read()]
    assert [len(cohort) for cohort in drawn] == [0, 2, 2, 2, 2]
    assert any("dan" in cohort for cohort in drawn)
    first = three(method, tmp_path / "b")
    first.run(method, newcomers=dan_from(1), **{**kwargs, "rounds": 2})
    second = three(method, tmp_path / "b")
    second.run(method, newcomers=lambda known: [], **kwargs)  # he is known: nobody needs to name him
    assert outcome(tmp_path / "a") == outcome(tmp_path / "b")


@pytest.mark.parametrize("name", ["fedit", "scaffold", "flexlora", "fedalt"])
def test_a_method_without_a_probe_asks_nothing(name: str, tmp_path: Path) -> None:
    method = METHODS[name]()
    world = three(method, tmp_path)
    transport = Asked(world.simulator)
    world.run(method, transport=transport, rounds=2, newcomers=dan_from(1))
    assert [(o.kind, o.round, o.client) for o in transport.orders] == [
        ("fit", r, c) for r in (1, 2) for c in (*FIRST, "dan")
    ]
    assert [record.get("joined") for record in world.log.read()] == [{"dan": {}}, None, None]


def test_fedit_with_a_joiner_before_round_1_is_fedit_with_all(tmp_path: Path) -> None:
    method = METHODS["fedit"]()
    late, all_there = three(method, tmp_path / "a"), world_of(method, tmp_path / "b")
    assert same(
        late.run(method, newcomers=dan_from(1)).tensors,
        all_there.run(method).tensors,
    )


def test_who_comes_in_the_last_round_is_not_asked(tmp_path: Path) -> None:
    method = METHODS["fedweave"]()
    world = three(method, tmp_path)
    transport = Asked(world.simulator)
    world.run(method, transport=transport, rounds=2, newcomers=dan_from(3))
    assert {order.client for order in transport.orders} == set(FIRST)


def test_a_hostile_newcomer_is_quarantined_and_does_not_take_part(tmp_path: Path) -> None:
    """The run is bit by bit one without it. That fewer than ``min_replies`` newcomers are usable is no error."""
    method = METHODS["fedweave"]()
    clean, world = three(method, tmp_path / "a"), three(method, tmp_path / "b")
    expected = clean.run(method, min_replies=2)

    def cut(order: Order, receipt: Receipt) -> None:
        if order.client == "dan":
            receipt.path.write_bytes(receipt.path.read_bytes()[:-9])

    notes, transport = Notes(), Asked(world.simulator, cut)
    asked = dan_from(2)
    once = lambda known: [] if any(o.client == "dan" for o in transport.orders) else asked(known)  # noqa: E731
    state = world.run(method, transport=transport, observer=notes, newcomers=once, min_replies=2)
    assert same(state.tensors, expected.tensors)
    assert state.values == expected.values
    records = world.log.read()
    assert [list(record["quarantined"]) for record in records] == [[], ["dan"], [], []]
    assert "cannot be decoded" in records[1]["quarantined"]["dan"]
    assert not any("joined" in record for record in records)
    assert sum("the reply of dan is quarantined" in said for said in notes.said) == 1
    assert world.checkpoints.load(3).joined == ()


@pytest.mark.parametrize("name", sorted(n for n, m in METHODS.items() if m.has_probe and not n.startswith("fedweave")))
def test_methods_whose_probe_settles_it_refuse_by_name_and_do_not_ask(name: str, tmp_path: Path) -> None:
    method = METHODS[name]()
    world = three(method, tmp_path)
    notes, transport = Notes(), Asked(world.simulator)
    world.run(method, transport=transport, rounds=2, observer=notes, newcomers=dan_from(1))
    assert {order.client for order in transport.orders} == set(FIRST)
    (said,) = [said for said in notes.said if "dan" in said]
    assert f"{method.title} cannot take in late joiners" in said


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"privacy": Privacy(clip=1.0, noise=0.1, delta=1e-5, reproducible=True)}, "privacy is accounted"),
        ({"secagg": SecureAggregation(min_contributors=2)}, "secure sums are"),
    ],
)
def test_privacy_and_secure_sums_are_for_the_first_start(more: dict[str, Any], why: str, tmp_path: Path) -> None:
    method = METHODS["fedit"]()
    world = three(method, tmp_path)
    notes = Notes()
    world.run(method, rounds=2, observer=notes, newcomers=dan_from(1), **more)
    (said,) = [said for said in notes.said if "dan" in said]
    assert why in said
    assert not any("joined" in record or "dan" in record.get("clients", {}) for record in world.log.read())


def test_scaffolds_mean_control_is_over_all_clients() -> None:
    """c is a mean over N = 3; with a fourth whose c_i is 0 it is three quarters of it."""
    method = Scaffold()
    state = method.init(Setup(0, SPEC, {"v": (5, 3)}, hidden_size=4, clients=FIRST))
    state = replace(state, kept=random_tensors(state.kept) | {"server/m/x": torch.ones(1)})
    joined = method.join(state, "dan", None)
    assert joined.values == {"clients": 4}
    for name, tensor in state.kept.items():
        torch.testing.assert_close(joined.kept[name], tensor * (1.0 if name == "server/m/x" else 0.75))


def test_flexloras_joiner_gets_the_next_rank() -> None:
    method = FlexLoRA(FlexLoRAOptions(ranks=[1, 4]))
    state = method.init(Setup(0, SPEC, {"v": (5, 3)}, hidden_size=4, clients=FIRST))
    joined: State = method.join(state, "dan", None)
    assert joined.values["ranks"] == {"ann": 1, "bob": 4, "cyd": 1, "dan": 4}
