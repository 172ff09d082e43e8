"""A SuperLink and nodes as real processes on loopback, for tests; all of them are ended whatever happens."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import yaml

from fedloom.data.tasks import Example
from fedloom.flower_cli import init_folder, make_keys, node_command, server_command, server_environment
from small_world import client_rows, tree, without_seconds

#: Far more than a quiet machine needs.
PATIENCE = 600.0
#: Three that take part, one that is hostile, one whose key is not listed, and one that comes late with ann's rows.
SITES, HOSTILE, UNLISTED, LATE = ("ann", "bob", "cyd"), "dan", "eve", "fay"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rows_of(name: str) -> list[Example]:
    return client_rows()["ann" if name == LATE else name]


def write_rows(folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"prompt": e.prompt, "response": e.response}) for e in rows_of(name)]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")


def write_node(folder: Path, name: str, backbone: Path) -> Path:
    """Write a site's rows and configuration; return the configuration."""
    write_rows(folder, name)
    about = {"client": name, "data": "rows.jsonl", "backbone": {"name": str(backbone), "threads": 1}}
    (folder / "node.yaml").write_text(json.dumps(about))
    return folder / "node.yaml"


def log_of(out: Path) -> list[dict[str, Any]]:
    path = out / "rounds.jsonl"
    return [without_seconds(json.loads(line)) for line in path.read_text().splitlines()] if path.is_file() else []


def states_of(out: Path) -> dict[str, bytes]:
    return {name: data for name, data in tree(out / "checkpoints").items() if name.endswith("state.safetensors")}


def result_of(out: Path) -> dict[str, Any]:
    """Return states, log and model; checkpoints also name the configuration, which differs in where rows are."""
    return {"log": log_of(out), "states": states_of(out), "model": tree(out / "model")}


def family(pid: int) -> list[psutil.Process]:
    try:
        return [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]
    except psutil.NoSuchProcess:
        return []


class Processes:
    """Processes by name, with a log file each in ``home``."""

    def __init__(self, home: Path, environment: dict[str, str]) -> None:
        self.home = home
        self.environment = environment
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in list(self.running):
            self.kill(name)
        if error is not None:
            for log in sorted(self.home.glob("*.log")):
                print(f"--- {log.name}\n{log.read_text(errors='replace')[-6000:]}")

    def start(
        self, name: str, command: Sequence[str], *, cwd: Path | None = None, environment: dict[str, str] | None = None
    ) -> None:
        with open(self.home / f"{name}.log", "ab") as log:
            self.running[name] = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment or self.environment, cwd=cwd or self.home
            )

    def call(self, line: str, *, cwd: Path | None = None) -> str:
        """Run a command to its end, which must be a good one; return what it printed."""
        done = subprocess.run(
            shlex.split(line),
            capture_output=True,
            text=True,
            env=self.environment,
            cwd=cwd or self.home,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, line + done.stdout + done.stderr
        return done.stdout

    def log(self, name: str) -> str:
        path = self.home / f"{name}.log"
        return path.read_text(errors="replace") if path.is_file() else ""

    def wait_for(self, condition: Callable[[], Any], what: str, every: float = 0.2) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, f"{what}: nothing after {PATIENCE:g} s"
            time.sleep(every)

    def kill(self, name: str) -> None:
        """End a process with SIGKILL, and all its children."""
        process = self.running.pop(name)
        for member in family(process.pid):
            try:
                member.kill()
            except psutil.NoSuchProcess:
                continue
        process.wait(timeout=30)

    def has_ended(self, name: str) -> bool:
        return name not in self.running or self.running[name].poll() is not None


class Sites(Processes):
    """One folder as ``fedloom flower init`` and ``keys`` write it, and the processes that run on it."""

    def __init__(self, home: Path) -> None:
        self.folder = home / "server"
        self.keys = self.folder / "keys"
        self.port = free_port()
        init_folder(self.folder, port=self.port)
        make_keys(self.folder, [*SITES, HOSTILE, UNLISTED, LATE], [])
        self.configure("run")
        here = Path(__file__).resolve().parent
        path = [str(here), str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        own = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "PYTHONPATH": os.pathsep.join(path)}
        super().__init__(home, server_environment(self.folder) | own)

    def configure(self, out: str, **sections: Any) -> Path:
        """Write the server's configuration for the next run; return the run's folder."""
        (self.folder / "server.yaml").write_text(yaml.safe_dump({"out": out, "sites": {"expected": 3}, **sections}))
        return self.folder / out

    def start_superlink(self) -> None:
        """Start what ``fedloom flower server`` becomes."""
        self.start("superlink", server_command(self.folder, insecure=False))
        self.wait_for(self._is_open, "the SuperLink's port")

    def _is_open(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def start_node(self, name: str, config: Path, *, program: Sequence[str] = ("-m", "fedloom.cli")) -> None:
        """Start ``fedloom flower node``."""
        command = [sys.executable, *program, "flower", "node", str(config), "--port", str(free_port())]
        command += ["--superlink", f"127.0.0.1:{self.port}"]
        command += ["--key", str(self.keys / name), "--ca", str(self.keys / "ca.pem")]
        shared = {k: v for k, v in self.environment.items() if k != "FEDLOOM_SERVER"}
        self.start(name, command, environment=shared | {"FLWR_HOME": str(config.parent / "flwr")})

    def have(self, backbone: Path) -> None:
        """See to it that all sites have this backbone, and that their nodes are there.

        Flower takes a node for alive for a minute after its last sign of life, and refuses another with its key.
        """
        configs = {name: write_node(self.home / name, name, backbone) for name in SITES}
        before = {name: self.log(name).count("SuperNode ID") for name in SITES if self.has_ended(name)}

        def there() -> bool:
            for name in before:
                if self.has_ended(name):
                    self.start_node(name, configs[name])
            return all(self.log(name).count("SuperNode ID") > before[name] for name in before)

        self.wait_for(there, "the nodes", every=1.0)

    def start_bare_node(self, name: str, config: Path) -> None:
        """Start the SuperNode that ``fedloom flower node`` becomes, without what it would need to work."""
        keys = self.keys / name, self.keys / "ca.pem"
        command, environment = node_command(config, f"127.0.0.1:{self.port}", *keys, False, free_port())
        own = {"FLWR_HOME": str(config.parent / "flwr"), "NO_COLOR": "1"}
        self.start(name, command, environment=environment | own)

    def refused(self, *options: str) -> str:
        """Run ``fedloom flower node`` with other options, which must end it; return what it said."""
        config = write_node(self.home / "refused", SITES[0], self.home)
        command = [sys.executable, "-m", "fedloom.cli", "flower", "node", str(config)]
        command += ["--superlink", f"127.0.0.1:{self.port}", *options]
        wide = self.environment | {"COLUMNS": "300"}
        done = subprocess.run(command, capture_output=True, text=True, env=wide, timeout=PATIENCE)
        assert done.returncode == 1, done.stderr
        return done.stderr

    def flwr(self, *arguments: str) -> str:
        return self.call(shlex.join(["flwr", *arguments]), cwd=self.folder)

    def register(self, *names: str) -> None:
        for name in names:
            self.flwr("supernode", "register", str(self.keys / f"{name}.pub"), "sites", "--name", name)

    def submit(self) -> str:
        """``flwr run``; return the run's id."""
        self.flwr("run", "app", "sites")
        return re.findall(r"Created run (\d+)", self.log("superlink"))[-1]

    def run(self) -> str:
        """Run what is configured to its end, well or ill; return what the ServerApp said."""
        return self.finish(self.submit())

    def finish(self, run: str) -> str:
        """Wait for the end of a run; return what its ServerApp said."""
        ended = re.compile(rf"Finished task \d+ of run {run}")
        self.wait_for(lambda: ended.search(self.log("superlink")), "the end of the run")
        return self.flwr("log", run, "sites", "--show")

    def working(self, name: str) -> list[psutil.Process]:
        """Return the processes that answer a message for a node now: the forks of its warm copy."""
        try:
            return [fork for copy in psutil.Process(self.running[name].pid).children() for fork in copy.children()]
        except psutil.NoSuchProcess:
            return []

    def server_apps(self) -> list[psutil.Process]:
        """Return the ServerApp that runs, if one does."""
        return [p for p in family(self.running["superlink"].pid) if "flwr-serverapp" in _command(p)]

    @contextmanager
    def server_program(self, lines: str) -> Iterator[None]:
        """Let the server's side of the app be another for a while."""
        place = self.folder / "app" / "fedloom_sites" / "server.py"
        honest = place.read_text()
        place.write_text(lines)
        yield
        place.write_text(honest)


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
