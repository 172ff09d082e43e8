"""The data folder, and files of rows."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def data_root() -> Path:
    root = Path(os.environ.get("FEDLOOM_DATA", Path(__file__).resolve().parents[2] / "../shared/data"))
    if not root.is_dir():
        pytest.skip(f"no data folder at {root}: set FEDLOOM_DATA")
    return root


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    def write(name: str, *rows: Any) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write
