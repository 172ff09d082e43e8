"""Who trains which expert of a model that comes with experts of its own: only what the run's files tell."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from typer.testing import CliRunner

from fedloom.cli import app
from fedloom.report.status import expert_lines, read_status
from fedloom.runtime.checkpoint import Checkpoint, CheckpointFolder
from fedloom.types import AdapterSpec, State

LAYER = "experts/decoder.block.1.layer.2.mlp"


def run_folder(out: Path, weights: dict[str, int], native: str = "full", **record: object) -> Path:
    """A run of one round between north (24 rows) and south (16); its model has twelve experts in one layer."""
    out.mkdir()
    (out / "config.yaml").write_text("method: {name: fcmoe}\nfederation: {rounds: 1}\n")
    site = {"bytes_up": 1, "bytes_down": 1, "seconds": 0.1}
    clients = {"north": {"examples": 24, **site}, "south": {"examples": 16, **site}}
    line = {"round": 1, "clients": clients, "quarantined": {}, "absent": [], "weights": weights, **record}
    (out / "rounds.jsonl").write_text(json.dumps(line) + "\n")
    tensors = {f"{LAYER}.{e}/wi.weight": torch.zeros(1, 1) for e in range(12)} if native else {}
    state = State(round=1, tensors=tensors, spec=AdapterSpec(("q_proj",), rank=1, native=native))
    CheckpointFolder(out / "checkpoints", {}).commit(Checkpoint(state, {}))
    return out


def test_sites_are_named_only_where_the_log_names_them(tmp_path: Path) -> None:
    weights = {"examples": 40} | {f"{LAYER}.{e}": 40 for e in (10, 0, 1, 2, 3, 5, 6)}
    weights |= {f"{LAYER}.8": 24, f"{LAYER}.11": 16}
    out = run_folder(tmp_path / "a", weights, shares={f"{LAYER}.8": {"north": 24}})
    assert expert_lines(read_status(out)) == [
        "decoder.block.1.layer.2.mlp: experts 0–3, 5, 6, 10 of 12: north (24), south (16)",
        "decoder.block.1.layer.2.mlp: experts 4, 7, 9 of 12: nobody",
        "decoder.block.1.layer.2.mlp: expert 8 of 12: north (24)",
        # Written before shares were logged.
        "decoder.block.1.layer.2.mlp: expert 11 of 12: sites that the log does not name (16)",
    ]
    plain = json.loads(CliRunner().invoke(app, ["status", str(out), "--json"]).output)
    assert list(plain["experts"])[:3] == [f"{LAYER}.0", f"{LAYER}.1", f"{LAYER}.2"]
    assert f"{LAYER}.11" not in plain["experts"]
    assert plain["unnamed"] == {f"{LAYER}.11": 16}


def test_lora_experts_have_a_line_each_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    weights = {"examples": 40, "experts/10": 40, "experts/2": 16, "router": 40}
    out = run_folder(tmp_path / "b", weights, native="", shares={"experts/2": {"south": 16}})
    said = CliRunner().invoke(app, ["status", str(out)], env={"COLUMNS": "80"}).output.splitlines()
    assert said[-2:] == ["experts/2: south (16)", "experts/10: north (24), south (16)"]


def test_sums_alone_name_nobody(tmp_path: Path) -> None:
    """With secure aggregation the server knows no client's examples, nor their sum."""
    out = run_folder(tmp_path / "c", {"experts/0": 40}, native="", shares={})
    assert expert_lines(read_status(out)) == ["experts/0: sites that the log does not name (40)"]
