"""What the end of a run says, from numbers made by hand."""

from __future__ import annotations

import io
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from fedloom.cli import app
from fedloom.quickstart import explain
from fedloom.terminal import TerminalObserver


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


ROUTED = {"targets": ["q_proj"], "experts": 2, "router_hidden": 4}


def write_model(out: Path, adapter: dict[str, Any]) -> None:
    (out / "model").mkdir(parents=True)
    (out / "model" / "fedloom.json").write_text(json.dumps({"adapter": adapter}))


def test_the_next_commands_work_as_they_are_printed(tmp_path: Path) -> None:
    out = tmp_path / "a run's folder [b] :smile:" / "of a name that no line of eighty columns can hold"
    write_model(out, ROUTED)
    console = Console(file=io.StringIO(), width=80)
    explain(console, out, {"seconds": 90.0})
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    generate, evaluate = (shlex.split(line) for line in lines if line.startswith("  fedloom"))
    question = "Sam has 3 boxes of 4 pens and gives 5 pens away. How many are left?"
    assert generate == ["fedloom", "generate", str(out / "model"), "--explain", "--prompt", question]
    assert evaluate == ["fedloom", "evaluate", str(out / "model"), "--task", "mine=FILE.jsonl"]
    assert f"  model   {out / 'model'}" in lines
    assert f"  report  {out / 'report.html'}  (open it in a browser)" in lines


@pytest.mark.parametrize(
    ("adapter", "routed"),
    [
        (ROUTED, True),
        ({"targets": [], "native": "full"}, False),  # the backbone weighs its experts for each token
        ({**ROUTED, "router_hidden": 0, "slots": [0, 1, 1], "slot_top": 2}, False),
        ({"targets": ["q_proj"]}, False),  # one LoRA
    ],
)
def test_routing_is_spoken_of_where_prompts_are_routed(adapter: dict[str, Any], routed: bool, tmp_path: Path) -> None:
    write_model(tmp_path, adapter)
    console = Console(file=io.StringIO(), width=200)
    measured = {"top1": {"loss": {"sums": 1.0, "macro": 1.0}, "score": {"sums": 0.5, "macro": 0.5}}}
    explain(console, tmp_path, {"routing": measured, "seconds": 90.0})
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert ("Test rows, top1 routing" in text) is routed
    assert "Test rows" in text
    assert "Score of sums: exact match" in text
    assert ("--explain" in text) is routed


@pytest.mark.parametrize("quiet", [[], ["--quiet"]])
def test_a_quiet_run_prints_its_results_and_its_models_place(
    quiet: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "c.yaml").write_text("data: {synthetic: {}}\n")
    metrics = {"routing": {"top1": {"loss": {"sums": 1.25, "macro": 1.25}}}, "seconds": 90.0}
    monkeypatch.setattr("fedloom.experiment.run", lambda *_, **__: metrics)
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["run", str(tmp_path / "c.yaml"), "--out", str(out), *quiet])
    assert done.exit_code == 0, done.output
    assert "1.250" in done.stdout
    assert ("Next:" in done.stdout) is not bool(quiet)
    if quiet:
        assert done.stdout.splitlines()[-1] == str(out / "model")


def test_a_notice_with_a_path_is_one_line() -> None:
    console = Console(file=io.StringIO(), width=80)
    notice = "The newest checkpoint is " + "x/" * 60 + " [b]"
    TerminalObserver(console).say(notice)
    assert console.file.getvalue() == notice + "\n"  # type: ignore[attr-defined]
