"""The messages of both ends of Flower: a JSON header, and a payload in chunks with its length and sha256."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Mapping
from typing import Any

from fedloom.errors import ConfigError, UpdateRejected
from fedloom.types import Plain

#: Flower 1.42 sends each record as one protobuf message, which may have 2³¹ − 1 bytes
#: (``flwr.supercore.constant.MAX_PROTOBUF_STREAM_MESSAGE_LENGTH``), and a SuperLink with ``--database`` as one SQLite
#: value of 10⁹ at most. Small chunks are far below both and travel side by side.
CHUNK = 8 << 20

#: The JSON beside a payload names a run, options and counts.
MAX_ABOUT = 1 << 20

#: Kinds of messages.
HELLO, ORDER, SECURE = "query.hello", "train.order", "train.secure"


def require_flower() -> None:
    """Raise a ConfigError that says how to install Flower, if it is not there."""
    if importlib.util.find_spec("flwr") is None:
        raise ConfigError("this needs Flower, which is not installed: pip install 'fedloom[flower]'")


def pack(about: Mapping[str, Plain], payload: bytes = b"") -> Any:
    """Return a ``RecordDict`` of a JSON header and the payload in chunks."""
    from flwr.app import ConfigRecord, RecordDict

    head = {**about, "bytes": len(payload), "sha256": hashlib.sha256(payload).hexdigest()}
    content = RecordDict({"about": ConfigRecord({"json": json.dumps(head, sort_keys=True)})})
    for index, start in enumerate(range(0, len(payload), CHUNK)):
        # The index makes equal chunks different records: Flower names a record by the hash of its content.
        content[f"chunk-{index}"] = ConfigRecord({"index": index, "data": payload[start : start + CHUNK]})
    return content


def unpack(content: Any, limit: int) -> tuple[dict[str, Plain], bytes]:
    """Return header and payload of what ``pack`` made.

    Raises:
        UpdateRejected: it was not made so, is longer than ``limit``, or does not have the checksum it names.
    """
    try:
        text = content.config_records["about"]["json"]
        about = json.loads(text if len(text) <= MAX_ABOUT else "")
        length, digest = about["bytes"], about["sha256"]
        records = content.config_records
        chunks = [records[f"chunk-{index}"]["data"] for index in range(len(records) - 1)]
        found = sum(len(chunk) for chunk in chunks)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise UpdateRejected(f"the message has not the form of one: {type(error).__name__}") from error
    if found > limit:
        raise UpdateRejected(f"it has {found} bytes; the limit is {limit}")
    if found != length or not all(isinstance(chunk, bytes) for chunk in chunks):
        raise UpdateRejected(f"the message says {length!r} bytes but holds {found}")
    payload = b"".join(chunks)
    if (actual := hashlib.sha256(payload).hexdigest()) != digest:
        raise UpdateRejected(f"the payload's sha256 is {actual}, but the message says {digest!r}")
    return about, payload
