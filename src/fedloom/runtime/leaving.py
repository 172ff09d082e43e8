"""What happens to a reply between the method and the wire, at the client: the one place where something leaves it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedloom.config import Config
from fedloom.methods.base import Method
from fedloom.numerics.tree import place, take
from fedloom.runtime.client import LocalClient, carry_out
from fedloom.runtime.compression import compress, with_feedback
from fedloom.runtime.memory import ClientMemory
from fedloom.runtime.wire import encode_reply
from fedloom.types import Order, Reply, Tensors, Wire


@dataclass(frozen=True)
class Leaving:
    """How replies leave a client; the same for all clients of a run.

    Attributes:
        wire: how they are compressed.
        feedback: what compression left over is added to the next update. This needs a server that adds updates up: to
            one that draws new factors every round the rest of an old one means nothing.
    """

    wire: Wire = "none"
    feedback: bool = False


def leaving_of(config: Config, method: Method) -> Leaving:
    """Return how replies leave a client under a configuration."""
    return Leaving(
        wire=config.federation.wire,
        feedback=config.federation.wire == "int8" and method.summed and config.server.aggregation == "factors",
    )


def leave(method: Method, client: LocalClient, order: Order, leaving: Leaving) -> tuple[bytes, ClientMemory | None]:
    """Do what an order asks; return the encoded reply, and the client's memory afterwards if it has changed."""
    reply, kept = carry_out(method, client, order)
    if leaving.wire == "none":
        return encode_reply(reply, order.round), kept
    change = changes(method, order, reply)
    if leaving.feedback and order.kind == "fit":
        packed, left = with_feedback(change, take(client.memory.tensors, "residual"), leaving.wire)
        kept = (kept or client.memory).updated(place(left, "residual"), {})
    else:
        packed = compress(change, leaving.wire)
    return encode_reply(replace(reply, send=packed), order.round, leaving.wire), kept


def changes(method: Method, order: Order, reply: Reply) -> Tensors:
    """Return what is sent as changes of what was received, where it is sent whole."""
    change = dict(reply.send)
    for name, tensor in reply.send.items():
        if (origin := method.origin(order, name)) is not None:
            change[name] = tensor - origin
    return change
