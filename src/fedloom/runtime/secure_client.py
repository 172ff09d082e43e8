"""A client's answers in a secure round: messages as bytes, and the update as integers."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fedloom.errors import SiteRefusal, UpdateRejected
from fedloom.methods.base import Method
from fedloom.numerics.fixed import HEAVIEST, PLACES, layout_of
from fedloom.numerics.privacy import clip
from fedloom.runtime.client import LocalClient, carry_out
from fedloom.runtime.leaving import Leaving
from fedloom.runtime.memory import ClientMemory
from fedloom.runtime.secagg import STAGES, SecureClient, Vector
from fedloom.types import Order, Plain

#: Shares for five thousand clients.
MAX_MESSAGE_HEADER = 8 << 20


def frame(header: Mapping[str, Plain], body: bytes = b"") -> bytes:
    """Return a JSON header, its length before it, and the body."""
    head = json.dumps(header, sort_keys=True).encode()
    return struct.pack("<Q", len(head)) + head + body


def unframe(data: bytes) -> tuple[dict[str, Plain], bytes]:
    """Undo ``frame``.

    Raises:
        UpdateRejected: it was not made so.
    """
    (length,) = struct.unpack("<Q", data[:8]) if len(data) >= 8 else (len(data),)
    if length > min(len(data) - 8, MAX_MESSAGE_HEADER):
        raise UpdateRejected("the message is truncated")
    try:
        header = json.loads(data[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise UpdateRejected("the message has no JSON header") from error
    if not isinstance(header, dict):
        raise UpdateRejected("the message's header is not an object")
    return header, data[8 + length :]


@dataclass(frozen=True)
class Work:
    """What a client did for an order.

    Attributes:
        vector: its update and weights as integers.
        kept: its memory afterwards, if that has changed.
    """

    vector: Vector
    kept: ClientMemory | None


def work_for_sum(
    method: Method, client: LocalClient, order: Order, plan: Mapping[str, Plain], leaving: Leaving
) -> Work:
    """Train, and write the update as the vector that will be masked.

    Args:
        method: its rule is a sum.
        client: who trains.
        order: what for.
        plan: ``units`` that are summed in this round, and how many ``clients`` share the weight that a sum can hold.
        leaving: with privacy the rounded vector is within the bound, and no loss is told.
    """
    privacy = leaving.privacy
    reply, kept = carry_out(method, client, order)
    counts = {unit: min(count, 1) for unit, count in reply.counts.items()} if leaving.uniform else reply.counts
    send = reply.send
    if privacy is not None:
        values = sum(t.numel() for t in send.values())
        send = clip(send, max(0.0, privacy.clip * (1 - 2.0**-20) - 2.0 ** -(PLACES + 1) * values**0.5))
    layout = layout_of([Method.asked(method, order)], plan["units"])
    wanted = {name: tensor for name, tensor in send.items() if name in layout.shapes}
    loss = None if privacy is not None else reply.metrics.get("loss")
    return Work(layout.write(wanted, counts, loss, HEAVIEST // max(1, int(plan["clients"]))), kept)


def answer(
    secrets: SecureClient, message: bytes, work: Callable[[bytes, dict[str, Plain]], Work]
) -> tuple[bytes, ClientMemory | None]:
    """Answer one message of a secure round.

    Args:
        secrets: the client's state, which changes.
        message: what the server sent.
        work: called with an encoded order and the message's header, when there is something to train.

    Raises:
        SiteRefusal: the message asks for what would uncover an update, or cannot be understood.
    """
    header, body = unframe(message)
    stage, round = header.get("stage"), header.get("round")
    if stage not in STAGES or type(round) is not int:
        raise SiteRefusal(f"a secure round has no stage {stage!r}")
    try:
        if stage == "keys":
            return frame({"keys": secrets.keys(round)}), None
        if stage == "shares":
            return frame({"sealed": secrets.shares(round, header["keys"], int(header["threshold"]))}), None
        if stage == "mask":
            done = work(body, header)
            masked = secrets.mask(round, header["sealed"], done.vector)
            return frame({}, masked.astype("<i8", copy=False).tobytes()), done.kept
        return frame({"shares": secrets.unmask(round, header["survivors"])}), None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SiteRefusal(f"stage {stage!r} cannot be understood: {type(error).__name__}") from error
