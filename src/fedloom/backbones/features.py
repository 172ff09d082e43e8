"""The frozen backbone's view of a prompt: input of every router and of prototype discovery."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from fedloom.backbones.load import Backbone
from fedloom.errors import ConfigError
from fedloom.files import write_private
from fedloom.types import Layer, Pooling

#: Part of every cache key, with layer and pooling: change it when the definition below changes.
DEFINITION = "a hidden layer, pooled over the prompt tokens, adapters off, float32, v2"

TOKENS_PER_BATCH = 2048


def batches_by_length(lengths: Sequence[int], tokens: int = TOKENS_PER_BATCH, most: int = 64) -> list[list[int]]:
    """Group indices of like length so that rows × longest stays within ``tokens`` (at least one row a group)."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if groups and len(groups[-1]) < most and (len(groups[-1]) + 1) * lengths[index] <= tokens:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def layer_index(layer: Layer, layers: int) -> int:
    """Return how many blocks the states of a layer have gone through, 0 (embeddings) to ``layers``.

    Args:
        layer: ``last``; an index (int); or a fraction of the depth (float from 0.0 to 1.0), rounded to the nearest.
        layers: the model's blocks.

    Raises:
        ConfigError: the model has no such layer.
    """
    index = layers if layer == "last" else round(layer * layers) if isinstance(layer, float) else int(layer)
    if not 0 <= index <= layers:
        raise ConfigError(
            f"layer is {layer!r}, but the backbone has {layers} layers. "
            f"Use 'last', an index from 0 to {layers}, or a fraction from 0.0 to 1.0."
        )
    return index


def _arithmetic(backbone: Backbone) -> list[str | int]:
    """Return what decides the last bits of a product on this machine."""
    where = backbone.device
    linear = sorted({type(m).__name__ for m in backbone.model.modules() if "Linear" in type(m).__name__})
    processor = torch.cuda.get_device_name(where) if where.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    # The type as it is now: the backbone's hash is taken when it is loaded, and ``load_model(dtype=…)`` casts it later.
    kind = str(next(backbone.model.parameters()).dtype)
    return [torch.__version__, where.type, processor, torch.get_num_threads(), kind, *linear]


def _read_cached(path: Path, shape: tuple[int, int]) -> torch.Tensor | None:
    """Return the features in a file of the cache, or None where there is none or it is damaged.

    A damaged file is no silent fall-back: a cache only saves work, and what is computed again is what it held.
    """
    try:
        features = load_file(path)["features"]
    except (FileNotFoundError, SafetensorError, KeyError):
        return None
    return features if features.shape == shape and features.dtype == torch.float32 else None


@torch.no_grad()
def prompt_features(
    backbone: Backbone,
    prompts: Sequence[Sequence[int]],
    *,
    layer: Layer = "last",
    pooling: Pooling = "mean",
    cache: Path | None = None,
    advance: Callable[[int], None] | None = None,
) -> torch.Tensor:
    """Return a hidden layer pooled over each prompt's tokens, un-normalised, (n, hidden) float32.

    Adapters must be off. The defaults are FedWeave's: the mean of the last layer. The cache holds one file per *list*
    of prompts, keyed by backbone hash, definition, layer and pooling, the machine's arithmetic and token ids (which fix
    tokenizer, template and text). A value depends in its last bits on the batch it was computed in, so a file per
    prompt would make a run's bits depend on which runs came before.

    Args:
        backbone: the frozen backbone.
        prompts: token ids of each templated prompt, none empty.
        layer: see ``layer_index``.
        pooling: ``mean`` over the tokens, or the ``last`` token's state.
        cache: folder of the cache; None computes without one.
        advance: called with the number of prompts done, for progress.

    Raises:
        ConfigError: there is no such layer, or the backbone is an encoder-decoder.
    """
    if backbone.writes_apart:
        raise ConfigError(
            f"this method routes or sorts prompts by the hidden states of a causal backbone; {backbone.name!r} is an "
            "encoder-decoder. Take another backbone, or a method without a router (fedit, or fcmoe on native experts)."
        )
    depth = layer_index(layer, backbone.layers)
    path = None
    if cache is not None:
        texts = [list(p) for p in prompts]
        what = [DEFINITION, depth, pooling, _arithmetic(backbone), backbone.hash, texts]
        key = hashlib.sha256(json.dumps(what).encode()).hexdigest()
        path = cache / "features" / key[:2] / f"{key}.safetensors"
        if (known := _read_cached(path, (len(prompts), backbone.hidden_size))) is not None:
            if advance:
                advance(len(prompts))
            return known
    features = torch.empty(len(prompts), backbone.hidden_size)
    lengths = [len(p) for p in prompts]
    for group in batches_by_length(lengths):
        longest = max(lengths[i] for i in group)
        ids = torch.zeros(len(group), longest, dtype=torch.int64)
        mask = torch.zeros(len(group), longest, 1)
        for row, index in enumerate(group):
            ids[row, : lengths[index]] = torch.as_tensor(prompts[index])
            mask[row, lengths[index] - 1 if pooling == "last" else 0 : lengths[index]] = 1
        hidden = backbone.hidden(ids.to(backbone.device), depth).float().cpu()
        features[group] = (hidden * mask).sum(1) / mask.sum(1)
        if advance:
            advance(len(group))
    if path is not None:
        write_private(path, save({"features": features}))  # private: features of a prompt tell of the prompt
    return features
