"""What a run's manifest says of the rows that it could not measure, in a simulation and across sites."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

from fedloom.config import parse_config
from fedloom.runtime.events import Observer
from fedloom.workload import load_data, server_data
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
    said: list[list[str]] = []
    for server in (False, True):
        observer = Mock(spec=Observer)
        if server:
            data = server_data(config, small_backbone(), {"ann": {"rows": 2}}, observer)
        else:
            data = load_data(config, small_backbone(), observer)
        assert data.manifest["test_rows_too_long"] == {"short": 0, "long": 3}
        assert {task: len(rows) for task, rows in data.test.items()} == {"short": 2, "long": 2}
        assert data.kinds == {"short": ("short", [0, 1]), "long": ("long", [0, 1])}
        said.append([call.args[0] for call in observer.say.call_args_list if call.args[0].startswith("long")])
    assert said[0] == said[1] != []
    assert "3 left out because the prompt fills 64 tokens" in said[1][0]
