"""What a run tells: one JSON line per round, and a running commentary for whoever watches."""

from __future__ import annotations

import json
import os
from pathlib import Path

from fedloom.errors import DataError
from fedloom.files import write_atomic
from fedloom.locking import no_link
from fedloom.types import Plain

_BYTES = ("bytes_up", "bytes_down")


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
    """Return whether this can be the record of a round: a log comes from outside, with the folder it lies in."""
    if not isinstance(found, dict) or not _is_count(found.get("round")):
        return False
    kinds = ("clients", "joined", "weights", "shares", "quarantined", "evaluation")
    clients, joined, weights, shares, quarantined, _ = sections = [found.get(key, {}) for key in kinds]
    absent = found.get("absent", [])
    if not all(isinstance(section, dict) for section in sections) or not isinstance(absent, list):
        return False
    if not all(isinstance(said, dict) for said in (*clients.values(), *joined.values(), *shares.values())):
        return False
    if (clients or weights) and not {"clients", "quarantined"} <= found.keys():
        return False
    counts = [client.get(key) for client in clients.values() for key in ("examples", *_BYTES)]
    counts += [late.get(key, 0) for late in joined.values() for key in ("examples", *_BYTES)]
    counts += [*weights.values(), *(count for by in shares.values() for count in by.values())]
    texts = [*absent, *quarantined.values()]
    spent = {"epsilon": None, "delta": 0} if found.get("privacy") is None else found["privacy"]
    if not isinstance(spent, dict) or type(spent.get("delta")) not in (int, float):
        return False
    spendings = [spent.get("epsilon", ""), spent.get("noise_to_signal")]  # a probe has no signal to measure noise by
    return (
        all(map(_is_count, counts))
        and all(isinstance(text, str) for text in texts)
        and all(value is None or type(value) in (int, float) for value in spendings)
    )


def _is_count(value: Plain) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


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
