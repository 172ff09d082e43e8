"""The program that a node starts in place of ``flwr-clientapp``: whatever app the server sent, fedloom's own runs.

A Flower node unpacks the server's app and imports it. Here the app is neither unpacked nor read.
"""

from __future__ import annotations

import logging
import shlex
import sys
from pathlib import Path
from typing import Any

from fedloom.errors import ConfigError
from fedloom.files import write_atomic
from fedloom.runtime.flower_warm import hand_over

REPLACED = ("install_from_fab", "get_load_client_app_fn")


def write_programs(folder: Path) -> Path:
    """Write a program for every kind of app that Flower may start: fedloom's client, and refusals for all others."""
    from flwr.supercore.constant import TASK_TYPE_TO_COMMAND, TaskType

    python = shlex.quote(sys.executable)
    for kind, name in TASK_TYPE_TO_COMMAND.items():
        line = f'exec {python} -m fedloom.runtime.flower_guard "$@"'
        if kind != TaskType.CLIENT_APP:
            line = f"echo 'fedloom: this node runs no {name}' >&2; exit 1"
        write_atomic(folder / name, f"#!/bin/sh\n{line}\n".encode())
        (folder / name).chmod(0o755)
    return folder


def run_app() -> None:
    """Run Flower's ClientApp process with the two functions replaced that would unpack and import the server's app."""
    from flwr.supernode.cli.flwr_clientapp import flwr_clientapp
    from flwr.supernode.runtime import run_clientapp as program

    if missing := [name for name in REPLACED if not hasattr(program, name)]:
        raise ConfigError(f"this Flower is not the tested 1.42: its client program has no {', '.join(missing)}")
    if any("dependency-installation" in argument for argument in sys.argv):
        raise ConfigError("this node installs nothing that an app asks for")

    def nothing(*_: Any, **__: Any) -> None:
        return None

    def ours(*_: Any, **__: Any) -> Any:
        # Imported only now that the process reports itself to the node: where importing PyTorch takes longer than the
        # node waits for a first sign of life (30 s), it would start one process after another.
        try:
            from fedloom.runtime.flower_site import client_app

            app = client_app()
        except Exception:
            # Flower sends an error's words to the server; what is wrong here, and where, stays in this log.
            logging.getLogger("flwr").exception("fedloom cannot be loaded")
            raise ConfigError("fedloom cannot be loaded at this site; the site's own log says more") from None
        return lambda *identity: app

    for name, function in zip(REPLACED, (nothing, ours), strict=True):
        setattr(program, name, function)
    flwr_clientapp()


def main() -> None:
    """Hand the arguments to the node's warm process; without one, run the app here."""
    if not hand_over(sys.argv[1:]):
        run_app()


if __name__ == "__main__":
    main()
