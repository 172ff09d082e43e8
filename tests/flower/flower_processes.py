"""A SuperLink and nodes as real processes on loopback, for tests; all of them are ended whatever happens."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import yaml

from fedloom.flower_cli import init_folder, make_keys, node_command, server_command, server_environment
from small_world import client_rows

#: Far more than a quiet machine needs.
PATIENCE = 600.0
#: Three that take part, one that is hostile, one whose key is not listed.
SITES, HOSTILE, UNLISTED = ("ann", "bob", "cyd"), "dan", "eve"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_node(folder: Path, name: str, backbone: Path, **more: Any) -> Path:
    """Write a site's rows and configuration; return the configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"prompt": e.prompt, "response": e.response}) for e in client_rows()[name]]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    about = {"client": name, "data": "rows.jsonl", "backbone": {"name": str(backbone), "threads": 1}, **more}
    (folder / "node.yaml").write_text(json.dumps(about))
    return folder / "node.yaml"


class Sites:
    """One folder as ``fedloom flower init`` and ``keys`` write it, and the processes that run on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "server"
        self.keys = self.folder / "keys"
        self.home = folder
        self.port = free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        init_folder(self.folder, port=self.port)
        self.configure("run")
        make_keys(self.folder, [*SITES, HOSTILE, UNLISTED], [])
        own = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
        self.environment = server_environment(self.folder) | own

    def __enter__(self) -> Sites:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in list(self.processes):
            self.kill(name)
        if error is not None:
            for log in sorted(self.home.glob("*.log")):
                print(f"--- {log.name}\n{log.read_text(errors='replace')[-6000:]}")

    def configure(self, out: str, **sections: Any) -> Path:
        """Write the server's configuration for the next run; return the run's folder."""
        (self.folder / "server.yaml").write_text(yaml.safe_dump({"out": out, "sites": {"expected": 3}, **sections}))
        return self.folder / out

    def start(self, name: str, command: Sequence[str], environment: dict[str, str] | None = None) -> None:
        with open(self.home / f"{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment or self.environment,
                cwd=self.folder,
            )

    def start_superlink(self) -> None:
        """Start what ``fedloom flower server`` becomes."""
        self.start("superlink", server_command(self.folder, insecure=False), self.environment)
        self.wait_for(self._is_open, "the SuperLink's port")

    def _is_open(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def start_node(
        self,
        name: str,
        config: Path,
        *,
        program: Sequence[str] = ("-m", "fedloom.cli"),
    ) -> None:
        """Start ``fedloom flower node``."""
        command = [sys.executable, *program, "flower", "node", str(config), "--port", str(free_port())]
        command += ["--superlink", f"127.0.0.1:{self.port}"]
        command += ["--key", str(self.keys / name), "--ca", str(self.keys / "ca.pem")]
        shared = {k: v for k, v in self.environment.items() if k != "FEDLOOM_SERVER"}
        self.start(name, command, shared | {"FLWR_HOME": str(config.parent / "flwr")})

    def start_refused(
        self, label: str, name: str, config: Path, *, ca: Path | None = None, insecure: bool = False
    ) -> None:
        """Start the node alone, without what it would need to work."""
        keys = (None, None) if insecure else (self.keys / name, ca or self.keys / "ca.pem")
        command, environment = node_command(config, f"127.0.0.1:{self.port}", *keys, insecure, free_port())
        self.start(label, command, environment | {"FLWR_HOME": str(config.parent / "flwr"), "NO_COLOR": "1"})

    def register(self, *names: str) -> None:
        for name in names:
            self.flwr("supernode", "register", str(self.keys / f"{name}.pub"), "sites", "--name", name)

    def flwr(self, *arguments: str) -> str:
        done = subprocess.run(
            ["flwr", *arguments],
            capture_output=True,
            text=True,
            env=self.environment,
            cwd=self.folder,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

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

    def log(self, name: str) -> str:
        path = self.home / f"{name}.log"
        return path.read_text(errors="replace") if path.is_file() else ""

    def wait_for(self, condition: Callable[[], Any], what: str, every: float = 0.2) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, f"{what}: nothing after {PATIENCE:g} s"
            time.sleep(every)

    def kill(self, name: str) -> None:
        """End a process with SIGKILL, and all its children, which Flower starts in sessions of their own."""
        process = self.processes.pop(name)
        for member in family(process.pid):
            try:
                member.kill()
            except psutil.NoSuchProcess:
                continue
        process.wait(timeout=30)

    def working(self, name: str) -> list[psutil.Process]:
        """Return the processes that answer a message for a node now: the forks of its warm copy."""
        try:
            return [fork for copy in psutil.Process(self.processes[name].pid).children() for fork in copy.children()]
        except psutil.NoSuchProcess:
            return []

    def server_app(self) -> psutil.Process:
        """Return the running ServerApp."""
        lines = {member: _command(member) for member in family(self.processes["superlink"].pid)}
        (found,) = [member for member, line in lines.items() if "flwr-serverapp" in line]
        return found


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def family(pid: int) -> list[psutil.Process]:
    try:
        return [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]
    except psutil.NoSuchProcess:
        return []
