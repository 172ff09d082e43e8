"""FedWeave: LoRA experts aggregated per prototype, one router aggregated per client, one expert active at inference.

D. Duan et al., "FedWeave: Rethinking the Unit of Specialization in Heterogeneous Federated MoE-LoRA",
arXiv 2607.26618 (2026), Algorithm 1.

Differs from FedAvg: an expert's update is weighted by the examples of the buckets aligned with that expert (Eq. 4),
not by the client's size; the buckets are found once, without labels (Eq. 1, 2).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field

from fedloom.errors import UpdateRejected
from fedloom.methods.base import Method, MethodOptions, Schema
from fedloom.numerics.aggregate import RunningMean
from fedloom.numerics.cluster import align, bucketize, signature_distance
from fedloom.numerics.init import router_init
from fedloom.numerics.schedule import schedule
from fedloom.numerics.seeding import generator
from fedloom.numerics.tree import place, subtract, take
from fedloom.types import AdapterSpec, Client, Order, Replies, Reply, Setup, State, Tensors, View, component

__all__ = ["FedWeave", "schedule"]


class FedWeaveOptions(MethodOptions):
    """Defaults are the paper's (Appendix A)."""

    clusterer: Literal["kmeans", "spectral", "agglomerative", "gaussian_mixture"] = "kmeans"
    max_buckets: int = Field(8, ge=1)
    restarts: int = Field(10, ge=1)
    warmup_steps: int = Field(10, ge=1)
    warmup_batch: int = Field(8, ge=1)
    linkage: Literal["average", "complete", "single"] = "average"
    max_experts: int = Field(8, ge=1)
    router_hidden: int = Field(512, ge=1)
    by_length: bool = True  # not in the paper: a bucket's mini-batches hold examples of like length, to pad less


class FedWeave(Method):
    title = "FedWeave"
    paper = "arXiv 2607.26618"
    aggregated = "expert m by the examples of its aligned buckets; the router by client size"
    local_only = "bucket membership of every example"
    exact = "no: factors are averaged per expert"
    default_rank = 8
    averages_factors = True
    has_probe = True
    Options = FedWeaveOptions
    options: FedWeaveOptions

    def init(self, setup: Setup) -> State:
        """Make the one initialisation that all warm-ups start from."""
        state = super().init(setup)
        return replace(state, values={"seed": setup.seed, "hidden_size": setup.hidden_size})

    # Stage 1, once (lines 1–6).

    def probe(self, client: Client, order: Order) -> Reply:
        """Embed, bucket, warm up one LoRA per bucket, send the adapters whose B factors are the signatures."""
        opt = self.options
        embedding = torch.nn.functional.normalize(client.features(), dim=1)  # (n, hidden), line 2
        buckets = bucketize(
            embedding,
            clusterer=opt.clusterer,
            max_buckets=opt.max_buckets,
            restarts=opt.restarts,
            seed=client.seed("buckets"),
        )
        members = members_of(buckets.labels.tolist(), buckets.count)
        warmup = replace(order.training, steps=opt.warmup_steps, batch_size=opt.warmup_batch, optimizer_state="reset")
        send: Tensors = {}
        steps, tokens = 0, 0
        for c, pool in enumerate(members):  # line 3
            client.load(order.tensors, order.spec)
            report = client.fit([pool] * warmup.steps, warmup, purpose=f"warmup-{c}", by_length=opt.by_length)
            send |= place(client.read(), f"buckets/{c}")
            steps, tokens = steps + report.steps, tokens + report.tokens
        return Reply(
            client.name,
            send,
            counts={"examples": client.size},
            metrics={"steps": steps, "tokens": tokens},
            values={"sizes": [len(pool) for pool in members]},
            keep_values={"buckets": buckets.labels.tolist()},
        )

    def discover(self, state: State, replies: Replies) -> State:
        """Align buckets across clients, choose M*, initialise experts and router (lines 5–6, Eq. 1 and 2)."""
        signatures: list[Tensors] = []
        sizes: dict[str, list[int]] = {}
        for reply in replies:
            sizes[reply.client] = reply.values["sizes"]
            for c in range(len(sizes[reply.client])):
                adapter = take(reply.send, f"buckets/{c}")
                signatures.append({name: t for name, t in adapter.items() if name.endswith(".lora_B")})
        distance = signature_distance(signatures)  # Eq. 1
        alignment = align(distance, linkage=self.options.linkage, max_experts=self.options.max_experts)
        label = iter(alignment.labels.tolist())
        assignment = {client: [next(label) for _ in sizes[client]] for client in sizes}

        experts = RunningMean()
        for reply in replies:  # Eq. 2: every bucket counts the same
            for c, m in enumerate(assignment[reply.client]):
                for name, value in take(reply.send, f"buckets/{c}").items():
                    experts.add(name.replace("experts/0/", f"experts/{m}/", 1), value, 1.0)
        tensors = experts.mean()
        width, hidden = self.options.router_hidden, state.values["hidden_size"]
        tensors |= router_init(hidden, width, alignment.count, generator(state.values["seed"], "router-init"))
        found = {
            "assignment": assignment,
            "sizes": sizes,
            "silhouette": alignment.silhouette,
            "scores": {str(k): v for k, v in alignment.scores.items()},
        }
        spec = self.deployed(state.spec, alignment.count)
        return replace(state, tensors=tensors, spec=spec, values=state.values | found)

    # Stage 2, every round (lines 7–15).

    def view(self, state: State, client: str | None) -> View:
        """Give all experts, the router and, to a client, the experts and sizes of its buckets (line 8)."""
        if client not in state.values.get("assignment", {}):
            return View(state.tensors, state.spec)
        values = {key: state.values[key][client] for key in ("assignment", "sizes")}
        return View(state.tensors, state.spec, values)

    def local(self, client: Client, order: Order) -> Reply:
        """Interleave bucket-homogeneous steps under the full mixture; the router state persists (lines 10–12)."""
        assignment = order.values["assignment"]
        members = members_of(client.memory.values["buckets"], len(assignment))
        sizes = [len(pool) for pool in members]
        client.load(order.tensors, order.spec)
        visits = schedule(sizes, order.training.steps)  # line 10
        report = client.fit([members[c] for c in visits], order.training, by_length=self.options.by_length)  # line 11
        counts = weights(assignment, sizes)
        update = subtract(client.read(), order.tensors)
        send = {name: delta for name, delta in update.items() if counts.get(component(name), 0) > 0}  # line 12
        return Reply(client.name, send, counts, report.metrics())

    # merge is the default: each component by the counts sent with it, which is Eq. 4 (line 14).

    def admits(self, state: State, client: str) -> bool:
        return client in state.values["assignment"]

    def expected(self, order: Order, reply: Reply) -> Schema:
        if order.kind != "probe":
            schema = super().expected(order, reply)
            if reply.counts != (known := weights(order.values["assignment"], order.values["sizes"])):
                raise UpdateRejected(f"its counts {reply.counts} are not those of its buckets at discovery, {known}")
            return schema
        if reply.counts.keys() != {"examples"}:
            raise UpdateRejected(f"a probe counts 'examples' only, not {sorted(reply.counts)}")
        sizes, examples = reply.values.get("sizes"), reply.counts["examples"]
        if not isinstance(sizes, list) or not 0 < len(sizes) <= self.options.max_buckets:
            raise UpdateRejected(f"'sizes' is not a list of 1 to {self.options.max_buckets} bucket sizes")
        if not all(type(n) is int and 0 < n <= examples for n in sizes) or sum(sizes) != examples:
            raise UpdateRejected(f"its bucket sizes do not add up to its {examples} examples")
        return {f"buckets/{c}/{name}": tuple(t.shape) for c in range(len(sizes)) for name, t in order.tensors.items()}

    def local_steps(self, order: Order) -> int:
        return self.options.warmup_steps if order.kind == "probe" else order.training.steps

    def origin(self, order: Order, name: str) -> torch.Tensor | None:
        return order.tensors[name.split("/", 2)[2]] if order.kind == "probe" else None

    def deployed(self, spec: AdapterSpec, experts: int) -> AdapterSpec:
        return replace(spec, experts=experts, router_hidden=self.options.router_hidden)


def members_of(labels: list[int], count: int) -> list[list[int]]:
    """Return the example indices of each bucket."""
    return [[i for i, label in enumerate(labels) if label == c] for c in range(count)]


def weights(assignment: list[int], sizes: list[int]) -> dict[str, int]:
    """Return a client's weights in Eq. 4: |D_i| for the router, n_{i,m} for each expert m that it has a bucket of."""
    counts = {"examples": sum(sizes), "router": sum(sizes)}
    for m, size in zip(assignment, sizes, strict=True):
        counts[f"experts/{m}"] = counts.get(f"experts/{m}", 0) + size
    return counts
