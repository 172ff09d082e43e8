"""Every server rule reads the replies of a round one at a time: a round of whole models must fit into memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from conftest import SENDING, Recording
from fedloom.methods.base import Method
from fedloom.methods.server import ServerStep, server_step
from fedloom.runtime.wire import decode
from fedloom.types import Reply
from small_world import same


class OneAtATime:
    """Recorded replies (``types.Replies``) in memory that tells when it is freed, views and all.

    Attributes:
        held: tensors of the last reply that were still there when the next was read, or the end came.
    """

    def __init__(self, recorded: dict[str, bytes]) -> None:
        self.recorded = recorded
        self.held: list[str] = []
        self.read = 0

    def __iter__(self) -> Iterator[Reply]:
        memory: dict[str, weakref.ref[np.ndarray]] = {}
        for client in sorted(self.recorded):
            self.held += [name for name, array in memory.items() if array() is not None]
            memory = {}
            yield self.reply(client, memory)
            self.read += 1
        self.held += [name for name, array in memory.items() if array() is not None]

    def reply(self, client: str, memory: dict[str, weakref.ref[np.ndarray]]) -> Reply:
        tensors, header = decode(self.recorded[client])
        send = {}
        for name, tensor in tensors.items():
            array = tensor.numpy().copy()
            memory[name], send[name] = weakref.ref(array), torch.from_numpy(array)
        return Reply(client, send, header["counts"], header["metrics"], header["values"])

    def __len__(self) -> int:
        return len(self.recorded)


@pytest.mark.parametrize("name", SENDING, indirect=True, scope="session")
def test_a_reply_is_gone_when_the_next_is_read(recording: Recording, method: Method) -> None:
    replies = OneAtATime(recording.replies[2])
    found = server_step(method, replace(recording.states[1], round=2), replies, ServerStep())
    assert replies.held == []
    assert replies.read >= len(replies)
    assert same(found.tensors, recording.states[2].tensors)
