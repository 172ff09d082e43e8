"""What the end of a run says, from numbers made by hand."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedloom.quickstart import explain


def said(top1: dict[str, Any], soft: dict[str, Any], tmp_path: Path) -> str:
    console = Console(file=io.StringIO(), width=100)
    routing = {"top1": {"loss": top1, "score": {}}, "soft": {"loss": soft, "score": {}}}
    (tmp_path / "model").mkdir()
    explain(console, tmp_path, {"routing": routing, "seconds": 90.0})
    return " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]


@pytest.mark.parametrize(("top1", "told"), [(1.5, True), (1.02, False)])
def test_an_unsure_router_is_named_with_its_task(top1: float, told: bool, tmp_path: Path) -> None:
    sure, empty = {"letters": 1.0, "sums": 1.0}, {"nothing": None}
    text = said({**sure, **empty, "sums": 2 * top1 - 1.0, "macro": top1}, {**sure, **empty, "macro": 1.0}, tmp_path)
    assert "Done in 1.5 minutes." in text
    assert ("One expert alone (top-1) has 50% more loss" in text) is told
    assert ("mostly on sums" in text) is told
