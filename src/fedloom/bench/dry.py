"""What a suite will take, from configurations and architectures alone: everything is built on the meta device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from rich.text import Text

from fedloom.adapters.inject import default_targets, graft
from fedloom.adapters.native import ROUTERS, find_native
from fedloom.adapters.native_lora import graft_expert_lora
from fedloom.bench.suite import Cell
from fedloom.budget import architecture
from fedloom.config import Config
from fedloom.types import AdapterSpec

#: Assumed, and said so beside the figures: what a data-centre GPU sustains on these small batches, in FLOP/s.
SUSTAINED = 150e12
#: Experts to expect where the method finds their number (FedWeave and FedLEASE select four in the paper's runs).
EXPERTS = 4


@dataclass(frozen=True)
class Forecast:
    """One cell's needs.

    Attributes:
        trainable: parameters that a client trains: of adapters and routers, or of a backbone with experts of its own.
        frozen: the other parameters of the backbone.
        round_bytes: float32 bytes per client, round and direction, at most.
        total_bytes: both directions, all clients and rounds, at most.
        memory: bytes on the device: frozen weights in bfloat16, trained ones with gradients and AdamW moments in
            float32, activations.
        examples: what a round trains on, at most.
        hours: local steps at the longest length and ``SUSTAINED``, without evaluation; of a mixture layer's experts a
            token meets only those that it is sent to.
    """

    trainable: int
    frozen: int
    round_bytes: int
    total_bytes: int
    memory: int
    examples: int
    hours: float


def forecast(cell: Cell) -> Forecast:
    """Build a cell's model on the meta device and count.

    Raises:
        ConfigError: the backbone is unknown.
        AdapterError: a target matches nothing.
    """
    config = cell.config
    method = config.build_method()
    adapter = config.adapter
    model_config, model = architecture(config.backbone.name)
    whole = sum(p.numel() for p in model.parameters())
    met = _met(model, whole)
    rank = adapter.rank or method.default_rank
    with torch.device("meta"):
        if adapter.native == "full":
            slots = find_native(model).slots()
        elif adapter.native == "lora":
            slots = graft_expert_lora(model, rank, adapter.alpha).slots()
        else:
            targets = tuple(adapter.targets or default_targets(model_config))
            spec = method.deployed(AdapterSpec(targets, rank, adapter.alpha, adapter.dropout), EXPERTS)
            slots = graft(model, spec, model_config.hidden_size).parameters_by_name()
    trainable = sum(slot.value.numel() for slot in slots.values())
    frozen = whole - trainable if adapter.native == "full" else whole
    clients = config.data.benchmark.clients if config.data.benchmark else max(1, len(config.data.clients))
    rounds, training = config.federation.rounds, config.training
    cohort = max(1, round(clients * config.federation.participation))
    examples = _examples(config, cohort)
    tokens = examples * config.data.max_length * rounds
    width, layers = model_config.hidden_size, model_config.num_hidden_layers
    # About 34 bytes per token, layer and channel are kept for the backward pass in mixed precision.
    activations = 34 * training.batch_size * config.data.max_length * width * layers
    return Forecast(
        trainable=trainable,
        frozen=frozen,
        round_bytes=4 * trainable,
        total_bytes=2 * 4 * trainable * cohort * rounds,
        memory=2 * frozen + 16 * trainable + activations,
        examples=examples,
        # Forward 2, backward through frozen weights 2, gradients of the backbone's own weights 2.
        hours=(6 if adapter.native == "full" else 4) * met * tokens / SUSTAINED / 3600,
    )


def _examples(config: Config, cohort: int) -> int:
    """Return how many examples a round trains on, at most."""
    training, benchmark = config.training, config.data.benchmark
    steps = training.steps * training.batch_size * cohort
    if training.epochs and benchmark is not None:  # all rows lie with the cohort, at most
        return min(steps, training.epochs * benchmark.train * len(benchmark.tasks))
    return steps


def _met(model: Any, whole: int) -> int:
    """Return the parameters that one token meets, of ``whole``: of native experts only the chosen ones."""
    if getattr(model.config, "model_type", "") not in ROUTERS:
        return whole
    idle = 0.0
    for layer in find_native(model).layers:
        size = sum(slot.value.numel() for _, slot in layer.expert_slots())
        idle += size * (1 - layer.top_k / layer.experts)
    return whole - int(idle)


def dry_table(cells: Sequence[Cell]) -> Table:
    """Return one row per label, backbone and tasks with what its cells need, and a sum."""
    groups: dict[tuple[str, str, str], list[Cell]] = {}
    for cell in cells:
        benchmark = cell.config.data.benchmark
        tasks = ", ".join(benchmark.tasks) if benchmark else ""
        groups.setdefault((cell.title, cell.config.backbone.name, tasks), []).append(cell)
    table = Table(
        title="What the suite will take",
        caption=f"At most: longest texts, {EXPERTS} experts where the method finds their number, "
        f"{SUSTAINED / 1e12:.0f} TFLOP/s sustained (assumed), evaluation not counted.",
    )
    table.add_column("method")
    table.add_column("backbone")
    for heading in (
        "cells",
        "examples per round",
        "trainable",
        "bytes per client, round, direction",
        "GB moved per cell",
        "device GB",
        "hours",
    ):
        table.add_column(heading, justify="right")
    hours, moved = 0.0, 0.0
    for (title, backbone, _), group in groups.items():
        one = forecast(group[0])
        hours, moved = hours + one.hours * len(group), moved + one.total_bytes * len(group)
        table.add_row(
            Text(title),
            Text(backbone),
            str(len(group)),
            f"{one.examples:,}",
            f"{one.trainable:,}",
            f"{one.round_bytes:,}",
            f"{one.total_bytes / 1e9:.2f}",
            f"{one.memory / 1e9:.1f}",
            f"{one.hours:.2f}",
        )
    table.add_section()
    table.add_row("all", "", str(len(cells)), "", "", "", f"{moved / 1e9:.1f}", "", f"{hours:.1f}")
    return table
