"""All clients on this machine, one after another on one shared backbone, through the same bytes as a real wire."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedloom.errors import SiteRefusal, UpdateRejected
from fedloom.methods.base import Method
from fedloom.runtime.client import LocalClient, Rows, Workbench
from fedloom.runtime.events import Observer
from fedloom.runtime.leaving import Leaving, leave
from fedloom.runtime.loop import Receipt
from fedloom.runtime.memory import MemoryFolder
from fedloom.runtime.secagg import SecureClient
from fedloom.runtime.secure_client import Work, answer, work_for_sum
from fedloom.runtime.spool import empty_spool, keep_reply
from fedloom.runtime.wire import decode_order, encode_order
from fedloom.types import Order, Plain


class Simulator:
    """A ``Transport`` without a network.

    Orders and replies are encoded and decoded, so that no client can touch another's tensors and the bytes reported are
    the bytes a wire would carry. Replies wait on disk: memory does not grow with the number of clients.

    Args:
        bench: the shared backbone.
        clients: name → rows, for every client that holds examples.
        seed: the run's seed.
        memory: where clients keep what never leaves them.
        spool: folder for the replies of the current round.
        leaving: how replies leave a client.
    """

    def __init__(
        self,
        bench: Workbench,
        clients: Mapping[str, Rows],
        seed: int,
        memory: MemoryFolder,
        spool: Path,
        leaving: Leaving | None = None,
    ) -> None:
        self.bench = bench
        self.clients = clients
        self.seed = seed
        self.memory = memory
        self.spool = spool
        self.leaving = leaving or Leaving()
        self.secrets: dict[str, SecureClient] = {}  # what clients know between the stages of a secure round

    def exchange(
        self, method: Method, orders: Sequence[Order], memories: dict[str, str], observer: Observer
    ) -> list[Receipt]:
        """See ``loop.Transport``."""
        empty_spool(self.spool)
        receipts = []
        for index, order in enumerate(orders):
            observer.client(order.client, index, len(orders))
            receipts.append(self._ask(method, order, memories.get(order.client), observer))
            if order.kind == "probe":
                observer.advance()
        return receipts

    def committed(self, memory_versions: set[str]) -> None:
        self.memory.forget_all_but(memory_versions)

    def ask(
        self, method: Method, round: int, messages: dict[str, bytes], memories: dict[str, str], observer: Observer
    ) -> list[Receipt]:
        """See ``loop.Transport``."""
        self.spool.mkdir(parents=True, exist_ok=True)
        receipts = []
        for index, (name, message) in enumerate(messages.items()):
            observer.client(name, index, len(messages))
            receipts.append(self._answer(method, round, name, message, memories.get(name), observer))
        return receipts

    def _answer(
        self, method: Method, round: int, name: str, message: bytes, version: str | None, observer: Observer
    ) -> Receipt:
        start, path = time.perf_counter(), self.spool / f"{name}.secure"

        def work(body: bytes, plan: dict[str, Plain]) -> Work:
            order = decode_order(body)
            return work_for_sum(method, self._client(order, version, observer), order, plan, self.leaving)

        try:
            up, kept = answer(self.secrets.setdefault(name, SecureClient(name)), message, work)
        except (SiteRefusal, UpdateRejected) as refusal:
            return Receipt(name, path, 0, len(message), time.perf_counter() - start, refused=str(refusal))
        keep_reply(path, up)
        if kept is not None:
            version = self.memory.write(name, round, kept)
        return Receipt(name, path, len(up), len(message), time.perf_counter() - start, version)

    def _client(self, order: Order, version: str | None, observer: Observer) -> LocalClient:
        return LocalClient(
            name=order.client,
            rows=self.clients[order.client],
            bench=self.bench,
            memory=self.memory.read(version),
            run_seed=self.seed,
            round=order.round,
            on_step=observer.step,
        )

    def _ask(self, method: Method, order: Order, version: str | None, observer: Observer) -> Receipt:
        start = time.perf_counter()
        down = encode_order(order)
        order = decode_order(down)
        client = self._client(order, version, observer)
        up, kept = leave(method, client, order, self.leaving)
        path = self.spool / f"{order.client}.safetensors"
        keep_reply(path, up)
        if kept is not None:
            version = self.memory.write(order.client, order.round, kept)
        seconds = time.perf_counter() - start
        return Receipt(order.client, path, len(up), len(down), seconds, version, times=client.times)
