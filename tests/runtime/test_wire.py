"""Bytes: what goes in comes out, and no bytes do harm."""

from __future__ import annotations

import json
import resource
import struct
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as np_st

from fedloom.errors import UpdateRejected
from fedloom.runtime.wire import (
    MAX_HEADER_BYTES,
    MAX_REPLY_HEADER_BYTES,
    decode,
    decode_order,
    decode_reply,
    decode_state,
    encode,
    encode_order,
    encode_reply,
    encode_state,
)
from fedloom.types import Order, Reply, State, Tensors
from small_world import SPEC, TRAINING, same

TENSORS: Tensors = {
    "experts/0/x.lora_A": torch.tensor([[1.5, -0.0], [float("inf"), 1e-42]]),
    "router/0.bias": torch.arange(3.0),
    "empty": torch.zeros(0, 4),
    "scalar": torch.tensor(7, dtype=torch.int64),
}

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64])
def test_A5_every_dtype_comes_back_bit_by_bit(dtype: torch.dtype) -> None:
    tensor = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).mul(100).to(dtype)
    found, _ = decode(encode({"x": tensor}, {}))
    assert found["x"].dtype == dtype
    assert found["x"].shape == (3, 5)
    assert bits(found["x"]) == bits(tensor)


def test_A5_all_65536_bfloat16_values_come_back_bit_by_bit() -> None:
    """NaN payloads, infinities, subnormals and negative zero among them."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    found, _ = decode(encode({"x": every}, {}))
    assert torch.equal(found["x"].view(torch.int16), every.view(torch.int16))


def test_views_and_strides_are_encoded_as_what_they_show() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    found, _ = decode(encode({"t": whole.T, "row": whole[1], "every second": whole[:, ::2]}, {}))
    assert torch.equal(found["t"], whole.T)
    assert torch.equal(found["row"], whole[1])
    assert torch.equal(found["every second"], whole[:, ::2])


@given(
    np_st.arrays("float32", np_st.array_shapes(max_dims=3, max_side=3, min_side=0)),
    st.dictionaries(st.text(max_size=5), JSON, max_size=3),
)
def test_tensors_and_header_come_back(values: Any, header: dict[str, Any]) -> None:
    tensor = torch.from_numpy(values)
    found, plain = decode(encode({"ö/名": tensor}, header))
    assert found["ö/名"].shape == tensor.shape
    assert found["ö/名"].numpy().tobytes() == values.tobytes()
    assert plain == header


def test_the_same_content_has_the_same_bytes_and_names_come_back_sorted() -> None:
    reverse = dict(reversed(TENSORS.items()))
    assert encode(TENSORS, {"a": 1, "b": 2}) == encode(reverse, {"b": 2, "a": 1})
    assert list(decode(encode(reverse, {}))[0]) == sorted(TENSORS)


def test_orders_and_states_come_back() -> None:
    order = Order("fit", "ann", 3, TENSORS, SPEC, TRAINING, {"assignment": [0, 2]})
    found = decode_order(encode_order(order))
    assert same(found.tensors, order.tensors)
    assert (found.kind, found.client, found.round, found.spec, found.training, found.values) == (
        *("fit", "ann", 3, SPEC, TRAINING),
        {"assignment": [0, 2]},
    )
    state = State(4, TENSORS, SPEC, {"seed": 1, "sizes": {"ann": [3]}})
    back = decode_state(encode_state(state))
    assert same(back.tensors, TENSORS)
    assert (back.round, back.spec, back.values) == (4, SPEC, state.values)


def test_replies_come_back_without_what_the_client_keeps() -> None:
    reply = Reply("ann", TENSORS, {"examples": 3}, {"loss": 0.5}, {"sizes": [3]}, {"mine": torch.ones(2)}, {"own": "x"})
    data = encode_reply(reply, 7)
    assert b"mine" not in data
    assert b"own" not in data
    found = decode_reply(data, "ann", 7)
    assert same(found.send, TENSORS)
    assert (found.client, found.counts, found.metrics, found.values) == (
        "ann",
        {"examples": 3},
        {"loss": 0.5},
        {"sizes": [3]},
    )
    assert (found.keep, found.keep_values) == ({}, {})


REPLY = encode_reply(Reply("ann", TENSORS, {"examples": 3}, {"loss": 0.5}, {"sizes": [3]}), 7)


def outcome(data: bytes | Path) -> Any:
    """Return a reply's parts as bytes and text, or why it is refused."""
    try:
        reply = decode_reply(data, "ann", 7)
    except UpdateRejected as reason:
        return str(reason).replace("deserializing header", "deserializing")
    return {name: (t.dtype, t.shape, bits(t)) for name, t in reply.send.items()}, str(replace(reply, send={}))


def test_a_file_gives_what_its_bytes_give(tmp_path: Path) -> None:
    """Whole, cut anywhere in the header, cut in the data, longer; and a file may go while its tensors are in use."""
    length = struct.unpack("<Q", REPLY[:8])[0] + 8
    cuts = [*range(0, length + 1, 7), length, len(REPLY) - 1, len(REPLY)]
    for number, data in enumerate([*(REPLY[:cut] for cut in cuts), REPLY + b"x"]):
        path = tmp_path / str(number)
        path.write_bytes(data)
        assert outcome(path) == outcome(data)
    reply = decode_reply(tmp_path / str(len(cuts) - 1), "ann", 7)
    (tmp_path / str(len(cuts) - 1)).unlink()
    assert same(reply.send, TENSORS)


def decodes_or_is_rejected(data: bytes) -> None:
    try:
        reply = decode_reply(data, "ann", 7)
    except UpdateRejected:
        return
    assert reply.client == "ann"
    assert all(isinstance(t, torch.Tensor) for t in reply.send.values())
    assert sum(t.numel() * t.element_size() for t in reply.send.values()) <= len(data)
    assert all(type(n) is int and n >= 0 for n in reply.counts.values())
    assert all(abs(m) < float("inf") for m in reply.metrics.values())


@given(st.binary(max_size=300))
def test_random_bytes_are_rejected(data: bytes) -> None:
    decodes_or_is_rejected(data)


@given(st.binary(max_size=200), st.binary(max_size=50))
def test_random_headers_of_the_right_length_are_rejected(header: bytes, body: bytes) -> None:
    decodes_or_is_rejected(struct.pack("<Q", len(header)) + header + body)


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, len(REPLY) - 1), st.integers(0, 255)), min_size=1, max_size=4), st.data())
def test_mutated_replies_are_rejected_or_valid(changes: list[tuple[int, int]], data: st.DataObject) -> None:
    mutated = bytearray(REPLY)
    for place, value in changes:
        mutated[place] = value
    cut = data.draw(st.integers(0, len(REPLY)))
    decodes_or_is_rejected(bytes(mutated))
    decodes_or_is_rejected(bytes(mutated[:cut]))
    decodes_or_is_rejected(bytes(mutated[:cut]) + bytes(mutated))


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(JSON, JSON, JSON, JSON, JSON)
def test_headers_of_any_json_are_rejected_or_valid(
    client: Any, round: Any, counts: Any, metrics: Any, values: Any
) -> None:
    header = {"client": client, "round": round, "counts": counts, "metrics": metrics, "values": values}
    decodes_or_is_rejected(encode({}, header))
    decodes_or_is_rejected(encode({}, header | {"client": "ann", "round": 7}))
    decodes_or_is_rejected(encode({}, header | {"client": "ann", "round": 7, "values": {}, "counts": {"examples": 1}}))


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "dtype": st.sampled_from(["F32", "BF16", "F8_E4M3", "F4", "I64", "U64", "BOOL", "C64", "X"]) | JSON,
                "shape": st.lists(st.integers(-1, 2**64), max_size=3) | JSON,
                "data_offsets": st.lists(st.integers(-1, 2**64), min_size=2, max_size=2) | JSON,
            }
        ),
        min_size=1,
        max_size=2,
    ),
    st.integers(0, 16),
)
def test_tensor_tables_of_any_json_are_rejected_or_valid(entries: list[Any], body: int) -> None:
    table = {f"t{i}": entry for i, entry in enumerate(entries)}
    plain = {"client": "ann", "round": 7, "counts": {}, "metrics": {}, "values": {}}
    header = json.dumps({"__metadata__": {"fedloom": json.dumps(plain)}, **table}).encode()
    decodes_or_is_rejected(struct.pack("<Q", len(header)) + header + bytes(body))


def table(**entry: Any) -> bytes:
    header = json.dumps({"__metadata__": {"fedloom": "{}"}, "x": entry}).encode()
    return struct.pack("<Q", len(header)) + header


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<Q", 2**63),
        struct.pack("<Q", 2**64 - 1) + b"{}",
        struct.pack("<Q", MAX_HEADER_BYTES + 1) + bytes(MAX_HEADER_BYTES + 1),
        table(dtype="F32", shape=[2**40], data_offsets=[0, 2**42]),
        table(dtype="F32", shape=[2**40], data_offsets=[0, 0]),
        table(dtype="F32", shape=[2**32, 2**32], data_offsets=[0, 0]),
        table(dtype="F32", shape=[2**62, 4], data_offsets=[0, 0]),
        struct.pack("<Q", 1 << 20) + b"[" * (1 << 20),
        struct.pack("<Q", 1 << 20) + b"9" * (1 << 20),
    ],
    ids=["2^63", "2^64", "header", "4 TiB", "4 TiB of nothing", "overflow to 0", "overflow", "depth", "digits"],
)
def test_promises_of_huge_content_cost_nothing(data: bytes) -> None:
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    with pytest.raises(UpdateRejected):
        decode(data)
    assert time.perf_counter() - start < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024  # KiB


def test_a_reply_has_a_shorter_header_than_what_is_our_own() -> None:
    own = {"buckets": [7] * (MAX_REPLY_HEADER_BYTES // 3)}
    assert decode(encode({}, own))[1] == own
    data = encode({}, {"client": "ann", "round": 7, "counts": {}, "metrics": {}, "values": own})
    with pytest.raises(UpdateRejected, match=rf"header has \d+ bytes, more than {MAX_REPLY_HEADER_BYTES}"):
        decode_reply(data, "ann", 7)


def test_a_zero_sized_tensor_of_huge_shape_takes_no_memory() -> None:
    decodes_or_is_rejected(table(dtype="F32", shape=[0, 2**60], data_offsets=[0, 0]))
    decodes_or_is_rejected(table(dtype="F32", shape=[0, 2**63], data_offsets=[0, 0]))
