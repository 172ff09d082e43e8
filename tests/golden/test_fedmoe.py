"""FedMoE (arXiv 2408.11304): the search for θ, modular aggregation and the adjustment of sub-models, by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from fedloom.errors import ConfigError, UpdateRejected
from fedloom.methods.fedmoe import FedMoE, FedMoEOptions
from fedloom.numerics.submodels import adjusted, choose, fewest, neighbours, router_rows, shares_of, similarity, stalled
from fedloom.runtime.memory import ClientMemory
from fedloom.runtime.quarantine import check_reply
from fedloom.types import AdapterSpec, Order, Reply, State, Tensors, Training
from small_world import NATIVE, World

SPEC = AdapterSpec((), native="full")
SHARES = {"a": [0.2, 0.5, 0.3], "b": [0.7, 0.1, 0.2]}


@pytest.mark.parametrize(
    ("budget", "theta", "kept"),
    [
        (0, 0.0, {"a.1", "b.0"}),  # one of each layer, whatever the budget
        (2, 0.5, {"a.1", "b.0"}),
        (3, 0.7, {"a.1", "a.2", "b.0"}),  # at 0.7, b has enough with one and a needs 0.5 + 0.3
        (4, 0.8, {"a.1", "a.2", "b.0", "b.2"}),  # at 0.8, b needs 0.7 + 0.2
        (5, 0.9, {"a.0", "a.1", "a.2", "b.0", "b.2"}),
        (6, 1.0, {"a.0", "a.1", "a.2", "b.0", "b.1", "b.2"}),
        (99, 1.0, {"a.0", "a.1", "a.2", "b.0", "b.1", "b.2"}),
    ],
)
def test_the_search_by_hand(budget: int, theta: float, kept: set[str]) -> None:
    found, largest = choose(SHARES, budget)
    assert set(found) == {f"experts/{unit}" for unit in kept}
    assert largest == pytest.approx(theta)


@settings(max_examples=80, deadline=None)
@given(
    counts=st.lists(st.lists(st.integers(0, 50), min_size=4, max_size=4), min_size=1, max_size=3),
    budget=st.integers(0, 12),
)
def test_no_larger_theta_of_a_fine_grid_fits(counts: list[list[int]], budget: int) -> None:
    tokens = {f"experts/l{i}.{e}": n for i, layer in enumerate(counts) for e, n in enumerate(layer)}
    shares = shares_of(tokens)
    kept, theta = choose(shares, budget)
    assert len(kept) <= max(budget, len(counts))
    for larger in (theta + step / 1000 for step in range(1, 1001) if theta + step / 1000 <= 1):
        assert len(fewest(shares, larger)) > budget or set(fewest(shares, larger)) == set(kept)
    for i in range(len(counts)):
        of_layer = [p for unit, p in zip((f"experts/l{i}.{e}" for e in range(4)), shares[f"l{i}"]) if unit in kept]
        assert of_layer
        assert sum(of_layer) >= theta - 1e-12


def test_shares_are_of_a_layers_tokens() -> None:
    tokens = {"experts/x.mlp.0": 3, "experts/x.mlp.1": 1, "experts/y.mlp.0": 0, "experts/y.mlp.1": 0}
    assert shares_of(tokens) == {"x.mlp": [0.75, 0.25], "y.mlp": [0.5, 0.5]}


# Modular aggregation.

ROUTER = "router/m.gate.weight"


def state(**values: Any) -> State:
    tensors: Tensors = {f"experts/m.{e}/w": torch.full((1, 2), 10.0 * e) for e in range(3)}
    tensors |= {ROUTER: torch.zeros(3, 2), "shared/norm": torch.ones(2)}
    shares = {"ann": {"m": [0.5, 0.5, 0.0]}, "bob": {"m": [0.0, 1.0, 0.0]}}
    kept = {"ann": ["experts/m.0", "experts/m.1"], "bob": ["experts/m.1"]}
    known = {"shares": shares, "kept": kept, "history": {}, "trial": {}, "frozen": []}
    return State(1, tensors, SPEC, known | values)


def reply(client: str, experts: dict[int, float], router: list[list[float]], norm: float, examples: int) -> Reply:
    send: Tensors = {f"experts/m.{e}/w": torch.full((1, 2), value) for e, value in experts.items()}
    send |= {ROUTER: torch.tensor(router), "shared/norm": torch.full((2,), norm)}
    units = {f"experts/m.{e}" for e in experts}
    counts = {"examples": examples} | dict.fromkeys([*units, "router", "shared"], examples)
    return Reply(client, send, counts, {"loss": 1.0}, {"activations": dict.fromkeys(sorted(units), 4)})


REPLIES = [
    reply("ann", {0: 1.0, 1: 4.0}, [[1.0, 1.0], [2.0, 2.0], [9.0, 9.0]], 4.0, 3),
    reply("bob", {1: 8.0}, [[7.0, 7.0], [6.0, 6.0], [9.0, 9.0]], 8.0, 1),
]


def test_one_holder_replaces_several_are_averaged_and_none_leaves_it() -> None:
    before = state()
    merged = FedMoE().merge(before, REPLIES).tensors
    assert merged["experts/m.0/w"].tolist() == [[1.0, 1.0]]  # ann alone: her 0 + 1
    assert merged["experts/m.1/w"].tolist() == [[15.0, 15.0]]  # 10 + (3·4 + 1·8) / 4
    assert merged["experts/m.2/w"] is before.tensors["experts/m.2/w"]
    assert merged["shared/norm"].tolist() == [6.0, 6.0]  # 1 + (3·4 + 1·8) / 4
    # A row counts where its expert is held: bob's first row is not, nobody's third is.
    assert merged[ROUTER].tolist() == [[1.0, 1.0], [3.0, 3.0], [0.0, 0.0]]  # second: (3·2 + 1·6) / 4
    assert not before.tensors[ROUTER].any()


def test_nobody_holds_anything_more_than_the_dense_parts() -> None:
    merged = FedMoE().merge(state(), [reply("bob", {}, [[7.0, 7.0]] * 3, 8.0, 1)]).tensors
    assert not merged[ROUTER].any()
    assert merged["shared/norm"].tolist() == [9.0, 9.0]


def test_rows_are_those_of_the_layer() -> None:
    units = ["experts/block.1.mlp.3", "experts/block.1.mlp.0", "experts/block.11.mlp.2"]
    assert router_rows("router/block.1.mlp.router.classifier.weight", units) == [0, 3]
    assert router_rows("router/block.11.mlp.router.classifier.weight", units) == [2]
    assert router_rows("router/block.2.mlp.router.classifier.weight", units) == []


def test_a_client_gets_its_experts_and_everything_else() -> None:
    view = FedMoE().view(state(), "bob")
    assert view.tensors.keys() == {"experts/m.1/w", ROUTER, "shared/norm"}
    assert view.spec == replace(SPEC, kept=("experts/m.1",))
    assert FedMoE().view(state(), None).spec == SPEC
    assert FedMoE().view(state(), None).tensors.keys() == state().tensors.keys()


@pytest.mark.parametrize(("options", "budget"), [({}, 1), ({"capacity": 1.0}, 3), ({"capacities": {"bob": 0.67}}, 2)])
def test_discovery_fills_the_budget(options: dict[str, Any], budget: int) -> None:
    tokens = {"experts/m.0": 1, "experts/m.1": 6, "experts/m.2": 3}
    start = replace(state(), values={})
    probes = [Reply("bob", {}, {"examples": 5}, values={"activations": tokens})]
    found = FedMoE(FedMoEOptions(**options)).discover(start, probes)
    assert len(found.values["kept"]["bob"]) == budget
    assert found.values["shares"] == {"bob": {"m": [0.1, 0.6, 0.3]}}
    assert found.values["theta"]["bob"] == pytest.approx({1: 0.6, 2: 0.9, 3: 1.0}[budget])
    assert not FedMoE().admits(found, "ann")


@pytest.mark.parametrize("share", [-3.0, 0.0, 7.0])
def test_a_capacity_is_a_share(share: float) -> None:
    with pytest.raises(ValidationError, match=r"capacities\.bob"):
        FedMoEOptions(capacities={"bob": share})


def test_a_capacity_for_nobody_is_refused_and_across_sites_awaited(tmp_path: Path) -> None:
    FedMoE(FedMoEOptions(capacities={"bob": 0.5})).check_clients(["ann", "bob"])
    with pytest.raises(ConfigError, match=r"method\.capacities names 'bbo', .*Did you mean 'bob'"):
        FedMoE(FedMoEOptions(capacities={"bbo": 0.5})).check_clients(["ann", "bob"])
    FedMoE(FedMoEOptions(capacities={"zoe": 0.5})).init(World(tmp_path, spec=NATIVE).setup)  # she may be late


def order(kind: str = "fit") -> Order:
    view = FedMoE().view(state(), "ann")
    return Order(kind, "ann", 1, view.tensors, view.spec, Training())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda r: r.send.update({"experts/m.2/w": torch.ones(1, 2)}), r"unknown, first 'experts/m\.2/w'"),
        (lambda r: r.send.pop("experts/m.1/w"), r"missing, first 'experts/m\.1/w'"),
        (lambda r: r.counts.update({"experts/m.2": 3}), r"unknown component 'experts/m\.2'"),
        (lambda r: r.counts.pop("experts/m.1"), r"not send: 'experts/m\.1'"),
        (lambda r: r.values["activations"].update({"experts/m.2": 3}), r"not send: 'experts/m\.2'"),
        (lambda r: r.values["activations"].pop("experts/m.0"), r"it sends: 'experts/m\.0'"),
        (lambda r: r.values["activations"].update({"experts/m.0": -1}), r"activations of 'experts/m\.0' are -1"),
        (lambda r: r.values.clear(), "states no 'activations'"),
        (lambda r: r.metrics.clear(), "states no loss"),
    ],
)
def test_a_wrong_set_of_experts_is_refused_by_name(change: Any, reason: str) -> None:
    spoilt = reply("ann", {0: 1.0, 1: 4.0}, [[1.0, 1.0]] * 3, 4.0, 3)
    check_reply(spoilt, FedMoE().expected(order(), spoilt))
    change(spoilt)
    with pytest.raises(UpdateRejected, match=reason):
        check_reply(spoilt, FedMoE().expected(order(), spoilt))


def test_a_probe_counts_every_expert_and_sends_nothing() -> None:
    asked = Order("probe", "ann", 0, state().tensors, SPEC, Training())
    tokens = {f"experts/m.{e}": 5 for e in range(3)}
    assert FedMoE().expected(asked, Reply("ann", {}, {"examples": 3}, values={"activations": tokens})) == {}
    for wrong in ({**tokens, "experts/m.3": 1}, {"experts/m.0": 5}):
        with pytest.raises(UpdateRejected, match=r"'experts/m\.[13]'"):
            FedMoE().expected(asked, Reply("ann", {}, {"examples": 3}, values={"activations": wrong}))


# Adjustment.

#: "cid" uses what "ann" uses; "dan" is orthogonal to both.
KNOWN = {
    "ann": {"m": [0.8, 0.2, 0.0, 0.0]},
    "bob": {"m": [0.6, 0.2, 0.2, 0.0]},
    "cid": {"m": [0.8, 0.2, 0.0, 0.0]},
    "dan": {"m": [0.0, 0.0, 0.0, 1.0]},
}


def units(*experts: int) -> list[str]:
    return [f"experts/m.{e}" for e in experts]


def test_similarity_and_neighbours_by_hand() -> None:
    assert similarity(KNOWN["ann"], KNOWN["cid"]) == pytest.approx(1.0)
    assert similarity(KNOWN["ann"], KNOWN["bob"]) == pytest.approx(0.52 / (0.68 * 0.44) ** 0.5)
    assert similarity(KNOWN["ann"], KNOWN["dan"]) == 0.0
    assert list(neighbours("ann", KNOWN, 2)) == ["cid", "bob"]


def test_adding_removing_and_their_limits_by_hand() -> None:
    kept = {"ann": units(0), "bob": units(0, 1, 2), "cid": units(0, 1, 2), "dan": units(3)}
    # Neighbours hold 3, ann 1: two more, by the neighbours' shares expert 1 (0.2) and expert 2.
    assert adjusted("ann", kept, KNOWN, 2, budget=4) == units(0, 1, 2)
    assert adjusted("ann", kept, KNOWN, 2, budget=2) == units(0, 1)
    assert adjusted("ann", kept, KNOWN, 2, budget=1) == units(0)
    # ann holds 4, its neighbours 1: three less, the lowest shares first.
    kept = {"ann": units(0, 1, 2, 3), "bob": units(0), "cid": units(0), "dan": units(3)}
    assert adjusted("ann", kept, KNOWN, 2, budget=4) == units(0)
    # A layer keeps its last expert, so one of the other layer goes.
    two = {c: {"m": p["m"], "z": [0.9, 0.1]} for c, p in KNOWN.items()}
    kept = {"ann": [*units(3), "experts/z.0", "experts/z.1"], "bob": units(0), "cid": units(0)}
    assert adjusted("ann", kept, two, 2, budget=6) == [*units(3), "experts/z.0"]
    # Nobody is like dan.
    assert adjusted("dan", kept | {"dan": units(3)}, KNOWN, 2, budget=4) == units(3)


def test_stalling_is_no_better_loss_for_as_long_as_patience() -> None:
    assert not stalled([3.0, 3.0], 2)  # too early to say
    assert stalled([3.0, 3.0, 3.1], 2)
    assert not stalled([3.0, 2.9, 3.1], 2)
    assert stalled([3.0, 2.0, 2.5, 2.5], 2)
    assert not stalled([3.0, 3.0, 3.0], 0)


def test_a_change_that_does_not_help_is_taken_back_and_one_that_does_stays() -> None:
    method = FedMoE(FedMoEOptions(patience=2, neighbours=1, capacity=1.0))
    shares = {"ann": {"m": [0.6, 0.4, 0.0]}, "bob": {"m": [0.6, 0.3, 0.1]}}
    kept = {"ann": units(0), "bob": units(0, 1)}

    def after(*losses: float) -> State:
        found = state(shares=shares, kept=kept)
        for loss in losses:
            found = method.adjust(found, {"ann": loss})
        return found

    assert after(3.0, 3.0).values["kept"]["ann"] == units(0)
    changed = after(3.0, 3.0, 3.0)
    assert changed.values["kept"]["ann"] == units(0, 1)
    assert changed.values["kept"]["bob"] == units(0, 1)
    assert changed.values["trial"] == {"ann": units(0)}
    back = after(3.0, 3.0, 3.0, 3.0, 3.0)
    assert (back.values["kept"]["ann"], back.values["trial"], back.values["frozen"]) == (units(0), {}, ["ann"])
    assert after(*[3.0] * 12).values["kept"]["ann"] == units(0)
    stays = after(3.0, 3.0, 3.0, 2.0, 2.5)
    assert (stays.values["kept"]["ann"], stays.values["trial"], stays.values["frozen"]) == (units(0, 1), {}, [])
    assert changed.values["log"] == {"experts": {"ann": 2, "bob": 2}, "frozen": 0}
    never = FedMoE(FedMoEOptions(patience=0))
    assert never.adjust(state(), {"ann": 3.0}).values["history"] == {}


def test_at_home_a_change_counts_once_it_has_helped() -> None:
    """ann's new expert came with the last merge, so she never trained it; bob has nothing on trial."""
    changed = state(kept={"ann": units(0, 1), "bob": units(1)}, trial={"ann": units(0)})
    memory = ClientMemory()
    assert FedMoE().personal_view(changed, "ann", memory).spec.kept == tuple(units(0))
    assert "experts/m.1/w" not in FedMoE().personal_view(changed, "ann", memory).tensors
    assert FedMoE().personal_view(changed, "bob", memory).spec.kept == tuple(units(1))
    assert FedMoE().view(changed, "ann").spec.kept == tuple(units(0, 1))  # what she trains next
