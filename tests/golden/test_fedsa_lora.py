"""FedSA-LoRA (arXiv 2410.01463): A is averaged, B stays, and the model that FedWeave's paper measures of it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
from dense_world import SHAPES, SHARES, answers, assert_adds, order_of, product, setup_of, total
from quadratic_client import QuadraticClient

from fedloom.methods.fedsa_lora import FedSALoRA
from fedloom.numerics.tree import place
from fedloom.runtime.memory import ClientMemory
from fedloom.types import State, Tensors
from small_world import World, random_tensors

METHOD = FedSALoRA()
SCALING = 3.0  # alpha 6, rank 2


def is_B(name: str) -> bool:
    return name.endswith("lora_B")


def after_a_round() -> tuple[State, dict[str, Tensors], dict[str, ClientMemory]]:
    """Return the state of round 1, the clients' A at its end, and memories with random B; ``d`` has none."""
    state = replace(METHOD.init(setup_of()), round=1)
    replies = answers(METHOD, state)
    ended = {r.client: {n: state.tensors[n].double() + t for n, t in r.send.items()} for r in replies}
    Bs = {n: t for n, t in state.tensors.items() if is_B(n)}
    memories = {c: ClientMemory(place(random_tensors(Bs, i, 1.0), "own")) for i, c in enumerate(SHARES)}
    return METHOD.merge(state, replies), ended, memories


def test_the_server_averages_A_and_never_sees_B() -> None:
    state, ended, _ = after_a_round()
    for name, tensor in state.tensors.items():
        if is_B(name):
            assert not tensor.any()
        else:
            expected = total([SHARES[c] * ended[c][name] for c in SHARES])
            torch.testing.assert_close(tensor.double(), expected, atol=1e-6, rtol=1e-6)
    assert state.values["sizes"] == {"a": 7, "b": 2, "c": 1}


def test_sizes_are_those_of_the_last_answer() -> None:
    state, _, _ = after_a_round()
    order = order_of(METHOD, replace(state, round=2), "b")
    target = random_tensors(state.tensors)
    later = METHOD.merge(replace(state, round=2), [METHOD.local(QuadraticClient("b", 9, target), order)])
    assert later.values["sizes"] == {"a": 7, "b": 9, "c": 1}


def test_the_model_for_everyone_pairs_the_shared_A_with_the_weighted_mean_of_all_B() -> None:
    state, _, memories = after_a_round()
    memories["d"] = ClientMemory()  # known, but it never answered
    view = METHOD.assembled(state, memories)
    dense = {}
    for path in SHAPES:
        A = state.tensors[f"experts/0/{path}.lora_A"].double()
        B = total([SHARES[c] * memories[c].tensors[f"own/experts/0/{path}.lora_B"].double() for c in SHARES])
        dense[path] = SCALING * B @ A
        torch.testing.assert_close(product(view.tensors, path, SCALING), dense[path], atol=1e-6, rtol=1e-6)
        assert dense[path].abs().max() > 0.1
    assert_adds(view, dense)


def test_before_the_first_answer_the_model_for_everyone_is_the_backbone() -> None:
    state = METHOD.init(setup_of())
    assert_adds(METHOD.assembled(state, {}), {path: torch.zeros(shape).double() for path, shape in SHAPES.items()})


def test_a_client_answers_with_its_own_B_and_a_newcomer_with_none() -> None:
    state, _, memories = after_a_round()
    for client, memory in (memories | {"d": ClientMemory()}).items():
        view = METHOD.personal_view(state, client, memory)
        for path in SHAPES:
            A, B = (f"experts/0/{path}.lora_{factor}" for factor in "AB")
            assert torch.equal(view.tensors[A], state.tensors[A])
            own = memory.tensors.get(f"own/{B}", torch.zeros_like(view.tensors[B]))
            assert torch.equal(view.tensors[B], own)


def test_B_goes_on_where_it_was_and_A_from_the_servers() -> None:
    """Plain SGD on F = ½ ‖w − t‖² with rate 0.1, three steps a round: 0.9³ of the way is left each time."""
    state = replace(METHOD.init(setup_of()), round=1)
    target = random_tensors(state.tensors, seed=4, scale=1.0)
    client = QuadraticClient("a", 7, target)
    for round in (1, 2):
        order = order_of(METHOD, replace(state, round=round), "a")
        order = replace(order, training=replace(order.training, lr=0.1))
        reply = METHOD.local(client, order)
        client.remember(reply.keep, reply.keep_values)
        assert all(name.endswith("lora_A") for name in reply.send)
        for name, update in reply.send.items():  # the server's A did not move in between
            torch.testing.assert_close(update, (1 - 0.9**3) * (target[name] - state.tensors[name]))
        for name, kept in client.memory.tensors.items():
            assert is_B(name)
            torch.testing.assert_close(kept, (1 - 0.9 ** (3 * round)) * target[name.removeprefix("own/")])


def test_an_absent_clients_memory_is_untouched(tmp_path: Path) -> None:
    world, seen = World(tmp_path), []
    world.run(METHOD, participation=0.5, evaluate=lambda state, memories: seen.append(dict(memories)))
    cohorts = [set(record.get("cohort", [])) for record in world.log.read()]
    for (before, after), cohort in zip(pairwise(seen), cohorts[1:], strict=True):
        assert {c for c in after if after[c] != before.get(c)} == cohort
