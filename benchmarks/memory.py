"""Peak memory of a simulation with 200 clients against one with 20, same rows per client.

Each run is ``fedloom.run`` in a process of its own: FedWeave, tiny backbone, 2 rounds, 40 rows per client.
"""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path

import torch
from common import Comparison, mixed_rows

import fedloom
from fedloom.config import parse_config

REPEATS = 1
ROWS = 40


def measure(args: Namespace) -> list[Comparison]:
    comparison = Comparison("peak memory, FedWeave, tiny backbone", "200 clients", "20 clients", "<= 1.10", "MiB")
    for _ in range(args.repeats):
        many, few = (in_child(args, clients) for clients in (200, 20))
        comparison.pairs.append((many["MiB"], few["MiB"]))
    comparison.note = f"seconds: {many['seconds']:.0f} and {few['seconds']:.0f}."
    return [comparison]


def in_child(args: Namespace, clients: int) -> dict[str, float]:
    command = [sys.executable, __file__, str(args.data), str(clients), str(torch.get_num_threads())]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def simulate(data: Path, clients: int, threads: int) -> None:
    """Run the simulation; print the peak of this process as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FEDLOOM_CACHE"] = folder  # features are computed, not read from an earlier run
        files = write_rows(Path(folder), data, clients)
        config = parse_config(
            {
                "backbone": {"name": "tiny", "threads": threads},
                "data": {"clients": files},
                "federation": {"rounds": 2},
                "training": {"steps": 2},
                "method": {"name": "fedweave", "warmup_steps": 1, "max_buckets": 3, "restarts": 2},
            }
        )
        metrics = fedloom.run(config, Path(folder) / "run")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"MiB": peak / 1024, "seconds": metrics["seconds"]}))


def write_rows(folder: Path, data: Path, clients: int) -> dict[str, str]:
    """Write 40 rows of two tasks for each client, drawn from the four tasks; return client → file."""
    by_task: dict[str, list[tuple[str, str]]] = {}
    for found in mixed_rows(data, 1).values():
        for row in found:
            by_task.setdefault(row.task, []).append((row.prompt, row.response))
    source = random.Random(0)
    files = {}
    for client in range(clients):
        rows = [pair for task in source.sample(sorted(by_task), 2) for pair in source.sample(by_task[task], ROWS // 2)]
        path = folder / f"client-{client:03d}.jsonl"
        lines = [json.dumps({"prompt": prompt, "response": response}) for prompt, response in rows]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        files[path.stem] = str(path)
    return files


if __name__ == "__main__":
    simulate(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
