"""What a run's manifest says of the rows that it could not measure."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

from fedloom.config import parse_config
from fedloom.runtime.events import Observer
from fedloom.workload import load_data
from small_world import small_backbone


def test_test_rows_without_room_for_an_answer_are_counted_by_task(tmp_path: Path) -> None:
    """One id per byte: "### Instruction:\\n…\\n\\n### Response:\\n" is 33 ids around the prompt, of at most 64."""

    def write(name: str, *lengths: int) -> str:
        rows = [json.dumps({"prompt": "x" * length, "response": "y"}) for length in lengths]
        file = tmp_path / f"{name}.jsonl"
        file.write_text("\n".join(rows))
        return str(file)

    clients = {"ann": write("ann", 5, 100)}
    test = {"short": write("short", 5, 6), "long": write("long", 5, 30, 31, 32, 200)}
    config = parse_config({"data": {"clients": clients, "test": test, "max_length": 64}})
    data = load_data(config, small_backbone(), Mock(spec=Observer))
    assert data.manifest["test_rows_too_long"] == {"short": 0, "long": 3}
    assert len(data.test["long"]) == 2
