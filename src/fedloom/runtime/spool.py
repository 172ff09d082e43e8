"""Where replies wait in a run's folder. That folder may come from others: only files of this kind are ever deleted."""

from __future__ import annotations

import re
from pathlib import Path

from fedloom.locking import refuse_link

_OWN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\.(safetensors|secure)")


def empty_spool(spool: Path) -> None:
    """Make the folder if need be, and delete the replies that an earlier round left there.

    Raises:
        ConfigError: it is a link.
    """
    refuse_link(spool)
    spool.mkdir(parents=True, exist_ok=True)
    for left_over in spool.iterdir():
        if _OWN.fullmatch(left_over.name) and (left_over.is_file() or left_over.is_symlink()):
            left_over.unlink()  # of a link, this is the link


def keep_reply(path: Path, encoded: bytes) -> None:
    """Write an encoded reply to a new file, in place of an older one, never through a link."""
    path.unlink(missing_ok=True)
    with open(path, "xb") as file:
        file.write(encoded)
