"""``fedloom`` of a hostile site: in the rounds of ``SENT`` it sends, well packed, what is made there of its answer."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import torch

from fedloom.cli import main
from fedloom.runtime.site import Site, Terms
from fedloom.runtime.wire import decode, encode
from fedloom.types import Tensors


def tensors(change: Callable[[Tensors], Tensors]) -> Callable[[bytes, bytes], bytes]:
    """Change the tensors of a reply, and keep its header."""

    def sent(reply: bytes, earlier: bytes) -> bytes:
        found, header = decode(reply)
        return encode(change(found), header)

    return sent


def first_transposed(found: Tensors) -> Tensors:
    name = min(found)
    return {**found, name: found[name].T.contiguous()}


#: Round → what is sent, made of the honest reply and the honest one of the round before.
SENT: dict[int, Callable[[bytes, bytes], bytes]] = {
    1: tensors(lambda found: {name: torch.full_like(t, torch.nan) for name, t in found.items()}),
    2: tensors(first_transposed),
    3: tensors(lambda found: found | {"experts/0/evil.lora_A": torch.zeros(2, 2)}),
    4: tensors(lambda found: {name: 1e6 * t for name, t in found.items()}),
    5: lambda reply, earlier: reply[: len(reply) // 2],
    6: lambda reply, earlier: pickle.dumps({name: t.tolist() for name, t in decode(reply)[0].items()}),
    7: lambda reply, earlier: earlier,
}

honest = Site.answer


def hostile(site: Site, payload: bytes, terms: Terms) -> tuple[bytes, bool]:
    reply, kept = honest(site, payload, terms)
    last = Path(site.config.folder).with_name("last reply")  # every answer is given by a process of its own
    earlier = last.read_bytes() if last.is_file() else b""
    last.write_bytes(reply)
    change = SENT.get(decode(reply)[1]["round"])
    return (reply, kept) if change is None else (change(reply, earlier), False)


if __name__ == "__main__":
    Site.answer = hostile  # type: ignore[method-assign]
    main()
