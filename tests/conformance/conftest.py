"""A method passes the conformance tests by being registered: every test here runs for every name in ``METHODS``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from fedloom.methods import METHODS
from fedloom.methods.base import Method
from fedloom.runtime.loop import Receipt
from fedloom.types import Order, State
from small_world import Wire, World


@pytest.fixture(params=sorted(METHODS), scope="session")
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def method(name: str) -> Method:
    return METHODS[name]()


@dataclass(frozen=True)
class Recording:
    """What went over the wire in the probe and two rounds of one run, and the states in between."""

    world: World
    orders: dict[int, dict[str, Order]]
    replies: dict[int, dict[str, bytes]]
    states: dict[int, State]

    @property
    def last(self) -> int:
        return max(self.states)


@pytest.fixture(scope="session")
def recording(name: str, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    world = World(tmp_path_factory.mktemp(f"recording-{name}"))
    orders: dict[int, dict[str, Order]] = {}
    replies: dict[int, dict[str, bytes]] = {}
    states: dict[int, State] = {}

    def record(asked: list[Order], receipts: list[Receipt]) -> list[Receipt]:
        orders[asked[0].round] = {order.client: order for order in asked}
        replies[asked[0].round] = {r.client: Path(r.path).read_bytes() for r in receipts}
        return receipts

    def keep_state(state: State, _: dict[str, str]) -> None:
        states[state.round] = state

    world.run(METHODS[name](), rounds=2, transport=Wire(world.simulator, record), evaluate=keep_state)
    return Recording(world, orders, replies, states)
