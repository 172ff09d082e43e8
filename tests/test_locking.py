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


def test_a_lock_that_is_a_link_is_refused_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    elsewhere = tmp_path / "authorized_keys"
    elsewhere.write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(elsewhere)
    with pytest.raises(ConfigError, match=r"\.lock is a symbolic link"), alone(tmp_path / "run", ""):
        pass
    assert elsewhere.read_text() == "mine"


def test_a_lock_that_becomes_a_link_in_between_is_not_followed(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / ".lock").symlink_to(tmp_path / "new")
    monkeypatch.setattr(locking, "refuse_link", lambda path: None)
    with pytest.raises(OSError, match="symbolic links"), alone(tmp_path, ""):
        pass
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("part", ["checkpoints", "checkpoints/memory", "checkpoints/spool", "models"])
def test_a_run_of_which_a_part_is_a_link_is_refused(tmp_path: Path, part: str) -> None:
    link, elsewhere = tmp_path / "run" / part, tmp_path / "elsewhere"
    link.parent.mkdir(parents=True)
    elsewhere.mkdir()
    link.symlink_to(elsewhere)
    with pytest.raises(ConfigError, match=f"{part} is a symbolic link"), alone(tmp_path / "run", ""):
        pass
    assert not (tmp_path / "run" / ".lock").exists()


def test_a_run_may_be_a_link_itself(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    with alone(tmp_path / "run", ""):
        assert (tmp_path / "disk" / ".lock").is_file()
