"""Cells run in processes of their own: one that fails costs itself, a finished one is never run again."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from fedloom.bench.runner import Progress, Results, run_cells
from fedloom.bench.suite import load_suite
from fedloom.cli import app
from fedloom.config import parse_config
from fedloom.errors import ConfigError
from fedloom.experiment import run
from fedloom.locking import alone
from small_world import client_rows, save_backbone


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three cells of one round on four small clients; the third names a file that does not exist."""
    folder = tmp_path_factory.mktemp("suite")
    save_backbone(folder / "backbone")
    for name, found in client_rows().items():
        rows = [{"prompt": e.prompt, "response": e.response} for e in found]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    clients = {name: f"{name}.jsonl" for name in client_rows()}
    plain: dict[str, Any] = {
        "name": "small",
        "title": "Small & <quick>",
        "base": {
            "backbone": {"name": str(folder / "backbone"), "threads": 1},
            "data": {"clients": clients, "test": {"mine": "ann.jsonl"}},
            "adapter": {"rank": 2},
            "federation": {"rounds": 1},
            "training": {"steps": 1, "batch_size": 2},
            "evaluation": {"generate": False, "routing": ["top1"]},
        },
        "methods": {
            "fedit": {"method": {"name": "fedit"}},
            "local": {"method": {"name": "local"}},
            "broken": {"title": "Broken", "method": {"name": "fedit"}, "data": {"test": {"mine": "nowhere.jsonl"}}},
        },
        "grid": [{"methods": ["fedit", "broken", "local"], "seeds": [1]}],
    }
    path = folder / "suite.yaml"
    path.write_text(yaml.safe_dump(plain))
    return path


@pytest.fixture(scope="module")
def finished(suite: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Progress]]:
    out = tmp_path_factory.mktemp("out")
    return out, run_cells(load_suite(suite)[1], out, jobs=2, command="fedloom bench small")


def test_one_that_fails_costs_itself(finished: tuple[Path, list[Progress]]) -> None:
    out, board = finished
    assert [(p.cell.label, p.state) for p in board] == [("fedit", "done"), ("broken", "failed"), ("local", "done")]
    assert "nowhere.jsonl" in board[1].why
    assert "Traceback" not in board[1].why
    assert Results(out).read().keys() == {"fedit_s1", "local_s1"}


def test_a_record_says_what_was_run_and_what_came_out(finished: tuple[Path, list[Progress]]) -> None:
    out, _ = finished
    record = Results(out).read()["fedit_s1"]
    metrics = json.loads((out / "cells" / "fedit_s1" / "metrics.json").read_text())
    rounds = [json.loads(line) for line in (out / "cells" / "fedit_s1" / "rounds.jsonl").read_text().splitlines()]
    assert record["routing"]["top1"]["loss"] == metrics["routing"]["top1"]["loss"]
    assert "each_loss" not in record["routing"]["top1"]
    examples = json.loads((out / "examples" / "fedit_s1.json").read_text())
    sums = examples["top1"]["each_loss"]["mine"]
    mean = sum(total for total, _ in sums) / sum(tokens for _, tokens in sums)
    assert mean == pytest.approx(record["routing"]["top1"]["loss"]["mine"], abs=1e-5)
    clients = rounds[1]["clients"].values()
    assert record["costs"]["bytes_up"] == sum(c["bytes_up"] for c in clients) / 4
    assert record["costs"]["steps"] == 4
    assert record["curve"] == [[r["round"], r["evaluation"]["loss"]["macro"]] for r in rounds]
    assert record["command"] == "fedloom bench small"
    assert str(out) not in json.dumps(record)
    local = Results(out).read()["local_s1"]
    assert (local["routing"], local["global_model"], local["personal"]) == ({}, False, True)
    manifest = json.loads((out / "cells" / "fedit_s1" / "manifest.json").read_text())
    assert record["source_hashes"] == manifest["source_hashes"] == [record["source_hash"]]
    assert len({record["rows"], record["test_rows"]}) == 2
    assert (local["rows"], local["test_rows"]) == (record["rows"], record["test_rows"])
    assert (record["config"]["training"]["steps"], record["config"]["training"]["clip"]) == (1, 1.0)


def test_a_finished_cell_is_never_run_again(suite: Path, finished: tuple[Path, list[Progress]]) -> None:
    out, _ = finished
    before = (out / "results.jsonl").read_bytes()
    manifest = (out / "cells" / "fedit_s1" / "manifest.json").stat().st_mtime_ns
    cells = [cell for cell in load_suite(suite)[1] if cell.label != "broken"]
    board = run_cells(cells, out)
    assert [p.state for p in board] == ["done", "done"]
    assert (out / "results.jsonl").read_bytes() == before
    assert (out / "cells" / "fedit_s1" / "manifest.json").stat().st_mtime_ns == manifest


def test_another_configuration_for_a_finished_cell_is_refused(
    suite: Path, finished: tuple[Path, list[Progress]]
) -> None:
    out, _ = finished
    plain = yaml.safe_load(suite.read_text())
    plain["base"]["training"]["steps"] = 2
    other = suite.with_name("other.yaml")
    other.write_text(yaml.safe_dump(plain))
    with pytest.raises(ConfigError, match=r"fedit_s1 is from another configuration.*training\.steps was 1, is 2"):
        run_cells(load_suite(other)[1], out)


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text('{"cell": "a"}\n{"cell": \n')
    with pytest.raises(ConfigError, match=r"results\.jsonl, line 2 is damaged"):
        Results(tmp_path).read()


def test_the_command_writes_tables_and_a_report(suite: Path, finished: tuple[Path, list[Progress]]) -> None:
    """On finished cells nothing is run; without --resume the folder is left alone."""
    out, _ = finished
    arguments = ["bench", str(suite), "--out", str(out), "--only", "fedit", "--only", "local"]
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code == 1
    done = CliRunner().invoke(app, [*arguments, "--resume"])
    assert done.exit_code == 0, done.output
    assert "2 of 2 cells are done" in done.output
    assert (out / "tables" / "table1.md").is_file()
    assert (out / "tables" / "table1.csv").is_file()
    assert "<quick>" not in (out / "report.html").read_text()
    nothing = CliRunner().invoke(app, ["bench", str(suite), "--out", str(out), "--resume", "--only", "zzz"])
    assert nothing.exit_code == 1
    assert "Known: broken_s1, fedit_s1, local_s1. --dry-run lists all." in nothing.stderr


@pytest.mark.parametrize("quiet", [[], ["--quiet"]])
def test_where_every_cell_fails_the_reason_and_the_log_are_named(
    quiet: list[str], suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(cells: Any, out: Path, *, chosen: Any, **more: Any) -> list[Progress]:
        return [Progress(cell, "failed", why="Error: no nowhere.jsonl") for cell in chosen]

    monkeypatch.setattr("fedloom.bench.command.run_cells", fail)
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["bench", str(suite), "--out", str(out), "--only", "broken", *quiet])
    assert done.exit_code == 1
    assert "broken_s1 failed: Error: no nowhere.jsonl" in done.stderr
    assert f"Its log is {out / 'cells' / 'broken_s1'}.log." in done.stderr
    assert "cannot read" not in done.output
    assert done.stdout == ("" if quiet else "0 of 1 cells are done; 0 files written.\n")


def test_a_dry_run_misses_a_file_that_is_not_there(suite: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["bench", str(suite), "--out", str(tmp_path / "out"), "--dry-run"])
    assert done.exit_code == 1
    assert f"broken_s1: {suite.parent / 'nowhere.jsonl'}: no such file" in done.stderr


def test_a_dry_run_names_the_cells(suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedloom.bench.command.dry_table", lambda cells: "")
    arguments = ["bench", str(suite), "--out", str(tmp_path / "out"), "--dry-run", "--only", "fedit", "--only", "local"]
    assert "Cells: fedit_s1, local_s1." in CliRunner().invoke(app, arguments).stdout


@pytest.mark.parametrize("change", ["other", "gone"])
def test_results_of_another_suite_are_refused_whatever_is_to_run(
    change: str, suite: Path, finished: tuple[Path, list[Progress]], tmp_path: Path
) -> None:
    """Tables are of all lines of the file, so --only does not help; the suite beside them stays the old one."""
    shutil.copy(finished[0] / "results.jsonl", tmp_path)
    (tmp_path / "suite.yaml").write_text("as it was")
    plain = yaml.safe_load(suite.read_text())
    if change == "other":
        plain["methods"]["local"]["training"] = {"lr": 0.5}
        said = "local_s1 is from another configuration than the suite has now: training.lr was 0.0001, is 0.5"
    else:
        plain["grid"] = [{"methods": ["fedit"], "seeds": [1]}]
        said = "local_s1 is no cell of the suite"
    other = suite.with_name(f"{change}-suite.yaml")
    other.write_text(yaml.safe_dump(plain))
    found = CliRunner().invoke(app, ["bench", str(other), "--out", str(tmp_path), "--only", "fedit", "--resume"])
    assert found.exit_code == 1
    words = " ".join(found.output.split())
    assert said in words
    assert "fedit_s1" not in words
    assert "Give another --out" in words
    assert (tmp_path / "suite.yaml").read_text() == "as it was"
    assert not (tmp_path / "tables").exists()


def test_two_processes_cannot_run_cells_in_one_folder(suite: Path, tmp_path: Path) -> None:
    with (
        alone(tmp_path, ""),
        pytest.raises(ConfigError, match=rf"another process \(pid {os.getpid()}\) runs the cells"),
    ):
        run_cells(load_suite(suite)[1], tmp_path)


def wait_for(found: Callable[[], Any]) -> Any:
    """Return what ``found`` returns as soon as that is something."""
    for _ in range(1000):
        if value := found():
            return value
        time.sleep(0.01)
    raise AssertionError("it did not come about in 10 seconds")


def alive(pid: int) -> bool:
    """Return whether a process runs; one that nobody has waited for yet does not."""
    shown = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(shown.strip()) and not shown.startswith("Z")


class Bench:
    """A process that runs a cell which only sleeps."""

    def __init__(self, suite: Path, folder: Path) -> None:
        self.out, self.said = folder / "out", folder / "pid"
        self.stub = folder / "sleeps"
        self.stub.write_text(f"#!/bin/sh\necho $$ > {self.said}\nexec sleep 60\n")
        self.stub.chmod(0o755)
        self.cells = load_suite(suite)[1][:1]
        self.process = multiprocessing.get_context("fork").Process(target=self.run)
        self.process.start()
        self.cell = int(wait_for(lambda: self.said.is_file() and self.said.read_text().strip()))

    def run(self) -> None:
        sys.executable = str(self.stub)
        try:
            run_cells(self.cells, self.out)
        except KeyboardInterrupt:
            os._exit(3)

    def end(self, number: signal.Signals) -> int | None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
        self.process.join(10)
        return self.process.exitcode


def test_a_bench_that_is_told_to_end_ends_its_cells(suite: Path, tmp_path: Path) -> None:
    bench = Bench(suite, tmp_path)
    assert bench.end(signal.SIGTERM) == 3
    assert not alive(bench.cell)
    with alone(bench.out, "holds it"):
        pass
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_cells_that_outlive_their_bench_keep_the_folder(suite: Path, tmp_path: Path) -> None:
    """Else a second bench would start a second process for the same cell."""
    bench = Bench(suite, tmp_path)
    assert bench.end(signal.SIGKILL) == -signal.SIGKILL
    try:
        assert alive(bench.cell)
        with pytest.raises(ConfigError, match="or did so and left some running"):
            run_cells(bench.cells, bench.out)
    finally:
        os.kill(bench.cell, signal.SIGKILL)
    wait_for(lambda: not alive(bench.cell))
    with alone(bench.out, "holds it"):
        pass


def test_two_processes_cannot_write_one_run(tmp_path: Path) -> None:
    """The other holds the folder before it has written anything, and leaves it free however it ends."""
    out = tmp_path / "out"

    def hold() -> None:
        with alone(out, ""):
            (tmp_path / "held").touch()
            time.sleep(60)

    other = multiprocessing.get_context("fork").Process(target=hold)
    other.start()
    try:
        wait_for((tmp_path / "held").exists)
        config = parse_config({"data": {"synthetic": {}}, "backbone": {"name": "no such"}})
        with pytest.raises(ConfigError, match=rf"another process \(pid {other.pid}\) is writing this run"):
            run(config, out, resume=True)
    finally:
        other.kill()
        other.join()
    with alone(out, "holds it"):
        assert (out / ".lock").read_text() == str(os.getpid())
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file is a file; give a folder"):
        run(config, tmp_path / "file")
