"""A client's own memory between rounds. It never crosses the wire."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedloom.errors import ConfigError, DataError, UpdateRejected
from fedloom.files import write_atomic
from fedloom.locking import remove_own
from fedloom.runtime.wire import decode, encode
from fedloom.types import Plain, Tensors

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
#: Versions of memories, and what is left of one where writing was killed.
_OWN = re.compile(rf"\.?{_NAME.pattern}-r\d+\.safetensors(\.\w+)?")


def check_client_name(name: str) -> str:
    """Return ``name`` if it can be a file name everywhere; names come from outside.

    Raises:
        ConfigError: it is empty, too long, or holds path characters.
    """
    if not _NAME.fullmatch(name) or ".." in name:
        raise ConfigError(
            f"{name!r} cannot be a client's name: use letters, digits, '.', '_' and '-', and start with a letter or "
            "digit."
        )
    return name


@dataclass(frozen=True)
class ClientMemory:
    """Tensors and plain values that the client kept in earlier rounds."""

    tensors: Tensors = field(default_factory=dict)
    values: dict[str, Plain] = field(default_factory=dict)

    def updated(self, tensors: Tensors, values: dict[str, Plain]) -> ClientMemory:
        return ClientMemory({**self.tensors, **tensors}, {**self.values, **values})


class MemoryFolder:
    """Immutable, versioned memory files ``<client>-r<round>.safetensors``.

    A checkpoint names the version of every client's memory, so that state and memories are always of one round.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, version: str | None) -> ClientMemory:
        if version is None:
            return ClientMemory()
        path = self.folder / version
        try:
            return ClientMemory(*decode(path.read_bytes()))
        except (FileNotFoundError, UpdateRejected) as error:
            raise DataError(
                f"a client's memory, {path}, is missing or damaged: {error}. Remove the newest checkpoint and resume, "
                "or start the run anew with another --out."
            ) from error

    def write(self, client: str, round: int, memory: ClientMemory) -> str:
        version = f"{check_client_name(client)}-r{round}.safetensors"
        write_atomic(self.folder / version, encode(memory.tensors, memory.values))
        return version

    def forget_all_but(self, versions: set[str]) -> None:
        """Delete versions that no checkpoint names any more, and no other file.

        Raises:
            ConfigError: the folder is a link to elsewhere.
        """
        remove_own(self.folder, _OWN, versions)


class Memories(Mapping[str, ClientMemory]):
    """Client → memory, each read from disk when asked for."""

    def __init__(self, folder: MemoryFolder, versions: Mapping[str, str]) -> None:
        self.folder = folder
        self.versions = versions

    def __getitem__(self, client: str) -> ClientMemory:
        return self.folder.read(self.versions[client])

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self.versions))

    def __len__(self) -> int:
        return len(self.versions)
