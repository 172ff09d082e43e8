"""Which examples make a mini-batch, and how a mini-batch is cut to pad less."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedloom.errors import DataError


def draw_batches(
    pools: Sequence[Sequence[int]],
    lengths: Sequence[int],
    batch_size: int,
    source: torch.Generator,
    by_length: bool = False,
    whole: bool = False,
) -> list[list[int]]:
    """Draw one mini-batch per entry of ``pools``, without replacement inside a pass over a pool.

    A pool that is visited again goes on where it stopped; when fewer than a batch are left it is shuffled anew. A pool
    smaller than a batch gives all it has.

    Args:
        pools: example indices, one pool per step.
        lengths: token length of every example.
        batch_size: most examples in a batch.
        source: generator; pools draw from it in order of first visit.
        by_length: let the batches of one pool hold examples of like length (the examples drawn stay the same).
        whole: end a pass with a smaller batch, so that it holds every example.

    Raises:
        DataError: a pool is empty.
    """
    visits: dict[tuple[int, ...], list[int]] = {}
    for step, pool in enumerate(pools):
        visits.setdefault(tuple(pool), []).append(step)
    batches: list[list[int]] = [[] for _ in pools]
    for pool, steps in visits.items():
        if not pool:
            raise DataError("there is no example to train on: a client's pool is empty.")
        take = min(batch_size, len(pool))
        left: list[int] = []
        drawn: list[list[int]] = []
        for _ in steps:
            if not left or (len(left) < take and not whole):
                left = [pool[i] for i in torch.randperm(len(pool), generator=source).tolist()]
            drawn.append(left[:take])
            left = left[take:]
        if by_length and take * len(steps) <= len(pool):  # else one example is in several batches
            flat = sorted((i for batch in drawn for i in batch), key=lambda i: (lengths[i], i))
            order = torch.randperm(len(steps), generator=source).tolist()
            drawn = [flat[k * take : (k + 1) * take] for k in order]
        for step, batch in zip(steps, drawn, strict=True):
            batches[step] = batch
    return batches


def split_by_length(indices: Sequence[int], lengths: Sequence[int], overhead: int = 256) -> list[list[int]]:
    """Cut a mini-batch, sorted by length, into the parts that cost least.

    Args:
        indices: examples of the mini-batch.
        lengths: token length of every example.
        overhead: what another part costs, in tokens: a pass has a fixed price beside the price of its padded tokens.
    """
    order = sorted(indices, key=lambda i: (lengths[i], i))
    best: list[tuple[int, int]] = [(0, 0)]  # for the first k examples: least cost, and where its last part begins
    for end in range(1, len(order) + 1):
        longest = lengths[order[end - 1]]
        best.append(min((best[start][0] + overhead + (end - start) * longest, start) for start in range(end)))
    parts: list[list[int]] = []
    end = len(order)
    while end:
        start = best[end][1]
        parts.append(order[start:end])
        end = start
    return parts[::-1]
