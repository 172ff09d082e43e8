"""What a suite will take, from configurations and architectures alone: everything is built on the meta device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedloom.adapters.inject import default_targets, target_modules
from fedloom.adapters.native import ROUTERS, find_native
from fedloom.adapters.native_lora import graft_expert_lora
from fedloom.bench.suite import Cell
from fedloom.budget import Payload, architecture, held, payload
from fedloom.config import Config
from fedloom.errors import DataError
from fedloom.methods.base import WarmUp
from fedloom.runtime.loop import cohort_size
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
        up_bytes, down_bytes: float32 bytes per client and round, at most.
        probe_steps: warm-up steps of one client before round 1, at most.
        total_bytes: both directions, all clients, the rounds and the probe, at most.
        memory: bytes on the device: frozen weights in bfloat16, trained ones with gradients and AdamW moments in
            float32, what else an order brings in float32, activations.
        examples: what a round trains on, at most.
        hours: warm-up and local steps, own heads and gates, and what a probe counts, at the longest length and
            ``SUSTAINED``, without evaluation; of a mixture layer's experts a token meets only those that it is sent to.
    """

    trainable: int
    frozen: int
    up_bytes: int
    down_bytes: int
    probe_steps: int
    total_bytes: int
    memory: int
    examples: int
    hours: float


def check_files(cells: Sequence[Cell]) -> None:
    """Refuse cells whose own files of rows are not there.

    Raises:
        DataError: naming the first cell and file.
    """
    for cell in cells:
        data = cell.config.data
        for path in (*data.clients.values(), *data.test.values()):
            if not Path(path).is_file():
                raise DataError(f"{cell.name}: {path}: no such file. Check the path.")


def forecast(cell: Cell) -> Forecast:
    """Build a cell's model on the meta device and count.

    Raises:
        ConfigError: the backbone is unknown.
        AdapterError: a target matches nothing.
        DataError: a client's file cannot be read.
    """
    config = cell.config
    method = config.build_method()
    adapter = config.adapter
    model_config, model = architecture(config.backbone.name)
    whole = sum(p.numel() for p in model.parameters())
    met = _met(model, whole)
    rank = adapter.rank or method.default_rank
    clients = _clients(config)
    one = probe_values = 0  # values of one bucket's warm-up, and of the probe
    if adapter.native:
        with torch.device("meta"):
            full = adapter.native == "full"
            named = find_native(model) if full else graft_expert_lora(model, rank, adapter.alpha, train_routers=True)
            slots = named.slots()
        sizes = {name: slot.value.numel() for name, slot in slots.items()}
        count = held(method, sizes)
        optimised = sum(sizes.values())  # experts that are stacked in one Parameter have moments, held or not
        sent = Payload(count, count, count)
        if method.has_probe:  # the whole model goes down once, and numbers come back
            probe_values = clients * optimised
    else:
        targets = tuple(adapter.targets or default_targets(model_config))
        shapes = target_modules(model, targets)
        sent = payload(method, AdapterSpec(targets, rank, adapter.alpha), shapes, model_config.hidden_size, EXPERTS)
        optimised = sent.trained
        one = sum(rank * (out + width) for out, width in shapes.values())
    frozen = whole - sent.trained if adapter.native == "full" else whole
    still = 0 if adapter.native == "full" else whole  # what no client trains
    rounds, training = config.federation.rounds, config.training
    cohort = cohort_size(clients, config.federation.participation)
    examples, warm = _examples(config, cohort), method.warms_up() or WarmUp(0, 0, 0)
    probed = clients * warm.buckets * warm.steps * warm.batch
    tokens = (examples * rounds + probed) * config.data.max_length
    width, layers = model_config.hidden_size, model_config.num_hidden_layers
    # About 34 bytes per token, layer and channel are kept for the backward pass in mixed precision.
    activations = 34 * training.batch_size * config.data.max_length * width * layers
    if warm.buckets:
        probe_values = clients * (1 + warm.buckets) * one  # one adapter down, one per bucket up
    # Forward 2, backward through frozen weights 2, gradients of the backbone's own weights 2.
    step = 6 if adapter.native == "full" else 4
    operations = step * met * tokens
    if method.own_heads:  # the whole backward is made; beside it, that of the own head
        head = model.get_output_embeddings().weight.numel()
        optimised += head
        own_tokens = method.head_rows(_rows(config), clients, rounds) * config.data.max_length
        operations += (step * met + 6 * head) * own_tokens
    elif adapter.native and method.has_probe:
        operations += 2 * met * _rows(config) * config.data.max_length
    return Forecast(
        trainable=sent.trained,
        frozen=frozen,
        up_bytes=4 * sent.up,
        down_bytes=4 * sent.down,
        probe_steps=warm.buckets * warm.steps,
        total_bytes=4 * ((sent.up + sent.down) * cohort * rounds + probe_values),
        memory=2 * still + 16 * optimised + 4 * max(0, sent.down - sent.trained) + activations,
        examples=examples,
        hours=operations / SUSTAINED / 3600,
    )


def _clients(config: Config) -> int:
    source = config.data.benchmark or config.data.synthetic
    return source.clients if source else max(1, len(config.data.clients))


def _examples(config: Config, cohort: int) -> int:
    """Return how many examples a round trains on, at most."""
    training, benchmark = config.training, config.data.benchmark
    steps = training.steps * training.batch_size * cohort
    if training.epochs and benchmark is not None:  # all rows lie with the cohort, at most
        return min(steps, training.epochs * benchmark.train * len(benchmark.tasks))
    return steps


def _rows(config: Config) -> int:
    """Return how many training rows there are, at most; of files the lines are counted."""
    if (benchmark := config.data.benchmark) is not None:
        return benchmark.train * len(benchmark.tasks)
    if (synthetic := config.data.synthetic) is not None:
        return synthetic.train * synthetic.clients
    try:
        return sum(Path(file).read_bytes().count(b"\n") + 1 for file in config.data.clients.values())
    except OSError as error:
        raise DataError(f"cannot read {error.filename}: {error.strerror}") from error


def _met(model: Any, whole: int) -> int:
    """Return the parameters that one token meets, of ``whole``: of native experts only the chosen ones."""
    if getattr(model.config, "model_type", "") not in ROUTERS:
        return whole
    idle = 0.0
    for layer in find_native(model).layers:
        size = sum(slot.value.numel() for _, slot in layer.expert_slots())
        idle += size * (1 - layer.top_k / layer.experts)
    return whole - int(idle)


def dry_table(cells: Sequence[Cell]) -> Group:
    """Return a table per backbone and tasks, and the sum: what the cells of each label need, in 80 columns.

    Cells of one label that need the same stand in one row.
    """
    groups: dict[tuple[str, str], dict[tuple[str, Forecast], int]] = {}
    known: dict[str, Forecast] = {}  # seeds do not matter
    labels: dict[str, set[str]] = {}  # title → labels
    for cell in cells:
        labels.setdefault(cell.title, set()).add(cell.label)
    for cell in cells:
        benchmark = cell.config.data.benchmark
        tasks = ", ".join(benchmark.tasks) if benchmark else ""
        configuration = cell.config.model_dump_json(exclude={"seed"})
        if configuration not in known:
            known[configuration] = forecast(cell)
        name = f"{cell.title} ({cell.label})" if len(labels[cell.title]) > 1 else cell.title
        rows = groups.setdefault((cell.config.backbone.name, tasks), {})
        row = (name, known[configuration])
        rows[row] = rows.get(row, 0) + 1
    shown: list[RenderableType] = [Text("What the suite will take", style="bold")]
    hours, moved, examples = 0.0, 0.0, set()
    for (backbone, tasks), rows in groups.items():
        title = Text(f"{backbone}: {tasks}" if tasks else backbone, style="italic")
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
        table.add_column("method", overflow="fold")
        for heading in ("cells", "trained M", "warm-up steps", "MB up", "MB down", "GB sent", "device GB", "hours"):
            table.add_column(heading, justify="right")
        for (name, one), count in rows.items():
            hours, moved = hours + one.hours * count, moved + one.total_bytes * count
            examples.add(one.examples)
            table.add_row(
                Text(name),
                str(count),
                f"{one.trainable / 1e6:,.2f}",
                f"{one.probe_steps:,}",
                f"{one.up_bytes / 1e6:,.2f}",
                f"{one.down_bytes / 1e6:,.2f}",
                f"{one.total_bytes / 1e9:,.2f}",
                f"{one.memory / 1e9:.1f}",
                f"{one.hours:.2f}",
            )
        shown.append(table)
    shown.append(Text(f"{len(cells)} cells: {moved / 1e9:,.1f} GB sent, {hours:.1f} hours.", style="bold"))
    shown.append(
        Text(
            "Millions of trained values; MB of a client in a round; GB, hours and memory of a cell. At most: "
            f"longest texts, {EXPERTS} experts where the method finds their number, as many warm-ups before round "
            f"1 as a client may have buckets, {SUSTAINED / 1e12:.0f} TFLOP/s (assumed), evaluation not counted; "
            f"{' or '.join(f'{count:,}' for count in sorted(examples))} examples in a round.",
            style="dim",
        )
    )
    return Group(*shown)
