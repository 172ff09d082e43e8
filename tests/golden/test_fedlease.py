"""FedLEASE (arXiv 2509.15087, as arXiv 2607.26618 compares with it): clusters and means by hand, the mixture and local
training against dense algebra in float64."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_world import LEARNING, SHAPES, Two, product, setup_of
from torch import Tensor

from fedloom.adapters.inject import graft
from fedloom.budget import budget
from fedloom.data.tokenize import Encoded
from fedloom.errors import UpdateRejected
from fedloom.methods.fedlease import FedLEASE, FedLEASEOptions
from fedloom.methods.server import ServerStep, server_step
from fedloom.numerics.tree import place, take
from fedloom.runtime import client as runtime_client
from fedloom.runtime.client import draw_batches
from fedloom.runtime.memory import ClientMemory
from fedloom.types import Order, Reply, State, Tensors, Training
from small_world import World, examples, random_tensors, same
from straight_loop import StraightLoop, largest_difference

METHOD = FedLEASE(FedLEASEOptions(router_hidden=3))
#: Directions of a client's B factors. a and d point one way, b and c another.
ANGLES = {"a": 0.0, "b": math.pi / 2, "c": math.pi / 2 + 0.1, "d": 0.05}
SIZES = {"a": 7, "b": 2, "c": 1, "d": 4}


def warmed_up(client: str, start: Tensors) -> Tensors:
    """Return an adapter whose B blocks turn by the client's angle in the plane of their first two entries."""
    moved = {}
    for name, tensor in start.items():
        moved[name] = tensor + SIZES[client] if name.endswith("lora_A") else tensor.clone()
        if name.endswith("lora_B"):
            moved[name][0, 0] = SIZES[client] * math.cos(ANGLES[client])
            moved[name][1, 0] = SIZES[client] * math.sin(ANGLES[client])
    return moved


def discovered(method: FedLEASE = METHOD) -> State:
    state = method.init(setup_of())
    replies = []
    for client, size in SIZES.items():
        order = Order("probe", client, 0, state.tensors, state.spec, LEARNING)
        send = place(warmed_up(client, state.tensors), "buckets/0")
        reply = Reply(client, send, {"examples": size}, values={"sizes": [size]})
        assert method.expected(order, reply).keys() == send.keys()
        replies.append(reply)
    return method.discover(state, replies)


def order_of(method: FedLEASE, state: State, client: str, round: int = 1) -> Order:
    view = method.view(state, client)
    return Order("fit", client, round, view.tensors, view.spec, LEARNING, view.values)


def moved(method: FedLEASE, state: State, client: str, by: float) -> Reply:
    """Return the reply of a client that moved all that it sends by one number."""
    order = order_of(method, state, client)
    send = {name: torch.full_like(t, by) for name, t in order.tensors.items() if method.sends(name, order)}
    units = {"experts/" + name.split("/")[1] if name.startswith("experts/") else name.split("/")[0] for name in send}
    reply = Reply(client, send, {"examples": SIZES[client]} | dict.fromkeys(units, SIZES[client]))
    assert method.expected(order, reply) == {name: tuple(t.shape) for name, t in send.items()}
    return reply


def test_clients_of_one_direction_share_an_expert_and_a_router() -> None:
    state = discovered()
    assert state.values["assignment"] == {"a": [0], "b": [1], "c": [1], "d": [0]}
    assert state.values["sizes"] == {client: [size] for client, size in SIZES.items()}
    assert (state.spec.experts, state.spec.routers, state.spec.router_hidden) == (2, 2, 3)
    assert same(take(state.tensors, "routers/0"), take(state.tensors, "routers/1"))
    assert take(state.tensors, "routers/1")["0.weight"].shape == (3, 4)


def test_an_expert_starts_at_the_plain_mean_of_its_clients_warm_ups() -> None:
    """Sizes do not weigh: A moves by (7 + 4)/2 in cluster 0 and by (2 + 1)/2 in cluster 1, B likewise."""
    start, tensors = METHOD.init(setup_of()).tensors, discovered().tensors
    for path in SHAPES:
        for expert, shift, clients in ((0, 5.5, "ad"), (1, 1.5, "bc")):
            A = tensors[f"experts/{expert}/{path}.lora_A"]
            torch.testing.assert_close(A, start[f"experts/0/{path}.lora_A"] + shift)
            B = tensors[f"experts/{expert}/{path}.lora_B"]
            x = sum(SIZES[c] * math.cos(ANGLES[c]) for c in clients) / 2
            y = sum(SIZES[c] * math.sin(ANGLES[c]) for c in clients) / 2
            assert B[:2, 0].tolist() == pytest.approx([x, y], abs=1e-5)
            assert int(B.count_nonzero()) == 2


def test_the_mean_goes_over_the_cluster_and_an_absent_client_changes_nothing() -> None:
    """a and b move by 1 and 10, d by 4; c is absent. Cluster 0: (1 + 4)/2 alike, (7·1 + 4·4)/11 by examples."""
    state = discovered()
    replies = [moved(METHOD, state, client, by) for client, by in (("a", 1.0), ("b", 10.0), ("d", 4.0))]
    for weights, zero in (("method", 2.5), ("sample", 23 / 11), ("uniform", 2.5)):
        end = server_step(METHOD, state, replies, ServerStep(weights=weights)).tensors  # type: ignore[arg-type]
        assert end.keys() == state.tensors.keys()
        for name, tensor in end.items():
            by = zero if name.startswith(("experts/0/", "routers/0/")) else 10.0
            torch.testing.assert_close(tensor, state.tensors[name] + by)
    only = METHOD.merge(state, replies[1:2]).tensors  # nobody of cluster 0 answered
    assert all(torch.equal(only[n], t) for n, t in state.tensors.items() if n.startswith(("experts/0/", "routers/0/")))


def gate(router: Tensors, feature: Tensor) -> Tensor:
    hidden = router["0.weight"].double() @ feature + router["0.bias"].double()
    hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
    return (router["2.weight"].double() @ hidden + router["2.bias"].double()).softmax(0)


def test_a_client_asks_its_own_router_and_the_global_model_the_mean_of_all() -> None:
    state = discovered()
    state = State(1, random_tensors(state.tensors, seed=3, scale=1.0), state.spec, state.values)
    feature, x = torch.tensor([0.3, -2.0, 1.0, 0.5], dtype=torch.float64), torch.randn(1, 3, 3)
    gates = [gate(take(state.tensors, f"routers/{j}"), feature) for j in (0, 1)]
    assert (gates[0] - gates[1]).abs().max() > 0.05
    held = [0, 0]
    for client, (cluster,) in state.values["assignment"].items():
        held[cluster] += sum(state.values["sizes"][client])
    assert held[0] != held[1]
    mean = (held[0] * gates[0] + held[1] * gates[1]) / sum(held)
    for view, g in ((METHOD.view(state, "b"), gates[1]), (METHOD.assembled(state, {}), mean)):
        assert view is not None
        model = Two()
        weight = model.v.weight.detach().double()  # type: ignore[union-attr, operator]
        grafted = graft(model, view.spec, hidden_size=4)
        grafted.load(view.tensors)
        grafted.eval()
        dense = sum(g[m] * product(view.tensors, "v", 3.0, m) for m in (0, 1))
        with grafted.routing(grafted.route(feature[None].float(), "soft")):
            found = model.v(x).double()  # type: ignore[operator]
        torch.testing.assert_close(found, x.double() @ (weight + dense).T, atol=1e-5, rtol=1e-5)
    assert same(METHOD.personal_view(state, "b", ClientMemory()).tensors, METHOD.view(state, "b").tensors)


def test_one_cluster_is_a_model_with_one_router() -> None:
    """All warm-ups alike: nothing to part."""
    state = METHOD.init(setup_of())
    send = place(warmed_up("a", state.tensors), "buckets/0")
    replies = [Reply(c, send, {"examples": 7}, values={"sizes": [7]}) for c in "abc"]
    state = METHOD.discover(state, replies)
    assert (state.spec.experts, state.spec.routers) == (1, 1)
    for client in (None, "a"):
        view = METHOD.view(state, client)
        grafted = graft(Two(), view.spec, hidden_size=4)
        grafted.load(view.tensors)


def test_a_client_outside_the_discovery_is_not_asked_and_gets_the_global_model() -> None:
    state = discovered()
    assert METHOD.admits(state, "a")
    assert not METHOD.admits(state, "z")
    assert same(METHOD.personal_view(state, "z", ClientMemory()).tensors, state.tensors)


@pytest.mark.parametrize("counts", [{"examples": 8}, {"experts/0": 6}, {"router": 0}])
def test_counts_are_those_of_discovery(counts: dict[str, int]) -> None:
    state = discovered()
    reply = moved(METHOD, state, "a", 1.0)
    with pytest.raises(UpdateRejected):
        METHOD.expected(order_of(METHOD, state, "a"), Reply("a", reply.send, reply.counts | counts))


# --- Local training -------------------------------------------------------------------------------------------------

TRAINING = Training(steps=4, batch_size=3, lr=2e-3, router_lr=1e-3, clip=1.0, weight_decay=0.01)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[World, list[list[Encoded]]]:
    world = World(tmp_path, clients={"ann": examples("sums", 4) + examples("shout", 3), "bob": examples("shout", 4)})
    batches: list[list[Encoded]] = []

    def record(*args: Any, **named: Any) -> list[list[int]]:
        drawn = draw_batches(*args, **named)
        batches.extend([world.clients["ann"].encoded[i] for i in batch] for batch in drawn)
        return drawn

    monkeypatch.setattr(runtime_client, "draw_batches", record)
    return world, batches


def local_order(world: World, method: FedLEASE, round: int) -> Order:
    """Return ann's order when she is in cluster 1 of 2, with factors and a router that are not zero."""
    state = method.init(world.setup)
    warm = random_tensors(state.tensors, seed=1)
    replies = [
        Reply(c, place(t, "buckets/0"), {"examples": n}, values={"sizes": [n]})
        for c, t, n in (("bob", state.tensors | random_tensors(warm, 2), 4), ("ann", warm, 7), ("cyd", warm, 2))
    ]
    state = method.discover(state, replies)
    assert state.values["assignment"]["ann"] == [1]
    view = method.view(state, "ann")
    spec = type(view.spec)(**{**vars(view.spec), "dropout": 0.0})
    return Order("fit", "ann", round, random_tensors(view.tensors, 5), spec, TRAINING, view.values)


def test_local_training_moves_its_own_expert_and_router_under_the_whole_mixture(world: Any) -> None:
    """As a straight loop in which expert 0 is frozen but part of the forward pass, and of no gradient norm."""
    world, batches = world
    method = FedLEASE(FedLEASEOptions(router_hidden=6))
    order = local_order(world, method, round=1)
    reply = method.local(world.client("ann"), order)
    mine = ("experts/1/", "router/")
    features = world.clients["ann"].features(world.bench)
    loop = StraightLoop(order.tensors, order.spec, TRAINING, trainable=lambda name: name.startswith(mine))
    losses = [loop.step(batch, [features[e.index] for e in batch]) for batch in batches]
    expected = {n: loop.read()[n] - t.double() for n, t in order.tensors.items() if n.startswith(mine)}
    assert largest_difference(reply.send, expected) < 1e-6
    assert min(float(t.abs().max()) for t in expected.values()) > 1e-4
    assert reply.metrics["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert reply.counts == {"examples": 7, "experts/1": 7, "router": 7}
    assert {e.index for batch in batches for e in batch} - {0, 1, 2, 3}  # of both patterns


def test_init_own_starts_round_1_from_the_clients_warm_up_alone(world: Any) -> None:
    """The end of a loop from (own warm-up, expert 0 silent), against the means that the server holds."""
    world, batches = world
    method = FedLEASE(FedLEASEOptions(router_hidden=6, init="own", warmup_steps=2, warmup_batch=2))
    init = method.init(world.setup)
    probe = method.probe(world.client("ann", round=0), Order("probe", "ann", 0, init.tensors, init.spec, TRAINING))
    assert same(take(probe.keep, "warm"), take(probe.send, "buckets/0"))
    memory = ClientMemory(probe.keep, probe.keep_values)
    batches.clear()
    order = local_order(world, method, round=1)
    reply = method.local(world.client("ann", memory=memory), order)
    start = dict(order.tensors)
    for name, tensor in take(probe.send, "buckets/0/experts/0").items():
        start[f"experts/1/{name}"] = tensor
    start |= {n: torch.zeros_like(t) for n, t in start.items() if n.startswith("experts/0/") and n.endswith("lora_B")}
    mine = ("experts/1/", "router/")
    features = world.clients["ann"].features(world.bench)
    loop = StraightLoop(start, order.spec, TRAINING, trainable=lambda name: name.startswith(mine))
    for batch in batches:
        loop.step(batch, [features[e.index] for e in batch])
    expected = {n: loop.read()[n] - t.double() for n, t in order.tensors.items() if n.startswith(mine)}
    assert largest_difference(reply.send, expected) < 1e-6
    later = Order("fit", "ann", 2, order.tensors, order.spec, TRAINING, order.values)
    other = method.local(world.client("ann", round=2, memory=memory), later)  # from round 2 on, as the default
    plain = FedLEASE(FedLEASEOptions(router_hidden=6)).local(world.client("ann", round=2), later)
    assert same(other.send, plain.send)


@pytest.mark.parametrize(("backbone", "total"), [("llama-3.2-3b", 15_476_752), ("gemma-2-2b", 11_118_608)])
def test_the_papers_parameter_counts(backbone: str, total: int) -> None:
    """FedWeave, Table 5: four rank-8 experts and four routers."""
    found = budget(backbone, "fedlease", 4)
    assert found.total == total
    assert found.router == 4 * budget(backbone, "fedweave", 4).router
