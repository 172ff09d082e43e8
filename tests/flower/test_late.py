"""A site that comes when rounds are under way, on the real ServerApp's code and real ClientApps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is an option of its own")

from doomed_server_moments import of_round
from fake_grid import Grid, Node, Notes, Restarts, results, terms_of, transport_of, write_sites
from flwr.app import Message

from fatal_moments import Killed, Point, fatal
from fedloom.flower_app import load_server, serve
from fedloom.methods import METHODS
from fedloom.report.status import read_status
from fedloom.runtime.checkpoint import CheckpointFolder
from fedloom.runtime.events import RoundLog
from fedloom.runtime.flower import FlowerTransport, Patience
from fedloom.runtime.flower_messages import pack
from small_world import same, world_of

FIRST = ("ann", "bob", "cyd")


class LateGrid(Grid):
    """dan's node is there once round 0 is committed: his answer to a hello comes while round 1 is under way."""

    def __init__(self, nodes: list[Node], checkpoints: Path) -> None:
        super().__init__(nodes)
        self.checkpoints = checkpoints

    def get_nodes(self) -> list[Node]:
        begun = any(self.checkpoints.glob("round-*"))
        return [node for node in self.nodes if begun or node.config.parent.name != "dan"]


class Late(Restarts):
    def write(self, deadline: float = 600.0) -> None:
        super().write(deadline)
        place = self.home / "server.yaml"
        place.write_text(place.read_text().replace("expected: 4", "expected: 3"))

    def serve(self, nodes: list[Node] | None = None) -> Notes:
        notes = Notes()
        grid = LateGrid(self.nodes if nodes is None else nodes, self.home / "run" / "checkpoints")
        serve(load_server(self.home / "server.yaml"), grid, notes)
        return notes

    def records(self) -> list[dict[str, Any]]:
        return RoundLog(self.home / "run" / "rounds.jsonl").read()


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, backbone_folder: Path) -> dict[str, Any]:
    """A run that nothing stopped."""
    late = Late(tmp_path_factory.mktemp("straight"), backbone_folder)
    notes = late.serve()
    records = late.records()
    assert [list(record.get("joined", ())) for record in records] == [[], ["dan"], [], []]
    # Three quarters of three clients are two, of four they are three.
    assert [len(record.get("cohort", ())) for record in records] == [0, 2, 3, 3]
    assert "dan" in records[2]["cohort"] + records[3]["cohort"]
    experts = records[1]["joined"]["dan"]["experts"]
    assert any(f"dan joins after round 1, with experts {experts}" in said for said in notes.said)
    sites = json.loads((late.home / "run" / "sites.json").read_text())
    assert sites["clients"] == list(FIRST)
    status = read_status(late.home / "run")
    assert status.sites["dan"].rounds == sum("dan" in record.get("cohort", ()) for record in records)
    assert status.experts[f"experts/{experts[0]}"]["dan"] == 1
    return late.result()


POINTS: dict[str, Point] = {
    "before the newcomer is asked": Point(FlowerTransport, "exchange", of_round(0, "probe"), nth=2),
    "after the newcomer's answer": Point(FlowerTransport, "exchange", of_round(0, "probe"), nth=2, after=True),
    "between its record and the checkpoint": Point(CheckpointFolder, "commit", lambda self, c: c.state.round == 1),
    "after it has joined": Point(CheckpointFolder, "commit", lambda self, c: c.state.round == 1, after=True),
    "in its first round": Point(FlowerTransport, "exchange", of_round(2), after=True),
}


@pytest.mark.parametrize("point", POINTS)
def test_a_server_that_starts_again_has_the_joiner_too(
    point: str, straight: dict[str, Any], backbone_folder: Path, tmp_path: Path
) -> None:
    late = Late(tmp_path, backbone_folder)
    with fatal(POINTS[point]), pytest.raises(Killed):
        late.serve()
    late.serve()
    assert late.result() == straight


@pytest.mark.parametrize("name", ["fedit", "fedweave"])
def test_joining_across_sites_is_bitwise_joining_in_a_simulation(
    name: str, backbone_folder: Path, tmp_path: Path
) -> None:
    method = METHODS[name]()
    simulated, sites = world_of(method, tmp_path / "a"), world_of(method, tmp_path / "b")
    for world in (simulated, sites):
        world.setup = replace(world.setup, clients=FIRST)
    calls: list[int] = []

    def after_round_1(known: Any) -> list[str]:
        calls.append(1)
        return [] if len(calls) < 2 or "dan" in known else ["dan"]

    simulated.run(method, newcomers=after_round_1)
    nodes = write_sites(tmp_path / "sites", backbone_folder)
    patience = Patience(expected=3, minimum=2, wait=0.0, deadline=60.0)
    transport, notes = transport_of(sites, nodes, terms_of(name, backbone_folder), patience)
    transport.grid = LateGrid(nodes, sites.out / "checkpoints")
    assert transport.gather() == list(FIRST)
    sites.run(method, transport=transport, observer=notes, newcomers=transport.newcomers)
    assert results(sites) == results(simulated)
    assert [record.get("cohort") for record in sites.log.read()][2:] == [[*FIRST, "dan"]] * 2


def test_a_hostile_newcomer_is_quarantined_and_asked_again_only_when_it_comes_anew(
    backbone_folder: Path, tmp_path: Path
) -> None:
    method = METHODS["fedweave"]()
    clean, world = world_of(method, tmp_path / "a"), world_of(method, tmp_path / "b")
    for each in (clean, world):
        each.setup = replace(each.setup, clients=FIRST)
    expected = clean.run(method)
    nodes = write_sites(tmp_path / "sites", backbone_folder)
    dan = nodes[3]
    probes: list[int] = []

    def nonsense(asked: Message, reply: Message) -> Message | None:
        if asked.metadata.message_type != "train.order":
            return reply
        probes.append(1)
        return Message(pack({"kept": False}, b"\x80\x04pickle."), reply_to=asked)

    dan.spoil = nonsense
    patience = Patience(expected=3, minimum=2, wait=0.0, deadline=60.0)
    transport, notes = transport_of(world, nodes, terms_of("fedweave", backbone_folder), patience)
    transport.grid = LateGrid(nodes, world.out / "checkpoints")
    transport.gather()
    state = world.run(method, transport=transport, observer=notes, newcomers=transport.newcomers)
    assert same(state.tensors, expected.tensors)
    assert same(state.kept, expected.kept)
    assert state.values == expected.values
    assert len(probes) == 1
    records = world.log.read()
    assert [list(record["quarantined"]) for record in records] == [[], ["dan"], [], []]
    assert "safetensors" in records[1]["quarantined"]["dan"]
    assert transport.newcomers(FIRST) == []
    dan.last_activated_at = "tomorrow"
    assert transport.newcomers(FIRST) == ["dan"]


def test_a_newcomer_that_falls_silent_costs_its_deadline_once(backbone_folder: Path, tmp_path: Path) -> None:
    """Fewer than ``minimum`` usable newcomers end neither the wait nor the run."""
    method = METHODS["fedweave"]()
    world = world_of(method, tmp_path / "run")
    world.setup = replace(world.setup, clients=FIRST)
    nodes = write_sites(tmp_path / "sites", backbone_folder)
    nodes[3].spoil = lambda asked, reply: None if asked.metadata.message_type == "train.order" else reply
    patience = Patience(expected=3, minimum=3, wait=0.0, deadline=1.0)
    transport, notes = transport_of(world, nodes, terms_of("fedweave", backbone_folder), patience)
    transport.grid = LateGrid(nodes, world.out / "checkpoints")
    transport.gather()
    world.run(method, transport=transport, observer=notes, newcomers=transport.newcomers, min_replies=3)
    assert [record["absent"] for record in world.log.read()] == [[], ["dan"], [], []]
    assert sum("dan did not answer in 1 s" in said for said in notes.said) == 1
