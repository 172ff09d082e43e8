"""Running a suite's cells, each in a process of its own, and keeping what came out.

A cell is an ordinary run in ``OUT/cells/<name>``. Once finished, its record is a line of ``OUT/results.jsonl`` and it
is never run again; one that was interrupted goes on from its newest checkpoint; one that fails costs itself only.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import yaml

from fedloom.bench.record import make_record
from fedloom.bench.suite import Cell
from fedloom.errors import ConfigError, FedloomError
from fedloom.files import write_atomic, write_json
from fedloom.runtime.events import RoundLog
from fedloom.types import Plain

#: Seconds between two looks at the running cells.
TICK = 0.5


@dataclass
class Progress:
    """Where one cell stands: ``waiting``, ``running``, ``done``, ``failed``."""

    cell: Cell
    state: str = "waiting"
    round: int = 0
    record: dict[str, Plain] | None = None
    why: str = ""
    started: float = 0.0


@dataclass
class Job:
    """A cell's process."""

    progress: Progress
    process: subprocess.Popen[bytes]
    log: IO[bytes] = field(repr=False)


class Results:
    """``OUT/results.jsonl``, one finished cell a line, and ``OUT/examples/<cell>.json``."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.path = out / "results.jsonl"

    def read(self) -> dict[str, dict[str, Plain]]:
        """Return cell → record.

        Raises:
            ConfigError: a line is damaged.
        """
        if not self.path.is_file():
            return {}
        records = {}
        for number, line in enumerate(self.path.read_text(encoding="utf-8").splitlines(), start=1):
            try:
                record = json.loads(line)
                records[record["cell"]] = record
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise ConfigError(
                    f"{self.path}, line {number} is damaged ({error}): remove it to run its cell again."
                ) from error
        return records

    def add(self, record: dict[str, Plain], examples: dict[str, Plain]) -> None:
        """Keep a finished cell; the examples first, so that a record never lacks them."""
        write_atomic(self.out / "examples" / f"{record['cell']}.json", json.dumps(examples).encode())
        lines = [json.dumps(r) for r in (self.read() | {record["cell"]: record}).values()]
        write_atomic(self.path, ("\n".join(lines) + "\n").encode())


def run_cells(
    cells: Sequence[Cell],
    out: Path,
    *,
    jobs: int = 1,
    command: str = "",
    show: Callable[[Sequence[Progress]], None] = lambda progress: None,
) -> list[Progress]:
    """Run what is not done yet.

    Args:
        cells: see ``suite.load_suite``.
        out: folder of the suite's results.
        jobs: cells at the same time.
        command: what the person typed, for the records.
        show: called a few times a second with every cell's progress.

    Raises:
        ConfigError: a finished cell was run with another configuration than the suite has now, or another process runs
            cells in ``out``.
    """
    with alone(out):
        return _run_cells(cells, out, jobs, command, show)


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Hold ``out`` for one process: two would lose each other's results."""
    out.mkdir(parents=True, exist_ok=True)
    with open(out / ".lock", "w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"another fedloom bench is running cells in {out}. Wait for it, or stop it.") from error
        yield


def _run_cells(
    cells: Sequence[Cell], out: Path, jobs: int, command: str, show: Callable[[Sequence[Progress]], None]
) -> list[Progress]:
    results = Results(out)
    known = results.read()
    board = [Progress(cell) for cell in cells]
    for progress in board:
        if (record := known.get(progress.cell.name)) is not None:
            if record["config_hash"] != progress.cell.config_hash:
                raise ConfigError(
                    f"{results.path} holds {progress.cell.name} from another configuration than the suite has now. "
                    "Give another --out, or remove its line and its folder in 'cells' to run it again."
                )
            progress.state, progress.record = "done", record
    queue = [progress for progress in board if progress.state == "waiting"]
    running: list[Job] = []
    try:
        while queue or running:
            while queue and len(running) < jobs:
                running.append(start(queue.pop(0), out))
            time.sleep(TICK)
            for job in list(running):
                job.progress.round = last_round(out / "cells" / job.progress.cell.name)
                if job.process.poll() is not None:
                    running.remove(job)
                    finish(job, results, command)
            show(board)
    finally:
        for job in running:
            job.process.terminate()
            job.process.wait()
            job.log.close()
    show(board)
    return board


def start(progress: Progress, out: Path) -> Job:
    """Start, or go on with, a cell."""
    folder = out / "cells" / progress.cell.name
    folder.mkdir(parents=True, exist_ok=True)
    config = out / "cells" / f"{progress.cell.name}.yaml"
    write_atomic(config, yaml.safe_dump(progress.cell.config.model_dump(), sort_keys=False).encode())
    log = open(out / "cells" / f"{progress.cell.name}.log", "ab")  # noqa: SIM115 (closed by finish)
    arguments = [sys.executable, "-m", "fedloom.cli", "run", str(config), "--out", str(folder), "--resume", "--quiet"]
    progress.state, progress.started = "running", time.monotonic()
    return Job(
        progress, subprocess.Popen(arguments, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL), log
    )


def finish(job: Job, results: Results, command: str) -> None:
    """Take in what a cell's process left; its checkpoints are not needed any more."""
    job.log.close()
    progress = job.progress
    folder = results.out / "cells" / progress.cell.name
    if job.process.returncode != 0:
        said = Path(f"{folder}.log").read_text(encoding="utf-8", errors="backslashreplace").strip().splitlines()
        progress.state, progress.why = "failed", "\n".join(said[-8:]) or f"exit code {job.process.returncode}"
        return
    try:
        record, examples = make_record(progress.cell, folder, command)
    except (FedloomError, OSError, ValueError, KeyError) as error:
        progress.state, progress.why = "failed", f"its results cannot be read: {type(error).__name__}: {error}"
        return
    results.add(record, examples)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    progress.state, progress.record = "done", record


def last_round(folder: Path) -> int:
    """Return the last round in a running cell's log."""
    try:
        records = RoundLog(folder / "rounds.jsonl").read()
    except FedloomError:
        return 0  # it is being written
    return records[-1]["round"] if records else 0


def write_suite_copy(path: Path, out: Path) -> None:
    """Keep the suite beside its results."""
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / "suite.yaml", path.read_bytes())


__all__ = ["Progress", "Results", "run_cells", "write_json", "write_suite_copy"]
