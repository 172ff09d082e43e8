"""The class of defaults: one LoRA, trained by every client on all its examples, averaged by sample count."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import BaseModel, ConfigDict

from fedloom.errors import UpdateRejected
from fedloom.numerics.aggregate import weighted_mean_by_component
from fedloom.numerics.init import lora_init
from fedloom.numerics.seeding import generator
from fedloom.numerics.tree import add, subtract
from fedloom.types import AdapterSpec, Client, Order, Replies, Reply, Setup, State, View, component

Schema = dict[str, tuple[int, ...]]


class MethodOptions(BaseModel):
    """A method's own options; unknown ones are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Method:
    """Functions over serialisable state. Nothing but the frozen options lives on ``self``."""

    title: ClassVar[str] = "FedAvg"
    paper: ClassVar[str] = ""
    aggregated: ClassVar[str] = ""
    local_only: ClassVar[str] = "nothing"
    exact: ClassVar[str] = ""
    default_rank: ClassVar[int] = 32
    has_probe: ClassVar[bool] = False
    Options: ClassVar[type[MethodOptions]] = MethodOptions

    def __init__(self, options: MethodOptions | None = None) -> None:
        self.options = options or self.Options()

    # Server, before round 1.

    def init(self, setup: Setup) -> State:
        """Return the state before any communication: the adapter's initial tensors."""
        tensors = lora_init(setup.shapes, setup.spec.rank, 1, generator(setup.seed, "adapter-init"))
        return State(round=0, tensors=tensors, spec=setup.spec)

    def probe(self, client: Client, order: Order) -> Reply:
        """Answer the one question asked before round 1 (only methods with ``has_probe``)."""
        raise UpdateRejected(f"{self.title} has no probe")

    def discover(self, state: State, replies: Replies) -> State:
        """Turn the probe's replies into the state of round 0."""
        return state

    # Every round.

    def view(self, state: State, client: str | None) -> View:
        """Return what a client gets; for None, what evaluation and export see."""
        return View(state.tensors, state.spec)

    def local(self, client: Client, order: Order) -> Reply:
        """Load, fit on all examples, send the whole update."""
        client.load(order.tensors, order.spec)
        report = client.fit([range(client.size)] * order.training.steps, order.training)
        send = subtract(client.read(), order.tensors)
        counts = {"examples": client.size} | {component(name): client.size for name in send}
        return Reply(client.name, send, counts, {"loss": report.loss, "steps": report.steps, "tokens": report.tokens})

    def merge(self, state: State, replies: Replies) -> State:
        """Add the sample-weighted mean update of each component; one that nobody sent stays as it is."""
        update, _ = weighted_mean_by_component(replies)
        tensors = dict(state.tensors) | add({name: state.tensors[name] for name in update}, update)
        return replace(state, tensors=tensors)

    # What the runtime needs to know.

    def admits(self, state: State, client: str) -> bool:
        """Return whether ``client`` can take part in rounds (a method with a probe may not know it)."""
        return True

    def local_steps(self, order: Order) -> int:
        """Return how many optimiser steps an order asks for, at most, for any tensor of the reply."""
        return order.training.steps

    def origin(self, order: Order, name: str) -> torch.Tensor | None:
        """Return what tensor ``name`` of a reply started from, if the reply holds it whole; None if it is an update."""
        return None

    def expected(self, order: Order, reply: Reply) -> Schema:
        """Return the tensor names and shapes that ``reply`` must hold, given what it says of itself.

        Raises:
            UpdateRejected: what it says of itself is impossible.
        """
        units = {component(name) for name in order.tensors}
        counts = {unit: count for unit, count in reply.counts.items() if unit != "examples"}
        if unknown := sorted(counts.keys() - units):
            raise UpdateRejected(f"counts name the unknown component {unknown[0]!r}")
        for unit, count in counts.items():
            if count > reply.counts["examples"]:
                raise UpdateRejected(f"it counts {count} examples for {unit!r}, of {reply.counts['examples']} in all")
        if not (sent := {unit for unit, count in counts.items() if count > 0}):
            raise UpdateRejected("it counts no examples for any component")
        return {name: tuple(t.shape) for name, t in order.tensors.items() if component(name) in sent}

    def deployed(self, spec: AdapterSpec, experts: int) -> AdapterSpec:
        """Return the specification of the trained model with ``experts`` experts, for the budget."""
        return replace(spec, experts=1)
