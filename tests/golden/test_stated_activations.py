"""Stated activations: what one client can have at most, and when they are sent and count."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedloom.config import parse_config
from fedloom.errors import ConfigError, UpdateRejected
from fedloom.methods.base import Method
from fedloom.methods.fcmoe import FCMoE
from fedloom.methods.fedavg_moe import FedAvgMoE, FedAvgMoEOptions
from fedloom.methods.stated_activations import check_tokens, gone_through
from fedloom.runtime.quarantine import check_reply
from fedloom.runtime.wire import decode, encode
from fedloom.types import AdapterSpec, Order, Reply, Training
from small_world import NATIVE, TRAINING, Wire, World, same

SPEC = AdapterSpec((), native="full")


def lying(client: str, tell: Any) -> Any:
    """Return what a transport does to replies so that ``client`` states other activations."""

    def change(orders: Any, receipts: list[Any]) -> list[Any]:
        for receipt in receipts:
            if receipt.client == client:
                tensors, header = decode(receipt.path.read_bytes())
                header["values"]["activations"] = tell(header["values"]["activations"])
                receipt.path.write_bytes(encode(tensors, header))
        return receipts

    return change


EPOCH = replace(TRAINING, epochs=1, steps=1000)


@pytest.mark.parametrize("method", [FCMoE(), FedAvgMoE(FedAvgMoEOptions(weighting="activations"))])
@pytest.mark.parametrize(
    ("tell", "reason"),
    [
        (lambda found: dict.fromkeys(found, 1 << 39), r"are 549755813888; at most 1 × 512"),
        (lambda found: {**found, next(iter(found)): -1}, r"are -1, not a number of tokens"),
    ],
)
def test_one_example_cannot_have_the_tokens_of_many(method: Method, tell: Any, reason: str, tmp_path: Path) -> None:
    """A client with one example that states 2^39 tokens an expert would be the whole mean of every expert."""
    worlds = [World(tmp_path / name, spec=NATIVE) for name in ("without", "with")]
    silent = Wire(worlds[0].simulator, lambda orders, receipts: [r for r in receipts if r.client != "dan"])
    loud = Wire(worlds[1].simulator, lying("dan", tell))
    states = [
        world.run(method, rounds=1, training=EPOCH, transport=wire)
        for world, wire in zip(worlds, (silent, loud), strict=True)
    ]
    (why,) = worlds[1].log.read()[-1]["quarantined"].items()
    assert why[0] == "dan"
    assert re.search(reason, why[1])
    assert same(states[0].tensors, states[1].tensors)


@pytest.mark.parametrize(
    ("training", "kind", "rows"),
    [
        (Training(steps=3, batch_size=4), "fit", 3 * 4),
        (Training(steps=3, batch_size=8), "fit", 3 * 5),  # five examples fill no batch of eight
        (Training(steps=100, batch_size=4, epochs=2), "fit", 2 * 5),
        (Training(steps=2, batch_size=4, epochs=2), "fit", 2 * 4),
        (Training(steps=3, batch_size=4), "probe", 5),
    ],
)
def test_the_most_tokens_by_hand(training: Training, kind: Any, rows: int) -> None:
    """An expert has each of 10 tokens once at most; the experts of one layer each token 8 times at most."""
    order = Order(kind, "ann", 1, {}, SPEC, training)

    def check(*tokens: int) -> None:
        active = {f"experts/m.{e}": n for e, n in enumerate(tokens)}
        reply = Reply("ann", {}, {"examples": 5}, values={"activations": active})
        check_tokens(reply, gone_through(order, reply), 10)

    most = 10 * rows
    check(most, most)
    check(*[most] * 8, 0)
    with pytest.raises(UpdateRejected, match=r"experts/m\.1"):
        check(most, most + 1)
    with pytest.raises(UpdateRejected, match=f"experts/m' are {8 * most + 1} in all"):
        check(*[most] * 8, 1)


def test_fedavg_sends_activations_only_where_they_count(tmp_path: Path) -> None:
    world = World(tmp_path, spec=NATIVE)
    order = Order("fit", "ann", 1, world.setup.initial, NATIVE, TRAINING)
    plain = FedAvgMoE().local(world.client("ann"), order)
    assert plain.values == {}
    check_reply(plain, FedAvgMoE().expected(order, plain))
    weighed = FedAvgMoE(FedAvgMoEOptions(weighting="activations"))
    reply = weighed.local(world.client("ann"), order)
    assert len(reply.values["activations"]) == 8
    check_reply(reply, weighed.expected(order, reply))
    with pytest.raises(UpdateRejected, match="states no 'activations'"):
        weighed.expected(order, plain)
    for steps in (0.001, 4.0, None):  # activations are divided by steps: few of them would weigh much
        metrics = {name: value for name, value in (reply.metrics | {"steps": steps}).items() if value is not None}
        with pytest.raises(UpdateRejected, match=f"states {steps} steps.*; 3 were asked"):
            weighed.expected(order, replace(reply, metrics=metrics))


@pytest.mark.parametrize("weights", ["sample", "uniform"])
@pytest.mark.parametrize(
    ("method", "refused"),
    [
        ({"name": "fcmoe"}, "FC-MoE weighs experts by activations × update norm"),
        ({"name": "fcmoe", "importance": False}, None),
        ({"name": "fedavg_moe", "weighting": "activations"}, "FedAvg weighs experts by activations × examples"),
        ({"name": "fedavg_moe"}, None),
    ],
)
def test_weights_that_would_count_for_a_part_only_are_refused(
    method: dict[str, Any], refused: str | None, weights: str
) -> None:
    plain = {"method": method, "server": {"weights": weights}, "data": {"clients": {"ann": "ann.jsonl"}}}
    if refused is None:
        parse_config(plain)
    else:
        with pytest.raises(ConfigError, match=f"server.weights '{weights}'.*{refused}"):
            parse_config(plain)
