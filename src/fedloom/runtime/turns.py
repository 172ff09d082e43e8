"""One message of a site at a time, whatever a server sends: Flower starts a process for each as it comes.

Two answers at once could put one mask on two vectors, and many would fill the machine. Locks are the system's, so they
end with the process that holds them; where the system has none (Windows), messages are answered side by side.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from fedloom.errors import SiteRefusal

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]

#: Messages that may wait for their turn: a server that starts again asks anew while the answer to its last run is made.
WAITING = 4


@contextmanager
def in_turn(folder: Path, queue: str) -> Iterator[None]:
    """Wait until no other message of this queue is answered in ``folder``.

    Raises:
        SiteRefusal: ``WAITING`` others wait.
    """
    if fcntl is None:
        yield
        return
    locks = folder / ".turns"
    locks.mkdir(parents=True, exist_ok=True)
    with ExitStack() as open_files:
        for place in range(WAITING + 1):
            file = open_files.enter_context(open(locks / f"{queue}-{place}", "ab"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                continue
        else:
            raise SiteRefusal(f"{WAITING + 1} other messages are being answered; try again later")
        fcntl.flock(open_files.enter_context(open(locks / queue, "ab")), fcntl.LOCK_EX)
        yield
