"""For every test: no network, a cache of its own, and one thread."""

from __future__ import annotations

import os
import shutil
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Before fedloom is imported anywhere, also by child processes.
os.environ["FEDLOOM_CACHE"] = tempfile.mkdtemp(prefix="fedloom-test-cache-")

import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch

torch.set_num_threads(1)  # small problems run fastest so; more threads wait for each other

_LOCAL = {"localhost", "127.0.0.1", "::1", "", None}
_connect, _connect_ex, _getaddrinfo = socket.socket.connect, socket.socket.connect_ex, socket.getaddrinfo


def _refuse_remote(family: int, address: Any) -> None:
    host = address[0] if isinstance(address, tuple) else None
    if family != socket.AF_UNIX and host not in _LOCAL:
        raise AssertionError(f"a test reached for the network: {address!r}")


def _guarded_connect(self: socket.socket, address: Any) -> None:
    _refuse_remote(self.family, address)
    _connect(self, address)


def _guarded_connect_ex(self: socket.socket, address: Any) -> int:
    _refuse_remote(self.family, address)
    return _connect_ex(self, address)


def _guarded_getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
    _refuse_remote(socket.AF_INET, (host,))
    return _getaddrinfo(host, *args, **kwargs)


@pytest.fixture(scope="session", autouse=True)
def _sealed() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", _guarded_connect)
        patch.setattr(socket.socket, "connect_ex", _guarded_connect_ex)
        patch.setattr(socket, "getaddrinfo", _guarded_getaddrinfo)
        yield
    shutil.rmtree(os.environ["FEDLOOM_CACHE"], ignore_errors=True)
