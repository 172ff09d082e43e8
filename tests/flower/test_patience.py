"""Whom a server waits for, and how long: sites are slow, lose a message, break down, or send half of a reply."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is an option of its own")

from fake_grid import Notes

from fedloom.runtime import flower, flower_pull
from fedloom.runtime.flower import Card, FlowerTransport, Patience
from fedloom.runtime.flower_messages import ORDER, pack
from fedloom.runtime.site import Terms

NEVER = float("inf")
DEADLINE = 10.0


class Clock:
    """Time that passes only where somebody waits."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Grid:
    """Each node answers after its own time; ``fails`` are errors, ``halves`` send a head and keep the body back."""

    def __init__(self, clock: Clock, takes: dict[int, float]) -> None:
        self.clock, self.takes = clock, takes
        self.fails: set[int] = set()
        self.halves: set[int] = set()
        self.released = threading.Event()
        self.asked: list[int] = []
        self.waiting: dict[str, tuple[float, bool, bool]] = {}

    def get_nodes(self) -> list[Any]:
        return [SimpleNamespace(node_id=node, last_activated_at="", name="") for node in self.takes]

    def push(self, content: Any, node: int, kind: str) -> str:
        self.asked.append(node)
        self.waiting[str(len(self.asked))] = self.clock.now + self.takes[node], node in self.fails, node in self.halves
        return str(len(self.asked))

    def pull_messages(self, ids: list[str]) -> list[Any]:
        at, fails, half = self.waiting.get(ids[0], (NEVER, False, False))
        if self.clock.now < at:
            return []
        del self.waiting[ids[0]]
        if half:
            self.released.wait()
        if fails or half:
            return [SimpleNamespace(has_error=lambda: True, error=SimpleNamespace(reason="no body"))]
        return [SimpleNamespace(has_error=lambda: False, content=pack({"kept": False}, b"reply"))]


FAST, SLOW = 1, 2


class Server:
    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch, slow: float) -> None:
        self.clock = Clock()
        monkeypatch.setattr(flower, "time", self.clock)
        monkeypatch.setattr(flower, "POLL_SECONDS", 0.5)
        monkeypatch.setattr(flower_pull, "JOIN_SECONDS", 0.05)
        self.grid, self.notes = Grid(self.clock, {FAST: 1.0, SLOW: slow}), Notes()
        terms = Terms(run="0" * 16, seed=1, method="fedit", backbone="0" * 64, tokenizer="0" * 64)
        patience = Patience(expected=2, minimum=1, wait=5.0, deadline=DEADLINE)
        self.transport = FlowerTransport(self.grid, terms, patience, home / "spool", 1 << 20, self.notes)
        monkeypatch.setattr(self.transport, "_greet", lambda node: None)
        monkeypatch.setattr(self.transport, "_push", self.grid.push)
        self.transport.cards = {"fast": Card(FAST, {}), "slow": Card(SLOW, {})}

    def round(self, number: int) -> tuple[list[str], float]:
        """Return who answered, and how long the round took."""
        start = self.clock.now
        found = self.transport._deliver(ORDER, number, {"fast": b"x", "slow": b"x"}, {}, self.notes)
        return [receipt.client for receipt in found], self.clock.now - start


def test_a_site_that_answers_late_is_waited_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(tmp_path, monkeypatch, slow=DEADLINE + 3.0)
    assert server.round(1) == (["fast"], pytest.approx(DEADLINE + 0.5))
    assert server.round(2) == (["fast"], pytest.approx(1.0))  # nobody waits, and it gets no second order
    assert server.grid.asked.count(SLOW) == 1
    server.clock.sleep(2.0)  # now its late answer is there, and thrown away
    server.grid.takes[SLOW] = 4.0
    assert server.round(3) == (["fast", "slow"], pytest.approx(4.0))
    assert server.grid.asked.count(SLOW) == 2
    assert sum("slow did not answer in 10 s" in said for said in server.notes.said) == 1


def test_a_message_that_is_lost_is_sent_again_after_two_deadlines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(tmp_path, monkeypatch, slow=NEVER)
    assert server.round(1)[0] == ["fast"]
    server.grid.takes[SLOW] = 1.0
    while server.clock.now < 2 * DEADLINE - 1:
        answered, took = server.round(2)
        assert (answered, took) == (["fast"], pytest.approx(1.0))
    assert server.grid.asked.count(SLOW) == 1
    server.clock.sleep(2.0)
    assert server.round(3)[0] == ["fast", "slow"]


def test_a_site_that_breaks_down_is_asked_again_but_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(tmp_path, monkeypatch, slow=3.0)
    server.grid.fails = {SLOW}
    assert server.round(1) == (["fast"], pytest.approx(3.0))
    assert any("slow gave no answer: no body" in said for said in server.notes.said)
    assert server.round(2) == (["fast"], pytest.approx(1.0))
    server.grid.fails = set()
    server.clock.sleep(3.0)
    assert server.round(3)[1] == pytest.approx(1.0)  # it is asked, and its error of round 2 counts for nothing
    server.clock.sleep(3.0)  # its answer comes late
    assert server.round(4) == (["fast", "slow"], pytest.approx(3.0))


def test_a_reply_whose_body_never_comes_holds_up_nobody_beyond_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(tmp_path, monkeypatch, slow=0.5)
    server.grid.halves = {SLOW}
    assert server.round(1) == (["fast"], pytest.approx(DEADLINE + 0.5))
    assert server.round(2) == (["fast"], pytest.approx(1.0))
    server.grid.released.set()


def test_what_flower_raises_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its server is gone, say."""
    server = Server(tmp_path, monkeypatch, slow=1.0)

    def gone(ids: list[str]) -> list[Any]:
        raise ConnectionError("gone")

    monkeypatch.setattr(server.grid, "pull_messages", gone)
    with pytest.raises(ConnectionError, match="gone"):
        server.round(1)


def test_flowers_own_patience_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its two hours for the body of a reply become the round's deadline, however often a server starts."""
    from flwr.supercore.inflatable.inflatable_utils import ObjectUnavailableError
    from flwr.superlink.grid import http_grid

    monkeypatch.setattr(http_grid, "pull_objects", http_grid.pull_objects)
    for _ in range(2):
        flower_pull.bound_pulls(0.05)

    def unavailable(name: str) -> bytes:
        raise ObjectUnavailableError(name)

    with pytest.raises(Exception, match="timeout or retry limit reached"):
        http_grid.pull_objects(["a"], unavailable, initial_backoff=0.01)
    monkeypatch.delattr(http_grid, "pull_objects")
    with pytest.raises(flower_pull.ConfigError, match="not the tested"):
        flower_pull.bound_pulls(1.0)
