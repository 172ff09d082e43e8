"""A round with secure aggregation, as the server sees it: four exchanges, and one mean update out of them.

A unit (an expert, the router) to which fewer than ``min_contributors`` clients contribute is left out of the vectors,
so that its sum cannot show a single client. If clients drop out so that a unit would fall below that number, or if
fewer than the threshold stay, nothing is uncovered: the round is asked again of those that stayed, without that unit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from fedloom.errors import RoundError, UpdateRejected
from fedloom.methods.base import Method
from fedloom.methods.protection import SecureAggregation
from fedloom.numerics.fixed import Layout, layout_of
from fedloom.numerics.tree import by_component, norm
from fedloom.runtime.answers import Answers, Federation, Receipt, farthest
from fedloom.runtime.events import Observer
from fedloom.runtime.quarantine import printable
from fedloom.runtime.secagg import SecureSum, threshold_of
from fedloom.runtime.secure_client import frame, unframe
from fedloom.runtime.totals import Totals, mean_reply
from fedloom.runtime.wire import encode_order
from fedloom.types import Order, Plain, Reply, component


class Asks(Protocol):
    """Carries a message to each client and brings back what answered."""

    def ask(
        self, method: Method, round: int, messages: dict[str, bytes], memories: dict[str, str], observer: Observer
    ) -> list[Receipt]: ...


@dataclass(frozen=True)
class Summed:
    """The one reply that stands for all (``types.Replies``)."""

    reply: Reply
    clients: int

    def __iter__(self) -> Iterator[Reply]:
        yield self.reply

    def __len__(self) -> int:
        return self.clients


@dataclass
class Tally:
    """What a round's exchanges cost each client, and who failed and why."""

    receipts: dict[str, Receipt] = field(default_factory=dict)
    quarantined: dict[str, str] = field(default_factory=dict)

    def add(self, new: Receipt) -> None:
        old = self.receipts.get(new.client)
        if old is not None:
            new = Receipt(
                new.client,
                new.path,
                old.bytes_up + new.bytes_up,
                old.bytes_down + new.bytes_down,
                old.seconds + new.seconds,
                new.memory or old.memory,
            )
        self.receipts[new.client] = new


def secure_exchange(
    method: Method,
    transport: Asks,
    orders: Sequence[Order],
    memories: dict[str, str],
    federation: Federation,
    observer: Observer,
) -> Answers:
    """Run a secure round and return its mean update as the only reply.

    Raises:
        RoundError: too few clients, or what they sent does not fit together; the model is as it was.
    """
    secure = federation.secagg
    assert secure is not None
    start, tally = time.perf_counter(), Tally()
    by_client = {order.client: order for order in orders}
    cohort = sorted(by_client)
    while True:
        asked = {client: method.asked(by_client[client]) for client in cohort}
        units = wide_enough([{component(n) for n in schema} for schema in asked.values()], secure.min_contributors)
        need = max(3, federation.min_replies)
        if len(cohort) < need or not units:
            raise RoundError(
                f"round {orders[0].round if orders else '?'}: secure aggregation needs {need} sites and a part of the "
                f"model to which {secure.min_contributors} contribute; {len(cohort)} sites are left, of "
                f"{len(orders)} asked. Failed: {tally.quarantined or 'none'}. The model is as it was before the round."
            )
        # A client that is asked again goes on from the memory that it had before the round.
        held = dict(memories)
        attempt = Attempt(method, transport, [by_client[c] for c in cohort], units, held, secure, observer, tally)
        stayed = attempt.collect()
        contributors = {u: sum(u in {component(n) for n in asked[c]} for c in stayed) for u in units}
        wide = all(count >= secure.min_contributors for count in contributors.values())
        if wide and len(stayed) >= max(need, attempt.sum.threshold):
            break
        observer.say(f"Round {orders[0].round}: too few sites stayed for one sum; those that stayed are asked again.")
        cohort = stayed
    totals = attempt.uncover(contributors)
    memories.update(attempt.memories)
    check_sum(method, orders[0], totals, contributors, federation)
    used = {unit for unit in units if totals.weights[unit] > 0}
    sums = {name: total for name, total in totals.sums.items() if component(name) in used}
    receipts = sorted(tally.receipts.values(), key=lambda receipt: receipt.client)
    absent = sorted(by_client.keys() - set(stayed) - tally.quarantined.keys())
    replies = Summed(mean_reply(sums, totals.weights), len(stayed))
    return Answers(replies, receipts, tally.quarantined, absent, time.perf_counter() - start, totals)


def wide_enough(contributions: Sequence[set[str]], least: int) -> list[str]:
    """Return the units to which at least so many clients contribute."""
    units = sorted(set().union(*contributions))
    return [unit for unit in units if sum(unit in found for found in contributions) >= least]


@dataclass
class Attempt:
    """The exchanges of one try, with one set of clients and units."""

    method: Method
    transport: Asks
    orders: Sequence[Order]
    units: list[str]
    memories: dict[str, str]
    secure: SecureAggregation
    observer: Observer
    tally: Tally

    def __post_init__(self) -> None:
        self.layout: Layout = layout_of([Method.asked(self.method, order) for order in self.orders], self.units)
        self.round = self.orders[0].round
        self.sum = SecureSum(threshold_of(self.secure.threshold, len(self.orders)), self.layout.length)

    def collect(self) -> list[str]:
        """Exchange keys and shares, then train; return the clients whose masked vectors are in the sum."""
        every = [order.client for order in self.orders]
        keys = self.exchange(
            "keys", {c: ({}, b"") for c in every}, lambda c, h, b: self.sum.take_keys(c, h.get("keys"))
        )
        if len(keys) < 3:
            return keys
        self.sum.threshold = threshold_of(self.secure.threshold, len(keys))
        known = {"keys": self.sum.keys, "threshold": self.sum.threshold}
        shared = self.exchange(
            "shares", dict.fromkeys(keys, (known, b"")), lambda c, h, b: self.sum.take_shares(c, h.get("sealed"))
        )
        if len(shared) < self.sum.threshold:
            return shared
        orders = {order.client: order for order in self.orders}
        plan = {"units": self.units, "clients": len(self.orders)}
        return self.exchange(
            "mask",
            {c: (plan | {"sealed": self.sum.sealed_for(c)}, encode_order(orders[c])) for c in shared},
            lambda c, h, b: self.sum.take_vector(c, b),
        )

    def uncover(self, contributors: dict[str, int]) -> Totals:
        """Ask for the shares that remove the masks from the sum, and read it."""
        survivors = sorted(self.sum.survivors)
        self.exchange(
            "unmask",
            {c: ({"survivors": survivors}, b"") for c in survivors},
            lambda c, h, b: self.sum.take_unmask(c, h.get("shares")),
        )
        weights, clients, loss, sums = self.layout.read(self.sum.result())
        if clients != contributors:
            wrong = next(unit for unit in clients if clients[unit] != contributors[unit])
            raise RoundError(
                f"round {self.round}: {clients[wrong]} clients say that they contributed to {wrong!r}, but "
                f"{contributors[wrong]} were asked and stayed. One of {', '.join(survivors)} does not follow the "
                "protocol. The model is as it was before the round."
            )
        return Totals(sums, {unit: float(w) for unit, w in weights.items()}, clients, loss)

    def exchange(
        self,
        stage: str,
        contents: dict[str, tuple[dict[str, Plain], bytes]],
        take: Callable[[str, dict[str, Plain], bytes], None],
    ) -> list[str]:
        """Ask each client and take in what it answers; return those whose answers were good."""
        messages = {
            c: frame({"stage": stage, "round": self.round, **head}, body) for c, (head, body) in contents.items()
        }
        good = []
        receipts = self.transport.ask(self.method, self.round, messages, self.memories, self.observer)
        for receipt in sorted({r.client: r for r in reversed(receipts)}.values(), key=lambda r: r.client):
            client = receipt.client
            try:
                if client not in messages:
                    raise UpdateRejected("it was not asked")
                if receipt.refused is not None:
                    raise UpdateRejected(receipt.refused)
                data = Path(receipt.path).read_bytes()
                receipt.path.unlink()  # the server keeps sums only
                take(client, *unframe(data))
                good.append(client)
            except UpdateRejected as reason:
                why = printable(str(reason))
                self.tally.quarantined[client] = f"in stage {stage!r}: {why}"
                self.observer.say(f"Round {self.round}: {client} is left out, in stage {stage!r}: {why}.")
            self.tally.add(receipt)
        self.memories.update({r.client: r.memory for r in receipts if r.memory is not None and r.client in good})
        return good


def check_sum(
    method: Method, order: Order, totals: Totals, contributors: dict[str, int], federation: Federation
) -> None:
    """Refuse a sum that no honest clients can make; which of them did, nobody can see.

    Raises:
        RoundError: naming what does not fit.
    """
    most = max(contributors.values())
    uniform = federation.server.uniform(method)
    for unit, weight in totals.weights.items():
        if not 0 <= weight <= contributors[unit] * (1 if uniform else federation.max_examples):
            raise RoundError(f"round {order.round}: the weights of {unit!r} add up to {weight:g}, which cannot be.")
    if federation.privacy is not None:
        judged = {"": (totals.sums, most * federation.privacy.clip)}
    else:  # a mean of updates is no longer than the longest can be, in each component
        judged = {}
        for unit, total in by_component(totals.sums).items():
            mean = {name: tensor / max(1.0, totals.weights[unit]) for name, tensor in total.items()}
            judged[f" in {unit!r}"] = mean, farthest(method, order, mean, method.local_steps(order))
    for where, (moved, limit) in judged.items():
        if (size := norm(moved)) > limit:
            raise RoundError(
                f"round {order.round}: the norm {size:.3g} of the clients' sum{where} exceeds {limit:.3g}, more than "
                "honest ones can reach. The model is as it was before the round."
            )
