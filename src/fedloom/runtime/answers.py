"""What became of a round's orders: answers read, checked and sorted into accepted, quarantined and absent."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from fedloom.config import Config
from fedloom.errors import RoundError, UpdateRejected
from fedloom.methods.base import Method
from fedloom.methods.protection import Privacy, SecureAggregation
from fedloom.methods.server import ServerStep
from fedloom.numerics.tree import by_component, norm
from fedloom.runtime.quarantine import NORM_FACTOR, ROUNDING, absurd_norms, check_reply, printable, reach
from fedloom.runtime.totals import Totals
from fedloom.runtime.wire import decode_reply
from fedloom.types import Order, Plain, Replies, Reply, Tensors, Wire


@dataclass(frozen=True)
class Receipt:
    """One client's answer as it arrived: bytes on disk, not yet trusted.

    Attributes:
        client: whose answer.
        path: file with the encoded reply.
        bytes_up: length of the encoded reply.
        bytes_down: length of the encoded order.
        seconds: from order to answer.
        memory: version of the client's memory after this order, if it keeps one.
        refused: why there is no reply to read, if the transport knows (a bad checksum, a site that declines).
        times: seconds that parts of the answer took, by name, where the client runs in this process.
    """

    client: str
    path: Path
    bytes_up: int
    bytes_down: int
    seconds: float
    memory: str | None = None
    refused: str | None = None
    times: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Federation:
    """How rounds are run.

    Attributes:
        rounds: number of rounds T.
        participation: share of the clients sampled each round, at least one.
        min_replies: fewer usable replies than this end the run with an error.
        norm_factor: an update with a norm beyond this many times its round's lower median (of three replies or more) is
            quarantined; so is, whatever this factor, one whose optimiser steps cannot reach as far.
        max_examples: a reply that counts more is quarantined, since counts are weights.
        max_length: most tokens of an example: a reply that states more than its examples can have, is quarantined.
        max_reply_bytes: a longer reply is quarantined unread, so that no site can fill the server's memory.
        server: weights, aggregation and optimiser around the method's own merge.
        wire: how replies are compressed.
        privacy: how clients are kept from being known by the model.
        secagg: how the server is kept from seeing single updates.
    """

    rounds: int = 20
    participation: float = 1.0
    min_replies: int = 1
    norm_factor: float = NORM_FACTOR
    max_examples: int = 10_000_000
    max_length: int = 512
    max_reply_bytes: int = 2 << 30
    server: ServerStep = field(default_factory=ServerStep)
    wire: Wire = "none"
    privacy: Privacy | None = None
    secagg: SecureAggregation | None = None

    @property
    def changes(self) -> bool:
        """Return whether replies hold changes throughout, also of tensors that a method sends whole."""
        return self.wire != "none" or self.privacy is not None


def federation_of(config: Config) -> Federation:
    """Return how a configuration has rounds run."""
    return Federation(
        **config.federation.model_dump(),
        max_length=config.data.max_length,
        server=config.server,
        privacy=config.privacy,
        secagg=config.secagg,
    )


@dataclass(frozen=True)
class Usable:
    """What is kept in memory of a reply that was found usable; its tensors stay on disk.

    Attributes:
        receipt: where it lies.
        order: what it answers.
        counts: see ``Reply``.
        metrics: see ``Reply``.
        size: ℓ2 norm of its whole change, of what optimiser steps move.
        free: ℓ2 norm of the rest, which only the other replies of the round can bound (control variates).
    """

    receipt: Receipt
    order: Order
    counts: dict[str, int]
    metrics: dict[str, float]
    size: float
    free: float


class Accepted:
    """The accepted replies, read from disk one at a time, in client order, as often as asked (``types.Replies``)."""

    def __init__(self, method: Method, found: Sequence[Usable], federation: Federation) -> None:
        self.method = method
        self.found = found
        self.federation = federation

    def __iter__(self) -> Iterator[Reply]:
        for usable in self.found:
            receipt, order = usable.receipt, usable.order
            # Not bound to a name here: it must be gone when the next is read.
            yield restored(
                self.method,
                order,
                decode_reply(receipt.path, receipt.client, order.round, self.federation.wire),
                self.federation,
            )

    def __len__(self) -> int:
        return len(self.found)


@dataclass(frozen=True)
class Answers:
    """What became of a round's orders: ``receipts`` of all that answered, and what was made of them.

    ``totals`` is there where the server knows no more than sums.
    """

    replies: Replies
    receipts: Sequence[Receipt]
    quarantined: dict[str, str]
    absent: list[str]
    seconds: float
    totals: Totals | None = None

    def record(self) -> dict[str, Plain]:
        """Describe the exchange for the log."""
        found = self.replies.found if isinstance(self.replies, Accepted) else []
        accepted = {usable.receipt.client: usable for usable in found}
        clients = {}
        weights: dict[str, int] = {}
        shares: dict[str, dict[str, int]] = {}
        weighted_loss, supervised = 0.0, 0
        for receipt in self.receipts:
            usable = accepted.get(receipt.client)
            counts, metrics = (usable.counts, usable.metrics) if usable else ({}, {})
            examples = counts.get("examples", 0)
            sent = {
                "bytes_up": receipt.bytes_up,
                "bytes_down": receipt.bytes_down,
                "seconds": round(receipt.seconds, 3),
            }
            sent |= {f"{what}_seconds": round(seconds, 4) for what, seconds in receipt.times.items()}
            clients[receipt.client] = {**metrics, "examples": examples, **sent}
            for unit, count in counts.items():
                weights[unit] = weights.get(unit, 0) + count
                shares.setdefault(unit, {})[receipt.client] = count
            if "loss" in metrics:
                weighted_loss, supervised = weighted_loss + examples * metrics["loss"], supervised + examples
        if self.totals is not None:
            weights = {unit: int(weight) for unit, weight in self.totals.weights.items()}
            weighted_loss, supervised = self.totals.loss
        everyone = shares.get("examples")
        return {
            "train_loss": weighted_loss / supervised if supervised else None,
            "clients": clients,
            "weights": weights,
            # Of what not every client sent, or not for all its examples: by whom.
            "shares": {unit: by for unit, by in shares.items() if by != everyone},
            "quarantined": self.quarantined,
            "absent": self.absent,
            "bytes_up": sum(r.bytes_up for r in self.receipts),
            "bytes_down": sum(r.bytes_down for r in self.receipts),
            "seconds": round(self.seconds, 3),
        }


def restored(method: Method, order: Order, reply: Reply, federation: Federation) -> Reply:
    """Return a reply as the method made it: what was clipped or compressed is the change of a tensor sent whole."""
    if not federation.changes:
        return reply
    return replace(reply, send={name: plus(method.origin(order, name), t) for name, t in reply.send.items()})


def plus(origin: torch.Tensor | None, change: torch.Tensor) -> torch.Tensor:
    return change if origin is None else origin + change


def change_of(method: Method, order: Order, reply: Reply) -> Tensors:
    """Return how far each tensor of a reply is from where it started, of those that optimiser steps move."""
    change = {name: tensor for name, tensor in reply.send.items() if method.stepped(name)}
    for name, tensor in change.items():
        if (origin := method.origin(order, name)) is not None:
            change[name] = tensor - origin
    return change


def examine(method: Method, order: Order, receipt: Receipt, federation: Federation) -> Usable:
    """Read one reply and check it by itself.

    Raises:
        UpdateRejected: it is not usable.
    """
    if receipt.refused is not None:
        raise UpdateRejected(receipt.refused)
    if (length := receipt.path.stat().st_size) > federation.max_reply_bytes:
        raise UpdateRejected(f"it has {length} bytes; max_reply_bytes is {federation.max_reply_bytes}")
    reply = decode_reply(receipt.path, receipt.client, order.round, federation.wire)
    examples = reply.counts.get("examples", 0)
    if examples == 0:
        raise UpdateRejected("it counts no examples")
    if examples > federation.max_examples:
        raise UpdateRejected(f"it counts {examples} examples; max_examples is {federation.max_examples}")
    check_reply(reply, method.expected(order, reply))
    method.plausible(order, reply, federation.max_length)
    change = change_of(method, order, restored(method, order, reply, federation))
    if federation.privacy is not None:
        size = within_privacy(order, reply, federation.privacy)
    else:
        size = within_reach(method, order, change, examples)
    free = norm({name: tensor for name, tensor in reply.send.items() if not method.stepped(name)})
    return Usable(receipt, order, reply.counts, reply.metrics, size, free)


def within_reach(method: Method, order: Order, change: Tensors, examples: int) -> float:
    """Return the norm of a change, of which each component must be within reach of the steps that examples make.

    Components one by one: what a round may move the whole model by would replace an expert.
    """
    sizes = []
    for unit, moved in by_component(change).items():
        steps = method.steps_behind(order, unit, examples)
        limit = farthest(method, order, moved, steps)
        if (size := norm(moved)) > limit:
            raise UpdateRejected(
                f"its norm {size:.3g} in {unit!r} exceeds {limit:.3g}, beyond what its optimiser steps ({steps:g}) can "
                "reach"
            )
        sizes.append(size)
    return math.hypot(*sizes)


def farthest(method: Method, order: Order, moved: Tensors, steps: float) -> float:
    """Return the norm that a change of a component's tensors can have after so many optimiser steps, and rounding."""
    start = norm(started(method, order, moved)) if order.training.weight_decay > 0 else 0.0
    return ROUNDING * reach(order.training, steps, sum(t.numel() for t in moved.values()), start)


def started(method: Method, order: Order, names: Iterable[str]) -> Tensors:
    """Return what tensors of a reply started from."""
    origins = {name: method.origin(order, name) for name in names}
    return {name: order.tensors[name] if origin is None else origin for name, origin in origins.items()}


def within_privacy(order: Order, reply: Reply, privacy: Privacy) -> float:
    """Return the norm of what was received, which must be clipped; a probe's has noise of known size on it."""
    size, limit = norm(reply.send), privacy.clip
    if order.kind == "probe":
        values = sum(t.numel() for t in reply.send.values())
        limit = (privacy.probe_clip or 0.0) * (1 + 2 * (privacy.probe_noise or 0.0) * math.sqrt(values)) * 1.01
    if size > limit:
        raise UpdateRejected(f"its norm {size:.6g} exceeds {limit:.6g}, to which it was to be clipped")
    return size


def judge(
    method: Method, orders: Sequence[Order], receipts: Sequence[Receipt], federation: Federation, seconds: float
) -> Answers:
    """Sort answers into accepted, quarantined and absent.

    Raises:
        RoundError: fewer than ``federation.min_replies`` are usable.
    """
    first = {receipt.client: receipt for receipt in reversed(receipts)}  # a second answer of one client is not read
    receipts = sorted(first.values(), key=lambda r: r.client)
    asked = {order.client: order for order in orders}
    accepted: list[Usable] = []
    quarantined: dict[str, str] = {}
    for receipt in receipts:
        try:
            if receipt.client not in asked:
                raise UpdateRejected("it was not asked")
            accepted.append(examine(method, asked[receipt.client], receipt, federation))
        except UpdateRejected as reason:
            quarantined[receipt.client] = printable(str(reason))
    for what in () if federation.privacy is not None else ("size", "free"):  # one client must not decide on another
        norms = [getattr(usable, what) for usable in accepted]
        for index in reversed(absurd_norms(norms, federation.norm_factor)):
            quarantined[accepted.pop(index).receipt.client] = (
                f"its norm {norms[index]:.3g} exceeds {federation.norm_factor:g} times the lower median of the round"
            )
    absent = sorted(asked.keys() - {r.client for r in receipts})
    least = federation.min_replies if federation.privacy is None else min(federation.min_replies, len(orders))
    if len(accepted) < least:
        raise RoundError(
            f"round {orders[0].round if orders else '?'} got {len(accepted)} usable replies of {len(orders)} asked; at "
            f"least {federation.min_replies} are needed. Quarantined: {quarantined or 'none'}. Silent: "
            f"{absent or 'none'}. The model is as it was before the round."
        )
    return Answers(Accepted(method, accepted, federation), receipts, quarantined, absent, seconds)
