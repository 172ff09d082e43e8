"""Alternate two sides, summarise their ratio, and describe the machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from fedloom.adapters.state import initial_tensors
from fedloom.data.partition import build_benchmark
from fedloom.data.sources import Example
from fedloom.types import AdapterSpec, Tensors

TASKS = ("arc_challenge", "gsm8k", "text_edit", "tweet_eval_sentiment")


@dataclass
class Comparison:
    """Two sides measured in turn; ``ratio`` is first / second, pair by pair.

    Attributes:
        name: what is compared.
        first: label of the numerator.
        second: label of the denominator.
        unit: ``s`` or ``MiB``.
        target: what the median ratio should be, such as ``<= 1.15``; empty where nothing is promised.
        pairs: (first, second) of each repetition.
        note: what a reader must know.
    """

    name: str
    first: str
    second: str
    target: str = ""
    unit: str = "s"
    pairs: list[tuple[float, float]] = field(default_factory=list)
    note: str = ""

    @property
    def ratios(self) -> list[float]:
        return [a / b for a, b in self.pairs]

    @property
    def met(self) -> bool | None:
        if not self.target:
            return None
        sign, bound = self.target.split()
        median = statistics.median(self.ratios)
        return median <= float(bound) if sign == "<=" else median >= float(bound)

    def summary(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "ratio": statistics.median(self.ratios),
            "lowest": min(self.ratios),
            "highest": max(self.ratios),
            "first_median": statistics.median(a for a, _ in self.pairs),
            "second_median": statistics.median(b for _, b in self.pairs),
            "met": self.met,
        }


def take_turns(sides: Mapping[str, Callable[[], Any]], args: Namespace) -> dict[str, list[float]]:
    """Time every side ``args.repeats`` times after one round to warm up, going round in alternating direction."""
    clock = clock_of(args)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(args.repeats + 1):
        for name in sorted(sides, reverse=repeat % 2 == 1):
            start = clock()
            sides[name]()
            if repeat:
                seconds[name].append(clock() - start)
    return seconds


def compare(name: str, seconds: Mapping[str, list[float]], first: str, second: str, target: str = "") -> Comparison:
    """Pair two sides that took turns."""
    return Comparison(name, first, second, target, pairs=list(zip(seconds[first], seconds[second], strict=True)))


def clock_of(args: Namespace) -> Callable[[], float]:
    """Return the clock: wall time, or CPU time (for a busy machine, with ``--threads 1``)."""
    return time.process_time if args.clock == "cpu" else time.perf_counter


def machine() -> dict[str, Any]:
    """Return what a reader needs to judge the seconds."""
    packages = ("torch", "transformers", "peft", "fedloom")
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in packages},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", "benchmarks/speed.py", *(_no_absolute(a) for a in sys.argv[1:])]),
    }


def _cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    if path.is_file():
        for line in path.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _no_absolute(argument: str) -> str:
    return Path(argument).name if Path(argument).is_absolute() else argument


def table(comparisons: list[Comparison]) -> str:
    """Return a Markdown table."""
    lines = [
        "| measured | ratio | min–max | target | first | second |",
        "|---|---|---|---|---|---|",
    ]
    for c in comparisons:
        s = c.summary()
        verdict = {True: " (met)", False: " (missed)", None: ""}[c.met]
        lines.append(
            f"| {c.name} | {s['ratio']:.2f} | {s['lowest']:.2f}–{s['highest']:.2f} | {c.target or '–'}{verdict} "
            f"| {c.first} {_quantity(s['first_median'], c.unit)} | {c.second} {_quantity(s['second_median'], c.unit)} |"
        )
    return "\n".join(lines + [f"\n{c.name}: {c.note}" for c in comparisons if c.note])


def _quantity(value: float, unit: str) -> str:
    if unit == "s" and value < 0.1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3g} {unit}" if unit == "s" else f"{value:.0f} {unit}"


def mixed_rows(data: Path, clients: int, seed: int = 42) -> dict[str, list[Example]]:
    """Return the training rows of the clients of the four-task benchmark."""
    return build_benchmark(TASKS, seed=seed, clients=clients, alpha=0.3, root=data, train=400, val=0, test=1).clients


def trained_like(spec: AdapterSpec, shapes: dict[str, tuple[int, int]], hidden_size: int, seed: int = 1) -> Tensors:
    """Return adapter tensors whose B is not zero, as after training."""
    source = torch.Generator().manual_seed(seed)
    tensors = initial_tensors(spec, shapes, hidden_size, source)
    return {
        name: 0.02 * torch.randn(t.shape, generator=source) if name.endswith(".lora_B") else t
        for name, t in tensors.items()
    }
