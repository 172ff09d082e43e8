"""One round's server step of FC-MoE against a plain weighted mean of the same replies, and against reading them.

Replies lie on disk and are read one by one, as in a run: N clients × P float32 parameters, half of them in 2 × 8
experts, every expert used by every client, every second client opposing. There are at most DISTINCT different replies,
each under several names, so that the disk need not hold N and is not what is measured. Peak memory is that of a process
of its own beyond what it held before the step, in sizes of one update.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from common import Comparison, compare, take_turns

from fedloom.methods.fcmoe import FCMoE
from fedloom.methods.fedavg_moe import FedAvgMoE
from fedloom.runtime.wire import decode_reply, encode_reply
from fedloom.types import AdapterSpec, Reply, State, Tensors, component

REPEATS = 3
DISTINCT = 8
EXPERTS = [f"experts/block.{layer}.mlp.{e}" for layer in range(2) for e in range(8)]


class OnDisk:
    """Replies read from a folder one at a time (``types.Replies``)."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.iterdir())

    def __iter__(self) -> Iterator[Reply]:
        for path in self.paths:
            yield decode_reply(path, path.stem, 1)

    def __len__(self) -> int:
        return len(self.paths)


def tensors(parameters: int, seed: int) -> Tensors:
    """Return about ``parameters`` numbers: 16 experts of two matrices, and as much again outside them."""
    source = torch.Generator().manual_seed(seed)
    width = max(1, int((parameters / 2 / len(EXPERTS) / 2 / 4) ** 0.5))
    found = {f"{unit}/{part}": (4 * width, width) for unit in EXPERTS for part in ("wi", "wo")}
    found |= {f"shared/{i}": (4 * width, width) for i in range(2 * len(EXPERTS))}
    return {name: torch.randn(shape, generator=source) for name, shape in found.items()}


def write_replies(folder: Path, clients: int, parameters: int) -> None:
    for i in range(clients):
        if i >= DISTINCT:
            os.link(folder / f"client-{i % DISTINCT:03d}.0", folder / f"client-{i % DISTINCT:03d}.{i // DISTINCT}")
            continue
        send = tensors(parameters, i)
        for name, tensor in send.items():
            tensor.mul_(1e-3).add_(-2e-4 if i % 2 else 3e-4)
            send[name] = tensor
        units = dict.fromkeys(map(component, send), 10 + i)
        active = dict.fromkeys(EXPERTS, 100 + i)
        reply = Reply(f"client-{i:03d}", send, {"examples": 10 + i} | units, {}, {"activations": active})
        (folder / f"{reply.client}.0").write_bytes(encode_reply(reply, 1))


def sides(folder: Path, parameters: int) -> dict[str, Callable[[], object]]:
    """Return what is measured, by name; the state is made here, before anything is."""
    state = State(0, tensors(parameters, 12345), AdapterSpec((), native="full"))
    replies = OnDisk(folder)
    return {
        "FC-MoE": lambda: FCMoE().merge(state, replies),
        "weighted mean": lambda: FedAvgMoE().merge(state, replies),
        "reading once": lambda: sum(len(reply.send) for reply in replies),
        "bytes once": lambda: read_once(replies.paths),
    }


def read_once(paths: list[Path]) -> int:
    """Read all files into one buffer, which is not made anew for each: new pages can cost more than the reading."""
    buffer = bytearray(max(path.stat().st_size for path in paths))
    total = 0
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                total += count
    return total


def measure(args: Namespace) -> list[Comparison]:
    with tempfile.TemporaryDirectory() as name:
        write_replies(Path(name), args.clients, args.parameters)
        update = next(Path(name).iterdir()).stat().st_size
        seconds = take_turns(sides(Path(name), args.parameters), args)
        peaks = {side: in_child(Path(name), args.parameters, side) / update for side in seconds}
    what = f"server step, {args.clients} clients × {update / 4e6:.3g} M parameters"
    found = [
        compare(what, seconds, "FC-MoE", other, target)
        for other, target in (("weighted mean", "<= 3"), ("reading once", ""), ("bytes once", "<= 4"))
    ]
    measured = ", ".join(f"{side} {peak:.2f}" for side, peak in peaks.items())
    found[0].note = f"{min(DISTINCT, args.clients)} different replies; peak memory, updates: {measured}."
    return found


def in_child(folder: Path, parameters: int, side: str) -> float:
    """Return the bytes that a side takes at its peak, in a process of its own.

    There the C library gives freed blocks back at once, so that what is counted is in use.
    """
    command = [sys.executable, __file__, str(folder), str(parameters), side]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return float(done.stdout)


def resident() -> int:
    """Return this process's resident bytes now (the peak that the kernel keeps would include the imports)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def peak_of(run: Callable[[], object]) -> int:
    before, highest, over = resident(), 0, threading.Event()

    def watch() -> None:
        nonlocal highest
        while not over.is_set():
            highest = max(highest, resident())
            time.sleep(0.0005)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    run()
    over.set()
    watcher.join()
    return highest - before


if __name__ == "__main__":
    print(json.dumps(peak_of(sides(Path(sys.argv[1]), int(sys.argv[2]))[sys.argv[3]])))
