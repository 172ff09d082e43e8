"""``fedloom`` of a hostile site: its node answers round 1 with NaN and later rounds with a pickle, both well packed."""

import pickle

import torch

from fedloom.cli import main
from fedloom.runtime.site import Site, Terms
from fedloom.runtime.wire import decode, encode

honest = Site.answer


def hostile(site: Site, payload: bytes, terms: Terms) -> tuple[bytes, bool]:
    reply, kept = honest(site, payload, terms)
    tensors, header = decode(reply)
    if header["round"] == 0:
        return reply, kept
    if header["round"] == 1:
        return encode({name: torch.full_like(t, torch.nan) for name, t in tensors.items()}, header), False
    return pickle.dumps({name: t.tolist() for name, t in tensors.items()}), False


Site.answer = hostile  # type: ignore[method-assign]
main()
