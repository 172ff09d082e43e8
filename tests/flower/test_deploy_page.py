"""``docs/deploy.md`` as a site engineer follows it: every command that it shows, in its order, in real processes."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is an option of its own")

import yaml
from flower_processes import PATIENCE, Processes, free_port, result_of, write_rows

from fedloom.config import parse_config
from fedloom.experiment import run
from small_world import save_backbone

pytestmark = pytest.mark.timeout(2 * PATIENCE)

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "deploy.md").read_text(encoding="utf-8")
SITES = {"hospital": "ann", "bank": "bob"}
SECTIONS: dict[str, Any] = {
    "method": {"name": "fedit"},
    "adapter": {"rank": 2, "alpha": 6.0, "dropout": 0.05},
    "federation": {"rounds": 2, "min_replies": 2},
    "training": {"steps": 3, "batch_size": 2, "lr": 0.01},
    "evaluation": {"generate": False},
}


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    more = {"PATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "FLWR_TELEMETRY_ENABLED": "0"}
    with Processes(tmp_path, {**os.environ, **more}) as found:
        yield found


def test_the_page_leads_from_nothing_to_a_model_that_is_bitwise_the_simulators(
    processes: Processes, tmp_path: Path
) -> None:
    backbone = save_backbone(tmp_path / "backbone")
    port = free_port()
    blocks = re.findall(r"```sh\n(.*?)```", PAGE, flags=re.DOTALL)
    commands = [line for block in blocks for line in block.splitlines()]
    assert len(commands) == 9, commands
    for command in commands:
        line = command.replace("smollm2-135m", str(backbone)).replace("server.example.org", "localhost")
        line = line.replace("localhost:8000", f"localhost:{port}")
        if command.startswith("fedloom flower init"):
            line += f" --port {port}"
        if command.startswith("fedloom flower server"):
            configure(tmp_path, backbone)
            processes.start("server", line.split())
            processes.wait_for(lambda: "Uvicorn running" in processes.log("server"), "the server")
        elif command.startswith("fedloom flower node"):
            for name in SITES:
                own = f"{line.replace('hospital', name)} --port {free_port()}"
                processes.start(name, own.split(), cwd=tmp_path / name)
            for name in SITES:
                processes.wait_for(lambda name=name: "SuperNode ID" in processes.log(name), f"the node of {name}")
        else:
            at_a_site = command.startswith("fedloom check")
            said = processes.call(line, cwd=tmp_path / "hospital" if at_a_site else tmp_path)
            if command.startswith("fedloom status"):
                assert "fedit · round 2 of 2 · finished" in said
                assert re.search(r"hospital +\d+ (s|min) ago +8 +2 +0 +0 ", said), said
    assert "fedloom_round 2\n" in (tmp_path / "sites" / "run" / "metrics.prom").read_text()
    rows = {name: str(tmp_path / name / "rows.jsonl") for name in SITES}
    backbone_section = {"name": str(backbone), "threads": 1}
    run(parse_config({**SECTIONS, "backbone": backbone_section, "data": {"clients": rows}}), tmp_path / "here")
    assert result_of(tmp_path / "sites" / "run") == result_of(tmp_path / "here")


def configure(home: Path, backbone: Path) -> None:
    """Write what the page tells people to write: the run's configuration, and a folder at each site."""
    sites = {"expected": 2, "wait": PATIENCE, "deadline": PATIENCE}
    section = {"name": str(backbone), "threads": 1}
    (home / "sites" / "server.yaml").write_text(
        yaml.safe_dump({"out": "run", "sites": sites, "backbone": section, **SECTIONS})
    )
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    for name, rows_of in SITES.items():
        write_rows(home / name, rows_of)
        node = yaml.safe_load(block) | {"client": name, "backbone": section}
        (home / name / "node.yaml").write_text(json.dumps(node))
        shutil.copy(home / "sites" / "keys" / "ca.pem", home / name)
        shutil.copy(home / "sites" / "keys" / name, home / name)
    (own_key,) = re.findall(r"`(ssh-keygen .*?)`", PAGE)
    if shutil.which("ssh-keygen"):  # in earnest a site makes its own key pair
        (home / "hospital" / "hospital").unlink()
        subprocess.run(shlex.split(own_key), cwd=home / "hospital", check=True, capture_output=True)
        shutil.move(home / "hospital" / "hospital.pub", home / "sites" / "keys" / "hospital.pub")
