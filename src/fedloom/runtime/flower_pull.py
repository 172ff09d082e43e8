"""Looking for a reply in Flower's grid without being held up by a site that sends its head and keeps its body back.

Flower hands a reply out as soon as its head is there, once, and then waits in ``pull_messages`` for the body: for two
hours, where nothing bounds it.
"""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import Any

from fedloom.errors import ConfigError

#: How long a look for one reply may hold up the looks for others.
JOIN_SECONDS = 0.2
logger = logging.getLogger("flwr")


class Unreadable:
    """Stands for a reply that is no message; ``unpack`` refuses it."""

    content = None

    def has_error(self) -> bool:
        return False


class Pull:
    """One look for the reply to a message, in a thread of its own."""

    def __init__(self, grid: Any, message_id: str) -> None:
        self._grid, self._message_id = grid, message_id
        self._found: list[Any] = []
        self._failed: Exception | None = None
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def found(self) -> list[Any] | None:
        """Return what has come, which may be nothing; None while it is coming.

        Raises:
            Exception: what Flower raised, if its server cannot be reached, say.
        """
        self._thread.join(JOIN_SECONDS)
        if self._thread.is_alive():
            return None
        if self._failed is not None:
            raise self._failed
        return self._found

    def _look(self) -> None:
        from google.protobuf.message import DecodeError

        try:
            self._found = list(self._grid.pull_messages([self._message_id]))
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError, DecodeError) as error:
            # Flower unpacks the reply, and stumbles over what is no message.
            logger.error("fedloom: a reply cannot be unpacked: %s", type(error).__name__)
            self._found = [Unreadable()]
        except Exception as error:  # noqa: BLE001 (``found`` raises it)
            self._failed = error


def bound_pulls(seconds: float) -> None:
    """Let Flower wait for the body of a reply no longer than this.

    Raises:
        ConfigError: this Flower is another than the tested one.
    """
    from flwr.superlink.grid import http_grid

    found = getattr(http_grid, "pull_objects", None)
    if found is None:
        raise ConfigError("this Flower is not the tested 1.42: its grid has no pull_objects")
    setattr(http_grid, "pull_objects", partial(found, max_time=seconds))  # noqa: B010 (no attribute that a type knows)
