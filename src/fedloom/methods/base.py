"""The class of defaults: one LoRA, trained by every client on all its examples, averaged by sample count."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict

from fedloom.errors import UpdateRejected
from fedloom.numerics.aggregate import weighted_mean_by_component
from fedloom.numerics.init import lora_init
from fedloom.numerics.seeding import generator
from fedloom.numerics.tree import add, subtract
from fedloom.types import AdapterSpec, Client, Memory, Order, Replies, Reply, Setup, State, Tensors, View, component

Schema = dict[str, tuple[int, ...]]


class Effort(NamedTuple):
    """Optimiser steps in all, and the summed rank of adapters, or the batch, beyond what the order itself says."""

    steps: int
    width: int = 0


class WarmUp(NamedTuple):
    """What a probe trains on one client, at most: a LoRA for each of so many buckets, in so many steps."""

    buckets: int
    steps: int
    batch: int


class Section(BaseModel):
    """A part of a configuration; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class MethodOptions(Section):
    """A method's own options."""


def by_unit(weights: Mapping[str, float]) -> Callable[[str], float]:
    """Return a function from a tensor's name to the weight of its component."""
    return lambda name: weights[component(name)]


class Method:
    """Functions over serialisable state. Nothing but the frozen options lives on ``self``.

    Attributes:
        title: name as the paper writes it.
        paper: where it comes from.
        aggregated: what the server averages, and by what weights.
        local_only: what never leaves a client.
        exact: whether the average is that of the dense updates.
        default_rank: LoRA rank, of each expert.
        weights: how clients weigh where ``server.weights`` does not say: by examples or all alike.
        unweighed: why ``server.weights`` cannot say it, if so; see ``weights_refused``.
        averages_factors: both factors of a LoRA are averaged, so the mean of their products can be taken instead.
        coordinates: what the method keeps from round to round in the coordinates of these factors, if anything.
        optimizer_refused: why no server optimiser can take what it merges for a step, if so.
        has_probe: clients are asked once before round 1.
        pooled: all rows are trained in one place, as one client (no federation at all).
        global_model: there is one model for everyone, which the global protocol measures.
        personal: clients end with models of their own.
        summed: the server adds the weighted mean of what is sent to what it has, so that sums tell it enough.
        singles: why it needs single updates, if not.
        keeps_moments: a client trains the same tensors, once, in each round, so that its optimiser may go on.
        native: for models whose experts are part of the backbone, and for those only.
        whole: why it trains all parameters of such a model, not LoRAs on its experts, if so.
        submodels: clients hold some of these experts only; see ``held``.
        own_heads: clients train output heads of their own, beside the model's; see ``head_rows``.
    """

    title: ClassVar[str] = "FedAvg"
    paper: ClassVar[str] = ""
    aggregated: ClassVar[str] = ""
    local_only: ClassVar[str] = "nothing"
    exact: ClassVar[str] = ""
    default_rank: ClassVar[int] = 32
    weights: ClassVar[Literal["sample", "uniform"]] = "sample"
    unweighed: ClassVar[str] = ""
    averages_factors: ClassVar[bool] = False
    coordinates: ClassVar[str] = ""
    optimizer_refused: ClassVar[str] = ""
    has_probe: ClassVar[bool] = False
    pooled: ClassVar[bool] = False
    global_model: ClassVar[bool] = True
    personal: ClassVar[bool] = False
    summed: ClassVar[bool] = False
    singles: ClassVar[str] = "its server rule works on single updates"
    keeps_moments: ClassVar[bool] = True
    native: ClassVar[bool] = False
    whole: ClassVar[str] = ""
    submodels: ClassVar[bool] = False
    own_heads: ClassVar[bool] = False
    Options: ClassVar[type[MethodOptions]] = MethodOptions

    def __init__(self, options: MethodOptions | None = None) -> None:
        self.options = options or self.Options()

    # Server, before round 1.

    def init(self, setup: Setup) -> State:
        """Return the state before any communication: the adapter's initial tensors, or the model's own experts.

        The first factors are drawn by the run's seed: under ``native: lora`` those on the model's own experts.
        """
        spec, draw = setup.spec, generator(setup.seed, "adapter-init")
        if not spec.native:
            return State(round=0, tensors=lora_init(setup.shapes, spec.rank, 1, draw), spec=spec)
        widths = {n.removesuffix(".lora_A"): (0, t.shape[1]) for n, t in setup.initial.items() if n.endswith(".lora_A")}
        drawn = lora_init(widths, spec.rank, 1, draw)
        first = {n.removeprefix("experts/0/"): A for n, A in drawn.items() if n.endswith(".lora_A")}
        return State(round=0, tensors=dict(setup.initial) | first, spec=spec)

    def probe(self, client: Client, order: Order) -> Reply:
        """Answer the one question asked before round 1 (only methods with ``has_probe``)."""
        raise UpdateRejected(f"{self.title} has no probe")

    def discover(self, state: State, replies: Replies) -> State:
        """Turn the probe's replies into the state of round 0."""
        return state

    # Between rounds, across sites.

    def closed(self) -> str | None:
        """Return why nobody can join once the rounds are under way, if so: the probe settles who takes part."""
        asks = self.has_probe and type(self).join is Method.join
        return f"{self.title} cannot take in late joiners: its probe settles who takes part" if asks else None

    def join(self, state: State, client: str, reply: Reply | None) -> State:
        """Take in a client that comes late, with its reply to the probe where the method has one.

        Raises:
            UpdateRejected: it cannot be taken in.
        """
        return state

    # Every round.

    def view(self, state: State, client: str | None) -> View:
        """Return what a client gets; for None, what evaluation and export see."""
        return View(state.tensors, state.spec)

    def trains(self, name: str, order: Order) -> bool:
        """Return whether a tensor is trained in this round."""
        return True

    def sends(self, name: str, order: Order) -> bool:
        """Return whether a tensor's update is sent in this round."""
        return self.trains(name, order)

    def correction(self, order: Order) -> Callable[[Tensors, Tensors], None] | None:
        """Return a function of (values, gradients) that changes each step's gradients in place, if there is one."""
        return None

    def local(self, client: Client, order: Order) -> Reply:
        """Load, fit on all examples, send the update of what is sent."""
        client.load(order.tensors, order.spec)
        report = client.fit(
            [range(client.size)] * client.steps(order.training),
            order.training,
            trainable=lambda name: self.trains(name, order),
            on_gradients=self.correction(order),
        )
        update = subtract(client.read(), order.tensors)
        send = {name: delta for name, delta in update.items() if self.sends(name, order)}
        counts = {"examples": client.size} | {component(name): client.size for name in send}
        return Reply(client.name, send, counts, report.metrics())

    def merge(self, state: State, replies: Replies) -> State:
        """Add the sample-weighted mean update of each component; one that nobody sent stays as it is."""
        update, _ = weighted_mean_by_component(replies)
        tensors = dict(state.tensors) | add({name: state.tensors[name] for name in update}, update)
        return replace(state, tensors=tensors)

    # After the rounds: what is measured and handed out.

    def assembled(self, state: State, memories: Mapping[str, Memory]) -> View | None:
        """Return the model for everyone; None for a method that has none.

        Args:
            state: the server's state.
            memories: what clients keep, which only a simulation can see; for methods whose paper measures a model that
                no server could build.
        """
        return self.view(state, None) if self.global_model else None

    def personal_view(self, state: State, client: str, memory: Memory) -> View:
        """Return the model that ``client`` answers with at home; default the one for everyone."""
        return self.view(state, None)

    # What the runtime needs to know.

    def admits(self, state: State, client: str) -> bool:
        """Return whether ``client`` can take part in rounds (a method with a probe may not know it)."""
        return True

    def local_steps(self, order: Order) -> int:
        """Return how many optimiser steps an order asks for, at most, for any tensor of the reply."""
        return order.training.steps

    def steps_behind(self, order: Order, unit: str, examples: int) -> float:
        """Return how many optimiser steps may lie behind a component of a reply by a client of so many examples.

        What they can reach is the most that the server takes in, so a ``local`` that fits more often says so here.
        """
        own = replace(order.training, steps=order.training.steps_of(examples))
        return self.local_steps(replace(order, training=own))

    def effort(self, order: Order, size: int) -> Effort:
        """Return what an order makes a client of ``size`` examples do, at most; a site holds it against its limits."""
        return Effort(self.local_steps(order))

    def origin(self, order: Order, name: str) -> torch.Tensor | None:
        """Return what tensor ``name`` of a reply started from, if the reply holds it whole; None if it is an update."""
        return None

    def stepped(self, name: str) -> bool:
        """Return whether optimiser steps bound the norm of tensor ``name`` of a reply (not: control variates)."""
        return True

    def asked(self, order: Order) -> Schema:
        """Return what a reply to a round's order is to hold, as far as the server can know."""
        return {name: tuple(t.shape) for name, t in order.tensors.items() if self.sends(name, order)}

    def countless(self, reply: Reply) -> Reply:
        """Return the reply without what tells of a client's number of examples, for differential privacy."""
        return replace(reply, counts={unit: min(n, 1) for unit, n in reply.counts.items()}, metrics={}, values={})

    def plausible(self, order: Order, reply: Reply, max_length: int) -> None:
        """Check what a reply states, where it counts, against what examples of ``max_length`` tokens can make.

        Raises:
            UpdateRejected: it cannot be.
        """

    def weights_refused(self) -> str:
        """Return why ``server.weights`` cannot say how clients weigh, if so: counts are not what updates weigh."""
        return self.unweighed

    def check_clients(self, clients: Sequence[str]) -> None:
        """Refuse options that name clients which a run does not have; across sites nobody knows who will come.

        Raises:
            ConfigError: naming the option.
        """

    def check_rounds(self, rounds: int) -> None:
        """Refuse a number of rounds after which nothing of the method would have happened.

        Raises:
            ConfigError: naming the option that says so.
        """

    def tells(self) -> str | None:
        """Return what tells of a client's rows though ``countless`` and noise are applied, if anything does."""
        return None

    def expected(self, order: Order, reply: Reply) -> Schema:
        """Return the tensor names and shapes that ``reply`` must hold, given what it says of itself.

        Raises:
            UpdateRejected: what it says of itself is impossible.
        """
        offered = Method.asked(self, order)
        units = {component(name) for name in offered}
        counts = {unit: count for unit, count in reply.counts.items() if unit != "examples"}
        if unknown := sorted(counts.keys() - units):
            raise UpdateRejected(f"counts name the unknown component {unknown[0]!r}")
        for unit, count in counts.items():
            if count > reply.counts["examples"]:
                raise UpdateRejected(f"it counts {count} examples for {unit!r}, of {reply.counts['examples']} in all")
        sent = {unit for unit, count in counts.items() if count > 0}
        if offered and not sent:
            raise UpdateRejected("it counts no examples for any component")
        return {name: shape for name, shape in offered.items() if component(name) in sent}

    def deployed(self, spec: AdapterSpec, experts: int) -> AdapterSpec:
        """Return the specification of the trained model with ``experts`` experts, for the budget."""
        return replace(spec, experts=1)

    def warms_up(self) -> WarmUp | None:
        """Return what the probe trains on a client, at most, for the budget; None where it trains nothing."""
        return None

    def held(self, units: Collection[str]) -> int:
        """Return how many of a native model's experts ``units`` one client holds, at most, for the budget."""
        return len(units)

    def head_rows(self, rows: int, clients: int, rounds: int) -> int:
        """Return over how many rows clients train heads of their own in all rounds, at most, for the budget.

        Args:
            rows: of all clients together; in each round all of them may lie with those that take part.
            clients: how many there are.
            rounds: how many are run.
        """
        return 0
