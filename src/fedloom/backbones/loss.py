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
    device = backbone.device
    rows, columns = batch.positions
    hidden = backbone.hidden(batch.ids.to(device))[rows.to(device), columns.to(device)]  # (n, hidden)
    return F.cross_entropy(backbone.logits(hidden).float(), batch.labels.to(device), reduction="none")
