"""Files of a run that a disk, a copy or a person has damaged: a message that names the file, never a traceback."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fedloom.errors import DataError
from fedloom.methods.base import Method
from fedloom.runtime.checkpoint import CheckpointFolder
from fedloom.runtime.events import RoundLog
from fedloom.runtime.memory import ClientMemory, MemoryFolder
from fedloom.runtime.wire import encode
from small_world import World, outcome

Spoil = Callable[[Path], object]


def cut(share: float) -> Spoil:
    return lambda path: path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])


def text(content: str) -> Spoil:
    return lambda path: path.write_text(content, encoding="utf-8")


NOT_JSON: dict[str, Spoil] = {
    "gone": Path.unlink,
    "empty": text(""),
    "truncated": cut(0.5),
    "not UTF-8": lambda path: path.write_bytes(b'{"identity": "\xff"}'),
    "very deep": text("[" * 100_000),
    "a list": text("[1]"),
    "null": text("null"),
    "a number of 5000 digits": text("9" * 5000),
}
DESCRIPTIONS = NOT_JSON | {
    "no memories": text('{"identity": {}}'),
    "identity in a list": text('{"identity": [], "memories": {}}'),
    "memories in a list": text('{"identity": {}, "memories": ["ann-r0"]}'),
    "a number for a memory": text('{"identity": {}, "memories": {"ann": 7}}'),
}
STATES: dict[str, Spoil] = {
    "gone": Path.unlink,
    "empty": text(""),
    "truncated header": cut(0.1),
    "truncated tensors": cut(0.9),
    "text": text("<html>502 Bad Gateway</html>"),
    "no header of ours": lambda path: path.write_bytes(encode({}, {})),
    "values in a list": lambda path: path.write_bytes(
        encode({}, {"round": 2, "spec": {"targets": ["q_proj"]}, "values": []})
    ),
    "an unknown field": lambda path: path.write_bytes(
        encode({}, {"round": 2, "spec": {"targets": ["q_proj"], "colour": 1}, "values": {}})
    ),
    "targets that are a number": lambda path: path.write_bytes(
        encode({}, {"round": 2, "spec": {"targets": 5}, "values": {}})
    ),
    "a spec in a list": lambda path: path.write_bytes(encode({}, {"round": 2, "spec": [1], "values": {}})),
    "another round": lambda path: path.write_bytes(
        encode({}, {"round": 1, "spec": {"targets": ["q_proj"]}, "values": {}})
    ),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished")
    World(out).run(Method(), rounds=2)
    return out


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    """A copy of a run of two rounds."""
    for name, content in ((p.relative_to(finished), p.read_bytes()) for p in finished.rglob("*") if p.is_file()):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "fault"),
    [("checkpoint.json", f) for f in DESCRIPTIONS] + [("state.safetensors", f) for f in STATES],
)
def test_a_damaged_checkpoint_is_named_and_the_run_goes_on_as_the_message_says(
    name: str, fault: str, finished: Path, out: Path
) -> None:
    folder = out / "checkpoints" / "round-000002"
    (DESCRIPTIONS if name == "checkpoint.json" else STATES)[fault](folder / name)
    with pytest.raises(DataError, match=rf"round-000002/{name} is missing or damaged: .*Remove the folder .*--resume"):
        World(out).run(Method(), rounds=2)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    World(out).run(Method(), rounds=2)
    assert outcome(out) == outcome(finished)


def test_all_memories_that_a_damaged_checkpoint_may_name_are_kept(out: Path) -> None:
    text("{}")(out / "checkpoints" / "round-000001" / "checkpoint.json")
    with pytest.raises(DataError, match=r"round-000001/checkpoint\.json"):
        CheckpointFolder(out / "checkpoints", {}).memory_versions()


@pytest.mark.parametrize("spoil", [Path.unlink, cut(0.5), text("")])
def test_a_damaged_memory_is_named(spoil: Spoil, tmp_path: Path) -> None:
    folder = MemoryFolder(tmp_path)
    version = folder.write("ann", 3, ClientMemory({"m": torch.ones(2)}, {"buckets": [0, 1]}))
    spoil(tmp_path / version)
    with pytest.raises(DataError, match=r"ann-r3\.safetensors, is missing or damaged: .*another --out"):
        folder.read(version)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2 is not JSON"),
        ("", "line 2 is not JSON"),
        ("[" * 100_000, "line 2 is not JSON"),
        ("\udcff", "line 2 is not JSON"),
        ("5", "line 2 is not the record"),
        ("[]", "line 2 is not the record"),
        ('{"round": "1"}', "line 2 is not the record"),
        ('{"round": true}', "line 2 is not the record"),
        ('{"round": 1, "clients": 5}', "line 2 is not the record"),
        ('{"round": 1, "clients": {"ann": 5}}', "line 2 is not the record"),
        ('{"round": 1, "evaluation": []}', "line 2 is not the record"),
        ('{"loss": 1}', "line 2 is not the record"),
        ('{"round": 7}', "does not hold the rounds 0 to 2"),
        ('{"round": 0}', "does not hold the rounds 0 to 2"),
        (None, "does not hold the rounds 0 to 2"),
    ],
)
def test_a_damaged_log_is_named(line: str | None, says: str, out: Path) -> None:
    lines = (out / "rounds.jsonl").read_text().splitlines()
    lines[1:2] = [] if line is None else [line]
    (out / "rounds.jsonl").write_text("\n".join(lines) + "\n", errors="surrogateescape")
    before = (out / "rounds.jsonl").read_bytes()
    with pytest.raises(DataError, match=rf"rounds\.jsonl is damaged: .*{says}.*another --out"):
        World(out).run(Method(), rounds=3)
    assert (out / "rounds.jsonl").read_bytes() == before


def test_a_log_that_is_gone_is_not_begun_in_the_middle(out: Path) -> None:
    (out / "rounds.jsonl").unlink()
    with pytest.raises(DataError, match="does not hold the rounds 0 to 2"):
        World(out).run(Method(), rounds=3)


def test_a_half_written_last_line_is_no_damage(out: Path) -> None:
    with open(out / "rounds.jsonl", "a") as file:
        file.write('{"round": 3, "cli')
    World(out).run(Method(), rounds=3)
    assert [json.loads(line)["round"] for line in (out / "rounds.jsonl").read_text().splitlines()] == [0, 1, 2, 3]
    assert len(RoundLog(out / "rounds.jsonl").read()) == 4
