"""FedLEASE's adaptive top-M (arXiv 2509.15087): slots by hand, the token mixture in float64, means inside a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dense_world import SHAPES, Two, product
from test_fedlease import discovered, moved

from fedloom.adapters.inject import graft
from fedloom.methods.fedlease import ClusterOptions
from fedloom.methods.fedlease_adaptive import FedLEASEAdaptive, slots
from fedloom.methods.server import ServerStep, server_step
from fedloom.numerics.tree import take
from fedloom.runtime.memory import ClientMemory
from fedloom.types import State
from small_world import World, random_tensors, same

METHOD = FedLEASEAdaptive()


def test_ones_own_expert_has_the_first_M_slots_and_the_others_follow_in_order() -> None:
    assert slots(0, 1) == (0,)
    assert slots(1, 3) == (1, 1, 1, 0, 2)
    assert slots(3, 4) == (3, 3, 3, 3, 0, 1, 2)


def test_discovery_gives_every_cluster_the_same_mixers_and_no_sentence_router() -> None:
    state = discovered(METHOD)
    assert state.values["assignment"] == {"a": [0], "b": [1], "c": [1], "d": [0]}
    for j in (0, 1):
        mixers = take(state.tensors, f"routers/{j}")
        assert {name: tuple(t.shape) for name, t in mixers.items()} == {
            f"mixers/{path}.weight": (3, width) for path, (_, width) in SHAPES.items()
        }
        for path, (_, width) in SHAPES.items():  # Kaiming-uniform with a = √5
            assert 0.3 / width**0.5 < float(mixers[f"mixers/{path}.weight"].abs().max()) <= 1 / width**0.5
    assert same(take(state.tensors, "routers/0"), take(state.tensors, "routers/1"))


def test_a_token_keeps_its_top_M_slots_renormalised() -> None:
    """y = x (W + Σ_e g_e s B_e A_e)ᵀ per token, g_e the sum over the slots of e among the two best of three."""
    state = discovered(METHOD)
    state = State(1, random_tensors(state.tensors, seed=3, scale=1.0), state.spec, state.values)
    for client, own, other in (("a", 0, 1), ("c", 1, 0)):
        view = METHOD.view(state, client)
        model = Two()
        grafted = graft(model, view.spec)
        grafted.load(view.tensors)
        grafted.eval()
        found_other = 0
        for path, (_, width) in SHAPES.items():
            x = torch.randn(2, 5, width, generator=torch.Generator().manual_seed(6))
            layer = getattr(model, path)
            found = layer(x).double()
            mixer = state.tensors[f"routers/{own}/mixers/{path}.weight"].double()
            for b in range(2):
                for t in range(5):
                    token = x[b, t].double()
                    p = (mixer @ token).softmax(0)
                    best = p.argsort(descending=True)[:2].tolist()
                    share = {own: 0.0, other: 0.0}
                    for slot in best:
                        share[(own, own, other)[slot]] += float(p[slot] / p[best].sum())
                    assert share[own] > 0
                    found_other += share[other] > 0
                    dense = layer.base.weight.double() + sum(
                        g * product(view.tensors, path, 3.0, m) for m, g in share.items()
                    )
                    torch.testing.assert_close(found[b, t], dense @ token, atol=1e-5, rtol=1e-5)
        assert 0 < found_other < 20  # some tokens ask the other expert too, and not all


def test_mixers_and_expert_are_averaged_inside_the_cluster_alike() -> None:
    """a and b move by 1 and 10, d by 4; c is absent: cluster 0 gets 2.5, cluster 1 gets 10, whatever the sizes."""
    state = discovered(METHOD)
    replies = [moved(METHOD, state, client, by) for client, by in (("a", 1.0), ("b", 10.0), ("d", 4.0))]
    assert {name.split("/")[0] for name in replies[0].send} == {"experts", "mixers"}
    end = server_step(METHOD, state, replies, ServerStep()).tensors
    for name, tensor in end.items():
        by = 2.5 if name.startswith(("experts/0/", "routers/0/")) else 10.0
        torch.testing.assert_close(tensor, state.tensors[name] + by)
    absent = METHOD.merge(state, replies[:1]).tensors
    assert all(torch.equal(absent[n], t) for n, t in state.tensors.items() if n.startswith(("experts/1", "routers/1")))


def test_there_is_no_model_for_everyone_and_outside_of_all_clusters_only_the_backbone() -> None:
    state = discovered(METHOD)
    assert METHOD.assembled(state, {}) is None
    assert METHOD.personal_view(state, "c", ClientMemory()).spec.slots == (1, 1, 0)
    outside = METHOD.personal_view(state, "z", ClientMemory())
    model = Two()
    before = {path: getattr(model, path).weight.clone() for path in SHAPES}
    grafted = graft(model, outside.spec)
    grafted.load(outside.tensors)
    for path, (_, width) in SHAPES.items():
        x = torch.randn(2, 3, width)
        assert torch.equal(getattr(model, path)(x), x @ before[path].T)


def test_a_run_trains_only_what_a_client_may(tmp_path: Path) -> None:
    world = World(tmp_path)
    states: list[State] = []
    world.run(METHOD, rounds=1, evaluate=lambda state, _: states.append(state), participation=0.25)
    (client,) = world.log.read()[-1]["cohort"]
    (own,) = states[0].values["assignment"][client]
    assert states[0].spec.experts > 1
    moved = {n for n, t in states[0].tensors.items() if not torch.equal(t, states[1].tensors[n])}
    assert moved == {n for n in states[0].tensors if n.startswith((f"experts/{own}/", f"routers/{own}/"))}


def test_a_width_of_a_sentence_router_is_no_option() -> None:
    assert METHOD.Options is ClusterOptions
    with pytest.raises(ValueError, match="router_hidden"):
        ClusterOptions(router_hidden=8)  # type: ignore[call-arg]
