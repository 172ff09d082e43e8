"""``method.experts`` in place of a choice by silhouette (FedWeave, arXiv 2607.26618, Stage 1), in all that align."""

from __future__ import annotations

import math

import pytest
from dense_world import LEARNING, setup_of

from fedloom.errors import ConfigError
from fedloom.methods import METHODS
from fedloom.numerics.tree import place
from fedloom.types import Order, Reply, State

#: Directions of the clients' B factors. a and d are nearest; then b and c; by silhouette, they are two groups.
ANGLES = {"a": 0.0, "b": math.pi / 2, "c": math.pi / 2 + 0.1, "d": 0.05}


def discovered(name: str, experts: int | None) -> State:
    """Return the state after the probe of four clients with one bucket each."""
    kind = METHODS[name]
    method = kind(kind.Options.model_validate({"experts": experts}))
    state = method.init(setup_of())
    replies = []
    for client, angle in ANGLES.items():
        order = Order("probe", client, 0, state.tensors, state.spec, LEARNING)
        warm = {n: t.clone() for n, t in state.tensors.items()}
        for n, tensor in warm.items():
            if n.endswith("lora_B"):
                tensor[0, 0], tensor[1, 0] = math.cos(angle), math.sin(angle)
        reply = Reply(client, place(warm, "buckets/0"), {"examples": 3}, values={"sizes": [3]})
        assert method.expected(order, reply).keys() == reply.send.keys()
        replies.append(reply)
    return method.discover(state, replies)


@pytest.mark.parametrize("name", ["fedweave", "fedweave_wo_client_router", "fedweave_wo_prototype_expert", "fedlease"])
def test_the_number_of_experts_may_be_given(name: str) -> None:
    for experts, labels in ((None, [0, 1, 1, 0]), (1, [0, 0, 0, 0]), (3, [0, 1, 2, 0]), (4, [0, 1, 2, 3])):
        state = discovered(name, experts)
        assert state.values["assignment"] == {client: [m] for client, m in zip(ANGLES, labels, strict=True)}
        assert state.spec.experts == len(set(labels))
        held = {n.split("/")[1] for n in state.tensors if n.startswith("experts/")}
        assert held == {str(m) for m in labels}
    with pytest.raises(ConfigError, match=r"method\.experts is 5, but all clients together have 4 buckets"):
        discovered(name, 5)
