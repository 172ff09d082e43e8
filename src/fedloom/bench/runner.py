"""Running a suite's cells, each in a process of its own, and keeping what came out.

A cell is an ordinary run in ``OUT/cells/<name>``. Once finished, its record is a line of ``OUT/results.jsonl`` and it
is never run again; one that was interrupted goes on from its newest checkpoint; one that fails costs itself only.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import yaml

from fedloom.bench.record import difference, make_record
from fedloom.bench.suite import Cell
from fedloom.errors import ConfigError, FedloomError
from fedloom.files import write_atomic
from fedloom.locking import alone, no_link
from fedloom.runtime.events import RoundLog
from fedloom.types import Plain

#: Seconds between two looks at the running cells.
TICK = 0.5
#: Most faults of earlier results that are named.
NAMED = 8


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
    chosen: Sequence[Cell] | None = None,
    suite: Path | None = None,
    jobs: int = 1,
    command: str = "",
    show: Callable[[Sequence[Progress]], None] = lambda progress: None,
) -> list[Progress]:
    """Run what is not done yet.

    Args:
        cells: all cells of the suite; earlier results must be theirs, since tables are made of all that ``out`` holds.
        out: folder of the suite's results.
        chosen: those of ``cells`` to run; default all.
        suite: the suite's file, of which a copy is kept beside the results.
        jobs: cells at the same time.
        command: what the person typed, for the records.
        show: called a few times a second with every cell's progress.

    Raises:
        ConfigError: earlier results are not the suite's as it is now, or another process runs cells in ``out``.
        KeyboardInterrupt: this process was told to end (SIGTERM); its cells have ended.
    """
    busy = (
        f"runs the cells of {out}, or did so and left some running; the .lock of a cell's folder names its process. "
        "Wait for them, or stop them."
    )
    with alone(out, busy) as lock, heeding_sigterm() as check:
        results = Results(out)
        known = results.read()
        refuse_strangers(cells, known, results.path)
        if suite is not None:
            write_atomic(out / "suite.yaml", suite.read_bytes())
        board = [Progress(cell) for cell in (cells if chosen is None else chosen)]
        for progress in board:
            if (record := known.get(progress.cell.name)) is not None:
                progress.state, progress.record = "done", record
        _run_waiting(board, results, jobs, command, show, lock, check)
        return board


def refuse_strangers(cells: Sequence[Cell], known: Mapping[str, dict[str, Plain]], path: Path) -> None:
    """Refuse earlier results, cell → record, that are not what the suite's cells would give."""
    of_suite = {cell.name: cell for cell in cells}
    said = {n: difference(r, of_suite[n]) if n in of_suite else "is no cell of the suite" for n, r in known.items()}
    if faults := [f"{name} {fault}" for name, fault in said.items() if fault]:
        more = f"\n  … and {len(faults) - NAMED} more" if len(faults) > NAMED else ""
        raise ConfigError(
            f"{path} does not fit the suite:\n  " + "\n  ".join(faults[:NAMED]) + f"{more}\n"
            "Tables are made of all its lines, so they would mix both. Give another --out, or the suite as it was "
            "(suite.yaml there), or remove these lines, and their folders in 'cells', to run what the suite has now."
        )


@contextmanager
def heeding_sigterm() -> Iterator[Callable[[], None]]:
    """Yield a check for moments when work may stop: after SIGTERM it raises KeyboardInterrupt, as Ctrl-C does."""
    told: list[int] = []

    def check() -> None:
        if told:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # Python lets no other thread handle signals
        yield check
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    try:
        yield check
    finally:
        signal.signal(signal.SIGTERM, before)


def _run_waiting(
    board: Sequence[Progress],
    results: Results,
    jobs: int,
    command: str,
    show: Callable[[Sequence[Progress]], None],
    lock: int,
    check: Callable[[], None],
) -> None:
    out = results.out
    queue = [progress for progress in board if progress.state == "waiting"]
    running: list[Job] = []
    try:
        while queue or running:
            while queue and len(running) < jobs:
                running.append(start(queue.pop(0), out, lock))
            time.sleep(TICK)
            check()
            for job in list(running):
                job.progress.round = last_round(out / "cells" / job.progress.cell.name)
                if job.process.poll() is not None:
                    running.remove(job)
                    finish(job, results, command)
            show(board)
    finally:
        for job in running:
            job.process.terminate()
        for job in running:
            job.process.wait()
            job.log.close()
    show(board)


def start(progress: Progress, out: Path, lock: int) -> Job:
    """Start, or go on with, a cell; it holds the folder's lock as well, since it may outlive this process."""
    folder = out / "cells" / progress.cell.name
    folder.mkdir(parents=True, exist_ok=True)
    config = out / "cells" / f"{progress.cell.name}.yaml"
    write_atomic(config, yaml.safe_dump(progress.cell.config.model_dump(), sort_keys=False).encode())
    log = open(out / "cells" / f"{progress.cell.name}.log", "ab", opener=no_link)  # noqa: SIM115 (closed by finish)
    arguments = [sys.executable, "-m", "fedloom.cli", "run", str(config), "--out", str(folder), "--resume", "--quiet"]
    progress.state, progress.started = "running", time.monotonic()
    process = subprocess.Popen(
        arguments, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, pass_fds=(lock,)
    )
    return Job(progress, process, log)


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
