"""One process at a time writes a folder; the system holds the lock, so it ends with the process, however that ends.

Where there are no such locks (Windows, some network file systems), nobody is kept out.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedloom.errors import ConfigError

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]


@contextmanager
def alone(folder: Path, what: str) -> Iterator[int]:
    """Make ``folder`` if need be and hold it.

    Args:
        folder: where the lock's file, ``.lock``, lies and stays; it says which process took the lock.
        what: what others are doing there when they hold it; it follows "another process (pid …)".

    Yields:
        The lock's file descriptor. A child that inherits it holds the lock as long as it lives, too.

    Raises:
        ConfigError: ``folder`` is a file, or another process holds it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise ConfigError(f"--out {folder} is a file; give a folder.") from error
    with open(folder / ".lock", "a+", encoding="utf-8") as file:
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
