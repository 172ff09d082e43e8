"""What a suite will take, from configurations and architectures alone: everything is built on the meta device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.table import Table
from rich.text import Text

from fedloom.adapters.inject import default_targets, graft
from fedloom.bench.suite import Cell
from fedloom.budget import architecture
from fedloom.types import AdapterSpec

#: Assumed, and said so beside the figures: what a data-centre GPU sustains on these small batches, in FLOP/s.
SUSTAINED = 150e12
#: Experts to expect where the method finds their number (FedWeave and FedLEASE select four in the paper's runs).
EXPERTS = 4


@dataclass(frozen=True)
class Forecast:
    """One cell's needs.

    Attributes:
        trainable: parameters of adapters and routers that a client holds.
        frozen: parameters of the backbone.
        round_bytes: float32 bytes per client, round and direction, at most.
        total_bytes: both directions, all clients and rounds, at most.
        memory: bytes on the device: frozen weights in bfloat16, adapters with gradients and AdamW moments, activations.
        hours: local steps at the longest length and ``SUSTAINED``, without evaluation.
    """

    trainable: int
    frozen: int
    round_bytes: int
    total_bytes: int
    memory: int
    hours: float


def forecast(cell: Cell) -> Forecast:
    """Build a cell's model on the meta device and count.

    Raises:
        ConfigError: the backbone is unknown.
        AdapterError: a target matches nothing.
    """
    config = cell.config
    method = config.build_method()
    model_config, model = architecture(config.backbone.name)
    targets = tuple(config.adapter.targets or default_targets(model_config))
    rank = config.adapter.rank or method.default_rank
    spec = method.deployed(AdapterSpec(targets, rank, config.adapter.alpha, config.adapter.dropout), EXPERTS)
    frozen = sum(p.numel() for p in model.parameters())
    with torch.device("meta"):
        grafted = graft(model, spec, model_config.hidden_size)
    trainable = sum(slot.value.numel() for slot in grafted.parameters_by_name().values())
    clients = config.data.benchmark.clients if config.data.benchmark else max(1, len(config.data.clients))
    rounds, training = config.federation.rounds, config.training
    cohort = max(1, round(clients * config.federation.participation))
    tokens = training.steps * training.batch_size * config.data.max_length * cohort * rounds
    width, layers = model_config.hidden_size, model_config.num_hidden_layers
    # About 34 bytes per token, layer and channel are kept for the backward pass in mixed precision.
    activations = 34 * training.batch_size * config.data.max_length * width * layers
    return Forecast(
        trainable=trainable,
        frozen=frozen,
        round_bytes=4 * trainable,
        total_bytes=2 * 4 * trainable * cohort * rounds,
        memory=2 * frozen + 16 * trainable + activations,
        hours=4 * frozen * tokens / SUSTAINED / 3600,  # forward 2, backward through frozen weights 2
    )


def dry_table(cells: Sequence[Cell]) -> Table:
    """Return one row per label and backbone with what its cells need, and a sum."""
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.title, cell.config.backbone.name), []).append(cell)
    table = Table(
        title="What the suite will take",
        caption=f"At most: longest texts, {EXPERTS} experts where the method finds their number, "
        f"{SUSTAINED / 1e12:.0f} TFLOP/s sustained (assumed), evaluation not counted.",
    )
    table.add_column("method")
    table.add_column("backbone")
    for heading in (
        "cells",
        "trainable",
        "bytes per client, round, direction",
        "GB moved per cell",
        "device GB",
        "hours",
    ):
        table.add_column(heading, justify="right")
    hours, moved = 0.0, 0.0
    for (title, backbone), group in groups.items():
        one = forecast(group[0])
        hours, moved = hours + one.hours * len(group), moved + one.total_bytes * len(group)
        table.add_row(
            Text(title),
            Text(backbone),
            str(len(group)),
            f"{one.trainable:,}",
            f"{one.round_bytes:,}",
            f"{one.total_bytes / 1e9:.2f}",
            f"{one.memory / 1e9:.1f}",
            f"{one.hours:.2f}",
        )
    table.add_section()
    table.add_row("all", "", str(len(cells)), "", "", f"{moved / 1e9:.1f}", "", f"{hours:.1f}")
    return table
