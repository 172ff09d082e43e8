"""Run one benchmark: ``python benchmarks/speed.py NAME``, of ``BENCHMARKS``. See README.md beside it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import generation
import memory
import mixture
import server_step
import step
import torch
from common import machine, table

BENCHMARKS = {"step": step, "mixture": mixture, "generation": generation, "memory": memory, "server_step": server_step}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=BENCHMARKS)
    parser.add_argument("--repeats", type=int, help="pairs measured; default as the benchmark says")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of <task>/<split>.jsonl")
    parser.add_argument("--backbone", default="smollm2-135m", help="of all but memory; tiny for a quick look")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    parser.add_argument("--threads", type=int, help="PyTorch threads; default PyTorch's own")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: for a busy machine, one thread")
    parser.add_argument("--clients", type=int, default=100, help="of server_step")
    parser.add_argument("--parameters", type=int, default=50_000_000, help="of server_step, for each client")
    args = parser.parse_args()
    benchmark = BENCHMARKS[args.name]
    args.repeats = args.repeats or benchmark.REPEATS
    if args.threads:
        torch.set_num_threads(args.threads)
    facts = machine() | {"clock": args.clock}
    comparisons = benchmark.measure(args)
    print(table(comparisons))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        record = {"benchmark": args.name, "machine": facts, "results": [c.summary() for c in comparisons]}
        args.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
