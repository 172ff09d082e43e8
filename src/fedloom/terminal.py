"""What a person in a terminal sees while a run goes on: rounds, clients and steps, with time left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from fedloom.runtime.events import Observer
from fedloom.types import Plain

PHASES = {
    "features": "Reading prompts with the frozen backbone",
    "probe": "Finding buckets in each client",
    "rounds": "Federated rounds",
    "evaluation": "Evaluating",
    "personalised": "Evaluating clients' own models",
}


class TerminalObserver(Observer):
    """Shows the current phase, the client at work with its loss, and prints notices above the bars.

    Without a terminal (a log file, CI) a line is printed per round instead of bars.
    """

    def __init__(self, console: Console, quiet: bool = False) -> None:
        self.console = console
        self.quiet = quiet
        self.progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=console,
            disable=quiet or not console.is_terminal,
            transient=True,
        )
        self._phase: TaskID | None = None
        self._clients: TaskID | None = None
        self._steps = 0
        self._of = 0

    @contextmanager
    def shown(self) -> Iterator[TerminalObserver]:
        """Show the bars inside."""
        with self.progress:
            yield self

    def say(self, message: str) -> None:
        if not self.quiet:
            # Not folded: notices name paths, which a fold would break.
            self.progress.console.print(Text(message), style="dim", soft_wrap=True)

    def phase(self, name: str, total: int) -> None:
        for task in (self._phase, self._clients):
            if task is not None:
                self.progress.remove_task(task)
        self._clients = None
        self._phase = self.progress.add_task(PHASES.get(name, name), total=total, note="")
        if not self.quiet and not self.console.is_terminal:
            self.console.print(f"{PHASES.get(name, name)} …", highlight=False)

    def advance(self, units: int = 1) -> None:
        if self._phase is not None:
            self.progress.advance(self._phase, units)

    def client(self, name: str, index: int, of: int) -> None:
        if self._clients is None or of != self._of:
            if self._clients is not None:
                self.progress.remove_task(self._clients)
            self._clients = self.progress.add_task("  clients", total=of, note="")
            self._of = of
        self._steps = 0
        self.progress.update(self._clients, completed=index, note=name)
        self._name = name

    def step(self, loss: float) -> None:
        self._steps += 1
        if self._clients is not None:
            self.progress.update(self._clients, note=f"{self._name}  step {self._steps}  loss {loss:.3f}")

    def round(self, record: dict[str, Plain]) -> None:
        if self.quiet or self.console.is_terminal:
            return
        loss, tested = record.get("train_loss"), (record.get("evaluation") or {}).get("loss", {}).get("macro")
        line = f"round {record['round']}"
        if loss is not None:
            line += f"  training loss {loss:.4f}"
        if tested is not None:
            line += f"  macro loss {tested:.4f}"
        if (cost := (record.get("privacy") or {}).get("epsilon")) is not None:
            line += f"  ε {cost:.3g}"
        self.console.print(line + f"  {record.get('seconds', 0):.1f} s", highlight=False)
