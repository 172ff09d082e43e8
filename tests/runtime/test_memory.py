"""A client's own memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedloom.errors import ConfigError
from fedloom.runtime.memory import ClientMemory, MemoryFolder, check_client_name
from small_world import same


@pytest.mark.parametrize(
    "name",
    ["", "../x", "..", ".", "a/b", "/etc/passwd", "a\\b", "a..b", ".hidden", "-x", "a b", "a\0", "ä", "a\n", "x" * 129],
)
def test_names_that_are_no_file_names_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be a client's name"):
        check_client_name(name)
    with pytest.raises(ConfigError):
        MemoryFolder(tmp_path / "memory").write(name, 0, ClientMemory())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["a", "client-03", "St.Mary_2", "x" * 128])
def test_names_that_are_taken(name: str) -> None:
    assert check_client_name(name) == name


def test_versions_stand_side_by_side_until_they_are_forgotten(tmp_path: Path) -> None:
    folder = MemoryFolder(tmp_path)
    first = ClientMemory({"m": torch.ones(2)}, {"buckets": [0, 1]})
    one = folder.write("ann", 0, first)
    two = folder.write("ann", 1, first.updated({"m": torch.zeros(1)}, {"note": "é"}))
    assert one != two
    assert same(folder.read(one).tensors, {"m": torch.ones(2)})
    assert same(folder.read(two).tensors, {"m": torch.zeros(1)})
    assert folder.read(two).values == {"buckets": [0, 1], "note": "é"}
    folder.forget_all_but({two})
    assert [p.name for p in tmp_path.iterdir()] == [two]


def test_no_version_is_an_empty_memory(tmp_path: Path) -> None:
    assert MemoryFolder(tmp_path).read(None) == ClientMemory()
    MemoryFolder(tmp_path / "absent").forget_all_but(set())


def test_updated_leaves_the_original_alone() -> None:
    memory = ClientMemory({"a": torch.ones(1)}, {"x": 1})
    memory.updated({"b": torch.ones(1)}, {"x": 2})
    assert memory.tensors.keys() == {"a"}
    assert memory.values == {"x": 1}
