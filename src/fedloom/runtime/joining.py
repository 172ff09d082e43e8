"""Late joiners: clients that come when rounds are under way, and take part from the next one on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from fedloom.errors import UpdateRejected
from fedloom.methods.base import Method
from fedloom.runtime.answers import Answers, Federation
from fedloom.runtime.events import Observer
from fedloom.types import Plain, Reply, State

#: Given the clients that take part, returns the names of others that are there and were not asked since they came.
Newcomers = Callable[[Collection[str]], Sequence[str]]


def nobody(known: Collection[str]) -> Sequence[str]:
    """Name no late joiner: all clients of a simulation are there from the start."""
    return ()


@dataclass
class Door:
    """Where newcomers are let in or turned away: at the end of a round, before it is committed.

    So a checkpoint says who has joined, and a server that ends before it is written asks them again.

    Attributes:
        first: clients of the first start.
        newcomers: who is there.
        ask: sends the probe's order, as it was before round 1, and judges what comes back.
        joined: who has joined, in name order.
        told: of whom was said that they cannot.
    """

    method: Method
    federation: Federation
    observer: Observer
    first: Sequence[str]
    newcomers: Newcomers
    ask: Callable[[Sequence[str], dict[str, str]], Answers]
    joined: tuple[str, ...] = ()
    told: set[str] = field(default_factory=set)

    def admitted(self, state: State) -> list[str]:
        """Return the clients from which a cohort is drawn, in name order."""
        return [client for client in sorted({*self.first, *self.joined}) if self.method.admits(state, client)]

    def open(self, state: State, memories: dict[str, str], record: dict[str, Plain]) -> State:
        """Take in who came, and say so in the round's record."""
        names = sorted(self.newcomers(self.admitted(state)))
        if not names or state.round >= self.federation.rounds:
            return state
        if (why := barred(self.method, self.federation)) is not None:
            for name in sorted(set(names) - self.told):
                self.observer.say(f"{name} is there but does not take part: {why}.")
            self.told |= set(names)
            return state
        if not self.method.has_probe:
            for name in names:
                state = self.let_in(state, name, None, {}, record)
            return state
        answers = self.ask(names, memories)
        turned_away = dict(answers.quarantined)
        costs = {r.client: {"bytes_up": r.bytes_up, "bytes_down": r.bytes_down} for r in answers.receipts}
        for reply in answers.replies:
            try:
                state = self.let_in(state, reply.client, reply, costs[reply.client], record)
            except UpdateRejected as reason:
                turned_away[reply.client] = str(reason)
                self.observer.say(f"{reply.client} is not taken in: {reason}.")
        record["quarantined"] = record["quarantined"] | turned_away
        record["absent"] = sorted({*record["absent"], *answers.absent})
        for way in ("bytes_up", "bytes_down"):
            record[way] += sum(cost[way] for cost in costs.values())
        return state

    def let_in(
        self, state: State, name: str, reply: Reply | None, cost: dict[str, int], record: dict[str, Plain]
    ) -> State:
        """Take in one newcomer, whose probe has cost so many bytes."""
        state = self.method.join(state, name, reply)
        experts = state.values.get("assignment", {}).get(name)
        record.setdefault("joined", {})[name] = cost | ({} if experts is None else {"experts": experts})
        self.joined = tuple(sorted({*self.joined, name}))
        self.observer.say(
            f"{name} joins after round {state.round}" + (f", with experts {experts}." if experts else ".")
        )
        return state


def barred(method: Method, federation: Federation) -> str | None:
    """Return why nobody may join after the first start, if so."""
    if federation.privacy is not None:
        return "privacy is accounted for the clients of the first start"
    if federation.secagg is not None:
        return "secure sums are over the clients of the first start"
    return method.closed()
