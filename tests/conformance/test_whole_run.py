"""``fedloom.run`` from files to model folder, for every registered method: interrupted, or with odd clients."""

from __future__ import annotations

import html
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from kill_points import POINTS
from rich.console import Console

from fatal_moments import Killed, arm, by_exception
from fedloom.config import Config, parse_config
from fedloom.errors import ConfigError, DataError
from fedloom.experiment import run
from fedloom.methods import METHODS
from fedloom.model import load_model
from fedloom.quickstart import explain
from fedloom.runtime.events import Observer
from small_world import client_rows, save_backbone, tree, without_seconds


class Notes(Observer):
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, message: str) -> None:
        self.said.append(message)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two backbones, four clients with rows, one with rows that teach nothing, one test set."""
    folder = tmp_path_factory.mktemp("files")
    save_backbone(folder / "backbone")
    save_backbone(folder / "switch", native=True)
    rows = {
        name: [{"prompt": e.prompt, "response": e.response} for e in found] for name, found in client_rows().items()
    }
    rows["eve"] = [{"prompt": "anything", "response": " "}] * 3
    rows["test"] = rows["ann"][:3]
    for name, found in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    return folder


@pytest.fixture(params=sorted(METHODS), scope="session")
def name(request: pytest.FixtureRequest) -> str:
    """Also methods that pool rows: here they do."""
    return str(request.param)


def config(files: Path, name: str, **more: Any) -> Config:
    clients = {client: str(files / f"{client}.jsonl") for client in ("ann", "bob", "cyd", "dan", "eve")}
    moments = "keep" if METHODS[name].keeps_moments else "reset"
    plain: dict[str, Any] = {
        "method": {"name": name},
        "backbone": {"name": str(files / ("switch" if METHODS[name].native else "backbone")), "threads": 1},
        "data": {"clients": clients, "test": {"mine": str(files / "test.jsonl")}},
        "adapter": {"native": "full"} if METHODS[name].native else {"rank": 2, "alpha": 6},
        "federation": {"rounds": 3},
        "training": {"steps": 3, "batch_size": 2, "lr": 0.01, "router_lr": 0.005, "optimizer_state": moments},
        "evaluation": {"generate": False, "every": 1},
    }
    return parse_config(plain | more)


def left_behind(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = {n: content for n, content in tree(out).items() if n.startswith("model")}
    found["log"] = [without_seconds(json.loads(line)) for line in (out / "rounds.jsonl").read_text().splitlines()]
    for name in ("metrics.json", "manifest.json"):
        found[name] = without_seconds(json.loads((out / name).read_text()))
    for key in ("source_hash", "source_hashes"):  # so that the package can be edited while its tests run
        del found["manifest.json"][key]
    found["config"] = (out / "config.yaml").read_text()
    return found


@pytest.fixture(scope="module")
def straight(name: str, files: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    out, notes = tmp_path_factory.mktemp("straight") / "out", Notes()
    run(config(files, name), out, observer=notes)
    return out, notes.said


@pytest.mark.parametrize("point", ["in the first exchange", "between log and checkpoint", "between two rounds"])
def test_M10_a_resumed_run_leaves_what_the_straight_one_leaves(
    point: str, name: str, files: Path, straight: tuple[Path, list[str]], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        arm(patch, POINTS[point], by_exception)
        with pytest.raises(Killed):
            run(config(files, name), out)
    with pytest.raises(ConfigError, match="already holds a run"):
        run(config(files, name), out)
    run(config(files, name), out, resume=True)
    assert left_behind(out) == left_behind(straight[0])


def test_another_configuration_does_not_resume(name: str, files: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(config(files, name, federation={"rounds": 0}), out)
    with pytest.raises(ConfigError, match="written with another seed"):
        run(config(files, name, federation={"rounds": 0}, seed=1), out, resume=True)


def test_A3_a_client_without_examples_is_reported_and_weighs_nothing(straight: tuple[Path, list[str]]) -> None:
    out, said = straight
    assert "eve holds no usable example: it takes no part and has weight 0." in said
    for line in (out / "rounds.jsonl").read_text().splitlines():
        record = json.loads(line)
        assert "eve" not in record.get("clients", {})
        assert "eve" not in record.get("cohort", [])
        assert record.get("weights", {}).get("examples", 16) == 16


def test_D9_clients_of_one_and_two_examples_shape_models_that_answer(
    name: str, straight: tuple[Path, list[str]]
) -> None:
    out, _ = straight
    last = json.loads((out / "rounds.jsonl").read_text().splitlines()[-1])
    sizes = {"pooled": 16} if METHODS[name].pooled else {"ann": 8, "bob": 5, "cyd": 2, "dan": 1}
    assert {client: entry["examples"] for client, entry in last["clients"].items()} == sizes
    assert {entry["steps"] for entry in last["clients"].values()} == {3 * (4 // len(sizes))}  # 12 steps a round in all
    assert last["quarantined"] == {}
    folders = ["model"] if METHODS[name].global_model else [f"models/{client}" for client in sizes]
    assert {p.parent.relative_to(out).as_posix() for p in out.rglob("fedloom.json")} == set(folders)
    assert isinstance(load_model(out / folders[-1]).generate("1+7=?", max_new_tokens=3), str)


def test_training_lowers_the_loss(name: str, straight: tuple[Path, list[str]]) -> None:
    records = [json.loads(line) for line in (straight[0] / "rounds.jsonl").read_text().splitlines()]
    losses = [record["train_loss"] for record in records[1:]]
    if METHODS[name].global_model:
        losses = [record["evaluation"]["loss"]["macro"] for record in records]
    assert losses[-1] < losses[0]


def test_what_a_person_is_shown_leads_to_models_that_exist(name: str, straight: tuple[Path, list[str]]) -> None:
    out, _ = straight
    console = Console(width=400, file=io.StringIO(), record=True)
    explain(console, out, json.loads((out / "metrics.json").read_text()))
    for text in (console.export_text(), html.unescape((out / "report.html").read_text())):
        named = set(re.findall(rf"{re.escape(str(out))}/(models?[\w/-]*)", text))
        assert named
        assert all((out / folder).is_dir() for folder in named)


def test_no_usable_example_anywhere_is_a_clear_error(name: str, files: Path, tmp_path: Path) -> None:
    only = {"clients": {"eve": str(files / "eve.jsonl")}}
    with pytest.raises(DataError, match="no client holds a usable example"):
        run(config(files, name, data=only), tmp_path / "out")


def test_a_client_named_like_a_path_is_refused(name: str, files: Path, tmp_path: Path) -> None:
    data = {"clients": {"../ann": str(files / "ann.jsonl")}}
    with pytest.raises(ConfigError, match="cannot be a client's name"):
        run(config(files, name, data=data), tmp_path / "out")
    assert not (tmp_path / "ann-r0.safetensors").exists()
