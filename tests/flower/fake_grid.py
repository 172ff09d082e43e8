"""Flower's grid without Flower's processes: each node is the real ClientApp, in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from flower_processes import result_of
from flwr.app import Context, Message, RecordDict

from fedloom.backbones.load import load_backbone
from fedloom.data.tokenize import tokenizer_hash
from fedloom.flower_app import load_server, serve
from fedloom.runtime.events import Observer
from fedloom.runtime.flower import FlowerTransport, Patience
from fedloom.runtime.flower_site import client_app
from fedloom.runtime.site import Terms
from small_world import World, client_rows, tree, without_seconds

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


#: Every client keeps its moments, so that each has a memory of each round.
SECTIONS: dict[str, Any] = {
    "seed": 42,
    "method": {"name": "fedweave", "warmup_steps": 2},
    "adapter": {"rank": 2, "alpha": 6.0, "dropout": 0.05},
    "federation": {"rounds": 3, "min_replies": 2, "participation": 0.75},
    "training": {"steps": 3, "batch_size": 2, "lr": 0.01, "router_lr": 0.005, "optimizer_state": "keep"},
    "evaluation": {"generate": False},
}


class Restarts:
    """Sites that stay, and a server that may end and start again."""

    def __init__(self, home: Path, backbone: Path) -> None:
        self.home = home
        self.sections = {**SECTIONS, "backbone": {"name": str(backbone), "threads": 1}}
        self.nodes = write_sites(home / "sites", backbone)
        self.write()

    def write(self, deadline: float = 600.0) -> None:
        """Write the server's configuration."""
        waits = {"expected": 4, "wait": 0.0, "deadline": deadline}
        (self.home / "server.yaml").write_text(yaml.safe_dump({"out": "run", "sites": waits, **self.sections}))

    def serve(self, nodes: list[Node] | None = None) -> Notes:
        """Start the server, with a grid that has forgotten all earlier messages."""
        notes = Notes()
        serve(load_server(self.home / "server.yaml"), Grid(self.nodes if nodes is None else nodes), notes)
        return notes

    def result(self) -> dict[str, Any]:
        """Return what must be as in a run that nothing stopped. The name of the run is drawn anew for each."""
        found = result_of(self.home / "run")
        name = json.loads((self.home / "run" / "sites.json").read_text())["run"]
        memories = {n.config.parent.name: tree(n.config.parent / "memory" / name) for n in self.nodes}
        return {**found, "memories": memories}
