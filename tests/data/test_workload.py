"""What a run's manifest says of the rows that it could not measure, in a simulation and across sites."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from fedloom.config import parse_config
from fedloom.errors import FedloomError
from fedloom.experiment import run
from fedloom.runtime.events import Observer
from fedloom.workload import load_data, read_data, server_data
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
            data = load_data(config, read_data(config), small_backbone(), observer)
        assert data.manifest["test_rows_too_long"] == {"short": 0, "long": 3}
        assert {task: len(rows) for task, rows in data.test.items()} == {"short": 2, "long": 2}
        assert data.kinds == {"short": ("short", [0, 1]), "long": ("long", [0, 1])}
        said.append([call.args[0] for call in observer.say.call_args_list if call.args[0].startswith("long")])
    assert said[0] == said[1] != []
    assert "3 left out because the prompt fills 64 tokens" in said[1][0]


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"data": {"clients": {"ann": "good.jsonl", "bob": "none.jsonl"}}}, r"none\.jsonl: no such file"),
        ({"data": {"clients": {"ann": "empty.jsonl"}}}, "the file holds no rows"),
        ({"data": {"clients": {"ann": "good.jsonl"}, "test": {"mine": "columns.jsonl"}}}, "field 'prompt' is missing"),
        ({"data": {"clients": {"klinik-zürich": "good.jsonl"}}}, "'klinik-zürich' cannot be a client's name"),
        ({"federation": {"min_replies": 3}}, "min_replies is 3, but a round asks 2 of 2 clients: set it to 2 or less"),
        ({"federation": {"min_replies": 2, "participation": 0.5}}, "min_replies is 2, but a round asks 1 of 2"),
        ({"federation": {"min_replies": 2}, "method": {"name": "centralised"}}, "a round asks 1 of 1"),
        ({"federation": {"min_replies": 2}}, "the backbone was loaded"),
    ],
)
def test_cheap_mistakes_are_said_before_the_backbone_is_loaded(
    sections: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "good.jsonl").write_text('{"prompt": "x", "response": "y"}\n')
    (tmp_path / "columns.jsonl").write_text('{"question": "x", "response": "y"}\n')
    (tmp_path / "empty.jsonl").touch()
    loaded = Mock(side_effect=FedloomError("the backbone was loaded"))
    monkeypatch.setattr("fedloom.experiment.load_backbone", loaded)
    clients = {"data": {"clients": {"ann": "good.jsonl", "bob": "good.jsonl"}}}
    with pytest.raises(FedloomError, match=says):
        run(parse_config(clients | sections, base=tmp_path), tmp_path / "out")
