"""A folder that one process writes at a time."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from fedloom import locking
from fedloom.errors import ConfigError
from fedloom.locking import alone


def test_the_second_is_refused_and_told_by_whom_until_the_first_has_ended(tmp_path: Path) -> None:
    with alone(tmp_path / "run", "is writing this run"):
        pid = (tmp_path / "run" / ".lock").read_text()
        with (
            pytest.raises(ConfigError, match=rf"another process \(pid {pid}\) is writing"),
            alone(tmp_path / "run", "is writing"),
        ):
            pass
    with alone(tmp_path / "run", "is writing this run"):
        pass


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EIO])
def test_a_file_system_without_locks_keeps_nobody_out(tmp_path: Path, monkeypatch: Any, number: int) -> None:
    def flock(*args: Any) -> None:
        raise OSError(number, "no")

    monkeypatch.setattr(locking.fcntl, "flock", flock)
    if number == errno.EIO:
        with pytest.raises(OSError, match="no"), alone(tmp_path, ""):
            pass
    else:
        with alone(tmp_path, ""):
            pass


def test_without_the_module_too(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(locking, "fcntl", None)
    with alone(tmp_path, ""), alone(tmp_path, ""):
        pass
