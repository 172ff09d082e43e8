"""The ServerApp of a machine that dies: each process ends itself with SIGKILL at the next of ``MOMENTS``.

The moments that have come are the lines of the file ``deaths`` beside the server's configuration.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import NoReturn

import pytest
from doomed_server_moments import MOMENTS

from fatal_moments import arm
from fedloom import flower_app

deaths = Path(os.environ[flower_app.SERVER_CONFIG]).with_name("deaths")


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise SystemExit  # is not reached


def doom() -> None:
    """Arm the next moment, if one is left; it is written down just before the process dies at it."""
    past = deaths.read_text().splitlines() if deaths.is_file() else []
    for name in [name for name in MOMENTS if name not in past][:1]:

        def here(name: str = name) -> NoReturn:
            with open(deaths, "a") as file:
                file.write(f"{name}\n")
            die()

        arm(pytest.MonkeyPatch(), MOMENTS[name], here)


doom()
app = flower_app.server_app()
