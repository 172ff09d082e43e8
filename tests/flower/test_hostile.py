"""What a hostile or broken site may send: it is quarantined or refused, and the result is as if it had been silent.

The replies are those of the real ClientApp, changed on the way; the server reads them as it reads what Flower brings.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is an option of its own")

import torch
from fake_grid import terms_of, transport_of, write_sites
from flwr.app import ConfigRecord, Message, RecordDict

from fedloom.methods import METHODS
from fedloom.runtime.flower import Patience
from fedloom.runtime.flower_messages import pack, unpack
from fedloom.runtime.wire import decode, encode
from fedloom.types import Plain, State, Tensors
from small_world import World, same, world_of

#: The sites of a fake grid answer at once, so nobody is waited for.
PATIENCE = Patience(expected=4, minimum=1, wait=0.0, deadline=0.0)
Change = Callable[[bytes], RecordDict]


def tensors(change: Callable[[Tensors], Tensors]) -> Change:
    """Change the tensors of a reply, and keep its header."""

    def spoil(payload: bytes) -> RecordDict:
        found, header = decode(payload)
        return pack({"kept": False}, encode(change(found), header))

    return spoil


def header(**changed: Plain) -> Change:
    """Change the header of a reply, and keep its tensors."""

    def spoil(payload: bytes) -> RecordDict:
        found, plain = decode(payload)
        return pack({"kept": False}, encode(found, {**plain, **changed}))

    return spoil


def payload(change: Callable[[bytes], bytes]) -> Change:
    """Change the bytes of a reply, under their right checksum."""
    return lambda data: pack({"kept": False}, change(data))


def beside_the_truth(data: bytes) -> RecordDict:
    content = pack({"kept": False}, data)
    content["chunk-0"] = ConfigRecord({"index": 0, "data": data[:-8]})
    return content


def first(found: Tensors, value: Callable[[torch.Tensor], torch.Tensor]) -> Tensors:
    name = min(found)
    return {**found, name: value(found[name])}


#: What is sent → what the log says of it.
HOSTILE: dict[str, tuple[Change, str]] = {
    "A4 NaN": (tensors(lambda t: first(t, lambda x: torch.full_like(x, torch.nan))), "holds NaN or infinity"),
    "infinity": (tensors(lambda t: first(t, lambda x: x / 0.0 + torch.inf)), "holds NaN or infinity"),
    "A4 a wrong shape": (tensors(lambda t: first(t, lambda x: x.T.contiguous())), "has shape"),
    "A4 an extra key": (tensors(lambda t: t | {"experts/0/evil.lora_A": torch.zeros(2, 2)}), "tensors are unknown"),
    "a key with a path": (tensors(lambda t: t | {"../../evil": torch.zeros(1)}), "tensors are unknown"),
    "a missing key": (tensors(lambda t: dict(list(t.items())[1:])), "tensors are missing"),
    "another dtype": (tensors(lambda t: first(t, lambda x: x.double())), "has dtype torch.float64"),
    "a norm of 10⁶ times": (tensors(lambda t: {n: 1e6 * x for n, x in t.items()}), "its norm"),
    "no examples": (header(counts={"examples": 0}), "counts no examples"),
    "a weight of 10⁹ examples": (header(counts={"examples": 10**9, "experts/0": 10**9}), "counts 1000000000 examples"),
    "negative examples": (header(counts={"examples": -5}), "not a number of examples"),
    "a metric that is text": (header(metrics={"loss": "rm -rf"}), "not a finite number"),
    "a replayed round": (header(round=1), "for round 1, but 'bob' was asked for round 2"),
    "another's name": (header(client="ann"), "answers as 'ann'"),
    "a truncated payload": (payload(lambda data: data[: len(data) // 2]), "truncated|cannot be decoded"),
    "a payload cut on the way": (beside_the_truth, "but holds"),
    "an empty payload": (payload(lambda data: b""), "only 0 bytes"),
    "a pickle": (payload(lambda data: pickle.dumps({"a": [1.0]})), "truncated or not in safetensors format"),
    "a zip of torch.save": (payload(lambda data: b"PK\x03\x04" + data), "truncated or not in safetensors format"),
    "no header": (lambda data: RecordDict(), "has not the form of one"),
    "a refusal full of escapes": (
        lambda data: pack({"refused": "\x1b[2Jgone\n{}"}),
        r"the site refuses: \\x1b\[2Jgone",
    ),
    "a reply beyond the limit": (payload(lambda data: data + bytes(1 << 20)), r"bytes; the limit is"),
}


def run(world: World, name: str, sites: Path, backbone: Path, spoil: Change | None) -> State:
    """Run three rounds in whose second one bob sends what ``spoil`` makes of his reply, or nothing."""
    method = METHODS[name]()
    nodes = write_sites(sites, backbone)
    orders = 0

    def in_round_two(asked: Message, reply: Message) -> Message | None:
        nonlocal orders
        orders += asked.metadata.message_type == "train.order"
        if orders != 2 + method.has_probe or asked.metadata.message_type != "train.order":
            return reply
        if spoil is None:
            return None
        return Message(spoil(unpack(reply.content, 1 << 30)[1]), reply_to=asked)

    nodes[1].spoil = in_round_two
    transport, notes = transport_of(world, nodes, terms_of(name, backbone), PATIENCE)
    transport.max_reply_bytes = 1 << 20
    transport.gather()
    return world.run(method, transport=transport, rounds=3, observer=notes)


@pytest.fixture(scope="module")
def without_bob(tmp_path_factory: pytest.TempPathFactory, backbone_folder: Path) -> dict[str, State]:
    """What the others make of round two without him, by method."""
    found = {}
    for name in ("fedweave",):
        home = tmp_path_factory.mktemp(name)
        world = world_of(METHODS[name](), home / "run")
        found[name] = run(world, name, home / "sites", backbone_folder, None)
        assert world.log.read()[2]["absent"] == ["bob"]
    return found


@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.parametrize("name", ["fedweave"])
def test_a_hostile_reply_is_as_good_as_none(
    name: str, what: str, without_bob: dict[str, State], backbone_folder: Path, tmp_path: Path
) -> None:
    spoil, reason = HOSTILE[what]
    world = world_of(METHODS[name](), tmp_path / "run")
    state = run(world, name, tmp_path / "sites", backbone_folder, spoil)
    records = world.log.read()
    assert [list(record.get("quarantined", [])) for record in records] == [[], [], ["bob"], []]
    said = records[2]["quarantined"]["bob"]
    assert re.search(reason, said)
    assert said.isprintable()
    assert len(said) <= 500
    expected = without_bob[name]
    assert same(state.tensors, expected.tensors)
    assert same(state.kept, expected.kept)
    assert state.values == expected.values
