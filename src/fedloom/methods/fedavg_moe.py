"""FedAvg on a native mixture-of-experts model, the baseline of FC-MoE's tables.

B. McMahan et al., "Communication-efficient learning of deep networks from decentralized data", arXiv 1602.05629 (2017).
``weighting: activations`` weighs an expert by (activations / steps)^t · n_i as FLAME does (arXiv 2506.16600).

Differs from FedAvg: with ``weighting: samples`` not at all: experts, routers and the rest are averaged by sample count.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Literal

from pydantic import Field

from fedloom.errors import UpdateRejected
from fedloom.methods.base import Method, MethodOptions, Schema
from fedloom.methods.stated_activations import bounded_by_tokens, check_activations
from fedloom.numerics.aggregate import RunningMean
from fedloom.numerics.tree import subtract
from fedloom.types import Client, Order, Replies, Reply, State, component


class FedAvgMoEOptions(MethodOptions):
    """``power``: FLAME's t, how strongly activations count."""

    weighting: Literal["samples", "activations"] = "samples"
    power: float = Field(1.0, gt=0)


class FedAvgMoE(Method):
    title = "FedAvg"
    paper = "arXiv 1602.05629"
    aggregated = "everything by sample count"
    exact = "yes: whole parameters are averaged (of LoRAs on experts, factors: no)"
    singles = "models with experts of their own are not summed yet"
    native = True
    Options = FedAvgMoEOptions
    options: FedAvgMoEOptions
    plausible = bounded_by_tokens

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

    def weights_refused(self) -> str:
        weighted = self.options.weighting == "activations"
        return f"{self.title} weighs experts by activations × examples: only the rest would change" if weighted else ""

    def expected(self, order: Order, reply: Reply) -> Schema:
        schema = super().expected(order, reply)
        if self.options.weighting == "activations":
            check_activations(reply, schema)
            stated, steps = reply.metrics.get("steps"), order.training.steps_of(reply.counts["examples"])
            if stated != steps:
                raise UpdateRejected(f"it states {stated} steps, by which activations are divided; {steps} were asked")
        return schema
