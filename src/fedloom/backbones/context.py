"""How many tokens a model can read: a table of positions ends; rotary, relative and ALiBi positions do not."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from fedloom.backbones.load import Backbone
from fedloom.errors import ConfigError

#: What ``transformers`` calls a table with one row per position: GPT-2's, OPT's and BART's, GPT's, BERT's. GPT-J has a
#: buffer of that name, in which it looks up its rotary angles.
TABLES = ("wpe", "embed_positions", "positions_embed", "position_embeddings")


def position_limit(model: nn.Module) -> int | None:
    """Return for how many tokens the model has positions; None where it computes them for any number."""
    parts = [*model.named_modules(), *model.named_buffers()]
    found = [part for name, part in parts if name.rpartition(".")[2] in TABLES]
    if not any(isinstance(part, nn.Embedding | torch.Tensor) for part in found):
        return None
    return int(model.config.max_position_embeddings)  # type: ignore[arg-type, union-attr]


def check_length(backbone: Backbone, max_length: int, say: Callable[[str], None], key: str = "data.max_length") -> None:
    """Say where examples may be longer than what the backbone was trained on.

    Args:
        backbone: the model that reads them.
        max_length: the most tokens of an example.
        say: told of a backbone that computes beyond its context, though it never learned to.
        key: what the configuration calls ``max_length``.

    Raises:
        ConfigError: the backbone has no positions for so many tokens.
    """
    limit = position_limit(backbone.model)
    if limit is not None and max_length > limit:
        raise ConfigError(
            f"{key} is {max_length}, but the backbone {backbone.name!r} has positions for {limit} tokens. Set {key} to "
            f"{limit} or less."
        )
    if beyond := _untrained(backbone, limit, max_length):
        say(f"{key} is {max_length}, {beyond}.")


def _untrained(backbone: Backbone, limit: int | None, length: int) -> str:
    """Return words for a length that the backbone computes, but did not learn; empty for one that it did."""
    trained = getattr(backbone.config, "max_position_embeddings", None)
    if limit is not None or not isinstance(trained, int) or length <= trained:
        return ""
    return f"beyond the {trained} tokens that the backbone {backbone.name!r} was trained on"


def check_room(
    backbone: Backbone, prompt: int, new_tokens: int, advice: str, say: Callable[[str], object] | None = None
) -> None:
    """Refuse an answer for which the backbone has no positions.

    Args:
        backbone: the model that answers.
        prompt: tokens of the longest prompt.
        new_tokens: the most tokens of an answer.
        advice: what to do about it, a sentence.
        say: told of an answer that the backbone computes beyond its context, though it never learned to.

    Raises:
        ConfigError: prompt and answer (for an encoder-decoder model, either) are longer than the table of positions.
    """
    limit = position_limit(backbone.model)
    needed = max(prompt, new_tokens) if backbone.writes_apart else prompt + new_tokens
    if limit is not None and needed > limit:
        raise ConfigError(
            f"a prompt of {prompt} tokens and an answer of up to {new_tokens} need {needed} positions, but the "
            f"backbone {backbone.name!r} has {limit}. {advice}"
        )
    if say is not None and (beyond := _untrained(backbone, limit, needed)):
        say(
            f"a prompt of {prompt} tokens and an answer of up to {new_tokens} are {beyond}: the answer may be empty or "
            f"make no sense. {advice}"
        )
