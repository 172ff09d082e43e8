"""The transport over Flower's messages, without Flower's processes: each node is a ClientApp in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is an option of its own")

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.app.error import Error
from flwr.supercore.task_identity import TaskIdentity

from fedloom.backbones.load import load_backbone
from fedloom.data.tokenize import tokenizer_hash
from fedloom.errors import RoundError, UpdateRejected
from fedloom.methods import METHODS
from fedloom.runtime import flower
from fedloom.runtime.events import Observer
from fedloom.runtime.flower import FlowerTransport, Patience, client_app, pack, unpack
from fedloom.runtime.site import Terms
from small_world import SECRET, World, client_rows, save_backbone, tree, without_seconds, world_of

PATIENCE = Patience(expected=4, minimum=1, wait=0.0, deadline=60.0)


class Notes(Observer):
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, message: str) -> None:
        self.said.append(message)


@dataclass
class Node:
    """What Flower tells of a node, and what runs on it."""

    node_id: int
    config: Path
    last_activated_at: str = "today"
    name: str = ""
    spoil: Callable[[Message, Message], Message | None] = field(default=lambda asked, reply: reply)


class Grid:
    """Flower's grid as far as the transport knows it. Message content is copied as bytes, as on a wire."""

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes
        self.app = client_app()
        self.replies: dict[str, Message] = {}
        self.asked: list[tuple[int, str]] = []

    def get_nodes(self) -> list[Node]:
        return list(self.nodes)

    def get_node_ids(self) -> list[int]:
        return [node.node_id for node in self.nodes]

    def push_messages(self, messages: list[Message]) -> list[str]:
        ids = []
        for message in messages:
            (node,) = [n for n in self.nodes if n.node_id == message.metadata.dst_node_id]
            message_id = f"message-{len(self.asked)}"
            self.asked.append((node.node_id, message.metadata.message_type))
            context = Context(1, node.node_id, {"config": str(node.config)}, RecordDict(), {}, 1)
            reply = node.spoil(message, self.app(message, context))
            if reply is not None:
                self.replies[message_id] = reply
            ids.append(message_id)
        return ids

    def pull_messages(self, message_ids: list[str]) -> list[Message]:
        return [self.replies.pop(i) for i in message_ids if i in self.replies]


@pytest.fixture(autouse=True)
def _inside_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower builds messages only inside a running app."""
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    monkeypatch.setattr(flower, "POLL_SECONDS", 0.01)
    flower._site.cache_clear()


@pytest.fixture(scope="module")
def backbone_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_backbone(tmp_path_factory.mktemp("backbone"))


def write_sites(folder: Path, backbone: Path, **more: Any) -> list[Node]:
    """Write rows and configuration of each of the small world's clients."""
    nodes = []
    for index, (name, examples) in enumerate(client_rows().items()):
        home = folder / name
        home.mkdir(parents=True)
        lines = [json.dumps({"prompt": e.prompt, "response": e.response}) for e in examples]
        (home / "rows.jsonl").write_text("\n".join(lines) + "\n")
        config = {"client": name, "data": "rows.jsonl", "backbone": {"name": str(backbone)}, **more}
        (home / "node.yaml").write_text(json.dumps(config))
        nodes.append(Node(index + 1, home / "node.yaml"))
    return nodes


def terms_of(method: str, backbone: Path, **changed: Any) -> Terms:
    loaded = load_backbone(str(backbone))
    plain = {"run": "0" * 16, "seed": 42, "method": method, "backbone": loaded.hash}
    return Terms(**{**plain, "tokenizer": tokenizer_hash(loaded.tokenizer), **changed})


def transport_of(
    world: World, nodes: list[Node], terms: Terms, patience: Patience = PATIENCE
) -> tuple[FlowerTransport, Notes]:
    notes = Notes()
    transport = FlowerTransport(Grid(nodes), terms, patience, world.out / "checkpoints" / "spool", 1 << 30, notes)
    return transport, notes


def results(world: World) -> dict[str, Any]:
    return {
        "checkpoints": {n: c for n, c in tree(world.out / "checkpoints").items() if n.startswith("round-")},
        "log": [without_seconds(record) for record in world.log.read()],
    }


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
        kept = tree(tmp_path / "sites" / client / "memory")
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
    monkeypatch.setattr(flower, "CHUNK", 4)
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
    method = METHODS["fedit"]()
    world = world_of(method, tmp_path / "run")
    nodes = write_sites(tmp_path / "sites", backbone_folder)
    rounds: list[int] = []

    def silent_in_rounds_1_and_2(asked: Message, reply: Message) -> Message | None:
        if asked.metadata.message_type == "train.order":
            rounds.append(1)
            return reply if len(rounds) > 2 else None
        return reply

    nodes[0].spoil = silent_in_rounds_1_and_2
    patience = Patience(expected=4, minimum=2, wait=0.0, deadline=3.0)
    transport, notes = transport_of(world, nodes, terms_of("fedit", backbone_folder), patience)
    transport.gather()
    world.run(method, transport=transport, rounds=4, observer=notes)
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
    (tmp_path / "sites" / "ann" / "rows.jsonl").write_text('{"prompt": "zebrafinch"}\n')
    flower._site.cache_clear()
    transport, notes = transport_of(world, nodes, terms_of("fedit", backbone_folder))
    assert transport.gather() == ["bob", "cyd", "dan"]
    assert any("it says: DataError; the site's own log says more" in said for said in notes.said)


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
