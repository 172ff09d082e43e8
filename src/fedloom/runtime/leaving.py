"""What happens to a reply between the method and the wire, at the client: the one place where something leaves it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fedloom.config import Config
from fedloom.methods.base import Method
from fedloom.methods.protection import Privacy
from fedloom.numerics.privacy import clip, gaussian, stretched
from fedloom.numerics.tree import norm, place, take
from fedloom.runtime.client import LocalClient, carry_out
from fedloom.runtime.compression import compress, expand, saved_up
from fedloom.runtime.memory import ClientMemory
from fedloom.runtime.private import source_of
from fedloom.runtime.wire import encode_reply
from fedloom.types import Order, Reply, Tensors, Wire


@dataclass(frozen=True)
class Leaving:
    """How replies leave a client; the same for all clients of a run.

    Attributes:
        wire: how they are compressed.
        feedback: what compression left over is added to the next update. This needs a server that adds updates up: to
            one that draws new factors every round the rest of an old one means nothing.
        privacy: clip, and say nothing of numbers of examples.
        uniform: in a secure sum every client weighs the same.
    """

    wire: Wire = "none"
    feedback: bool = False
    privacy: Privacy | None = None
    uniform: bool = False


def leaving_of(config: Config, method: Method) -> Leaving:
    """Return how replies leave a client under a configuration."""
    return Leaving(
        wire=config.federation.wire,
        feedback=config.federation.wire == "int8" and method.summed and config.server.aggregation == "factors",
        privacy=config.privacy,
        uniform=config.server.uniform(method),
    )


def leave(method: Method, client: LocalClient, order: Order, leaving: Leaving) -> tuple[bytes, ClientMemory | None]:
    """Do what an order asks; return the encoded reply, and the client's memory afterwards if it has changed."""
    reply, kept = carry_out(method, client, order)
    if leaving.wire == "none" and leaving.privacy is None:
        return encode_reply(reply, order.round), kept
    change = changes(method, order, reply)
    if leaving.privacy is not None:
        reply = method.countless(reply)
    if order.kind == "probe":
        if leaving.privacy is not None:
            seed = source_of(leaving.privacy, client.run_seed, "probe-noise", client.name)
            change = veiled(change, leaving.privacy, seed)
        packed = compress(change, leaving.wire)
    else:
        packed, left = shaped(change, take(client.memory.tensors, "residual"), leaving)
        if leaving.feedback:
            kept = (kept or client.memory).updated(place(left, "residual"), {})
    return encode_reply(replace(reply, send=packed), order.round, leaving.wire), kept


def changes(method: Method, order: Order, reply: Reply) -> Tensors:
    """Return what is sent as changes of what was received, where it is sent whole."""
    change = dict(reply.send)
    for name, tensor in reply.send.items():
        if (origin := method.origin(order, name)) is not None:
            change[name] = tensor - origin
    return change


def shaped(update: Tensors, residual: Tensors, leaving: Leaving) -> tuple[Tensors, Tensors]:
    """Clip and compress an update and what earlier rounds left over; return the packed form and what is left over now.

    What clipping takes off is not left over: it would come back in rounds that it does not belong to.
    """
    wanted = {name: t + residual[name] if name in residual else t for name, t in update.items()}
    if leaving.privacy is None:
        packed = compress(wanted, leaving.wire)
    else:
        wanted = clip(wanted, leaving.privacy.clip)
        packed = within(wanted, leaving.privacy.clip, leaving.wire)
    return packed, saved_up(wanted, expand(packed, leaving.wire))


def within(tensors: Tensors, bound: float, wire: Wire) -> Tensors:
    """Compress so that what is received has no norm above ``bound``: rounding may lengthen a vector.

    A norm that is NaN passes: the server quarantines it.
    """
    target = bound
    while True:
        packed = compress(clip(tensors, target), wire)
        if not (found := norm(expand(packed, wire))) > bound:
            return packed
        target *= bound / found * (1 - 2.0**-12)


def veiled(change: Tensors, privacy: Privacy, seed: int) -> Tensors:
    """Normalise what each bucket (or client) sends before round 1, and add noise to it.

    Only the direction of a signature is compared, so that every bucket may have the same length, and all together
    ``probe_clip``: that is the sensitivity, and the length of the start that experts get from it.
    """
    assert privacy.probe_clip is not None  # checked with the configuration
    assert privacy.probe_noise is not None
    buckets = sorted({bucket_of(name) for name in change})
    groups = [{name: t for name, t in change.items() if bucket_of(name) == bucket} for bucket in buckets]
    known = {name: t for group in stretched(groups, privacy.probe_clip) for name, t in group.items()}
    source = torch.Generator().manual_seed(seed)
    noise = gaussian(known, privacy.probe_noise * privacy.probe_clip, source)
    return {name: (tensor.double() + noise[name]).float() for name, tensor in known.items()}


def bucket_of(name: str) -> str:
    """Return ``buckets/3`` of ``buckets/3/experts/0/x.lora_A``."""
    return "/".join(name.split("/")[:2])
