"""What a run tells: one JSON line per round, and a running commentary for whoever watches."""

from __future__ import annotations

import json
import os
from pathlib import Path

from fedloom.types import Plain


class RoundLog:
    """``rounds.jsonl``: one line per round, written before the round's checkpoint and cut back to it on resume."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: dict[str, Plain]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[dict[str, Plain]]:
        """Return the complete lines."""
        if not self.path.is_file():
            return []
        text = self.path.read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def cut_after(self, round: int) -> None:
        """Drop the records of rounds after ``round``, and a half-written line."""
        kept = [record for record in self.read() if record["round"] <= round]
        partial = self.path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(r) + "\n" for r in kept), encoding="utf-8")
        os.replace(partial, self.path)


class Observer:
    """Told what happens; does nothing. A terminal or a test overrides what it cares for."""

    def say(self, message: str) -> None:
        """A notice worth a line: a client without examples, a quarantined reply, a plain template."""

    def phase(self, name: str, total: int) -> None:
        """A phase of ``total`` units begins (``features``, ``probe``, ``rounds``, ``evaluation``)."""

    def advance(self, units: int = 1) -> None:
        """``units`` of the current phase are done."""

    def client(self, name: str, index: int, of: int) -> None:
        """Client ``index`` (from 0) of a cohort of ``of`` begins."""

    def step(self, loss: float) -> None:
        """The current client took one optimiser step."""

    def round(self, record: dict[str, Plain]) -> None:
        """A round was completed and checkpointed."""
