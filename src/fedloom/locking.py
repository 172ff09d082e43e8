"""One process at a time writes a folder; the system holds the lock, so it ends with the process, however that ends.

Where there are no such locks (Windows, some network file systems), nobody is kept out. A folder may come from others,
so what is written there does not go through links.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from fedloom.errors import ConfigError

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]


def no_link(path: str, flags: int) -> int:
    """Open a file as ``opener`` of ``open``, but not where a symbolic link leads.

    Raises:
        ConfigError: it is one.
    """
    refuse_link(Path(path))
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def refuse_link(path: Path) -> None:
    """Refuse a symbolic link where a file or folder of fedloom's is to be.

    Raises:
        ConfigError: it is one.
    """
    if path.is_symlink():
        raise ConfigError(
            f"{path} is a symbolic link, and what is written there would go elsewhere. Remove it, or give another "
            "folder."
        )


def remove_own(folder: Path, own: re.Pattern[str], but: Collection[str] = ()) -> None:
    """Delete what bears a name of ``own`` in a folder, and no other file; of a link, the link.

    Raises:
        ConfigError: the folder is a link to elsewhere.
    """
    refuse_link(folder)
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name not in but and own.fullmatch(path.name) and (path.is_file() or path.is_symlink()):
            path.unlink()


#: Folders below a run's that it writes and empties. The run's own may be a link: people keep runs on other disks.
WRITTEN = ("checkpoints", "checkpoints/memory", "checkpoints/spool", "models")


@contextmanager
def alone(folder: Path, what: str) -> Iterator[int]:
    """Make ``folder`` if need be and hold it.

    Args:
        folder: where the lock's file, ``.lock``, lies and stays; it says which process took the lock.
        what: what others are doing there when they hold it; it follows "another process (pid …)".

    Yields:
        The lock's file descriptor. A child that inherits it holds the lock as long as it lives, too.

    Raises:
        ConfigError: ``folder`` is a file, another process holds it, or the lock or a part of a run's folder is a link.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise ConfigError(f"--out {folder} is a file; give a folder.") from error
    for part in WRITTEN:
        refuse_link(folder / part)
    with open(folder / ".lock", "a+", encoding="utf-8", opener=no_link) as file:
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise ConfigError(f"another process (pid {file.read() or 'not yet known'}) {what}") from error
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield file.fileno()
