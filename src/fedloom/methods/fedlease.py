"""FedLEASE: one LoRA expert and one router per cluster of clients.

L. Wang et al., FedLEASE, arXiv 2509.15087 (2025), in the form that FedWeave (arXiv 2607.26618, 'Baselines and
Comparison Scope', Appendix A) compares with: rank 8, two-layer routers on frozen sentence features, cluster count by
silhouette. ``fedlease_adaptive`` has the authors' own routing.

Differs from FedAvg: a client belongs to the cluster of clients whose warmed-up B factors point as its own do. It
trains its cluster's expert and router under the mixture of all experts, and the mean goes over the cluster.
The papers do not say which router answers for everyone: here the gates of all routers are averaged, by the examples
of their clusters. All routers start from one draw.
Its authors warm up for 5 rounds of 2 local epochs; the default here is FedWeave's 10 steps for each of its buckets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field

from fedloom.methods.base import Effort, Method, Schema, WarmUp
from fedloom.methods.discovery import ExpertOptions, align_buckets, check_counts, start_of, warm_up, warmed_up
from fedloom.numerics.aggregate import weighted_mean_by_component
from fedloom.numerics.init import router_init
from fedloom.numerics.seeding import generator
from fedloom.numerics.tree import add, place, take
from fedloom.types import AdapterSpec, Client, Memory, Order, Replies, Reply, Setup, State, Tensors, View, component


class ClusterOptions(ExpertOptions):
    """``init``: a client starts round 1 from the mean warm-up of each cluster (the paper), or from its ``own`` warm-up
    among experts that add nothing (the authors' code)."""

    init: Literal["mean", "own"] = "mean"


class FedLEASEOptions(ClusterOptions):
    router_hidden: int = Field(512, ge=1, le=65536)


class FedLEASE(Method):
    title = "FedLEASE"
    paper = "arXiv 2509.15087"
    aggregated = "expert and router of a cluster over its clients, all alike"
    exact = "no: factors are averaged per expert"
    singles = "experts are single clients' updates, grouped by their likeness"
    default_rank = 8
    weights = "uniform"
    averages_factors = True
    has_probe = True
    personal = True
    Options: ClassVar[type[ClusterOptions]] = FedLEASEOptions
    options: FedLEASEOptions

    def init(self, setup: Setup) -> State:
        """Make the one initialisation that all warm-ups start from."""
        state = super().init(setup)
        return replace(state, values={"seed": setup.seed, "hidden_size": setup.hidden_size})

    def probe(self, client: Client, order: Order) -> Reply:
        """Warm up one LoRA on all examples."""
        reply = warm_up(client, order, [0] * client.size, self.options, by_length=False)
        keep = place(take(reply.send, "buckets/0"), "warm") if self.options.init == "own" else {}
        return replace(reply, keep=keep)

    def discover(self, state: State, replies: Replies) -> State:
        """Cluster clients by the cosine distance of their B factors; expert j is the mean warm-up of cluster j."""
        experts, count, found = align_buckets(replies, self.options)
        state = replace(state, tensors=experts, spec=self.deployed(state.spec, count), values=state.values | found)
        routing = self.routing(state)
        clusters = {f"routers/{j}/{name}": tensor.clone() for j in range(count) for name, tensor in routing.items()}
        spec = state.spec
        if spec.routers > 1:  # in the global model's gates a cluster counts as many times as it has examples
            held = [0] * count
            for client, (cluster,) in found["assignment"].items():
                held[cluster] += sum(found["sizes"][client])
            spec = replace(spec, router_weights=tuple(map(float, held)))
        return replace(state, tensors=experts | clusters, spec=spec)

    def routing(self, state: State) -> Tensors:
        """Draw what routes in every cluster at the start, by its name in the server's state."""
        width, hidden = self.options.router_hidden, state.values["hidden_size"]
        router = router_init(hidden, width, state.spec.experts, generator(state.values["seed"], "router-init"))
        return take(router, "router")

    def view(self, state: State, client: str | None) -> View:
        """Give all experts and all routers or, to a client, the router of its own cluster."""
        found = state.values.get("assignment", {}).get(client)
        if found is None and state.spec.routers > 1:
            return View(state.tensors, state.spec)
        (cluster,) = found or [0]
        experts = place(take(state.tensors, "experts"), "experts")
        router = place(take(state.tensors, f"routers/{cluster}"), "router")
        values = {key: state.values[key][client] for key in ("assignment", "sizes")} if found else {}
        return View(experts | router, replace(state.spec, routers=1, router_weights=()), values)

    def trains(self, name: str, order: Order) -> bool:
        """Train the router and the cluster's own expert; other experts stay frozen in the mixture."""
        return component(name) in ("router", f"experts/{order.values['assignment'][0]}")

    def local(self, client: Client, order: Order) -> Reply:
        """Train as FedAvg does; with ``init: own``, round 1 starts from the client's own warm-up alone."""
        if self.options.init == "mean" or order.round > 1:
            return super().local(client, order)
        own = f"experts/{order.values['assignment'][0]}"
        silent = {name: torch.zeros_like(t) for name, t in order.tensors.items() if name.endswith(".lora_B")}
        start = order.tensors | silent | place(take(client.memory.tensors, "warm/experts/0"), own)
        reply = super().local(client, replace(order, tensors=start))
        return replace(reply, send={n: t + (start[n] - order.tensors[n]) for n, t in reply.send.items()})

    def merge(self, state: State, replies: Replies) -> State:
        """Average each expert and each cluster's router over the members that answered."""
        update, _ = weighted_mean_by_component(self.by_cluster(state, replies))
        return replace(state, tensors=state.tensors | add({n: state.tensors[n] for n in update}, update))

    def by_cluster(self, state: State, replies: Replies) -> Iterator[Reply]:
        """Name a client's routing tensors as the server does."""
        for reply in replies:
            (cluster,) = state.values["assignment"][reply.client]
            names = {name: name if name.startswith("experts/") else self.home(name, cluster) for name in reply.send}
            counts = {component(new): reply.counts[component(old)] for old, new in names.items()}
            yield replace(reply, send={names[n]: t for n, t in reply.send.items()}, counts=reply.counts | counts)
            del reply  # so that it is gone when the next is read

    def home(self, name: str, cluster: int) -> str:
        """Return the server's name of a client's routing tensor."""
        return name.replace("router/", f"routers/{cluster}/", 1)

    def personal_view(self, state: State, client: str, memory: Memory) -> View:
        return self.view(state, client)

    def admits(self, state: State, client: str) -> bool:
        return client in state.values["assignment"]

    def expected(self, order: Order, reply: Reply) -> Schema:
        if order.kind == "probe":
            return warmed_up(order, reply, 1)
        schema = super().expected(order, reply)
        (size,) = order.values["sizes"]
        check_counts(reply, {"examples": size} | {component(n): size for n in order.tensors if self.sends(n, order)})
        return schema

    def local_steps(self, order: Order) -> int:
        """Count the warm-up too where a reply may hold it: own warm-up and its cluster's mean differ by two of them."""
        if order.kind == "probe":
            return self.options.warmup_steps
        own = self.options.init == "own" and order.round == 1
        return order.training.steps + (2 * self.options.warmup_steps if own else 0)

    def effort(self, order: Order, size: int) -> Effort:
        return Effort(self.local_steps(order), self.options.warmup_batch if order.kind == "probe" else 0)

    def origin(self, order: Order, name: str) -> torch.Tensor | None:
        return start_of(order, name) if order.kind == "probe" else None

    def warms_up(self) -> WarmUp:
        return WarmUp(1, self.options.warmup_steps, self.options.warmup_batch)

    def deployed(self, spec: AdapterSpec, experts: int) -> AdapterSpec:
        return replace(spec, experts=experts, router_hidden=self.options.router_hidden, routers=experts)
