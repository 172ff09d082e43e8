"""Greedy decoding of many prompts at once, each under its own routing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import DynamicCache

from fedloom.adapters.moe_lora import Routing
from fedloom.runtime.client import Workbench


@torch.no_grad()
def greedy(
    bench: Workbench,
    prompts: Sequence[Sequence[int]],
    routing: Routing,
    max_new_tokens: int,
    stop: Sequence[int],
    *,
    batch_size: int = 32,
    advance: Callable[[int], None] | None = None,
) -> list[list[int]]:
    """Return the new token ids of each prompt, up to and without the first stop token.

    The same tokens as ``model.generate(do_sample=False, num_beams=1)`` with these gates held for prompt and answer.

    Args:
        prompts: token ids, none empty.
        routing: expert indices (n,), gates (n, M), or None for the bare backbone.
        max_new_tokens: the most new tokens per prompt.
        stop: token ids that end an answer.
        advance: called with the number of prompts done.
    """
    bench.grafted.eval()
    decode = _write if bench.backbone.writes_apart else _decode
    answers: list[list[int]] = [[] for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i))
    for start in range(0, len(order), batch_size):
        group = order[start : start + batch_size]
        part = None if routing is None else routing[group]
        for index, ids in zip(group, decode(bench, [prompts[i] for i in group], part, max_new_tokens, stop)):
            answers[index] = ids
        if advance:
            advance(len(group))
    return answers


def _decode(
    bench: Workbench, prompts: list[Sequence[int]], routing: Routing, budget: int, stop: Sequence[int]
) -> list[list[int]]:
    """Decode one batch; rows that have stopped leave it, so that short answers do not wait for long ones."""
    model: Any = bench.backbone.model
    device = bench.backbone.device
    longest = max(len(p) for p in prompts)
    pad = bench.backbone.tokenizer.pad_token_id
    ids = torch.tensor([[pad] * (longest - len(p)) + list(p) for p in prompts], device=device)
    # Without padding no mask is given, so that the fused causal kernel can be used.
    padded = any(len(p) != longest for p in prompts)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device) if padded else None
    stops = torch.tensor(sorted(set(stop)), device=device)
    answers: list[list[int]] = [[] for _ in prompts]
    alive = list(range(len(prompts)))
    routing = None if routing is None else routing.to(device)
    cache, positions = DynamicCache(config=model.config), _positions(mask, longest, len(prompts), device)
    for _ in range(budget):
        with bench.grafted.routing(routing):
            logits = model(
                input_ids=ids, attention_mask=mask, position_ids=positions, cache=cache, logits_to_keep=1
            ).logits
        ids = logits[:, -1].argmax(-1, keepdim=True)  # (b, 1)
        ended = torch.isin(ids[:, 0], stops).tolist()
        for row, token in enumerate(ids[:, 0].tolist()):
            if not ended[row]:
                answers[alive[row]].append(token)
        if any(ended):
            going = [row for row, over in enumerate(ended) if not over]
            if not going:
                break
            keep = torch.tensor(going, device=device)
            alive = [alive[row] for row in going]
            ids, positions = ids[keep], positions[keep]
            mask = None if mask is None else mask[keep]
            routing = None if routing is None else routing[keep]
            cache.batch_select_indices(keep)
        positions = positions[:, -1:] + 1
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(len(alive), 1)], dim=1)
    return answers


def _write(
    bench: Workbench, prompts: list[Sequence[int]], routing: Routing, budget: int, stop: Sequence[int]
) -> list[list[int]]:
    """Let an encoder-decoder model answer one batch."""
    model: Any = bench.backbone.model
    device, pad = bench.backbone.device, bench.backbone.tokenizer.pad_token_id
    longest = max(len(p) for p in prompts)
    ids = torch.tensor([list(p) + [pad] * (longest - len(p)) for p in prompts], device=device)
    mask = torch.tensor([[1] * len(p) + [0] * (longest - len(p)) for p in prompts], device=device)
    with bench.grafted.routing(routing):
        written = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=budget,
            do_sample=False,
            num_beams=1,
            eos_token_id=sorted(set(stop)),
            pad_token_id=pad,
        )[:, 1:]  # without the start token
    answers = []
    for row in written.tolist():
        end = next((at for at, token in enumerate(row) if token in set(stop)), len(row))
        answers.append(row[:end])
    return answers


def _positions(mask: torch.Tensor | None, length: int, rows: int, device: torch.device) -> torch.Tensor:
    """Return position ids (b, t) that count real tokens from 0."""
    if mask is None:
        return torch.arange(length, device=device).expand(rows, -1)
    return (mask.cumsum(1) - 1).clamp(min=0)
