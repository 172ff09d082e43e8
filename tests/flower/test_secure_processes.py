"""With secure aggregation no process of the server holds a single site's update, at any moment that was looked at."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is an option of its own")

from flower_processes import HOSTILE, PATIENCE, SITES, Sites, family, log_of, write_node

from fedloom.runtime.checkpoint import CheckpointFolder
from marker import traces
from small_world import save_backbone, tree

pytestmark = [pytest.mark.timeout(3 * PATIENCE), pytest.mark.xdist_group("flower processes")]

BOBS_ROWS = 5
SECTIONS: dict[str, Any] = {
    "seed": 42,
    "method": {"name": "fedit"},
    "adapter": {"rank": 2, "alpha": 6.0, "dropout": 0.05},
    "federation": {"rounds": 1, "min_replies": 3},
    "training": {"steps": 3, "batch_size": 2, "lr": 0.01},
    "evaluation": {"generate": False},
}


def memory_holds(pid: int, wanted: list[bytes]) -> bool:
    """Return whether a process has any of ``wanted`` in what it can write to."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        with open(f"/proc/{pid}/mem", "rb") as memory:
            for start, end in (line.split()[0].split("-") for line in lines if "w" in line.split()[1]):
                try:
                    memory.seek(int(start, 16))
                    content = memory.read(int(end, 16) - int(start, 16))
                except (OSError, ValueError, OverflowError):
                    continue  # a mapping that is gone, or no memory at all
                if any(trace in content for trace in wanted):
                    return True
    except (FileNotFoundError, ProcessLookupError):
        pass  # it has ended
    return False


@pytest.mark.skipif(not os.access("/proc/self/mem", os.R_OK), reason="the system shows no process's memory")
def test_processes_no_update_in_the_servers_memory_files_and_logs(tmp_path: Path) -> None:
    """Of four sites one breaks down after it has shared its keys, in training."""
    backbone = save_backbone(tmp_path / "backbone")
    program = [str(Path(__file__).parent / "marked_node.py")]
    with Sites(tmp_path / "sites") as sites:
        sites.start_superlink()
        names = [*SITES, HOSTILE]
        sites.register(*names)
        for name in names:
            sites.start_node(name, write_node(sites.home / name, name, backbone), program=program)
        waits = {"expected": 4, "wait": PATIENCE, "deadline": PATIENCE}
        shared = {**SECTIONS, "backbone": {"name": str(backbone), "threads": 1}, "sites": waits}
        out = sites.configure("run-secure", **shared, secagg={"min_contributors": 3, "threshold": 0.6})
        run = sites.submit()
        looked = 0
        while not re.search(rf"Finished task \d+ of run {run}", sites.log("superlink")):
            for process in family(sites.running["superlink"].pid):
                looked += 1
                assert not memory_holds(process.pid, traces(BOBS_ROWS))
            time.sleep(0.2)
        said = sites.finish(run)
        assert "Done: " in said, said
        assert looked > 10
        logs = b"".join(path.read_bytes() for path in sites.home.glob("*.log"))
        for content in [logs, *tree(sites.folder).values()]:
            assert not any(trace in content for trace in traces(BOBS_ROWS))
        record = log_of(out)[1]
        assert record["quarantined"] == {"dan": "in stage 'mask': the site refuses: training broke down"}
        assert record["weights"] == {"experts/0": 8 + BOBS_ROWS + 2}  # ann, bob, cyd

        kept = traces(BOBS_ROWS)
        assert memory_holds(os.getpid(), kept)  # the same look finds what is there
        before, after = (CheckpointFolder(out / "checkpoints", {}).state(round).tensors for round in (0, 1))
        # And it was in the sum: no step of the others, of 0.01 each, outweighs it anywhere.
        assert all(bool((after[name] > tensor).all()) for name, tensor in before.items())
