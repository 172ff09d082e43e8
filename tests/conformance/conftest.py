"""A method passes the conformance tests by being registered.

Every test here runs for every name in ``METHODS``, but where a property of the method's class makes it pointless:

- a method that pools rows has one client and no federation: ``test_whole_run`` alone is about it;
- a method that sends no tensors cannot send wrong ones;
- what the runtime does alone (decode a message, write a checkpoint) is tried in full on one method of each structure,
  and in part on the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fedloom.methods import METHODS
from fedloom.methods.base import Method
from fedloom.runtime.loop import Receipt
from fedloom.runtime.memory import ClientMemory
from fedloom.types import Order, Setup, State, Training
from small_world import SPEC, World, world_of


def sends_tensors(kind: type[Method]) -> bool:
    """Return whether a method's replies hold tensors at all, as its own ``sends`` says of its first round."""
    if kind.has_probe or kind.sends is Method.sends:
        return True
    method = kind()
    state = method.init(Setup(0, SPEC, {"v": (5, 3)}, hidden_size=4, clients=("a", "b")))
    view = method.view(state, "a")
    order = Order("fit", "a", 1, view.tensors, view.spec, Training(), view.values)
    return any(method.sends(name, order) for name in order.tensors)


def structure(kind: type[Method]) -> tuple[bool, ...]:
    return kind.native, kind.has_probe, kind.personal, kind.global_model, sends_tensors(kind)


FEDERATED = sorted(name for name, kind in METHODS.items() if not kind.pooled)
SENDING = [name for name in FEDERATED if sends_tensors(METHODS[name])]
PROBING = [name for name in FEDERATED if METHODS[name].has_probe]
#: A native method asks how often each expert is used: numbers only.
PROBING_BY_TENSORS = [name for name in PROBING if not METHODS[name].native]
#: The first method of each structure.
REPRESENTATIVES = sorted({structure(METHODS[name]): name for name in reversed(FEDERATED)}.values())


@pytest.fixture(params=FEDERATED, scope="session")
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def method(name: str) -> Method:
    return METHODS[name]()


@dataclass
class Recording:
    """What went over the wire in the probe and two rounds of one run, by round and client, and the states in between.

    Attributes:
        before: the memory with which a client got an order.
        memories: each client's memory after a round.
    """

    world: World
    orders: dict[int, dict[str, Order]] = field(default_factory=dict)
    replies: dict[int, dict[str, bytes]] = field(default_factory=dict)
    before: dict[int, dict[str, ClientMemory]] = field(default_factory=dict)
    states: dict[int, State] = field(default_factory=dict)
    memories: dict[int, dict[str, ClientMemory]] = field(default_factory=dict)

    @property
    def last(self) -> int:
        return max(self.states)

    def exchange(
        self, method: Method, orders: Sequence[Order], memories: dict[str, str], observer: Any
    ) -> list[Receipt]:
        """See ``loop.Transport``."""
        round = orders[0].round
        self.orders[round] = {order.client: order for order in orders}
        self.before[round] = {o.client: self.world.memory.read(memories.get(o.client)) for o in orders}
        receipts = self.world.simulator.exchange(method, orders, memories, observer)
        self.replies[round] = {r.client: Path(r.path).read_bytes() for r in receipts}
        return receipts

    def committed(self, memory_versions: set[str]) -> None:
        self.world.simulator.committed(memory_versions)

    def keep(self, state: State, memories: dict[str, str]) -> None:
        """Take in a state and the clients' memories of the same moment."""
        self.states[state.round] = state
        self.memories[state.round] = {c: self.world.memory.read(memories.get(c)) for c in self.world.clients}


@pytest.fixture(scope="session")
def recording(name: str, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    method = METHODS[name]()
    found = Recording(world_of(method, tmp_path_factory.mktemp(f"recording-{name}")))
    found.world.run(method, rounds=2, transport=found, evaluate=found.keep)
    return found
