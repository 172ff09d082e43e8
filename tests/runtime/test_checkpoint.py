"""Checkpoints and the log: whole or not there. (tests/conformance kills whole runs.)"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedloom.errors import ConfigError
from fedloom.files import write_atomic
from fedloom.runtime import checkpoint as module
from fedloom.runtime.checkpoint import Checkpoint, CheckpointFolder
from fedloom.runtime.events import RoundLog
from fedloom.types import State
from small_world import SPEC, same

STATE = State(0, {"router/0.bias": torch.arange(3.0)}, SPEC, {"assignment": {"ann": [0, 1]}})


def at(round: int) -> Checkpoint:
    return Checkpoint(replace(STATE, round=round), {"bob": f"bob-r{round}", "ann": "ann-r0"})


def test_a_checkpoint_comes_back(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, {"seed": 1, "lr": 0.1})
    folder.commit(at(3))
    found = CheckpointFolder(tmp_path, {"seed": 1, "lr": 0.1}).load(3)
    assert same(found.state.tensors, STATE.tensors)
    assert (found.state.round, found.state.spec, found.state.values) == (3, SPEC, STATE.values)
    assert found.memories == {"ann": "ann-r0", "bob": "bob-r3"}
    assert sorted(p.name for p in (tmp_path / "round-000003").iterdir()) == ["checkpoint.json", "state.safetensors"]


def test_another_configuration_cannot_resume_and_what_differs_is_named(tmp_path: Path) -> None:
    then = {"federation": {"rounds": 2, "wire": "none"}, "data": {"benchmark": None}, "rows": "a" * 64, "seed": 1}
    now = {"federation": {"rounds": 3, "wire": "none"}, "data": {"benchmark": {}}, "rows": "b" * 64, "seed": 1}
    CheckpointFolder(tmp_path, then).commit(at(1))
    with pytest.raises(ConfigError) as refused:
        CheckpointFolder(tmp_path, now).load(1)
    said = "another federation.rounds (2, now 3), data.benchmark (null, now {}), rows: resume with"
    assert said in str(refused.value)


def test_the_two_newest_are_kept(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, {})
    assert folder.rounds() == []
    for round in range(12):
        folder.commit(at(round))
    assert folder.rounds() == [10, 11]
    assert folder.memory_versions() == {"ann-r0", "bob-r10", "bob-r11"}
    for name in ("round-0000099", "round-99", "round-000099.old"):
        (tmp_path / name).mkdir()  # not ours
    assert folder.rounds() == [10, 11]


@pytest.mark.parametrize("step", ["state", "json", "rename"])
def test_a_failed_commit_leaves_the_old_ones_whole_and_the_next_one_cleans_up(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = CheckpointFolder(tmp_path, {})
    folder.commit(at(0))
    folder.commit(at(1))

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        owner, name = {"state": (module, "write_atomic"), "json": (module, "write_json"), "rename": (Path, "rename")}[
            step
        ]
        patch.setattr(owner, name, full)
        with pytest.raises(OSError, match="No space"):
            folder.commit(at(2))
    assert folder.rounds() == [0, 1]
    assert folder.load(1).memories == at(1).memories
    folder.commit(at(2))
    assert folder.rounds() == [1, 2]
    assert not list(tmp_path.glob(".partial-*"))


def test_what_older_checkpoints_hold_of_measures_at_the_end_does_not_count(tmp_path: Path) -> None:
    during = {"split": "test", "limit": None, "routing": ["top1"]}
    older = during | {"routing": ["top1", "soft"], "personalised": 50, "personalised_scores": False}
    CheckpointFolder(tmp_path, {"seed": 1, "evaluation": older}).commit(at(1))
    assert CheckpointFolder(tmp_path, {"seed": 1, "evaluation": during}).load(1).state.round == 1
    for other in ({"split": "validation"}, {"routing": ["soft"]}):
        with pytest.raises(ConfigError, match="another evaluation"):
            CheckpointFolder(tmp_path, {"seed": 1, "evaluation": during | other}).load(1)


def test_an_atomic_write_is_old_or_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "file"
    write_atomic(path, b"old")

    def broken(*args: object) -> None:
        raise KeyboardInterrupt

    for call in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, broken)
            with pytest.raises(KeyboardInterrupt):
                write_atomic(path, b"new")
        assert path.read_bytes() == b"old"
        assert [p.name for p in path.parent.iterdir()] == ["file"]
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o644


def test_the_log_is_cut_back_to_a_round(tmp_path: Path) -> None:
    log = RoundLog(tmp_path / "out" / "rounds.jsonl")
    assert log.read() == []
    for round in range(4):
        log.append({"round": round, "note": "line\nbreak"})
    log.cut_after(2)
    assert [r["round"] for r in log.read()] == [0, 1, 2]
    with open(log.path, "a") as file:
        file.write('{"round": 3, "no')
    assert [r["round"] for r in log.read()] == [0, 1, 2]
    log.cut_after(2)
    log.append({"round": 3})
    assert [json.loads(line)["round"] for line in log.path.read_text().splitlines()] == [0, 1, 2, 3]
    log.cut_after(-1)
    assert log.path.read_text() == ""


def test_a_log_of_odd_line_separators_is_read_line_by_line(tmp_path: Path) -> None:
    log = RoundLog(tmp_path / "rounds.jsonl")
    log.append({"round": 0, "quarantined": {"bob": "a\u2028b\x85c\x0b"}})
    assert log.read() == [{"round": 0, "quarantined": {"bob": "a\u2028b\x85c\x0b"}}]
