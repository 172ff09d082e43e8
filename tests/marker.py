"""A planted marker: one client's update is one number throughout, and whoever sees its bytes has seen that update."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from fedloom.methods import METHODS
from fedloom.types import Client, Order, Reply

MARK = 0.1234567


class Marked(METHODS["fedit"]):  # type: ignore[misc]
    """FedIT in which Bob's update is ``MARK`` throughout."""

    def local(self, client: Client, order: Order) -> Reply:
        reply: Reply = super().local(client, order)
        if client.name != "bob":
            return reply
        return replace(reply, send={name: torch.full_like(tensor, MARK) for name, tensor in reply.send.items()})


def traces(weight: int) -> list[bytes]:
    """Return Bob's update as bytes: in float32 and float64, and as the integers of his vector, weighted and not."""
    value = float(np.float32(MARK))
    whole = round(value * 2.0**32)
    floats = [np.full(3, value, kind).tobytes() for kind in ("<f4", "<f8")]
    return floats + [np.full(3, times * whole, "<i8").tobytes() for times in (1, weight)]
