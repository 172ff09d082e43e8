"""A run's folder that leads elsewhere by links, or holds files that are not fedloom's: those stay as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedloom.errors import ConfigError
from fedloom.runtime.events import RoundLog
from fedloom.runtime.memory import ClientMemory, MemoryFolder
from fedloom.runtime.spool import empty_spool, keep_reply


def filled(folder: Path) -> Path:
    """Return a folder of which every file is somebody else's, though some are called as fedloom's own."""
    folder.mkdir()
    for name in ("thesis.tex", "ann.safetensors", "ann-r1.safetensors"):
        (folder / name).write_text("mine")
    return folder


def untouched(folder: Path) -> bool:
    return sorted(path.read_text() for path in folder.iterdir()) == ["mine"] * 3


def test_a_spool_or_memory_that_is_a_link_is_refused_and_nothing_is_deleted(tmp_path: Path) -> None:
    home, link = filled(tmp_path / "home"), tmp_path / "link"
    link.symlink_to(home)
    with pytest.raises(ConfigError, match="link is a symbolic link"):
        empty_spool(link)
    with pytest.raises(ConfigError, match="link is a symbolic link"):
        MemoryFolder(link).forget_all_but(set())
    assert untouched(home)


def test_only_own_files_are_deleted_and_of_links_the_links(tmp_path: Path) -> None:
    home = filled(tmp_path / "home")
    spool = filled(tmp_path / "spool")
    (spool / "bob.secure").symlink_to(home / "thesis.tex")
    (spool / "kept.safetensors").mkdir()
    empty_spool(spool)
    assert {path.name for path in spool.iterdir()} == {"thesis.tex", "kept.safetensors"}
    memory = filled(tmp_path / "memory")
    (memory / "bob-r2.safetensors").symlink_to(home / "thesis.tex")
    (memory / ".ann-r3.safetensors.x1_y2z3w").write_bytes(b"")  # left where writing was killed
    MemoryFolder(memory).forget_all_but({MemoryFolder(memory).write("cid", 4, ClientMemory())})
    assert {path.name for path in memory.iterdir()} == {"thesis.tex", "ann.safetensors", "cid-r4.safetensors"}
    assert untouched(home)


def test_a_reply_replaces_a_link_instead_of_following_it(tmp_path: Path) -> None:
    home = filled(tmp_path / "home")
    path = tmp_path / "ann.safetensors"
    path.symlink_to(home / "thesis.tex")
    for encoded in (b"one", b"two"):
        keep_reply(path, encoded)
        assert path.read_bytes() == encoded
    assert not path.is_symlink()
    assert untouched(home)


def test_a_log_that_is_a_link_is_not_written_through(tmp_path: Path) -> None:
    home = filled(tmp_path / "home")
    log = RoundLog(tmp_path / "rounds.jsonl")
    log.path.symlink_to(home / "thesis.tex")
    with pytest.raises(ConfigError, match=r"rounds\.jsonl is a symbolic link"):
        log.append({"round": 0})
    log.path.unlink()
    log.append({"round": 0})
    log.path.with_suffix(".partial").symlink_to(home / "thesis.tex")
    log.cut_after(0)
    assert log.read() == [{"round": 0}]
    assert untouched(home)
