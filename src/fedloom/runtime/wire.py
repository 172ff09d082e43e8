"""Orders, replies, states and memories as bytes: safetensors with one JSON header. Nothing in them can run code."""

from __future__ import annotations

import io
import json
import struct
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from fedloom.errors import UpdateRejected
from fedloom.runtime.compression import expand
from fedloom.types import AdapterSpec, Order, Plain, Reply, State, Tensors, Training, Wire

#: A header beyond this is refused before it is parsed: parsed JSON can take twenty times its bytes. A reply's header
#: holds a table of tensors (some 130 bytes each) and a few numbers, a client's memory also the bucket of every example.
MAX_HEADER_BYTES = 64 << 20
MAX_REPLY_HEADER_BYTES = 8 << 20

#: Metrics go into the log as they are, so a reply may hold only so many, of such length and size.
MAX_METRICS, MAX_METRIC_NAME, MAX_METRIC = 64, 64, 1e18


def encode(tensors: Tensors, header: dict[str, Plain]) -> bytes:
    """Encode tensors (dtype kept, bfloat16 included) and a JSON header."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return save_tensors(plain, metadata={"fedloom": json.dumps(header, sort_keys=True, allow_nan=True)})


def decode(data: bytes, max_header: int = MAX_HEADER_BYTES) -> tuple[Tensors, dict[str, Plain]]:
    """Decode what ``encode`` made; names come back sorted.

    Raises:
        UpdateRejected: the bytes are truncated, not safetensors, or carry no fedloom header or one that is too long.
    """
    with io.BytesIO(data) as file:
        header = _header(file, len(data), max_header)
    try:
        tensors = load_tensors(data)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise _undecodable(error) from error
    return dict(sorted(tensors.items())), header


def decode_file(path: Path, max_header: int = MAX_HEADER_BYTES) -> tuple[Tensors, dict[str, Plain]]:
    """Decode a file as ``decode`` does; its tensors are views of the mapped file, so that nothing is held twice."""
    with path.open("rb") as file:
        header = _header(file, path.stat().st_size, max_header)
    try:
        with safe_open(path, framework="pt") as content:
            tensors = {name: content.get_tensor(name) for name in sorted(content.keys())}
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise _undecodable(error) from error
    return tensors, header


def _header(file: BinaryIO, size: int, most: int) -> dict[str, Plain]:
    if size < 8:
        raise UpdateRejected(f"the payload has only {size} bytes")
    (length,) = struct.unpack("<Q", file.read(8))
    if length > size - 8:
        raise UpdateRejected("the payload is truncated or not in safetensors format")
    if length > most:
        raise UpdateRejected(f"the payload's header has {length} bytes, more than {most}")
    try:
        header = json.loads(json.loads(file.read(length))["__metadata__"]["fedloom"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _undecodable(error) from error
    if not isinstance(header, dict):
        raise UpdateRejected("the payload's header is not an object")
    return header


def _undecodable(error: Exception) -> UpdateRejected:
    return UpdateRejected(f"the payload cannot be decoded: {type(error).__name__}: {error}")


def encode_order(order: Order) -> bytes:
    header = {"kind": order.kind, "client": order.client, "round": order.round, "values": order.values}
    return encode(order.tensors, {**header, "spec": order.spec.to_plain(), "training": asdict(order.training)})


def decode_order(data: bytes) -> Order:
    tensors, header = decode(data)
    return Order(
        kind=header["kind"],
        client=header["client"],
        round=header["round"],
        tensors=tensors,
        spec=AdapterSpec.from_plain(header["spec"]),
        training=Training(**header["training"]),
        values=header["values"],
    )


def encode_reply(reply: Reply, round: int, wire: Wire = "none") -> bytes:
    """Encode what leaves a client: ``send``, compressed by ``wire``, and plain numbers beside it, never ``keep``."""
    header = {"client": reply.client, "round": round, "counts": reply.counts, "metrics": reply.metrics}
    if wire != "none":
        header["wire"] = wire
    return encode(reply.send, {**header, "values": reply.values})


def decode_reply(data: bytes | Path, client: str, round: int, wire: Wire = "none") -> Reply:
    """Decode a reply and check that it is this client's, for this round, with counts and metrics that are numbers.

    ``send`` has at most four times as many bytes as on the wire.
    Of a file, tensors are mapped: it must not change while the reply is in use.

    Raises:
        UpdateRejected: it is not.
    """
    most = MAX_REPLY_HEADER_BYTES
    tensors, header = decode_file(data, most) if isinstance(data, Path) else decode(data, most)
    if header.get("client") != client or header.get("round") != round:
        raise UpdateRejected(
            f"it answers as {header.get('client')!r} for round {header.get('round')!r}, but {client!r} was asked for "
            f"round {round}"
        )
    if header.get("wire", "none") != wire:
        raise UpdateRejected(f"it is encoded as {header.get('wire', 'none')!r}, but {wire!r} was ordered")
    counts, metrics, values = (header.get(key) for key in ("counts", "metrics", "values"))
    if not isinstance(counts, dict) or not isinstance(metrics, dict) or not isinstance(values, dict):
        raise UpdateRejected("its counts, metrics or values are not objects")
    for name, count in counts.items():
        if type(count) is not int or not 0 <= count < 1 << 40:
            raise UpdateRejected(f"the count of {name!r} is {count!r}, not a number of examples")
    if len(metrics) > MAX_METRICS or any(len(name) > MAX_METRIC_NAME for name in metrics):
        raise UpdateRejected(f"its {len(metrics)} metrics are too many, or have names that are too long")
    for name, metric in metrics.items():
        if type(metric) not in (int, float) or not abs(metric) < MAX_METRIC:  # also false for NaN
            raise UpdateRejected(f"the metric {name!r} is {metric!r}, not a finite number of sensible size")
    return Reply(client, expand(tensors, wire), counts, metrics, values)


def encode_state(state: State) -> bytes:
    tensors = state.tensors | {f"kept:{name}": tensor for name, tensor in state.kept.items()}
    return encode(tensors, {"round": state.round, "spec": state.spec.to_plain(), "values": state.values})


def decode_state(data: bytes) -> State:
    tensors, header = decode(data)
    kept = {name.removeprefix("kept:"): tensors.pop(name) for name in list(tensors) if name.startswith("kept:")}
    return State(header["round"], tensors, AdapterSpec.from_plain(header["spec"]), header["values"], kept)
