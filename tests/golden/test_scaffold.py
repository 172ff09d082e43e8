"""SCAFFOLD (arXiv 1910.06378) against Algorithm 1 with option II, written down again in NumPy with plain SGD."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dense_world import CLIENTS, COUNTS, setup_of
from quadratic_client import QuadraticClient

from fedloom.errors import UpdateRejected
from fedloom.methods.base import Method
from fedloom.methods.fedit import FedIT
from fedloom.methods.scaffold import LONGEST, LONGEST_CHANGE, Scaffold
from fedloom.methods.server import ServerStep, server_step
from fedloom.numerics.tree import norm
from fedloom.runtime.loop import Federation, Receipt, judge, make_orders
from fedloom.runtime.wire import decode_reply, encode_reply
from fedloom.types import Order, Reply, State, Tensors, Training
from small_world import Wire, World, random_tensors

METHOD = Scaffold()
TRAINING = Training(steps=4, lr=0.1)
CURVATURES = {"a": 0.5, "b": 1.0, "c": 3.0, "d": 2.0}
#: ``d`` never answers, and others are absent at times.
ROUNDS = [["a", "b", "c"], ["b"], ["a", "c"], ["a", "b", "c"]]


def clients(state: State) -> dict[str, QuadraticClient]:
    return {
        name: QuadraticClient(name, COUNTS.get(name, 4), random_tensors(state.tensors, i, 1.0), CURVATURES[name])
        for i, name in enumerate(CLIENTS)
    }


def order_of(method: Method, state: State, client: str) -> Order:
    view = method.view(state, client)
    return Order("fit", client, state.round, view.tensors, view.spec, TRAINING, view.values)


def step(method: Method, state: State, found: dict[str, QuadraticClient], answering: list[str]) -> State:
    state = replace(state, round=state.round + 1)
    replies = []
    for name in answering:
        order = order_of(method, state, name)
        reply = method.local(found[name], order)
        assert method.expected(order, reply) == {n: tuple(t.shape) for n, t in reply.send.items()}
        found[name].remember(reply.keep, reply.keep_values)
        replies.append(reply)
    return server_step(method, state, replies, ServerStep())


def algorithm_1(state: State, found: dict[str, QuadraticClient], rounds: list[list[str]]) -> dict[str, Any]:
    """Return x, c and every c_i, tensor by tensor in float64."""
    lr, K, N = TRAINING.lr, TRAINING.steps, len(CLIENTS)
    x = {n: t.double().numpy().copy() for n, t in state.tensors.items()}
    c = {n: np.zeros_like(v) for n, v in x.items()}
    own = {name: {n: np.zeros_like(v) for n, v in x.items()} for name in CLIENTS}
    for S in rounds:
        new_x, new_c = {}, {}
        for n in x:
            steps, changes = [], []
            for name in S:
                h, t = found[name].curvature, found[name].target[n].double().numpy()
                y = x[n].copy()
                for _ in range(K):
                    y = y - lr * (h * (y - t) - own[name][n] + c[n])  # line 10
                plus = own[name][n] - c[n] + (x[n] - y) / (K * lr)  # line 12, option II
                steps.append(y - x[n])
                changes.append(plus - own[name][n])
                own[name][n] = plus
            new_x[n] = x[n] + np.mean(steps, axis=0)  # lines 16 and 17, η_g = 1
            new_c[n] = c[n] + len(S) / N * np.mean(changes, axis=0)
        x, c = new_x, new_c
    return {"x": x, "c": c, "own": own}


def close(found: Tensors, expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        np.testing.assert_allclose(tensor.numpy(), expected[name], rtol=1e-4, atol=1e-5)


def test_rounds_with_absent_clients_follow_algorithm_1() -> None:
    state = METHOD.init(setup_of())
    found = clients(state)
    expected = algorithm_1(state, found, ROUNDS)
    for answering in ROUNDS:
        state = step(METHOD, state, found, answering)
    close(state.tensors, expected["x"])
    close({n.removeprefix("control/"): t for n, t in state.kept.items()}, expected["c"])
    for name in "abc":
        close({n.removeprefix("own/"): t for n, t in found[name].memory.tensors.items()}, expected["own"][name])
    assert not found["d"].memory.tensors
    # c is the mean of all c_i, also of the one that never answered.
    for n in state.tensors:
        mean = sum(found[c].memory.tensors[f"own/{n}"] for c in "abc") / 4
        torch.testing.assert_close(state.kept[f"control/{n}"], mean, atol=1e-5, rtol=1e-4)


def test_it_finds_the_optimum_where_averaging_alone_stops_beside_it() -> None:
    """min Σ h_i/2 ‖w − t_i‖² is Σ h_i t_i / Σ h_i; unequal curvatures make FedAvg's clients drift off it."""
    found = {}
    for method in (METHOD, FedIT()):
        state = method.init(setup_of())
        sites = {name: client for name, client in clients(state).items() if name != "d"}
        state = replace(state, values={"clients": 3})
        for _ in range(150):
            state = step(method, state, sites, list(sites))
        best = {n: sum(s.curvature * s.target[n] for s in sites.values()) / 4.5 for n in state.tensors}
        found[method.title] = max(float((state.tensors[n] - best[n]).abs().max()) for n in best)
    assert found["SCAFFOLD"] < 1e-4
    assert found["FedIT"] > 0.1


def test_what_goes_down_and_up() -> None:
    state = METHOD.init(setup_of())
    assert state.values == {"clients": 4}
    assert not any(t.any() for t in state.kept.values())
    model = state.tensors.keys()
    assert METHOD.view(state, "a").tensors.keys() == model | {f"control/{n}" for n in model}
    assert METHOD.view(state, None).tensors.keys() == model
    order = order_of(METHOD, replace(state, round=1), "a")
    reply = METHOD.local(clients(state)["a"], order)
    assert reply.send.keys() == order.tensors.keys()
    assert [n for n in reply.send if not METHOD.stepped(n)] == [n for n in reply.send if n.startswith("control/")]
    partial = Reply("a", {n: reply.send[n] for n in model}, {"examples": 7, "experts/0": 7})
    with pytest.raises(UpdateRejected, match="control variate"):
        METHOD.expected(order, partial)


def test_a_control_variate_far_beyond_the_rounds_is_quarantined(tmp_path: Path) -> None:
    """Below its absolute bound the round's other replies decide: a 100-fold one of four is left out by its norm."""
    quarantined = quarantined_by(tmp_path, 100, norm_factor=10)
    assert quarantined.keys() == {"bob"}
    assert "times the lower median of the round" in quarantined["bob"]


def test_a_control_variate_beyond_any_mean_gradient_is_quarantined(tmp_path: Path) -> None:
    quarantined = quarantined_by(tmp_path, 1e6)
    assert quarantined.keys() == {"bob"}
    assert "in 'control' exceeds 250" in quarantined["bob"]


def quarantined_by(out: Path, factor: float, **federation: Any) -> dict[str, str]:
    """Return who is quarantined in a round in which bob's change of his control variate is multiplied."""
    world = World(out)

    def grow(orders: list[Order], receipts: list[Receipt]) -> list[Receipt]:
        for receipt in receipts:
            if receipt.client == "bob":
                reply = decode_reply(receipt.path.read_bytes(), "bob", orders[0].round)
                send = {n: t * factor if n.startswith("control/") else t for n, t in reply.send.items()}
                receipt.path.write_bytes(encode_reply(replace(reply, send=send), orders[0].round))
        return receipts

    world.run(Scaffold(), rounds=1, transport=Wire(world.simulator, grow), **federation)
    found: dict[str, str] = world.log.read()[-1]["quarantined"]
    return found


def exchanged(state: State, evil: float, folder: Path) -> tuple[State, dict[str, str]]:
    """Return the state after a round of an honest site of gradient 0.1 and one that says no more than Δc = ``evil``."""
    state = replace(state, round=state.round + 1)
    orders = make_orders(METHOD, "fit", state, ["bank", "evil"], TRAINING)
    receipts = []
    for order in orders:
        share = 0.1 if order.client == "bank" else evil
        send = {n: torch.full_like(t, share) if n.startswith("control/") else 0 * t for n, t in order.tensors.items()}
        reply = Reply(order.client, send, {"examples": 10, "experts/0": 10, "control": 10})
        path = folder / f"{order.client}.safetensors"
        path.write_bytes(encode_reply(reply, order.round))
        receipts.append(Receipt(order.client, path, 1, 1, 0.0))
    answers = judge(METHOD, orders, receipts, Federation(), 0.0)
    return server_step(METHOD, state, answers.replies, ServerStep()), answers.quarantined


@pytest.mark.parametrize("evil", [3.3e38, 20.0])
def test_one_of_two_sites_cannot_spoil_the_control_variate(tmp_path: Path, evil: float) -> None:
    """With two replies no median judges. What is too long is refused; what is not, never adds up to more than 100."""
    state = METHOD.init(replace(setup_of(), clients=("bank", "evil")))
    assert norm({n: torch.full_like(t, 20.0) for n, t in state.kept.items()}) < LONGEST_CHANGE
    for _ in range(40):
        state, quarantined = exchanged(state, evil, tmp_path)
        assert quarantined.keys() == (set() if evil == 20.0 else {"evil"})
        assert norm(state.kept) < LONGEST * 1.0001
    if evil == 20.0:
        assert norm(state.kept) == pytest.approx(LONGEST)
    else:  # 40 rounds of 0.1, halved
        torch.testing.assert_close(state.kept, {n: torch.full_like(t, 2.0) for n, t in state.kept.items()})


def test_a_client_whose_gradients_are_too_long_keeps_their_direction() -> None:
    state = METHOD.init(setup_of())
    far = {n: 1e4 * t for n, t in random_tensors(state.tensors, 3, 1.0).items()}
    reply = METHOD.local(QuadraticClient("a", 4, far), order_of(METHOD, state, "a"))
    kept = {n.removeprefix("own/"): t for n, t in reply.keep.items()}
    assert norm(kept) == pytest.approx(LONGEST)
    # With the curvature 1 each gradient is a multiple of w − target, w being next to nothing here.
    longest = norm(far)
    for name, tensor in kept.items():
        torch.testing.assert_close(tensor, -far[name] * (LONGEST / longest), rtol=1e-3, atol=1e-2)
