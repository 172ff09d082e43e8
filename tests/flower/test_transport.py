"""The transport over Flower's messages, without Flower's processes: each node is a ClientApp in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is an option of its own")

from fake_grid import PATIENCE, Node, results, terms_of, transport_of, write_sites
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.app.error import Error

from fedloom.backbones.load import load_backbone
from fedloom.errors import RoundError, SiteRefusal, UpdateRejected
from fedloom.methods import METHODS
from fedloom.runtime import flower_messages, flower_site
from fedloom.runtime.flower import Patience
from fedloom.runtime.flower_messages import pack, unpack
from fedloom.runtime.memory import ClientMemory
from fedloom.types import State
from small_world import SECRET, TRAINING, client_rows, save_backbone, tree, world_of


@pytest.mark.parametrize("name", ["fedit", "fedweave", "fedsa_lora", "scaffold"])
def test_the_model_is_bitwise_the_simulators(name: str, backbone_folder: Path, tmp_path: Path) -> None:
    """State, named memories and log, bytes on the wire included."""
    method = METHODS[name]()
    simulated, sites = world_of(method, tmp_path / "a"), world_of(method, tmp_path / "b")
    simulated.run(method)
    transport, notes = transport_of(
        sites, write_sites(tmp_path / "sites", backbone_folder), terms_of(name, backbone_folder)
    )
    assert transport.gather() == ["ann", "bob", "cyd", "dan"]
    sites.run(method, transport=transport, observer=notes)
    assert results(sites) == results(simulated)
    for client in client_rows():
        kept = tree(tmp_path / "sites" / client / "memory" / ("0" * 16))
        assert len(kept) <= 3
        newest = {Path(n).name: c for n, c in kept.items()}
        for version, content in tree(simulated.out / "checkpoints" / "memory").items():
            assert not version.startswith(client) or newest[version] == content


def test_nothing_of_the_rows_crosses(backbone_folder: Path, tmp_path: Path) -> None:
    crossed: list[bytes] = []

    def listen(asked: Message, reply: Message) -> Message:
        crossed.extend(
            part if isinstance(part, bytes) else str(part).encode()
            for message in (asked, reply)
            for record in message.content.config_records.values()
            for part in record.values()
        )
        return reply

    method = METHODS["fedweave"]()
    world = world_of(method, tmp_path / "run")
    nodes = write_sites(tmp_path / "sites", backbone_folder)
    for node in nodes:
        node.spoil = listen
    transport, _notes = transport_of(world, nodes, terms_of("fedweave", backbone_folder))
    transport.gather()
    world.run(method, transport=transport, rounds=1)
    assert len(crossed) > 20
    for text in (SECRET, SECRET.upper(), str(tmp_path)):
        assert not any(text.encode() in part for part in crossed)


def test_payloads_are_cut_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower_messages, "CHUNK", 4)
    payload = bytes(12) + b"x"  # equal chunks stay several
    content = pack({"kept": True}, payload)
    assert sorted(content) == ["about", "chunk-0", "chunk-1", "chunk-2", "chunk-3"]
    about, found = unpack(content, 13)
    assert (found, about["kept"]) == (payload, True)
    with pytest.raises(UpdateRejected, match="13 bytes; the limit is 12"):
        unpack(content, 12)
    changed = pack({}, payload)
    changed["chunk-1"] = ConfigRecord({"index": 1, "data": b"\0\0\1\0"})
    with pytest.raises(UpdateRejected, match="sha256"):
        unpack(changed, 99)
    del changed["chunk-3"]
    with pytest.raises(UpdateRejected, match="says 13 bytes but holds 12"):
        unpack(changed, 99)
    for other in (RecordDict(), RecordDict({"about": ConfigRecord({"json": "[1]"})})):
        with pytest.raises(UpdateRejected, match="form"):
            unpack(other, 99)


def test_a_mismatch_is_refused_with_both_hashes(backbone_folder: Path, tmp_path: Path) -> None:
    world = world_of(METHODS["fedit"](), tmp_path / "run")
    nodes = write_sites(tmp_path / "sites", backbone_folder)
    theirs = save_backbone(tmp_path / "other", seed=8)
    config = json.loads(nodes[1].config.read_text())
    nodes[1].config.write_text(json.dumps({**config, "backbone": {"name": str(theirs)}}))
    terms = terms_of("fedit", backbone_folder)
    transport, notes = transport_of(world, nodes, terms)
    assert transport.gather() == ["ann", "cyd", "dan"]
    (refusal,) = [said for said in notes.said if "refused" in said]
    assert load_backbone(str(theirs)).hash in refusal
    assert terms.backbone in refusal


def test_too_few_sites_end_the_wait_with_both_numbers(backbone_folder: Path, tmp_path: Path) -> None:
    world = world_of(METHODS["fedit"](), tmp_path / "run")
    nodes = write_sites(tmp_path / "sites", backbone_folder)[:1]
    patience = Patience(expected=4, minimum=2, wait=0.1, deadline=1.0)
    transport, _ = transport_of(world, nodes, terms_of("fedit", backbone_folder), patience)
    with pytest.raises(RoundError, match=r"1 sites are there after 0.1 s \(ann\); at least 2 are needed"):
        transport.gather()


def test_a_silent_site_costs_its_deadline_once_and_may_come_back(backbone_folder: Path, tmp_path: Path) -> None:
    """Its node comes anew after round 2; ``test_patience`` has the clock in its hand."""
    method = METHODS["fedit"]()
    world = world_of(method, tmp_path / "run")
    nodes = write_sites(tmp_path / "sites", backbone_folder)
    nodes[0].spoil = lambda asked, reply: None if asked.metadata.message_type == "train.order" else reply
    patience = Patience(expected=4, minimum=2, wait=0.0, deadline=3.0)
    transport, notes = transport_of(world, nodes, terms_of("fedit", backbone_folder), patience)
    transport.gather()

    def restart_after_2(state: State, memories: dict[str, str]) -> None:
        if state.round == 2:
            nodes[0].spoil = lambda asked, reply: reply
            nodes[0].last_activated_at = "tomorrow"
            transport.gather()

    world.run(method, transport=transport, rounds=4, observer=notes, evaluate=restart_after_2)
    log = world.log.read()
    assert [record.get("absent", []) for record in log] == [[], ["ann"], ["ann"], [], []]
    assert log[1]["seconds"] >= 3.0
    assert log[2]["seconds"] < 3.0
    assert sum("ann did not answer in 3 s" in said for said in notes.said) == 1


def test_broken_answers_are_quarantined_by_name_and_reason(backbone_folder: Path, tmp_path: Path) -> None:
    method = METHODS["fedit"]()
    world = world_of(method, tmp_path / "run")
    nodes = write_sites(tmp_path / "sites", backbone_folder)

    def in_training(change: Callable[[Message], Message]) -> Callable[[Message, Message], Message]:
        return lambda asked, reply: change(reply) if asked.metadata.message_type == "train.order" else reply

    def flipped(reply: Message) -> Message:
        data = bytearray(reply.content["chunk-0"]["data"])
        data[-1] ^= 1
        reply.content["chunk-0"] = ConfigRecord({"index": 0, "data": bytes(data)})
        return reply

    nodes[0].spoil = in_training(flipped)
    nodes[1].spoil = in_training(lambda reply: Message(pack({"kept": False}, b"\x80\x04pickle."), reply_to=reply))
    nodes[2].spoil = in_training(lambda reply: Message(Error(2, "the process ended"), reply_to=reply))
    transport, notes = transport_of(world, nodes, terms_of("fedit", backbone_folder))
    transport.gather()
    world.run(method, transport=transport, rounds=1, observer=notes)
    record = world.log.read()[1]
    assert record["quarantined"].keys() == {"ann", "bob"}
    assert "sha256" in record["quarantined"]["ann"]
    assert "truncated or not in safetensors" in record["quarantined"]["bob"]
    assert record["absent"] == ["cyd"]
    assert any("cyd gave no answer: the process ended" in said for said in notes.said)


def test_a_site_keeps_to_its_limits_and_its_secrets(backbone_folder: Path, tmp_path: Path) -> None:
    method = METHODS["fedit"]()
    world = world_of(method, tmp_path / "run")
    nodes = write_sites(tmp_path / "sites", backbone_folder, limits={"max_steps": 2})
    transport, notes = transport_of(world, nodes, terms_of("fedit", backbone_folder))
    transport.gather()
    with pytest.raises(RoundError, match="asks for 3 steps; this site's limit is 2"):
        world.run(method, transport=transport, rounds=1)
    longer = terms_of("fedweave", backbone_folder, options={"warmup_steps": 3})
    transport, notes = transport_of(world, nodes, longer)
    transport.gather()
    weave, two = longer.build_method(), replace(TRAINING, steps=2)
    warm = world_of(weave, tmp_path / "warm")
    with pytest.raises(RoundError, match="method asks for 3 steps; this site's limit is 2"):
        warm.run(weave, transport=transport, rounds=0, training=two)
    (tmp_path / "sites" / "ann" / "rows.jsonl").write_text('{"prompt": "zebrafinch"}\n')
    flower_site._site.cache_clear()
    transport, notes = transport_of(world, nodes, terms_of("fedit", backbone_folder))
    assert transport.gather() == ["bob", "cyd", "dan"]
    assert any("it says: DataError; the site's own log says more" in said for said in notes.said)


def test_a_site_bounds_the_time_of_a_message_and_the_runs_it_keeps(backbone_folder: Path, tmp_path: Path) -> None:
    """Whatever a server asks for: clustering over and over again, or a new run each minute."""
    method = METHODS["fedweave"]()
    world = world_of(method, tmp_path / "run")
    nodes = write_sites(tmp_path / "sites", backbone_folder, limits={"max_seconds": 1, "max_runs": 1})
    endless = terms_of("fedweave", backbone_folder, options={"restarts": 10_000_000})
    transport, _ = transport_of(world, nodes[:1], endless, Patience(expected=1, minimum=1, wait=0.0, deadline=60.0))
    transport.gather()
    with pytest.raises(RoundError, match=r"longer than 1 s, the site's limit \(max_seconds\)"):
        world.run(endless.build_method(), transport=transport, rounds=0)

    flower_site._site.cache_clear()
    sites = write_sites(tmp_path / "patient", backbone_folder, limits={"max_runs": 1})

    def run(name: str) -> None:
        world = world_of(METHODS["fedit"](), tmp_path / name)
        transport, _ = transport_of(world, sites, terms_of("fedit", backbone_folder, run=name))
        transport.gather()
        keeping = replace(TRAINING, optimizer_state="keep")
        world.run(METHODS["fedit"](), transport=transport, rounds=1, training=keeping)

    run("1" * 16)
    with pytest.raises(RoundError, match=r"as many runs as it may \(max_runs: 1\)"):
        run("2" * 16)
    assert not (tmp_path / "patient" / "ann" / "memory" / ("2" * 16)).exists()


def test_what_a_site_refuses_is_one_line_of_its_log(
    backbone_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (node, *_) = write_sites(tmp_path, backbone_folder)
    lines: list[str] = []
    monkeypatch.setattr(flower_site.logger, "error", lambda form, *values: lines.append(form % values))

    def refuse(*_: Any) -> None:
        raise SiteRefusal("no \x1b[2J\n" + 1000 * "x")

    content = pack({"terms": terms_of("fedit", backbone_folder).model_dump()})
    flower_site._answered(content, {"config": str(node.config)}, refuse)
    assert lines == [r"fedloom refuses: no \x1b[2J\n" + 492 * "x"]  # 500 characters of the reason, 8 of them before


def test_one_name_is_one_node_and_a_key_is_bound_to_its_name(backbone_folder: Path, tmp_path: Path) -> None:
    world = world_of(METHODS["fedit"](), tmp_path / "run")
    ann, bob, *_ = write_sites(tmp_path / "sites", backbone_folder)
    bob.name = "ann"  # registered so at the SuperLink
    grid_nodes = [ann, bob, Node(9, ann.config)]
    transport, notes = transport_of(world, grid_nodes, terms_of("fedit", backbone_folder))
    assert transport.gather() == ["ann"]
    assert transport.present() == {"ann": 1}
    assert any("registered for 'ann', but it says that it is 'bob'" in said for said in notes.said)
    assert any("another node that is online is 'ann' already" in said for said in notes.said)
    transport.grid.nodes = [Node(10, ann.config)]  # the node has gone, another takes its place
    transport.present()
    assert transport.present() == {"ann": 10}


def test_what_flower_cannot_unpack_is_quarantined_by_name(backbone_folder: Path, tmp_path: Path) -> None:
    method = METHODS["fedit"]()
    world = world_of(method, tmp_path / "run")
    nodes = write_sites(tmp_path / "sites", backbone_folder)
    transport, _ = transport_of(world, nodes, terms_of("fedit", backbone_folder))
    transport.gather()
    inner = transport.grid.pull_messages

    def pull(message_ids: list[str]) -> list[Message]:
        found: list[Message] = inner(message_ids)
        if any(message.metadata.src_node_id == 1 for message in found):
            raise ValueError("`Message` objects must have exactly one child.")
        return found

    transport.grid.pull_messages = pull
    world.run(method, transport=transport, rounds=1)
    record = world.log.read()[1]
    assert record["quarantined"] == {"ann": "the message has not the form of one: AttributeError"}
    assert record["clients"].keys() == {"ann", "bob", "cyd", "dan"}


def test_of_an_introduction_only_what_has_a_form_is_kept(backbone_folder: Path, tmp_path: Path) -> None:
    """Half a character (a lone surrogate) is JSON, and cannot be written to a file."""
    world = world_of(METHODS["fedit"](), tmp_path / "run")
    nodes = write_sites(tmp_path / "sites", backbone_folder)[:1]

    def spoil(asked: Any, reply: Any) -> Any:
        about, _ = unpack(reply.content, 1 << 20)
        hello = about["hello"] | {
            "truncated": "\ud800",
            "no_label_left": -1,
            "rows": {"rows": 8, "kept": "\ud800", "x": 1},
        }
        return Message(pack({"hello": hello}), reply_to=reply)

    nodes[0].spoil = spoil
    transport, _ = transport_of(world, nodes, terms_of("fedit", backbone_folder), replace(PATIENCE, expected=1))
    assert transport.gather() == ["ann"]
    known = transport.cards["ann"].hello
    assert sorted(known) == ["backbone", "client", "examples", "fedloom", "rows", "tokenizer"]
    assert known["rows"] == {"rows": 8}


def test_a_site_that_is_always_late_keeps_the_memory_that_is_named(backbone_folder: Path, tmp_path: Path) -> None:
    site = flower_site._site(str(write_sites(tmp_path, backbone_folder)[0].config))
    terms = terms_of("fedit", backbone_folder)
    for round, named in [(1, None), (2, 1), (3, 2), (4, 2), (5, 2), (6, 2), (7, 2)]:
        site._keep(terms.model_copy(update={"memory": named}), round, ClientMemory())
    kept = {path.name for path in (tmp_path / "ann" / "memory" / terms.run).iterdir()}
    assert {"ann-r1.safetensors", "ann-r2.safetensors"} <= kept  # an older checkpoint names the first
    assert "ann-r3.safetensors" not in kept
