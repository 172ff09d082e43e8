"""One process at a node that has imported everything; every process that answers a message is a copy of it.

Flower starts a program for every message. Importing PyTorch and transformers anew each time takes seconds, and a
minute on a busy machine. So ``fedloom flower node`` leaves a copy of itself behind, and the program that Flower starts
hands its arguments to that copy, which forks. Only Linux is known to fork well after these imports; elsewhere each
program imports for itself.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

#: Names the socket of the copy, in the environment of the node and of all that it starts.
SOCKET = "FEDLOOM_WARM"


def stay_warm(app: Callable[[], None]) -> dict[str, str]:
    """Leave a copy of this process behind that lives as long as this process id; each request runs ``app`` in a fork.

    No threads may run yet. The copy answers only its own user: the socket lies in a folder that only they can enter.

    Returns:
        What to add to the environment of the node that this process becomes.
    """
    if sys.platform != "linux":
        return {}
    folder = tempfile.mkdtemp(prefix="fedloom-node-")
    place = str(Path(folder) / "socket")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(place)
    listener.listen()
    node = os.getpid()
    gc.freeze()  # a collection in a fork would copy every page that it marks
    if os.fork():
        listener.close()
        return {SOCKET: place}
    arguments = _serve(listener, node, folder)
    sys.argv = ["flwr-clientapp", *arguments]
    app()
    sys.exit(0)


def _serve(listener: socket.socket, node: int, folder: str) -> list[str]:
    """Fork for every request; return only in a fork, with its arguments. Ends when the node has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches all; the node decides
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    listener.settimeout(1.0)
    while os.getppid() == node:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        with connection:
            connection.settimeout(10.0)
            try:
                arguments = json.loads(connection.makefile("rb").readline())
                forked = os.fork()
                if forked:
                    connection.sendall(b"%d\n" % forked)
                    continue
            except (OSError, ValueError) as error:
                print(f"fedloom: a request to start an app was lost: {error}", file=sys.stderr)
                continue
        listener.close()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return list(arguments)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def hand_over(arguments: list[str]) -> bool:
    """Let the warm copy run the app with these arguments; return whether there is one that does."""
    place = os.environ.get(SOCKET, "")
    if not place:
        return False
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(10.0)
            connection.connect(place)
            connection.sendall(json.dumps(arguments).encode() + b"\n")
            return connection.makefile("rb").readline().endswith(b"\n")
    except OSError as error:
        print(f"fedloom: the node's warm process does not answer ({error}); this one starts cold.", file=sys.stderr)
        return False
