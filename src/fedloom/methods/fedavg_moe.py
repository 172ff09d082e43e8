"""FedAvg on a native mixture-of-experts model, the baseline of FC-MoE's tables.

B. McMahan et al., "Communication-efficient learning of deep networks from decentralized data", arXiv 1602.05629 (2017).
``weighting: activations`` weighs an expert by (activations / steps)^t · n_i as FLAME does (arXiv 2506.16600).

Differs from FedAvg: with ``weighting: samples`` not at all: experts, routers and the rest are averaged by sample count.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Literal

from pydantic import Field

from fedloom.errors import UpdateRejected
from fedloom.methods.base import Method, MethodOptions, Schema
from fedloom.numerics.aggregate import RunningMean
from fedloom.numerics.tree import subtract
from fedloom.types import Client, Order, Plain, Replies, Reply, State, component


class FedAvgMoEOptions(MethodOptions):
    """``power``: FLAME's t, how strongly activations count."""

    weighting: Literal["samples", "activations"] = "samples"
    power: float = Field(1.0, ge=0)


class FedAvgMoE(Method):
    title = "FedAvg"
    paper = "arXiv 1602.05629"
    aggregated = "everything by sample count"
    exact = "yes: whole parameters are averaged (of LoRAs on experts, factors: no)"
    singles = "models with experts of their own are not summed yet"
    native = True
    Options = FedAvgMoEOptions
    options: FedAvgMoEOptions

    def local(self, client: Client, order: Order) -> Reply:
        """Train everything; send everything and, where it counts, how many tokens each expert had."""
        client.load(order.tensors, order.spec)
        report = client.fit([range(client.size)] * client.steps(order.training), order.training)
        send = subtract(client.read(), order.tensors)
        counts = {"examples": client.size} | {component(name): client.size for name in send}
        values = {"activations": report.activations} if self.options.weighting == "activations" else {}
        return Reply(client.name, send, counts, report.metrics(), values)

    def merge(self, state: State, replies: Replies) -> State:
        means = RunningMean()
        for reply in replies:
            means.add_each(reply.send, partial(self.weight, reply))
            del reply  # so that it is gone when the next is read
        update = means.mean()
        del means
        return replace(state, tensors=state.tensors | {n: state.tensors[n] + update.pop(n) for n in list(update)})

    def weight(self, reply: Reply, name: str) -> float:
        """Return what a tensor of a reply counts; an expert without a token counts nothing under FLAME's rule."""
        unit = component(name)
        if self.options.weighting == "samples" or not unit.startswith("experts/"):
            return float(reply.counts[unit])
        return (reply.values["activations"][unit] / reply.metrics["steps"]) ** self.options.power * reply.counts[unit]

    def weighs(self) -> str | None:
        return "activations × examples" if self.options.weighting == "activations" else None

    def expected(self, order: Order, reply: Reply) -> Schema:
        schema = super().expected(order, reply)
        if self.options.weighting == "activations":
            check_activations(reply, schema)
            training, stated = order.training, reply.metrics.get("steps")
            passes = training.epochs * math.ceil(reply.counts["examples"] / training.batch_size)
            steps = min(training.steps, passes) if training.epochs else training.steps
            if stated != steps:
                raise UpdateRejected(f"it states {stated} steps, by which activations are divided; {steps} were asked")
        return schema


#: No family of ``adapters.native.ROUTERS`` was published with more experts a token (DeepSeek, OLMoE and Qwen: 8).
MOST_A_TOKEN = 8


def check_activations(reply: Reply, schema: Schema) -> None:
    """Check that a reply states the tokens of exactly the experts in ``schema``: they are weights.

    Raises:
        UpdateRejected: it does not.
    """
    active: Plain = reply.values.get("activations")
    if not isinstance(active, dict):
        raise UpdateRejected("it states no 'activations'")
    experts = {component(name) for name in schema if name.startswith("experts/")}
    if differing := sorted(active.keys() ^ experts):
        which = "of an expert that it does not send" if differing[0] in active else "not of an expert that it sends"
        raise UpdateRejected(f"'activations' tells {which}: {differing[0]!r}")
    for unit, tokens in active.items():
        if type(tokens) is not int or tokens < 0:
            raise UpdateRejected(f"the activations of {unit!r} are {tokens!r}, not a number of tokens")


def check_tokens(order: Order, reply: Reply, max_length: int) -> None:
    """Check that the examples a reply counts have the tokens it states: an expert has each token once at most.

    Raises:
        UpdateRejected: they cannot.
    """
    training, rows = order.training, reply.counts["examples"]
    if order.kind != "probe":
        drawn = training.steps * min(training.batch_size, rows)
        rows = min(drawn, training.epochs * rows) if training.epochs else drawn
    layers: dict[str, list[int]] = {}
    active: Plain = reply.values.get("activations", {})
    if not isinstance(active, dict):
        raise UpdateRejected("'activations' are no numbers by expert")
    for unit, tokens in active.items():
        if type(tokens) is not int or tokens > rows * max_length:
            limit = f"{rows} × {max_length}, examples gone through × data.max_length"
            raise UpdateRejected(f"the activations of {unit!r} are {tokens!r}; at most {limit}, can be")
        layers.setdefault(unit.rpartition(".")[0], []).append(tokens)
    for layer, found in layers.items():
        if sum(found) > (most := rows * max_length * min(len(found), MOST_A_TOKEN)):
            raise UpdateRejected(f"the activations of {layer!r} are {sum(found)} in all; at most {most} can be")
