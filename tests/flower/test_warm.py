"""The copy of a node's process that answers its messages: it forks for each, and ends with the node."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedloom.runtime.flower_warm import SOCKET, hand_over, stay_warm

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks well after heavy imports")

NODE = """
import os, sys
from fedloom.runtime.flower_warm import SOCKET, stay_warm

def app():
    print("app", *sys.argv[1:], os.getpid() != copy, os.getppid() == copy, flush=True)
    if "fail" in sys.argv:
        raise SystemExit(3)

parent = os.getpid()
os.register_at_fork(after_in_child=lambda: globals().setdefault("copy", os.getpid()))
environment = stay_warm(app)
print(environment[SOCKET], flush=True)
os.execvp("sleep", ["sleep", "60"])
"""


@pytest.fixture
def node() -> Iterator[tuple[subprocess.Popen[str], Path]]:
    process = subprocess.Popen([sys.executable, "-c", NODE], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process, Path(process.stdout.readline().strip())
    process.kill()
    process.wait()


def test_each_request_runs_in_a_fork_of_the_copy(
    node: tuple[subprocess.Popen[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    process, place = node
    assert process.stdout is not None
    assert place.parent.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv(SOCKET, str(place))
    for arguments in (["--token", "a b"], ["fail"], ["--after", "a failure"]):
        assert hand_over(arguments)
        assert process.stdout.readline() == f"app {' '.join(arguments)} True True\n"


def test_the_copy_ends_with_its_node(
    node: tuple[subprocess.Popen[str], Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    process, place = node
    monkeypatch.setenv(SOCKET, str(place))
    process.kill()
    process.wait()
    end = time.monotonic() + 60
    while place.exists():
        assert time.monotonic() < end
        time.sleep(0.1)
    assert not hand_over([])
    assert "does not answer" in capfd.readouterr().err


def test_without_a_copy_a_program_works_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SOCKET, raising=False)
    assert not hand_over([])
    monkeypatch.setattr(sys, "platform", "darwin")
    assert stay_warm(lambda: None) == {}
