"""Cells run in processes of their own: one that fails costs itself, a finished one is never run again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from fedloom.bench.runner import Progress, Results, alone, run_cells
from fedloom.bench.suite import load_suite
from fedloom.cli import app
from fedloom.errors import ConfigError
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
    with pytest.raises(ConfigError, match="fedit_s1 from another configuration"):
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


def test_two_processes_cannot_run_cells_in_one_folder(suite: Path, tmp_path: Path) -> None:
    with alone(tmp_path), pytest.raises(ConfigError, match="another fedloom bench is running"):
        run_cells(load_suite(suite)[1], tmp_path)
