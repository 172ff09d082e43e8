"""FedWeave: LoRA experts aggregated per prototype, one router aggregated per client, one expert active at inference.

D. Duan et al., "FedWeave: Rethinking the Unit of Specialization in Heterogeneous Federated MoE-LoRA",
arXiv 2607.26618 (2026), Algorithm 1.

Differs from FedAvg: an expert's update is weighted by the examples of the buckets aligned with that expert (Eq. 4),
not by the client's size; the buckets are found once, without labels (Eq. 1, 2).
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import Field

from fedloom.methods.base import Effort, Method, Schema, WarmUp
from fedloom.methods.discovery import (
    DiscoveryOptions,
    ExpertOptions,
    align_buckets,
    check_counts,
    find_buckets,
    join_nearest,
    members_of,
    references,
    start_of,
    unsized,
    warm_up,
    warmed_up,
    weights,
)
from fedloom.numerics.init import router_init
from fedloom.numerics.schedule import schedule
from fedloom.numerics.seeding import generator
from fedloom.numerics.tree import subtract
from fedloom.types import AdapterSpec, Client, Order, Replies, Reply, Setup, State, Tensors, View, component

__all__ = ["FedWeave", "schedule", "weights"]


class MixtureOptions(ExpertOptions):
    """What FedWeave and its ablations share."""

    router_hidden: int = Field(512, ge=1, le=65536)


class FedWeaveOptions(DiscoveryOptions, MixtureOptions):
    """Defaults are the paper's (Appendix A)."""

    by_length: bool = True  # not in the paper: a bucket's mini-batches hold examples of like length, to pad less


class FedWeave(Method):
    title = "FedWeave"
    paper = "arXiv 2607.26618"
    aggregated = "expert m by the examples of its aligned buckets; the router by client size"
    local_only = "bucket membership of every example"
    exact = "no: factors are averaged per expert"
    default_rank = 8
    averages_factors = True
    summed = True
    has_probe = True
    Options: ClassVar[type[MixtureOptions]] = FedWeaveOptions
    options: FedWeaveOptions

    def init(self, setup: Setup) -> State:
        """Make the one initialisation that all warm-ups start from."""
        state = super().init(setup)
        return replace(state, values={"seed": setup.seed, "hidden_size": setup.hidden_size})

    # Stage 1, once (lines 1–6).

    def probe(self, client: Client, order: Order) -> Reply:
        """Embed, bucket, warm up one LoRA per bucket, send the adapters whose B factors are the signatures."""
        return warm_up(client, order, self.buckets(client), self.options, by_length=self.options.by_length)  # line 3

    def buckets(self, client: Client) -> list[int]:
        """Return the bucket of each example (line 2)."""
        return find_buckets(client, self.options).labels.tolist()

    def discover(self, state: State, replies: Replies) -> State:
        """Align buckets across clients, choose M*, initialise experts and router (lines 5–6, Eq. 1 and 2)."""
        experts, count, found = align_buckets(replies, self.options)
        width, hidden = self.options.router_hidden, state.values["hidden_size"]
        router = router_init(hidden, width, count, generator(state.values["seed"], "router-init"))
        spec = self.deployed(state.spec, count)
        kept = state.kept | references(experts)
        return replace(state, tensors=experts | router, spec=spec, values=state.values | found, kept=kept)

    def join(self, state: State, client: str, reply: Reply | None) -> State:
        """Give a late joiner the experts that its buckets' warm-ups are nearest to."""
        return join_nearest(state, client, reply)

    # Stage 2, every round (lines 7–15).

    def view(self, state: State, client: str | None) -> View:
        """Give all experts, the router and, to a client, the experts and sizes of its buckets (line 8)."""
        if client not in state.values.get("assignment", {}):
            return View(state.tensors, state.spec)
        values = {key: state.values[key][client] for key in ("assignment", "sizes")}
        return View(state.tensors, state.spec, values)

    def local(self, client: Client, order: Order) -> Reply:
        """Interleave bucket-homogeneous steps under the full mixture, for the experts of its buckets and the router."""
        assignment = order.values["assignment"]
        members = members_of(client.memory.values["buckets"], len(assignment))
        sizes = [len(pool) for pool in members]
        client.load(order.tensors, order.spec)
        end, metrics = self.take_steps(client, order, members, schedule(sizes, client.steps(order.training)))  # line 10
        counts = weights(assignment, order.values["sizes"])
        update = subtract(end, order.tensors)
        send = {name: delta for name, delta in update.items() if counts.get(component(name), 0) > 0}  # line 12
        return Reply(client.name, send, counts, metrics)

    def take_steps(
        self, client: Client, order: Order, members: list[list[int]], visits: list[int]
    ) -> tuple[Tensors, dict[str, float]]:
        """Take each step on the bucket it visits; the router's state persists over all of them (line 11)."""
        report = client.fit([members[c] for c in visits], order.training, by_length=self.options.by_length)
        return client.read(), report.metrics()

    # merge is the default: each component by the counts sent with it, which is Eq. 4 (line 14).

    def admits(self, state: State, client: str) -> bool:
        return client in state.values["assignment"]

    def expected(self, order: Order, reply: Reply) -> Schema:
        if order.kind == "probe":
            return warmed_up(order, reply, self.options.max_buckets)
        schema = super().expected(order, reply)
        check_counts(reply, weights(order.values["assignment"], order.values["sizes"]))
        return schema

    def asked(self, order: Order) -> Schema:
        units = weights(order.values["assignment"], order.values["sizes"])
        return {name: shape for name, shape in super().asked(order).items() if component(name) in units}

    def countless(self, reply: Reply) -> Reply:
        return replace(unsized(reply) if "sizes" in reply.values else reply, metrics={})

    def tells(self) -> str | None:
        varies = getattr(self.options, "buckets", "max") != "max"
        return "how many buckets a client has tells of its rows; set method.buckets to 'max'" if varies else None

    def local_steps(self, order: Order) -> int:
        return self.options.warmup_steps if order.kind == "probe" else order.training.steps

    def effort(self, order: Order, size: int) -> Effort:
        if order.kind != "probe":
            return super().effort(order, size)
        opt, buckets = self.options, min(self.options.max_buckets, size)
        return Effort(buckets * opt.warmup_steps, max(buckets * order.spec.rank, opt.warmup_batch))

    def origin(self, order: Order, name: str) -> torch.Tensor | None:
        return start_of(order, name) if order.kind == "probe" else None

    def warms_up(self) -> WarmUp:
        return WarmUp(self.options.max_buckets, self.options.warmup_steps, self.options.warmup_batch)

    def deployed(self, spec: AdapterSpec, experts: int) -> AdapterSpec:
        return replace(spec, experts=experts, router_hidden=self.options.router_hidden)
