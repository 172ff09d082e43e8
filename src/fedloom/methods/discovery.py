"""What discovers experts before round 1: buckets inside a client, warm-ups, and their alignment across clients.

FedWeave's Stage 1 (arXiv 2607.26618, Algorithm 1, lines 1–6). A *bucket* is a set of a client's examples; methods that
specialise by client have one bucket per client.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from pydantic import Field

from fedloom.errors import UpdateRejected
from fedloom.methods.base import MethodOptions, Schema
from fedloom.numerics.aggregate import RunningMean
from fedloom.numerics.cluster import Buckets, align, bucketize, signature_distance, standardise
from fedloom.numerics.tree import place, take
from fedloom.types import Client, Layer, Order, Plain, Pooling, Replies, Reply, State, Tensors


class DiscoveryOptions(MethodOptions):
    """How a client's examples fall into buckets. Defaults are FedWeave's (Appendix A); docs/discovery.md compares."""

    clusterer: Literal["kmeans", "spectral", "agglomerative", "gaussian_mixture"] = "kmeans"
    max_buckets: int = Field(8, ge=1)
    restarts: int = Field(10, ge=1)
    buckets: Literal["silhouette", "max", "gap"] = "silhouette"  # how their number is chosen
    layer: Layer = "last"  # of the frozen backbone; the router's input stays the last
    pooling: Pooling = "mean"
    standardise: bool = False  # each coordinate over the client's examples, before ℓ2-normalisation


class ExpertOptions(MethodOptions):
    """How buckets become experts. Defaults are FedWeave's (Appendix A); ``experts`` null: chosen by silhouette."""

    warmup_steps: int = Field(10, ge=1)
    warmup_batch: int = Field(8, ge=1)
    linkage: Literal["average", "complete", "single"] = "average"
    max_experts: int = Field(8, ge=1)
    experts: int | None = Field(None, ge=1)


def find_buckets(client: Client, options: DiscoveryOptions) -> Buckets:
    """Cluster a client's examples by their ℓ2-normalised frozen features (n, hidden); with one bucket, take all."""
    if options.max_buckets == 1:
        return Buckets(np.zeros(client.size, np.int64), 1)
    features = client.features(layer=options.layer, pooling=options.pooling)
    if options.standardise:
        features = standardise(features)
    with client.timed("cluster"):
        return bucketize(
            torch.nn.functional.normalize(features, dim=1),
            clusterer=options.clusterer,
            max_buckets=options.max_buckets,
            restarts=options.restarts,
            choose=options.buckets,
            seed=client.seed("buckets"),
        )


def members_of(labels: Sequence[int], count: int) -> list[list[int]]:
    """Return the example indices of each bucket."""
    return [[i for i, label in enumerate(labels) if label == c] for c in range(count)]


def warm_up(client: Client, order: Order, buckets: Sequence[int], options: ExpertOptions, *, by_length: bool) -> Reply:
    """Train one LoRA per bucket, all from the adapter of ``order``, and send them whole; the labels stay home.

    Args:
        client: whose examples.
        order: the probe.
        buckets: bucket of each example, numbered 0, 1, ….
        options: steps and batch size.
        by_length: see ``Client.fit``; only where a bucket holds one pattern.

    Returns:
        ``buckets/<c>/experts/0/<path>.lora_A`` and ``.lora_B``, and in ``values`` the ``sizes`` of the buckets.
    """
    members = members_of(buckets, max(buckets) + 1)
    training = replace(order.training, steps=options.warmup_steps, batch_size=options.warmup_batch)
    training = replace(training, optimizer_state="reset")
    send: Tensors = {}
    steps, tokens = 0, 0
    for c, pool in enumerate(members):
        client.load(order.tensors, order.spec)
        report = client.fit([pool] * training.steps, training, purpose=f"warmup-{c}", by_length=by_length)
        send |= place(client.read(), f"buckets/{c}")
        steps, tokens = steps + report.steps, tokens + report.tokens
    return Reply(
        client.name,
        send,
        counts={"examples": client.size},
        metrics={"steps": steps, "tokens": tokens},
        values={"sizes": [len(pool) for pool in members]},
        keep_values={"buckets": list(buckets)},
    )


def align_buckets(replies: Replies, options: ExpertOptions) -> tuple[Tensors, int, dict[str, Plain]]:
    """Match the buckets of all clients by their warm-ups' B factors; an expert is the mean of its buckets' warm-ups.

    FedWeave Eq. 1 and 2. Every bucket counts the same.

    Returns:
        The experts' tensors; their number M; ``assignment`` (client → expert of each bucket), ``sizes`` (client →
        examples of each bucket), the ``silhouette`` and the ``scores`` of all candidates.
    """
    signatures: list[Tensors] = []
    sizes: dict[str, list[int]] = {}
    for reply in replies:
        sizes[reply.client] = reply.values["sizes"]
        for c in range(len(sizes[reply.client])):
            signatures.append(signature(take(reply.send, f"buckets/{c}")))
    distance = signature_distance(signatures)  # Eq. 1
    alignment = align(distance, linkage=options.linkage, max_experts=options.max_experts, experts=options.experts)
    label = iter(alignment.labels.tolist())
    assignment = {client: [next(label) for _ in found] for client, found in sizes.items()}
    experts = RunningMean()
    for reply in replies:  # Eq. 2
        for c, m in enumerate(assignment[reply.client]):
            for name, value in take(reply.send, f"buckets/{c}").items():
                experts.add(name.replace("experts/0/", f"experts/{m}/", 1), value, 1.0)
    scores = {str(count): score for count, score in alignment.scores.items()}
    found = {"assignment": assignment, "sizes": sizes, "silhouette": alignment.silhouette, "scores": scores}
    return experts.mean(), alignment.count, found


def signature(adapter: Tensors) -> Tensors:
    """Return an adapter's B factors, by which Eq. 1 compares."""
    return {name: tensor for name, tensor in adapter.items() if name.endswith(".lora_B")}


def references(experts: Tensors) -> Tensors:
    """Return the signatures of the experts' starts, for ``State.kept``: those that ``join_nearest`` compares with."""
    return place({name: tensor.clone() for name, tensor in signature(experts).items()}, "start")


def join_nearest(state: State, client: str, reply: Reply | None) -> State:
    """Assign a late joiner's buckets to the experts whose starts are nearest by Eq. 1; of equals, the first.

    The paper has no late joiners. An expert's start is the mean warm-up of its buckets (Eq. 2), from the same adapter
    as the joiner's; what training has made of it since would no longer compare with a warm-up. No tensor changes.
    """
    starts = [take(state.kept, f"start/experts/{m}") for m in range(state.spec.experts)]
    if not all(starts):
        raise UpdateRejected("this run began with a fedloom that kept no signatures for late joiners")
    assert reply is not None  # methods with a probe get one
    sizes = reply.values["sizes"]
    own = [signature(take(reply.send, f"buckets/{c}/experts/0")) for c in range(len(sizes))]
    distance = signature_distance([*starts, *own])[len(starts) :, : len(starts)]  # (buckets, experts)
    found = {"assignment": distance.argmin(axis=1).tolist(), "sizes": sizes}
    return replace(state, values=state.values | {key: state.values[key] | {client: v} for key, v in found.items()})


def weights(assignment: list[int], sizes: list[int]) -> dict[str, int]:
    """Return a client's weights in Eq. 4: |D_i| for the router, n_{i,m} for each expert m that it has a bucket of."""
    counts = {"examples": sum(sizes), "router": sum(sizes)}
    for m, size in zip(assignment, sizes, strict=True):
        counts[f"experts/{m}"] = counts.get(f"experts/{m}", 0) + size
    return counts


def check_sizes(reply: Reply, most: int) -> list[int]:
    """Return the bucket sizes that a probe's reply states.

    Raises:
        UpdateRejected: they are not 1 to ``most`` numbers that add up to its examples.
    """
    if reply.counts.keys() != {"examples"}:
        raise UpdateRejected(f"a probe counts 'examples' only, not {sorted(reply.counts)}")
    sizes, examples = reply.values.get("sizes"), reply.counts["examples"]
    if not isinstance(sizes, list) or not 0 < len(sizes) <= most:
        raise UpdateRejected(f"'sizes' is not a list of 1 to {most} bucket sizes")
    if not all(type(n) is int and 0 < n <= examples for n in sizes) or sum(sizes) != examples:
        raise UpdateRejected(f"its bucket sizes do not add up to its {examples} examples")
    return sizes


def warmed_up(order: Order, reply: Reply, most: int) -> Schema:
    """Return what the reply of ``warm_up`` must hold, with ``most`` buckets at most."""
    sizes = check_sizes(reply, most)
    return {f"buckets/{c}/{name}": tuple(t.shape) for c in range(len(sizes)) for name, t in order.tensors.items()}


def unsized(reply: Reply) -> Reply:
    """Return the reply of ``warm_up`` as if every bucket held one example."""
    sizes = [1] * len(reply.values["sizes"])
    return replace(reply, counts={"examples": len(sizes)}, values={"sizes": sizes})


def start_of(order: Order, name: str) -> torch.Tensor:
    """Return what tensor ``name`` of the reply of ``warm_up`` started from."""
    return order.tensors[name.split("/", 2)[2]]


def check_counts(reply: Reply, known: dict[str, int]) -> None:
    """Refuse weights that are not those known since discovery."""
    if reply.counts != known:
        raise UpdateRejected(f"its counts {reply.counts} are not those of its buckets at discovery, {known}")
