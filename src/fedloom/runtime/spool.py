"""Where replies wait in a run's folder. That folder may come from others: only files of this kind are ever deleted."""

from __future__ import annotations

import re
from pathlib import Path

from fedloom.locking import remove_own

_OWN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\.(safetensors|secure)")


def empty_spool(spool: Path) -> None:
    """Make the folder if need be, and delete the replies that an earlier round left there.

    Raises:
        ConfigError: it is a link.
    """
    remove_own(spool, _OWN)
    spool.mkdir(parents=True, exist_ok=True)


def keep_reply(path: Path, encoded: bytes) -> None:
    """Write an encoded reply to a new file, in place of an older one, never through a link."""
    path.unlink(missing_ok=True)
    with open(path, "xb") as file:
        file.write(encoded)
