"""A round's checkpoint: the server's state and the version of every client's memory, committed by one rename.

No generator state is stored because there is none: every random draw comes from a generator that is derived from
(seed, purpose, client, round) when it is needed.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from fedloom.errors import ConfigError, DataError, UpdateRejected
from fedloom.files import sync_folder, write_atomic, write_json
from fedloom.runtime.wire import decode_state, encode_state
from fedloom.types import Plain, State

KEEP = 2


@dataclass(frozen=True)
class Checkpoint:
    """What a run needs to go on after ``state.round`` rounds."""

    state: State
    memories: dict[str, str]  # client → version in the memory folder
    joined: tuple[str, ...] = ()  # clients that take part beside those of the first start, in name order


class CheckpointFolder:
    """``round-000003/`` holds ``state.safetensors`` and ``checkpoint.json``; under its final name it is complete."""

    def __init__(self, folder: Path, identity: dict[str, Plain]) -> None:
        self.folder = folder
        self.identity = identity

    def rounds(self) -> list[int]:
        """Return the rounds that have a checkpoint, in order."""
        if not self.folder.is_dir():
            return []
        names = [path.name for path in self.folder.iterdir() if path.is_dir()]
        return sorted(int(n[6:]) for n in names if re.fullmatch(r"round-(\d{6}|[1-9]\d{6,})", n))

    def path(self, round: int) -> Path:
        return self.folder / f"round-{round:06d}"

    def commit(self, checkpoint: Checkpoint) -> None:
        """Write the checkpoint; a kill at any moment leaves the old ones whole."""
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=self.folder, prefix=".partial-"))
        write_atomic(partial / "state.safetensors", encode_state(checkpoint.state))
        memories = dict(sorted(checkpoint.memories.items()))  # not in the order in which clients answered
        about: dict[str, Plain] = {"identity": self.identity, "memories": memories}
        if checkpoint.joined:
            about["joined"] = list(checkpoint.joined)
        write_json(partial / "checkpoint.json", about)
        partial.rename(self.path(checkpoint.state.round))
        sync_folder(self.folder)
        for old in self.rounds()[:-KEEP]:
            shutil.rmtree(self.path(old))
        for left_over in self.folder.glob(".partial-*"):
            shutil.rmtree(left_over)

    def memory_versions(self) -> set[str]:
        """Return the memory versions that any checkpoint names."""
        return {version for round in self.rounds() for version in self._description(round)["memories"].values()}

    def state(self, round: int) -> State:
        """Load the server's state of a checkpoint, of whatever configuration.

        Raises:
            DataError: its file is missing or damaged.
        """
        path = self.path(round) / "state.safetensors"
        try:
            state = decode_state(path.read_bytes())
        except (FileNotFoundError, UpdateRejected, KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._damaged(path, f"it lacks {error}" if isinstance(error, KeyError) else error) from error
        if state.round != round or not isinstance(state.values, dict):
            raise self._damaged(path, f"it is not a state of round {round}")
        return state

    def load(self, round: int) -> Checkpoint:
        """Load a checkpoint.

        Raises:
            ConfigError: it was written by a run with another configuration.
            DataError: a file of it is missing or damaged.
        """
        found = self._description(round)
        then = found["identity"] | _measured_during(found["identity"])
        if then != self.identity:
            raise ConfigError(
                f"{self.folder} was written with another {', '.join(_differences(then, self.identity))}: resume with "
                "the configuration that started the run, or give another --out."
            )
        return Checkpoint(self.state(round), found["memories"], tuple(found.get("joined", ())))

    def _description(self, round: int) -> dict[str, Plain]:
        """Return the content of ``checkpoint.json``: ``identity``, ``memories`` and, if anybody has, who ``joined``."""
        path = self.path(round) / "checkpoint.json"
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError, RecursionError) as error:
            raise self._damaged(path, error) from error
        sections = [found.get(key) for key in ("identity", "memories")] if isinstance(found, dict) else []
        if not sections or not all(isinstance(section, dict) for section in sections):
            raise self._damaged(path, "it holds no identity or no memories")
        if not all(isinstance(version, str) for version in found["memories"].values()):
            raise self._damaged(path, "a version of a memory is not text")
        joined = found.get("joined", [])
        if not isinstance(joined, list) or not all(isinstance(client, str) for client in joined):
            raise self._damaged(path, "'joined' is not a list of clients")
        return found

    def _damaged(self, path: Path, why: object) -> DataError:
        return DataError(
            f"{path} is missing or damaged: {why}. Remove the folder {path.parent}: --resume then goes on from another "
            "checkpoint, or from the start if there is none."
        )


def _differences(then: Plain, now: Plain, key: str = "") -> list[str]:
    """Return each dotted key whose values differ, with both; of hashes, which say nothing to a person, only the key."""
    if isinstance(then, dict) and isinstance(now, dict):
        inner = {k: f"{key}.{k}" if key else k for k in then | now}
        return [said for k, path in inner.items() for said in _differences(then.get(k), now.get(k), path)]
    if then == now:
        return []
    if all(isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) for value in (then, now)):
        return [key]
    was, is_now = (json.dumps(value, ensure_ascii=False) for value in (then, now))
    return [f"{key} ({was}, now {is_now})"]


def _measured_during(identity: dict[str, Plain]) -> dict[str, Plain]:
    """Return the section ``evaluation`` as it is kept now: older checkpoints hold what is measured at the end, too."""
    section = identity.get("evaluation")
    if not isinstance(section, dict) or "personalised" not in section:
        return {}
    return {"evaluation": {key: section.get(key) for key in ("split", "limit")} | {"routing": section["routing"][:1]}}
