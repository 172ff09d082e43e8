"""A broken or hostile reply is left out with its reason in the log, and changes nothing for the others (A4).

The replies are recorded once; here they are played back, one of them spoilt.
"""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import FEDERATED, PROBING, PROBING_BY_TENSORS, REPRESENTATIVES, SENDING, Recording, sends_tensors
from fedloom.errors import RoundError
from fedloom.methods.base import Method
from fedloom.runtime.events import Observer
from fedloom.runtime.loop import Receipt
from fedloom.runtime.wire import decode, encode
from fedloom.types import Order, State, Tensors
from small_world import outcome, same, world_of

VICTIM = "bob"
Spoil = Callable[[Recording, int], bytes]


class Playback:
    """A transport that brings recorded replies; ``spoilt`` replaces one, or loses it if it is None."""

    def __init__(self, recording: Recording, spool: Path, spoilt: dict[tuple[int, str], bytes | None]) -> None:
        self.recording, self.spool, self.spoilt = recording, spool, spoilt

    def exchange(self, method: Method, orders: Sequence[Order], memories: Any, observer: Any) -> list[Receipt]:
        receipts = []
        self.spool.mkdir(exist_ok=True)
        for order in orders:
            recorded = self.recording.replies[order.round][order.client]
            data = self.spoilt.get((order.round, order.client), recorded)
            if data is not None:
                path = self.spool / order.client
                path.write_bytes(data)
                receipts.append(Receipt(order.client, path, len(data), 0, 0.0))
        return receipts

    def committed(self, memory_versions: set[str]) -> None:
        """No memories here."""


class Notes(Observer):
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, message: str) -> None:
        self.said.append(message)


def play(
    recording: Recording, method: Method, out: Path, round: int, spoilt: dict[str, bytes | None]
) -> tuple[State, dict[str, Any], list[str]]:
    """Return the state after ``round``, its log record and what was said."""
    world, notes = world_of(method, out), Notes()
    transport = Playback(recording, out / "spool", {(round, client): data for client, data in spoilt.items()})
    state = world.run(method, rounds=round, transport=transport, observer=notes)
    return state, world.log.read()[-1], notes.said


def edited(change: Callable[[Tensors, dict[str, Any]], Any]) -> Spoil:
    def spoil(recording: Recording, round: int) -> bytes:
        tensors, header = decode(recording.replies[round][VICTIM])
        change(tensors, header)
        return encode(tensors, header)

    return spoil


def first(change: Callable[[torch.Tensor], torch.Tensor]) -> Spoil:
    """Change the first B factor, or what comes first."""

    def apply(tensors: Tensors, header: dict[str, Any]) -> None:
        name = next((n for n in tensors if n.endswith("lora_B")), next(iter(tensors)))
        tensors[name] = change(tensors[name].clone())

    return edited(apply)


def poisoned(value: float) -> Spoil:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[-1] = value
        return tensor

    return first(change)


def counted(value: Any) -> Spoil:
    return edited(lambda tensors, header: header["counts"].update(examples=value))


def measured(value: Any) -> Spoil:
    return edited(lambda tensors, header: header["metrics"].update(loss=value))


def raw(make: Callable[[bytes], bytes]) -> Spoil:
    return lambda recording, round: make(recording.replies[round][VICTIM])


def with_header(header: str) -> Spoil:
    """Replace the JSON header of safetensors itself."""
    data = header.encode()
    return raw(lambda _: struct.pack("<Q", len(data)) + data)


Faults = dict[str, tuple[Spoil, str]]

#: Wrong tensors: what each method expects is its own.
TENSOR_FAULTS: Faults = {
    "a missing key": (edited(lambda t, h: t.pop(next(iter(t)))), "1 tensors are missing"),
    "no tensors": (edited(lambda t, h: t.clear()), "tensors are missing"),
    "NaN": (poisoned(float("nan")), "holds NaN or infinity"),
    "infinity": (poisoned(float("inf")), "holds NaN or infinity"),
    "minus infinity": (poisoned(float("-inf")), "holds NaN or infinity"),
    "a transposed tensor": (first(lambda t: t.T.contiguous()), "has shape"),
    "one dimension more": (first(lambda t: t[None]), "has shape"),
    "an empty tensor": (first(lambda t: t[:0]), "has shape"),
    "bfloat16": (first(lambda t: t.bfloat16()), "has dtype torch.bfloat16"),
    "float64": (first(lambda t: t.double()), "has dtype torch.float64"),
    "integers": (first(lambda t: t.int()), "has dtype torch.int32"),
    "a million-fold norm": (edited(lambda t, h: t.update({n: v * 1e6 for n, v in t.items()})), "its norm"),
    "the largest finite numbers": (edited(lambda t, h: [v.fill_(3e38) for v in t.values()]), "its norm"),
    "a truncated payload": (raw(lambda data: data[:-1]), "cannot be decoded"),
}
#: Tensors too many, which a method that sends none can be sent as well.
KEY_FAULTS: Faults = {
    "an unknown key": (edited(lambda t, h: t.update({"experts/0/lm_head.lora_A": torch.ones(2)})), "unknown, first"),
    "a key in another unit": (edited(lambda t, h: t.update({"experts/9/x.lora_A": torch.ones(2)})), "unknown, first"),
    "a very long unknown key": (edited(lambda t, h: t.update({"x" * 10_000: torch.ones(2)})), "unknown, first"),
}
#: Wrong messages, whatever the method.
MESSAGE_FAULTS: Faults = {
    "no examples": (counted(0), "it counts no examples"),
    "no count": (edited(lambda t, h: h["counts"].pop("examples")), "it counts no examples"),
    "a negative count": (counted(-5), "not a number of examples"),
    "half an example": (counted(2.5), "not a number of examples"),
    "true as a count": (counted(True), "not a number of examples"),
    "text as a count": (counted("5"), "not a number of examples"),
    "a count beyond reason": (counted(10**30), "not a number of examples"),
    "counts in a list": (edited(lambda t, h: h.update(counts=[5])), "are not objects"),
    "no metrics": (edited(lambda t, h: h.pop("metrics")), "are not objects"),
    "a loss that is NaN": (measured(float("nan")), "not a finite number"),
    "a loss that is infinite": (measured(float("inf")), "not a finite number"),
    "a loss of 401 digits": (measured(10**400), "not a finite number"),
    "a loss of 1e300": (measured(1e300), "not a finite number"),
    "a thousand metrics": (edited(lambda t, h: h.update(metrics={str(i): 1 for i in range(1000)})), "too many"),
    "a metric of a long name": (edited(lambda t, h: h["metrics"].update({"x" * 100: 1})), "too long"),
    "a loss in words": (measured("low"), "not a finite number"),
    "another client's name": (edited(lambda t, h: h.update(client="ann")), "it answers as 'ann'"),
    "another client's reply": (lambda recording, round: recording.replies[round]["ann"], "it answers as 'ann'"),
    "no name": (edited(lambda t, h: h.pop("client")), "it answers as None"),
    "a replayed round": (edited(lambda t, h: h.update(round=h["round"] - 1)), "it answers as 'bob' for round"),
    "nothing": (raw(lambda data: b""), "only 0 bytes"),
    "a few bytes": (raw(lambda data: data[:5]), "only 5 bytes"),
    "a truncated header": (raw(lambda data: data[:50]), "truncated"),
    "bytes at the end": (raw(lambda data: data + b"\0"), "cannot be decoded"),
    "a pickle": (raw(lambda data: pickle.dumps({"weights": [1.0] * 100})), "truncated or not in safetensors"),
    "a torch file": (raw(lambda data: b"PK\x03\x04" + data), "truncated or not in safetensors"),
    "text": (raw(lambda data: b"<html>502 Bad Gateway</html>"), "truncated or not in safetensors"),
    "another safetensors file": (with_header("{}"), "cannot be decoded: KeyError"),
    "a header that is a list": (with_header('{"__metadata__": {"fedloom": "[1]"}}'), "not an object"),
    "a header of brackets": (with_header("[" * 100_000), "cannot be decoded"),
    "half a surrogate pair": (with_header('{"__metadata__": {"fedloom": "\\ud800"}}'), "cannot be decoded"),
}
#: Only in rounds: here the counts are weights, component by component.
COUNT_FAULTS: Faults = {
    "no component counted": (
        edited(lambda t, h: (t.clear(), h["counts"].update({n: 0 for n in h["counts"] if n != "examples"}))),
        "counts no examples for any component",
    ),
    "a component of more examples than there are": (
        edited(lambda t, h: h["counts"].update({n: 10**9 for n in h["counts"] if n != "examples"})),
        "1000000000",
    ),
}
ROUND_FAULTS: Faults = {
    "a count for no component": (edited(lambda t, h: h["counts"].update({"experts/9": 3})), "experts/9"),
    "the reply of the round before": (lambda recording, round: recording.replies[round - 1][VICTIM], "for round"),
}
FAULTS = TENSOR_FAULTS | KEY_FAULTS | MESSAGE_FAULTS | COUNT_FAULTS | ROUND_FAULTS


def cases(*known: tuple[list[str], Faults]) -> list[tuple[str, str]]:
    return [(name, fault) for names, faults in known for name in names for fault in faults]


def check(fault: tuple[Spoil, str], recording: Recording, method: Method, tmp_path: Path, round: int) -> None:
    spoil, reason = fault
    state, record, said = play(recording, method, tmp_path / "spoilt", round, {VICTIM: spoil(recording, round)})
    without, silent, _ = play(recording, method, tmp_path / "silent", round, {VICTIM: None})
    assert record["quarantined"].keys() == {VICTIM}
    assert reason in record["quarantined"][VICTIM]
    assert [message for message in said if VICTIM in message and reason in message]
    assert same(state.tensors | state.kept, without.tensors | without.kept)
    assert (state.spec, state.values) == (without.spec, without.values)
    assert record["weights"] == silent["weights"]
    assert record["train_loss"] == silent["train_loss"]
    assert silent["absent"] == [VICTIM]
    assert len(json.dumps(record, allow_nan=False)) < 4000


IN_ROUNDS = cases(
    (FEDERATED, KEY_FAULTS | ROUND_FAULTS), (SENDING, TENSOR_FAULTS | COUNT_FAULTS), (REPRESENTATIVES, MESSAGE_FAULTS)
)


@pytest.mark.parametrize(("name", "fault"), IN_ROUNDS, indirect=["name"], scope="session")
def test_A4_a_spoilt_update_is_quarantined(fault: str, recording: Recording, method: Method, tmp_path: Path) -> None:
    check(FAULTS[fault], recording, method, tmp_path, round=2)


@pytest.mark.parametrize(
    ("name", "fault"),
    cases((PROBING, KEY_FAULTS), (PROBING_BY_TENSORS, TENSOR_FAULTS), (PROBING[:1], MESSAGE_FAULTS)),
    indirect=["name"],
    scope="session",
)
def test_A4_a_spoilt_probe_is_quarantined(fault: str, recording: Recording, method: Method, tmp_path: Path) -> None:
    check(FAULTS[fault], recording, method, tmp_path, round=0)


def test_playback_is_the_recorded_run(recording: Recording, method: Method, tmp_path: Path) -> None:
    """So that the comparisons above say something."""
    state, record, _ = play(recording, method, tmp_path / "a", 2, {})
    assert same(state.tensors | state.kept, recording.states[2].tensors | recording.states[2].kept)
    assert record["quarantined"] == {}
    without, _, _ = play(recording, method, tmp_path / "b", 2, {VICTIM: None})
    assert same(without.tensors | without.kept, state.tensors | state.kept) != sends_tensors(type(method))


def test_A4_everyone_else_spoilt_leaves_the_one(recording: Recording, method: Method, tmp_path: Path) -> None:
    spoilt: dict[str, bytes | None] = dict.fromkeys(("bob", "cyd", "dan"), b"not even a message")
    state, record, _ = play(recording, method, tmp_path / "a", 2, spoilt)
    alone, _, _ = play(recording, method, tmp_path / "b", 2, dict.fromkeys(spoilt))
    assert record["quarantined"].keys() == spoilt.keys()
    assert same(state.tensors, alone.tensors)


def test_A1_a_round_without_examples_is_an_error_and_changes_nothing(
    recording: Recording, method: Method, tmp_path: Path
) -> None:
    _, _, _ = play(recording, method, tmp_path, 1, {})
    before = outcome(tmp_path)

    def empty(client: str) -> bytes:
        tensors, header = decode(recording.replies[2][client])
        return encode(tensors, {**header, "counts": dict.fromkeys(header["counts"], 0)})

    with pytest.raises(RoundError, match=r"0 usable replies of 4 asked.*counts no examples.*as it was before"):
        play(recording, method, tmp_path, 2, {client: empty(client) for client in recording.replies[2]})
    assert outcome(tmp_path) == before
