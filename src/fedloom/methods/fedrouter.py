"""FedRouter: one LoRA per cluster of like prompts; an example goes to the expert of the nearest centroid.

FedRouter, arXiv 2604.00050 (2026); public code GabrielTalasso/FedRouter.

Differs from FedAvg: prompts are clustered inside each client by their frozen features, and the clients' centroids once
more at the server. Each round a client trains one of its clusters, in turn, as a plain LoRA, and each expert averages
those who trained it, by the examples of the cluster (the authors' code counts the whole client's).

What others can see: a client sends its centroids, and the centroid of a cluster of one example is that example's
feature.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from pydantic import Field

from fedloom.errors import ConfigError, UpdateRejected
from fedloom.methods.base import Method, MethodOptions, Schema
from fedloom.methods.discovery import check_counts, check_sizes, members_of
from fedloom.numerics.cluster import bucketize
from fedloom.numerics.seeding import derive_seed
from fedloom.numerics.tree import place, subtract, take
from fedloom.types import AdapterSpec, Client, Memory, Order, Replies, Reply, Setup, State, View

#: Means of unit vectors are no longer than 1, up to rounding.
LONGEST = 1.001


class FedRouterOptions(MethodOptions):
    """``experts`` null: chosen by silhouette, as the clusters inside a client are; the authors fix both numbers."""

    max_clusters: int = Field(8, ge=1)
    max_experts: int = Field(8, ge=1)
    experts: int | None = Field(None, ge=1)
    restarts: int = Field(10, ge=1)


class FedRouter(Method):
    title = "FedRouter"
    paper = "arXiv 2604.00050"
    aggregated = "an expert by the examples of the local clusters that trained it"
    local_only = "cluster membership of every example"
    exact = "no: factors are averaged per expert"
    default_rank = 8
    averages_factors = True
    has_probe = True
    personal = True
    keeps_moments = False
    Options = FedRouterOptions
    options: FedRouterOptions

    def init(self, setup: Setup) -> State:
        """Make the one initialisation that all experts start from."""
        state = super().init(setup)
        return replace(state, values={"seed": setup.seed, "hidden_size": setup.hidden_size})

    def probe(self, client: Client, order: Order) -> Reply:
        """Cluster the ℓ2-normalised features (n, hidden) and send the means (k, hidden); labels stay home."""
        unit = torch.nn.functional.normalize(client.features(), dim=1)
        opt = self.options
        with client.timed("cluster"):
            found = bucketize(unit, max_buckets=opt.max_clusters, restarts=opt.restarts, seed=client.seed("buckets"))
        labels = found.labels.tolist()
        members = members_of(labels, found.count)
        return Reply(
            client.name,
            {"centroids": torch.stack([unit[pool].mean(0) for pool in members])},
            counts={"examples": client.size},
            values={"sizes": [len(pool) for pool in members]},
            keep_values={"buckets": labels},
        )

    def discover(self, state: State, replies: Replies) -> State:
        """Cluster the centroids of all clients by k-means; an expert's centroid is the plain mean of its members."""
        sizes = {reply.client: reply.values["sizes"] for reply in replies}
        centroids = torch.cat([reply.send["centroids"] for reply in replies])  # (P, hidden)
        opt, seed = self.options, derive_seed(state.values["seed"], "centroids")
        least, most = (opt.experts, opt.experts) if opt.experts else (2, opt.max_experts)
        found = bucketize(centroids, min_buckets=least, max_buckets=most, restarts=opt.restarts, seed=seed)
        if opt.experts and found.count != opt.experts:
            raise ConfigError(
                f"method.experts is {opt.experts}, but the clients' {len(centroids)} clusters do not part into so many."
            )
        label = iter(found.labels.tolist())
        assignment = {client: [next(label) for _ in own] for client, own in sizes.items()}
        start = take(state.tensors, "experts/0")
        experts = {f"experts/{m}/{name}": t.clone() for m in range(found.count) for name, t in start.items()}
        means = [centroids[pool].mean(0) for pool in members_of(found.labels.tolist(), found.count)]
        tensors = experts | {"router/centroids": torch.stack(means)}
        values = state.values | {"assignment": assignment, "sizes": sizes, "silhouette": found.silhouette}
        return replace(state, tensors=tensors, spec=self.deployed(state.spec, found.count), values=values)

    def view(self, state: State, client: str | None) -> View:
        """Give all experts and centroids or, to a client, the expert of the cluster whose turn it is."""
        known = state.values.get("assignment", {})
        if client is None or client not in known:
            return View(state.tensors, state.spec, {"hidden_size": state.values["hidden_size"]})
        cluster = (state.round - 1) % len(known[client])
        unit = f"experts/{known[client][cluster]}"
        values = {"unit": unit, "cluster": cluster, "sizes": state.values["sizes"][client]}
        return View(place(take(state.tensors, unit), unit), replace(state.spec, experts=1, centroids=False), values)

    def local(self, client: Client, order: Order) -> Reply:
        """Train the expert on the one local cluster, as a plain LoRA."""
        unit, cluster, sizes = (order.values[key] for key in ("unit", "cluster", "sizes"))
        pool = members_of(client.memory.values["buckets"], len(sizes))[cluster]
        start = place(take(order.tensors, unit), "experts/0")
        client.load(start, order.spec)
        report = client.fit([pool] * client.steps(order.training), order.training)
        update = take(subtract(client.read(), start), "experts/0")
        return Reply(client.name, place(update, unit), {"examples": client.size, unit: len(pool)}, report.metrics())

    # merge is the default: each expert by the examples of the local clusters that trained it.

    def personal_view(self, state: State, client: str, memory: Memory) -> View:
        """Let a client's examples choose among the experts of its own clusters."""
        own = sorted(set(state.values["assignment"].get(client, range(state.spec.experts))))
        tensors = {"router/centroids": state.tensors["router/centroids"][own]}
        for m, expert in enumerate(own):
            tensors |= place(take(state.tensors, f"experts/{expert}"), f"experts/{m}")
        return View(tensors, replace(state.spec, experts=len(own)))

    def admits(self, state: State, client: str) -> bool:
        return client in state.values["assignment"]

    def expected(self, order: Order, reply: Reply) -> Schema:
        if order.kind != "probe":
            schema = super().expected(order, reply)
            unit, cluster, sizes = (order.values[key] for key in ("unit", "cluster", "sizes"))
            check_counts(reply, {"examples": sum(sizes), unit: sizes[cluster]})
            return schema
        schema = {"centroids": (len(check_sizes(reply, self.options.max_clusters)), order.values["hidden_size"])}
        sent = reply.send.get("centroids", torch.zeros(0))
        if torch.isfinite(sent).all() and sent.ndim == 2 and (sent.double().norm(dim=1) > LONGEST).any():
            raise UpdateRejected("its norm is beyond 1 in a centroid, which is a mean of unit vectors")
        return schema

    def stepped(self, name: str) -> bool:
        return name != "centroids"

    def deployed(self, spec: AdapterSpec, experts: int) -> AdapterSpec:
        return replace(spec, experts=experts, centroids=True)
