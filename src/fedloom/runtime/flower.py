"""The server's end of Flower: orders go to sites and replies come back (``runtime.flower_site`` is the other end).

A payload travels as the bytes of ``runtime.wire`` (``runtime.secure_client`` in a secure round) in the records of
``runtime.flower_messages``.
Flower is imported only where it is used, so that fedloom works without it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from fedloom.errors import ConfigError, RoundError, UpdateRejected
from fedloom.files import write_json
from fedloom.methods.base import Method
from fedloom.runtime.events import Observer
from fedloom.runtime.flower_messages import HELLO, ORDER, SECURE, pack, unpack
from fedloom.runtime.flower_pull import Pull
from fedloom.runtime.loop import Receipt
from fedloom.runtime.memory import check_client_name
from fedloom.runtime.quarantine import printable
from fedloom.runtime.site import Terms, mismatch, round_of, version_of
from fedloom.runtime.spool import empty_spool, keep_reply
from fedloom.runtime.wire import encode_order
from fedloom.types import Order, Plain
from fedloom.version import __version__

#: What is kept of a site's introduction, if it has that form; whatever else it says is dropped.
HELLO_WORDS = ("client", "fedloom", "backbone", "tokenizer")
HELLO_COUNTS = ("examples", "truncated", "no_label_left")
ROW_COUNTS = ("rows", "kept", "empty_response", "empty_prompt")

POLL_SECONDS = 0.5
logger = logging.getLogger("flwr")


def counted(said: Mapping[str, Plain], keys: Iterable[str]) -> dict[str, int]:
    """Return those of the keys under which a site said a number of rows: all else could spoil the server's files."""
    return {key: said[key] for key in keys if type(said.get(key)) is int and 0 <= said[key] < 1 << 40}


@dataclass(frozen=True)
class Patience:
    """How long the server waits, in seconds.

    Attributes:
        expected: sites to wait for before round 1.
        minimum: fewer than this that answer are an error, after ``wait``.
        wait: for sites that are not there.
        deadline: for the answers of a round.
    """

    expected: int
    minimum: int
    wait: float
    deadline: float


@dataclass(frozen=True)
class Card:
    """What a site said of itself, and the node on which it runs now."""

    node: int
    hello: dict[str, Plain]


class Owed(NamedTuple):
    """An answer that did not come in time; after ``until`` (monotonic seconds) it counts as lost."""

    client: str
    until: float


class FlowerTransport:
    """A ``Transport`` over Flower's ``Grid``.

    A site that missed a deadline, or broke down, is not waited for until it answers or its node comes anew: it costs
    its deadline once. It gets no new order while it owes an answer to an old one, for two deadlines at most; an answer
    that comes late is thrown away.

    Args:
        grid: Flower's grid, of a running ServerApp.
        terms: what is said beside every order.
        patience: how long to wait.
        spool: folder for the replies of the current round.
        max_reply_bytes: a longer reply is refused.
        observer: told who came, and who is refused and why.
        presence: file that says when which site was last heard of, who is refused, and who is waited for.
        on_commit: called when a round is finished and checkpointed.
    """

    def __init__(
        self,
        grid: Any,
        terms: Terms,
        patience: Patience,
        spool: Path,
        max_reply_bytes: int,
        observer: Observer,
        presence: Path | None = None,
        on_commit: Callable[[], None] = lambda: None,
    ) -> None:
        self.grid = grid
        self.terms = terms
        self.patience = patience
        self.spool = spool
        self.max_reply_bytes = max_reply_bytes
        self.observer = observer
        self.presence = presence
        self.on_commit = on_commit
        self.last_seen: dict[str, str] = {}
        self.refused: dict[str, str] = {}
        self.cards: dict[str, Card] = {}
        self.silent: set[str] = set()
        self.owed: dict[str, Owed] = {}  # by the id of an order that had no answer in time
        self.probed: set[str] = set()  # since their nodes came
        self.offered: set[str] = set()
        self._greeted: dict[tuple[int, str], str] = {}  # node and when it came → id of the hello it was sent
        self._hellos: dict[str, Any] = {}  # id of an unanswered hello → node
        self._pulls: dict[str, Pull] = {}

    def gather(self, clients: Iterable[str] | None = None) -> list[str]:
        """Wait for sites: for ``patience.expected``, or for all of ``clients``; after ``wait`` be content with fewer.

        Returns:
            The names of those that are there, sorted.

        Raises:
            RoundError: fewer than ``patience.minimum`` are.
        """
        wanted = None if clients is None else set(clients)
        expected = self.patience.expected if wanted is None else len(wanted)
        end = time.monotonic() + self.patience.wait
        while True:
            here = sorted(name for name in self.present() if wanted is None or name in wanted)
            if len(here) >= expected or (time.monotonic() >= end and len(here) >= self.patience.minimum):
                return here
            if time.monotonic() >= end:
                raise RoundError(
                    f"{len(here)} sites are there after {self.patience.wait:g} s ({', '.join(here) or 'none'}); at "
                    f"least {self.patience.minimum} are needed. Start the others, then the run again; it goes on."
                )
            time.sleep(POLL_SECONDS)

    def present(self) -> dict[str, int]:
        """Return client → node of the sites that are online and have introduced themselves; greet new ones."""
        nodes = list(self.grid.get_nodes())
        for node in nodes:
            self._greet(node)
        for message_id, node in list(self._hellos.items()):
            for message in self._pull(message_id):
                del self._hellos[message_id]
                self._meet(node, message)
        online = {node.node_id for node in nodes}
        return {name: card.node for name, card in self.cards.items() if card.node in online}

    def newcomers(self, known: Collection[str]) -> list[str]:
        """Return who is there beside ``known`` and was not probed in vain since its node came."""
        self.offered = set(self.present()) - set(known) - self.probed
        return sorted(self.offered)

    def exchange(
        self, method: Method, orders: Sequence[Order], memories: dict[str, str], observer: Observer
    ) -> list[Receipt]:
        """See ``loop.Transport``."""
        if not orders:
            return []
        encoded = {order.client: encode_order(order) for order in orders}
        probe = orders[0].kind == "probe"
        late = probe and encoded.keys() <= self.offered
        self.probed |= encoded.keys() if probe else set()
        receipts = self._deliver(ORDER, orders[0].round, encoded, memories, observer, late=late)
        observer.advance(len(receipts) * (probe and not late))
        return receipts

    def ask(
        self, method: Method, round: int, messages: dict[str, bytes], memories: dict[str, str], observer: Observer
    ) -> list[Receipt]:
        """See ``loop.Transport``."""
        return self._deliver(SECURE, round, messages, memories, observer)

    def _deliver(
        self,
        kind: str,
        round: int,
        payloads: Mapping[str, bytes],
        memories: Mapping[str, str],
        observer: Observer,
        *,
        late: bool = False,
    ) -> list[Receipt]:
        """Send each client its payload and wait for what comes back; of late joiners none is needed."""
        least = 0 if late else self.patience.minimum
        empty_spool(self.spool)
        nodes = self._enough(set(payloads), least)
        start = time.monotonic()
        unasked = sorted(payloads.keys() & nodes.keys())
        pending: dict[str, str] = {}
        receipts: list[Receipt] = []
        while True:
            self._sift()
            owing = {owed.client for owed in self.owed.values()}
            for client in [c for c in unasked if c not in owing]:
                unasked.remove(client)
                terms = self.terms.model_copy(update={"memory": round_of(memories.get(client, ""))})
                content = pack({"terms": terms.model_dump()}, payloads[client])
                if (message_id := self._push(content, nodes[client], kind)) is not None:
                    pending[message_id] = client
            for message_id, client in list(pending.items()):
                for message in self._pull(message_id):
                    del pending[message_id]
                    self._answered(client, message)
                    self._seen(client, set(pending.values()) - self.silent)
                    receipt = self._receive(message, client, round, len(payloads[client]), time.monotonic() - start)
                    if receipt is not None:
                        receipts.append(receipt)
                        observer.client(client, len(receipts) - 1, len(payloads))
            waited_for = set(pending.values()) - self.silent
            enough = not waited_for and len(receipts) >= least
            if not (pending or unasked) or enough or time.monotonic() - start > self.patience.deadline:
                break
            self.present()  # whoever comes back takes part in the next round
            time.sleep(POLL_SECONDS)
        for client in sorted(set(pending.values()) - self.silent):
            observer.say(f"Round {round}: {client} did not answer in {self.patience.deadline:g} s.")
        self.silent |= set(pending.values())
        until = start + 2 * self.patience.deadline
        self.owed |= {message_id: Owed(client, until) for message_id, client in pending.items()}
        return sorted(receipts, key=lambda receipt: receipt.client)

    def _sift(self) -> None:
        """Throw late answers away, and forget what is lost; whoever owes nothing more is asked again."""
        for message_id, owed in list(self.owed.items()):
            for message in self._pull(message_id):
                self._answered(owed.client, message)
                del self.owed[message_id]
            if time.monotonic() > owed.until:
                self.owed.pop(message_id, None)
                self._pulls.pop(message_id, None)

    def _answered(self, client: str, message: Any) -> None:
        """Wait for a client from now on, or no longer if it had no more than an error to tell."""
        (self.silent.add if message.has_error() else self.silent.discard)(client)

    def committed(self, memory_versions: set[str]) -> None:
        """Sites keep their memories themselves, and a server that starts anew names the version it wants."""
        self.on_commit()

    def _seen(self, client: str, waiting_for: Iterable[str] = ()) -> None:
        """Note that a client said something, and tell whoever watches."""
        self.last_seen[client] = datetime.now(UTC).isoformat(timespec="seconds")
        self._tell(waiting_for)

    def _tell(self, waiting_for: Iterable[str] = ()) -> None:
        if self.presence is not None:
            about = {"last_seen": self.last_seen, "refused": self.refused, "waiting_for": sorted(waiting_for)}
            examples = {name: card.hello.get("examples", 0) for name, card in self.cards.items()}
            write_json(self.presence, {**about, "examples": examples})

    def _enough(self, clients: set[str], least: int) -> dict[str, int]:
        """Return client → node of those of ``clients`` that are there; wait only while they are fewer than needed."""
        nodes = self.present()
        if len(clients & nodes.keys()) < min(least, len(clients)):
            self.gather(clients)
            nodes = self.present()
        return nodes

    def _push(self, content: Any, node: int, kind: str) -> str | None:
        from flwr.app import Message

        ttl = max(self.patience.deadline, self.patience.wait) + 60
        (message_id,) = self.grid.push_messages([Message(content, node, kind, ttl=ttl)]) or [None]
        return message_id or None

    def _pull(self, message_id: str) -> list[Any]:
        """Return the reply to a message, if it is there as a whole; a site that is slow to send it holds up nobody."""
        if message_id not in self._pulls:
            self._pulls[message_id] = Pull(self.grid, message_id)
        found = self._pulls[message_id].found()
        if found is None:
            return []
        del self._pulls[message_id]
        return found

    def _greet(self, node: Any) -> None:
        """Ask a node who it is, once each time it comes."""
        key = node.node_id, node.last_activated_at
        if key in self._greeted:
            return
        message_id = self._push(pack({"terms": self.terms.model_dump()}), node.node_id, HELLO)
        if message_id is not None:
            self._greeted[key] = message_id
            self._hellos[message_id] = node

    def _meet(self, node: Any, message: Any) -> None:
        """Take a site in, or say why not. A node that broke down over its hello is greeted again."""
        if message.has_error():
            self._greeted.pop((node.node_id, node.last_activated_at), None)
            return
        try:
            about, _ = unpack(message.content, self.max_reply_bytes)
            self._admit(node, about)
        except (UpdateRejected, ConfigError) as refusal:
            self.refused[str(node.node_id)] = printable(str(refusal))
            self.observer.say(f"A site (node {node.node_id}) is refused: {self.refused[str(node.node_id)]}.")
            self._tell()

    def _admit(self, node: Any, about: Mapping[str, Plain]) -> None:
        if "refused" in about:
            raise UpdateRejected(f"it says: {about['refused']}")
        hello = about.get("hello")
        if not isinstance(hello, dict) or not isinstance(hello.get("client"), str):
            raise UpdateRejected("it does not say who it is")
        name = check_client_name(hello["client"])
        if node.name and node.name != name:
            raise UpdateRejected(f"its key is registered for {node.name!r}, but it says that it is {name!r}")
        if hello.get("fedloom") != __version__:
            raise UpdateRejected(f"{name} runs fedloom {hello.get('fedloom')}, the server {__version__}")
        for what in ("backbone", "tokenizer"):
            if (said := mismatch(what, str(hello.get(what)), getattr(self.terms, what))) is not None:
                raise UpdateRejected(f"{name}: {said}")
        examples = hello.get("examples") if self.terms.privacy is None else 1
        if type(examples) is not int or not 1 <= examples < 1 << 40:
            raise UpdateRejected(f"{name} counts no examples")
        other = self.cards.get(name)
        if other is not None and other.node != node.node_id and other.node in set(self.grid.get_node_ids()):
            raise UpdateRejected(f"another node that is online is {name!r} already")
        self.silent.discard(name)  # whoever comes back is waited for again, and owes nothing
        self.owed = {message_id: owed for message_id, owed in self.owed.items() if owed.client != name}
        self.probed.discard(name)
        known: dict[str, Plain] = {word: hello[word] for word in HELLO_WORDS} | counted(hello, HELLO_COUNTS)
        if isinstance(rows := hello.get("rows"), dict):
            known["rows"] = counted(rows, ROW_COUNTS)
        self.cards[name] = Card(node.node_id, known)
        self.refused.pop(str(node.node_id), None)
        self._seen(name)
        how_many = "" if self.terms.privacy is not None else f", with {examples} examples"
        self.observer.say(f"{name} is there{how_many}.")

    def _receive(self, message: Any, client: str, round: int, down: int, seconds: float) -> Receipt | None:
        """Write a reply to the spool, unread but for its header and checksum; None if Flower brings no reply."""
        if message.has_error():
            reason = printable(str(message.error.reason))
            self.observer.say(f"Round {round}: {client} gave no answer: {reason}.")
            return None
        path = self.spool / f"{client}.safetensors"
        try:
            about, payload = unpack(message.content, self.max_reply_bytes)
            if "refused" in about:
                raise UpdateRejected(f"the site refuses: {about['refused']}")
        except UpdateRejected as refusal:
            return Receipt(client, path, 0, down, seconds, refused=str(refusal))
        keep_reply(path, payload)
        memory = version_of(client, round) if about.get("kept") is True else None
        return Receipt(client, path, len(payload), down, seconds, memory)
