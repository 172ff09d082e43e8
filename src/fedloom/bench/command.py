"""``fedloom bench``: the live table while cells run, and what was written at the end."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fedloom.bench.dry import check_files, dry_table
from fedloom.bench.outputs import write_outputs
from fedloom.bench.runner import Progress, run_cells
from fedloom.bench.suite import load_suite, selected
from fedloom.errors import ConfigError

#: Most rows of the live table.
SHOWN = 24


def bench_command(
    path: Path,
    out: Path,
    *,
    console: Console,
    errors: Console,
    resume: bool,
    jobs: int,
    only: Sequence[str],
    dry_run: bool,
    quiet: bool,
) -> bool:
    """Run a suite and write its tables, figures and report; return whether every cell is done.

    Why cells failed is said on ``errors``, whatever ``quiet``, before anything is made of the others.

    Raises:
        ConfigError: the suite is wrong, ``only`` fits no cell, ``out`` holds results and ``resume`` is not given, or
            they do not fit the suite.
    """
    suite, cells = load_suite(path)
    chosen = selected(cells, only, path)
    if dry_run:
        check_files(chosen)
        console.print(dry_table(chosen))
        console.print(Text(f"Cells: {', '.join(cell.name for cell in chosen)}."), soft_wrap=True)
        return True
    if (out / "results.jsonl").exists() and not resume:
        raise ConfigError(f"{out} already holds results. Give --resume to go on with them, or another --out.")
    command = shlex.join(["fedloom", *sys.argv[1:]])
    begun = time.monotonic()
    run = partial(run_cells, cells, out, chosen=chosen, suite=path, jobs=jobs, command=command)
    if quiet:
        board = run()
    elif console.is_terminal:
        with Live(console=console, refresh_per_second=2, transient=True) as live:
            board = run(show=lambda b: live.update(live_table(suite.title, b, begun, jobs)))
    else:
        board = run(show=Lines(console))
    failed = [progress for progress in board if progress.state == "failed"]
    for progress in failed:
        errors.print(Text(f"{progress.cell.name} failed: {progress.why}", style="red"), soft_wrap=True)
        errors.print(Text(f"Its log is {out / 'cells' / progress.cell.name}.log."), soft_wrap=True)
    if failed:
        errors.print("Run the same command with --resume to try the failed cells again.")
    written = write_outputs(out, suite.title, suite.notes) if (out / "results.jsonl").exists() else []
    if not quiet:
        done = sum(progress.state == "done" for progress in board)
        console.print(f"{done} of {len(board)} cells are done; {len(written)} files written.", highlight=False)
        if written:
            console.print(Text(f"Look at {out / 'report.html'}; tables are in {out / 'tables'}."), soft_wrap=True)
    return not failed


class Lines:
    """Without a terminal: one line when a cell changes its state."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.seen: dict[str, str] = {}

    def __call__(self, board: Sequence[Progress]) -> None:
        for progress in board:
            if self.seen.get(progress.cell.name, "waiting") != progress.state:
                self.seen[progress.cell.name] = progress.state
                self.console.print(Text(f"{progress.cell.name}: {progress.state} {_loss(progress)}".rstrip()))


def live_table(title: str, board: Sequence[Progress], begun: float, jobs: int) -> Table:
    """Return the table of cells: running ones first, then finished ones, then those that wait."""
    table = Table(title=Text(title), caption=_left(board, begun, jobs))
    for heading, justify in (("cell", "left"), ("state", "left"), ("round", "right"), ("macro loss", "right")):
        table.add_column(heading, justify="right" if justify == "right" else "left")
    order = {"running": 0, "failed": 1, "done": 2, "waiting": 3}
    ranked = sorted(board, key=lambda p: order[p.state])
    for progress in ranked[:SHOWN]:
        rounds = progress.cell.config.federation.rounds
        at = f"{progress.round}/{rounds}" if progress.state == "running" else ""
        table.add_row(Text(progress.cell.name), progress.state, at, _loss(progress))
    if len(ranked) > SHOWN:
        table.add_row(f"… {len(ranked) - SHOWN} more", "", "", "")
    return table


def _loss(progress: Progress) -> str:
    routing = (progress.record or {}).get("routing") or {}
    loss = next(iter(routing.values()))["loss"]["macro"] if routing else None
    return "" if loss is None else f"{loss:.4f}"


def _left(board: Sequence[Progress], begun: float, jobs: int) -> str:
    """Say how far it is and, from finished cells and the rounds of running ones, how long it will take."""
    now = time.monotonic()
    done = [p for p in board if p.state == "done"]
    running = [p for p in board if p.state == "running"]
    said = f"{len(done)} of {len(board)} done, {(now - begun) / 60:.0f} min"
    took = [p.record["seconds"] for p in done if p.record]
    took += [(now - p.started) * p.cell.config.federation.rounds / p.round for p in running if p.round]
    if took and len(done) < len(board):
        mean = sum(took) / len(took)
        waiting = sum(p.state == "waiting" for p in board)
        behind = sum(min(now - p.started, mean) for p in running)
        said += f", about {((waiting + len(running)) * mean - behind) / jobs / 60:.0f} min left"
    return said
