"""FedRouter (arXiv 2604.00050): clusters, turns and means by hand; routing against the nearest centroid in float64."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_world import LEARNING, SHAPES, Two, product, setup_of

from fedloom.adapters.inject import graft
from fedloom.errors import ConfigError, UpdateRejected
from fedloom.methods.fedrouter import FedRouter, FedRouterOptions
from fedloom.numerics.tree import take
from fedloom.runtime import client as runtime_client
from fedloom.runtime.client import draw_batches
from fedloom.runtime.memory import ClientMemory
from fedloom.types import Order, Reply, State
from small_world import TRAINING, World, examples, random_tensors, same

METHOD = FedRouter()
#: Angles of the centroids of each client's clusters, and their sizes: three bundles, near 0, 2 and 4.
ANGLES = {"a": [0.0, 2.0], "b": [2.1], "c": [4.0, 0.1, 2.2], "d": [3.9]}
SIZES = {"a": [7, 2], "b": [5], "c": [1, 3, 6], "d": [4]}


def unit(angle: float) -> list[float]:
    return [math.cos(angle), math.sin(angle), 0.0, 0.0]


def probe_reply(client: str, tensor: torch.Tensor | None = None) -> Reply:
    centroids = torch.tensor([unit(x) for x in ANGLES[client]]) if tensor is None else tensor
    sizes = SIZES[client]
    return Reply(client, {"centroids": centroids}, {"examples": sum(sizes)}, values={"sizes": sizes})


def discovered(method: FedRouter = METHOD, round: int = 0) -> State:
    state = method.init(setup_of())
    state = method.discover(state, [probe_reply(client) for client in ANGLES])
    return State(round, state.tensors, state.spec, state.values)


def order_of(state: State, client: str) -> Order:
    view = METHOD.view(state, client)
    return Order("fit", client, state.round, view.tensors, view.spec, LEARNING, view.values)


def moved(state: State, client: str, by: float) -> Reply:
    order = order_of(state, client)
    size, cluster = sum(SIZES[client]), order.values["cluster"]
    counts = {"examples": size, order.values["unit"]: SIZES[client][cluster]}
    reply = Reply(client, {n: torch.full_like(t, by) for n, t in order.tensors.items()}, counts)
    assert METHOD.expected(order, reply).keys() == reply.send.keys()
    return reply


def test_the_server_clusters_the_centroids_and_takes_plain_means() -> None:
    state = discovered()
    assert state.values["assignment"] == {"a": [0, 1], "b": [1], "c": [2, 0, 1], "d": [2]}
    assert (state.spec.experts, state.spec.centroids, state.spec.router_hidden) == (3, True, 0)
    for m, bundle in enumerate(([0.0, 0.1], [2.0, 2.1, 2.2], [4.0, 3.9])):
        x, y = (sum(f(v) for v in bundle) / len(bundle) for f in (math.cos, math.sin))
        assert state.tensors["router/centroids"][m].tolist() == pytest.approx([x, y, 0, 0], abs=1e-6)
    init = take(METHOD.init(setup_of()).tensors, "experts/0")
    assert all(same(take(state.tensors, f"experts/{m}"), init) for m in range(3))


def test_the_number_of_experts_can_be_fixed() -> None:
    assert discovered(FedRouter(FedRouterOptions(experts=2))).spec.experts == 2
    assert discovered(FedRouter(FedRouterOptions(experts=5))).spec.experts == 5
    assert discovered(FedRouter(FedRouterOptions(experts=1))).spec.experts == 1
    with pytest.raises(ConfigError, match=r"experts is 7, but the clients' 7 clusters"):
        discovered(FedRouter(FedRouterOptions(experts=7)))


def test_clusters_take_turns() -> None:
    """a: experts 0, 1, 0, …; b: always 1; c: 2, 0, 1, 2."""
    states = [discovered(round=r) for r in (1, 2, 3, 4)]
    units = {client: [order_of(state, client).values["unit"][-1] for state in states] for client in "abc"}
    assert units == {"a": ["0", "1", "0", "1"], "b": ["1"] * 4, "c": ["2", "0", "1", "2"]}
    order = order_of(discovered(round=2), "c")
    assert (order.values["cluster"], order.values["sizes"], order.spec.experts) == (1, [1, 3, 6], 1)
    assert not order.spec.centroids


def test_an_expert_averages_by_the_examples_of_the_cluster_that_trained_it() -> None:
    """Round 2: a trains its 2 examples of expert 1, b its 5, c its 3 of expert 0; d is absent and expert 2 stays.

    Expert 1: (2·1 + 5·8)/7 = 6. By whole clients, as the authors' code has it, it would be (9·1 + 5·8)/14 = 3.5.
    """
    state = discovered(round=2)
    state = State(2, random_tensors(state.tensors, 4), state.spec, state.values)
    end = METHOD.merge(state, [moved(state, "a", 1.0), moved(state, "b", 8.0), moved(state, "c", -3.0)]).tensors
    assert end.keys() == state.tensors.keys()
    for name, tensor in end.items():
        by = {"experts/0": -3.0, "experts/1": 6.0}.get(name[:9], 0.0)
        torch.testing.assert_close(tensor, state.tensors[name] + by, rtol=1e-6, atol=1e-6)
    assert torch.equal(end["router/centroids"], state.tensors["router/centroids"])


@pytest.mark.parametrize(("angle", "everyone", "b"), [(0.3, 0, 1), (1.4, 1, 1), (4.2, 2, 1), (5.6, 0, 1)])
def test_an_example_goes_to_the_nearest_centroid(angle: float, everyone: int, b: int) -> None:
    """Against dense algebra on both layers; a client's own model knows its own clusters only."""
    state = discovered()
    drawn = {n: t for n, t in random_tensors(state.tensors, 4, 1.0).items() if n.startswith("experts/")}
    state = State(1, state.tensors | drawn, state.spec, state.values)
    distances = [(state.tensors["router/centroids"][m].double() - torch.tensor(unit(angle))).norm() for m in range(3)]
    assert min(range(3), key=lambda m: distances[m]) == everyone
    own = METHOD.personal_view(state, "b", ClientMemory())
    for view, expert in ((METHOD.assembled(state, {}), everyone), (own, b)):
        assert view is not None
        model = Two()
        weights = {path: getattr(model, path).weight.detach().double() for path in SHAPES}
        grafted = graft(model, view.spec, hidden_size=4)
        grafted.load(view.tensors)
        grafted.eval()
        feature = 9.0 * torch.tensor([unit(angle)])  # its length does not matter
        for path, (_, width) in SHAPES.items():
            x = torch.randn(1, 3, width)
            with grafted.routing(grafted.route(feature, "top1")):
                found = getattr(model, path)(x).double()
            dense = weights[path] + product(state.tensors, path, 3.0, expert)
            torch.testing.assert_close(found, x.double() @ dense.T, atol=1e-5, rtol=1e-5)


def test_local_centroids_are_means_of_unit_features_and_labels_stay_home(tmp_path: Path) -> None:
    world = World(tmp_path, clients={"ann": examples("sums", 5) + examples("shout", 4)})
    state = METHOD.init(world.setup)
    order = Order("probe", "ann", 0, state.tensors, state.spec, TRAINING, METHOD.view(state, "ann").values)
    reply = METHOD.probe(world.client("ann", round=0), order)
    assert reply.keep_values == {"buckets": [0] * 5 + [1] * 4}
    assert reply.values == {"sizes": [5, 4]}
    features = world.clients["ann"].features(world.bench).double()
    unit = features / features.norm(dim=1, keepdim=True)
    expected = torch.stack([unit[:5].sum(0) / 5, unit[5:].sum(0) / 4])
    torch.testing.assert_close(reply.send["centroids"].double(), expected, atol=1e-6, rtol=1e-6)
    assert METHOD.expected(order, reply) == {"centroids": (2, 32)}
    assert reply.send["centroids"].dtype == torch.float32


def test_local_training_draws_from_the_one_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path, clients={"ann": examples("sums", 5) + examples("shout", 4)})
    seen: list[int] = []

    def record(*args: Any, **named: Any) -> list[list[int]]:
        drawn = draw_batches(*args, **named)
        seen.extend(i for batch in drawn for i in batch)
        return drawn

    monkeypatch.setattr(runtime_client, "draw_batches", record)
    start = {n.replace("/0/", "/3/"): t for n, t in METHOD.init(world.setup).tensors.items()}
    values = {"unit": "experts/3", "cluster": 1, "sizes": [5, 4]}
    order = Order("fit", "ann", 2, start, world.setup.spec, TRAINING, values)
    reply = METHOD.local(world.client("ann", memory=ClientMemory(values={"buckets": [0] * 5 + [1] * 4})), order)
    assert set(seen) == {5, 6, 7, 8}
    assert reply.counts == {"examples": 9, "experts/3": 4}
    assert reply.send.keys() == start.keys()
    with pytest.raises(UpdateRejected, match="not those of its buckets"):
        METHOD.expected(order, Reply("ann", reply.send, {"examples": 9, "experts/3": 9}))


@pytest.mark.parametrize("scale", [1.01, 1e6])
def test_a_centroid_is_not_longer_than_one(scale: float) -> None:
    state = METHOD.init(setup_of())
    order = Order("probe", "a", 0, state.tensors, state.spec, LEARNING, METHOD.view(state, "a").values)
    honest = probe_reply("a")
    assert METHOD.expected(order, honest) == {"centroids": (2, 4)}
    with pytest.raises(UpdateRejected, match="its norm"):
        METHOD.expected(order, probe_reply("a", scale * honest.send["centroids"]))


def test_a_client_outside_the_discovery_is_not_asked_and_chooses_among_all_experts() -> None:
    state = discovered()
    assert METHOD.admits(state, "a")
    assert not METHOD.admits(state, "z")
    assert same(METHOD.personal_view(state, "z", ClientMemory()).tensors, state.tensors)
    own = METHOD.personal_view(state, "a", ClientMemory())
    assert own.spec.experts == 2
    assert torch.equal(own.tensors["router/centroids"], state.tensors["router/centroids"][:2])
