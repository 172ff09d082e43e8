"""The smoke suite of the repository through the command line: every moving part of the benchmark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT.parent / "shared" / "data"


@pytest.mark.timeout(900)
@pytest.mark.skipif(not ROWS.is_dir(), reason="the suite's rows are not beside this checkout")
def test_every_cell_runs_with_equal_steps_and_all_outputs_are_written(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedloom.cli", "bench", str(ROOT / "experiments" / "smoke" / "suite.yaml")]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--out", str(tmp_path), "--jobs", "2"], capture_output=True, text=True, env=environment, timeout=800
    )
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    found = {(r["label"], r["alpha"], r["seed"]): r for r in records}
    assert len(found) == len(records) == 10
    for record in records:
        assert record["costs"]["steps"] == 4 * 2 * 2  # clients × rounds × steps, whatever the method
        assert record["global_model"] == bool(record["routing"])
    # FedIT and the experts of the others start from one backbone: the bare loss of a seed's test rows is the same.
    bare = {r["seed"]: set() for r in records}
    for r in records:
        if r["before"]:
            bare[r["seed"]].add(round(r["before"]["loss_backbone"]["macro"], 5))
    assert all(len(values) == 1 for values in bare.values())
    for name in ("table1", "table1_personalised", "table3", "table4", "table5", "costs"):
        assert (tmp_path / "tables" / f"{name}.md").is_file(), name
    for name in ("fig2_routing", "fig3_alpha", "fig4_routing_cost", "table1_loss", "loss_curves"):
        assert (tmp_path / "figures" / f"{name}.svg").is_file(), name
    page = (tmp_path / "report.html").read_text()
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "Smoke test of the benchmark" in page
