"""Next-token loss with logits only where there is a label."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fedloom.backbones.load import Backbone
from fedloom.data.tokenize import Batch


def token_losses(backbone: Backbone, batch: Batch) -> torch.Tensor:
    """Return the cross-entropy of every supervised token, (n,), float32, in the order of ``batch.labels``.

    The output head is a large part of a small model (a quarter of SmolLM2-135M's multiplications per token), and only
    responses are supervised; so hidden states are selected before the head.
    """
    if backbone.writes_apart:
        return _written_losses(backbone, batch)
    device = backbone.device
    rows, columns = batch.positions
    hidden = backbone.hidden(batch.ids.to(device))[rows.to(device), columns.to(device)]  # (n, hidden)
    return F.cross_entropy(backbone.logits(hidden).float(), batch.labels.to(device), reduction="none")


def halves(batch: Batch, pad_id: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cut conversations for an encoder-decoder model.

    Returns:
        Prompt ids (b, s) padded on the right, their mask (b, s), and response ids (b, t) with −100 where there is none.
    """
    positions = torch.arange(batch.ids.shape[1])[None]  # (1, length)
    longest = int(batch.prompts.max())
    mask = positions[:, :longest] < batch.prompts[:, None]
    source = batch.ids[:, :longest].where(mask, torch.tensor(pad_id))
    target = torch.full((len(batch.ids), int((batch.lengths - batch.prompts).max())), -100, dtype=torch.int64)
    steps = batch.columns + 1 - batch.prompts[batch.rows]  # place of each label in its response
    target[batch.rows, steps] = batch.labels
    return source, mask.long(), target


def token_masks(backbone: Backbone, batch: Batch) -> dict[str, torch.Tensor]:
    """Return which positions (b, t) of ``token_losses``' forward pass hold tokens: ``causal``, or both sides."""
    if not backbone.writes_apart:
        positions = torch.arange(batch.ids.shape[1])[None]
        return {"causal": (positions < batch.lengths[:, None]).long()}
    _, mask, target = halves(batch, backbone.tokenizer.pad_token_id)
    return {"encoder": mask, "decoder": (target >= 0).long()}


def _written_losses(backbone: Backbone, batch: Batch) -> torch.Tensor:
    """The decoder writes the response from the start token on; see ``token_losses``."""
    source, mask, target = halves(batch, backbone.tokenizer.pad_token_id)
    start = torch.full_like(target[:, :1], int(backbone.config.decoder_start_token_id))
    written = torch.cat([start, target[:, :-1]], dim=1)
    written = written.where(written >= 0, torch.tensor(backbone.tokenizer.pad_token_id))
    device = backbone.device
    source, mask, written = source.to(device), mask.to(device), written.to(device)
    output = backbone.model(input_ids=source, attention_mask=mask, decoder_input_ids=written, use_cache=False)
    steps = batch.columns + 1 - batch.prompts[batch.rows]
    chosen = output.logits[batch.rows.to(device), steps.to(device)]
    return F.cross_entropy(chosen.float(), batch.labels.to(device), reduction="none")
