"""FedALT (arXiv 2503.11880): the rest of the world by hand, what stays at home, the mixture against dense algebra."""

from __future__ import annotations

from pathlib import Path

import torch
from dense_world import CLIENTS, COUNTS, SHAPES, Two, answers, order_of, product, setup_of

from fedloom.adapters.inject import graft
from fedloom.methods.fedalt import FedALT
from fedloom.numerics.tree import take
from fedloom.runtime.memory import ClientMemory
from fedloom.types import AdapterSpec, Memory, Order, Reply, State, Tensors
from small_world import TRAINING, World, random_tensors, same

METHOD = FedALT()


def own(tensors: Tensors) -> Tensors:
    return {name: t for name, t in tensors.items() if name.startswith("experts/0/")}


def rest(tensors: Tensors) -> Tensors:
    return {name: t for name, t in tensors.items() if name.startswith("experts/1/")}


def test_the_rest_of_the_world_by_hand() -> None:
    """Rank 1, a layer of 2 × 1. All start at A = 1, B = 0; counts do not matter; c is absent in round 1.

    Round 1: a moves to A = 3, B = (2, 4), b to A = 5, B = (−2, 0).
    Then a sees b, b sees a, and c sees A = 4, B = (0, 2): their mean.
    Round 2: b is absent; a moves on to A = 4, B = (2, 5), c from the start to A = 9, B = (6, −4).
    Then a sees (5 + 9)/2 = 7 and (2, −2); b sees (4 + 9)/2 = 6.5 and (4, 0.5); c sees (4 + 5)/2 = 4.5 and (0, 2.5).
    """
    A, B = "v.lora_A", "v.lora_B"
    zero = {f"experts/1/{A}": torch.zeros(1, 1), f"experts/1/{B}": torch.zeros(2, 1)}
    first = {f"experts/0/{A}": torch.ones(1, 1), f"experts/0/{B}": torch.zeros(2, 1)}
    spec = AdapterSpec(("v",), rank=1, alpha=2.0, experts=2, slots=(0, 1))
    state = State(1, first | zero | {"mixers/v.weight": torch.ones(2, 1)}, spec)

    def moved(client: str, count: int, a: float, b: list[float]) -> Reply:
        send = {f"experts/0/{A}": torch.tensor([[a]]), f"experts/0/{B}": torch.tensor(b)[:, None]}
        return Reply(client, send, {"examples": count, "experts/0": count})

    def seen(state: State, client: str, expert: int = 1) -> tuple[float, list[float]]:
        tensors = METHOD.view(state, client).tensors
        return float(tensors[f"experts/{expert}/{A}"]), tensors[f"experts/{expert}/{B}"].flatten().tolist()

    assert seen(state, "a") == (0.0, [0.0, 0.0])
    one = METHOD.merge(state, [moved("a", 7, 2.0, [2.0, 4.0]), moved("b", 1, 4.0, [-2.0, 0.0])])
    assert [seen(one, c) for c in "abc"] == [(5.0, [-2.0, 0.0]), (3.0, [2.0, 4.0]), (4.0, [0.0, 2.0])]
    assert [seen(one, c, 0) for c in "abc"] == [(3.0, [2.0, 4.0]), (5.0, [-2.0, 0.0]), (1.0, [0.0, 0.0])]
    two = METHOD.merge(one, [moved("a", 7, 1.0, [0.0, 1.0]), moved("c", 2, 8.0, [6.0, -4.0])])
    assert [seen(two, c) for c in "abc"] == [(7.0, [2.0, -2.0]), (6.5, [4.0, 0.5]), (4.5, [0.0, 2.5])]
    assert seen(two, "b", 0) == seen(one, "b", 0)  # the absent client's own is as it was


def test_the_mean_of_the_others_in_float64() -> None:
    state = METHOD.init(setup_of())
    replies = answers(METHOD, state)
    merged = METHOD.merge(state, replies)
    ends = {r.client: {n: state.tensors[n].double() + t.double() for n, t in r.send.items()} for r in replies}
    for client in CLIENTS:
        others = [ends[c] for c in COUNTS if c != client]
        assert len(others) == (3 if client == "d" else 2)
        for name, tensor in rest(METHOD.view(merged, client).tensors).items():
            mean = torch.stack([found[name.replace("experts/1", "experts/0")] for found in others]).mean(0)
            torch.testing.assert_close(tensor.double(), mean, atol=1e-6, rtol=1e-6)
    assert same(merged.tensors, state.tensors)


def test_no_order_holds_another_clients_factors_once_three_have_sent() -> None:
    state = METHOD.init(setup_of())
    for round in (1, 2):
        state = METHOD.merge(state, answers(METHOD, state, seed=round))
        for client in CLIENTS:
            order = order_of(METHOD, state, client)
            for other in COUNTS.keys() - {client}:
                for name, theirs in take(state.kept, f"clients/{other}").items():
                    alike = [t for t in order.tensors.values() if t.shape == theirs.shape]
                    assert not any(torch.allclose(t, theirs, atol=1e-3) for t in alike), (client, other, name)


def test_with_two_clients_the_others_mean_is_the_other() -> None:
    """The limit that the docstring states."""
    state = METHOD.init(setup_of())
    merged = METHOD.merge(state, answers(METHOD, state)[:2])
    seen = rest(METHOD.view(merged, "a").tensors)
    theirs = take(merged.kept, "clients/b")
    assert all(torch.equal(t, theirs[n.replace("experts/1", "experts/0")]) for n, t in seen.items())


def test_mixers_never_leave_and_the_rest_of_the_world_is_not_trained(tmp_path: Path) -> None:
    """Two rounds of one client by its own code: the second goes on from its memory, not from the order."""
    world = World(tmp_path)
    state = METHOD.init(world.setup)
    view = METHOD.view(state, "ann")
    tensors = view.tensors | rest(random_tensors(view.tensors))
    order = Order("fit", "ann", 1, tensors, view.spec, TRAINING)
    reply = METHOD.local(world.client("ann"), order)
    assert reply.send.keys() == own(tensors).keys()
    kept = take(reply.keep, "own")
    assert kept.keys() == {name for name in tensors if name.startswith(("experts/0/", "mixers/"))}
    assert all(not torch.equal(kept[name], tensors[name]) for name in kept)
    for name, update in reply.send.items():
        torch.testing.assert_close(tensors[name] + update, kept[name], atol=1e-7, rtol=1e-6)

    still = Order("fit", "ann", 2, tensors, view.spec, TRAINING.__class__(steps=1, lr=0.0, router_lr=0.0))
    memory = ClientMemory().updated(reply.keep, reply.keep_values)
    again = METHOD.local(world.client("ann", round=2, memory=memory), still)
    assert same(take(again.keep, "own"), kept)
    assert same(again.send, reply.send)  # seen from the same order


def test_a_client_answers_with_its_own_lora_and_mixers_on_the_rest_of_the_world() -> None:
    """y = (W + s Σ_e g_e(x) B_e A_e) x with g = softmax of the mixer, token by token, in float64."""
    state = METHOD.init(setup_of())
    merged = METHOD.merge(state, answers(METHOD, state))
    drawn = random_tensors(merged.tensors, seed=9, scale=1.0)
    home = {name: t for name, t in drawn.items() if not name.startswith("experts/1/")}
    memory: Memory = ClientMemory({f"own/{name}": t for name, t in home.items()} | {"optimizer/0/step": torch.ones(1)})
    view = METHOD.personal_view(merged, "a", memory)
    model = Two()
    weights = {path: getattr(model, path).weight.detach().double() for path in SHAPES}
    grafted = graft(model, view.spec)
    grafted.load(view.tensors)
    grafted.eval()
    tensors = home | rest(METHOD.view(merged, "a").tensors)
    for path, (_, width) in SHAPES.items():
        x = torch.randn(2, 3, width, generator=torch.Generator().manual_seed(4))
        with grafted.routing(torch.ones(2, 1)):
            found = getattr(model, path)(x).double()
        gates = (x.double() @ tensors[f"mixers/{path}.weight"].double().T).softmax(-1)
        expected = x.double() @ weights[path].T
        for e in (0, 1):
            expected = expected + gates[..., e, None] * (x.double() @ product(tensors, path, 3.0, e).T)
        torch.testing.assert_close(found, expected, atol=5e-5, rtol=1e-5)


def test_a_client_that_was_never_asked_answers_with_the_first_lora_on_the_rest_of_the_world() -> None:
    state = METHOD.init(setup_of())
    merged = METHOD.merge(state, answers(METHOD, state))
    view = METHOD.personal_view(merged, "d", ClientMemory())
    assert same(own(view.tensors), own(state.tensors))
    assert all(t.any() for t in rest(view.tensors).values())


def test_there_is_no_model_for_everyone_and_the_capacity_is_that_of_rank_32() -> None:
    assert METHOD.assembled(METHOD.init(setup_of()), {}) is None
    spec = METHOD.deployed(AdapterSpec(("v",), rank=METHOD.default_rank), 1)
    assert spec.experts * spec.rank == 32
    assert spec.slots == (0, 1)
