"""What a run tells: one JSON line per round, and a running commentary for whoever watches."""

from __future__ import annotations

import json
import os
from pathlib import Path

from fedloom.errors import DataError
from fedloom.files import write_atomic
from fedloom.locking import no_link
from fedloom.types import Plain


class RoundLog:
    """``rounds.jsonl``: one line per round, written before the round's checkpoint and cut back to it on resume."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: dict[str, Plain]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a", encoding="utf-8", opener=no_link) as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[dict[str, Plain]]:
        """Return the complete lines.

        Raises:
            DataError: a line is not the record of a round.
        """
        if not self.path.is_file():
            return []
        records = []
        for number, line in enumerate(self.path.read_bytes().split(b"\n")[:-1], start=1):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise self._damaged(f"line {number} is not JSON ({error})") from error
            if not _is_record(record):
                raise self._damaged(f"line {number} is not the record of a round")
            records.append(record)
        return records

    def cut_after(self, round: int) -> None:
        """Drop the records of rounds after ``round``, and a half-written line.

        Raises:
            DataError: not every round up to ``round`` has its line.
        """
        kept = [record for record in self.read() if record["round"] <= round]
        if [record["round"] for record in kept] != list(range(round + 1)):
            raise self._damaged(f"it does not hold the rounds 0 to {round}, one line each")
        write_atomic(self.path, "".join(json.dumps(r) + "\n" for r in kept).encode())

    def _damaged(self, why: str) -> DataError:
        return DataError(f"{self.path} is damaged: {why}. Restore it, or start the run anew with another --out.")


def _is_record(found: Plain) -> bool:
    """Return whether this can be the record of a round."""
    if not isinstance(found, dict) or type(found.get("round")) is not int:
        return False
    kinds = ("clients", "joined", "weights", "shares", "quarantined", "evaluation")
    sections = [found.get(key, {}) for key in kinds]
    fits = all(isinstance(section, dict) for section in sections)
    return fits and all(isinstance(client, dict) for section in sections[:2] for client in section.values())


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
