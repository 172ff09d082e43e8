"""One run from configuration to model folder, report and metrics."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from fedloom.adapters.inject import default_targets, target_modules
from fedloom.adapters.native import find_native
from fedloom.adapters.native_mask import check_choosing
from fedloom.backbones.load import Backbone, cache_dir, load_backbone
from fedloom.config import BackboneConfig, Config, config_of
from fedloom.errors import ConfigError
from fedloom.export import save_model
from fedloom.files import write_atomic, write_json
from fedloom.locking import alone
from fedloom.measure import audit, evaluate_final, evaluate_round, experts_of
from fedloom.methods.base import Method
from fedloom.provenance import identity, manifest
from fedloom.report import write_report
from fedloom.runtime.answers import federation_of
from fedloom.runtime.checkpoint import CheckpointFolder
from fedloom.runtime.client import Workbench
from fedloom.runtime.events import Observer, RoundLog
from fedloom.runtime.leaving import leaving_of
from fedloom.runtime.loop import cohort_size, federate
from fedloom.runtime.memory import Memories, MemoryFolder
from fedloom.runtime.simulate import Simulator
from fedloom.types import AdapterSpec, Memory, Plain, Setup, State, View
from fedloom.workload import Data, Run, check_replies, cut_epochs, load_data, read_data


def run(
    config: Config | Mapping[str, Any] | str | Path,
    out: str | Path,
    *,
    resume: bool = False,
    observer: Observer | None = None,
) -> dict[str, Plain]:
    """Train, evaluate and write everything to ``out``.

    Args:
        config: the path of a YAML file, what such a file holds, or what ``fedloom.load_config`` returns.
        out: folder for ``config.yaml manifest.json rounds.jsonl metrics.json model/ report.html checkpoints/``. Without
            a global model there is ``models/<client>/`` in place of ``model/``.
        resume: go on from the newest checkpoint in ``out``.
        observer: told what happens.

    Returns:
        What ``metrics.json`` holds.

    Raises:
        FedloomError: see the message; what was written before stays usable with ``resume``.
    """
    config, out = config_of(config), Path(out)
    with alone(out, f"is writing this run, {out}. Wait for it, stop it, or give another --out."):
        return _run(config, out, resume, observer or Observer())


def _run(config: Config, out: Path, resume: bool, observer: Observer) -> dict[str, Plain]:
    start = time.perf_counter()
    if (out / "checkpoints").exists() and not resume:
        raise ConfigError(f"{out} already holds a run. Give --resume to go on with it, or another --out.")
    resumed = resume and bool(CheckpointFolder(out / "checkpoints", {}).rounds())
    method = config.build_method()
    found = read_data(config)
    check_replies(config, 1 if method.pooled else len(found.clients))
    backbone = backbone_of(config.backbone)
    data = load_data(config, found, backbone, observer, pooled=method.pooled)
    method.check_clients(sorted(data.clients))
    if cut := cut_epochs(config.training.ordered(), data.sizes):
        observer.say(cut)
    bench, setup = setup_of(config, method, backbone, sorted(name for name, rows in data.clients.items() if len(rows)))
    checkpoints = describe(out, config, backbone, data)
    this = Run(config, method, bench, data)
    if method.has_probe and not setup.spec.native:
        observer.phase("features", sum(map(len, data.clients.values())) + sum(map(len, data.test.values())))
        for rows in [*data.clients.values(), *data.test.values()]:
            rows.features(bench, observer.advance)

    memory = MemoryFolder(out / "checkpoints" / "memory")
    leaving = leaving_of(config, method)
    state = federate(
        method,
        Simulator(bench, data.clients, config.seed, memory, out / "checkpoints" / "spool", leaving),
        setup,
        config.training.ordered(cohort_size(len(data.sizes), config.federation.participation) if method.pooled else 1),
        federation_of(config),
        checkpoints,
        RoundLog(out / "rounds.jsonl"),
        observer,
        evaluate=lambda state, versions: evaluate_round(this, state, Memories(memory, versions)),
    )
    memories = Memories(memory, checkpoints.load(state.round).memories)
    return finish(out, this, state, memories, observer, start=start, resumed=resumed)


def backbone_of(wanted: BackboneConfig) -> Backbone:
    """Pin PyTorch's threads and load the frozen model."""
    if wanted.threads:
        torch.set_num_threads(wanted.threads)
    return load_backbone(wanted.name, dtype=wanted.dtype, device=wanted.device)


def setup_of(config: Config, method: Method, backbone: Backbone, clients: Sequence[str]) -> tuple[Workbench, Setup]:
    """Graft what a run trains onto the backbone; return the workbench, and what the method needs before round 1."""
    spec = adapter_spec(config, method, backbone)
    shapes = {} if spec.native else target_modules(backbone.model, spec.targets)
    bench = Workbench(backbone, spec, cache_dir())
    setup = Setup(
        seed=config.seed,
        spec=spec,
        shapes=shapes,
        hidden_size=backbone.hidden_size,
        clients=tuple(clients),
        initial=bench.grafted.read() if spec.native else {},
    )
    return bench, setup


def describe(out: Path, config: Config, backbone: Backbone, data: Data) -> CheckpointFolder:
    """Write ``config.yaml`` and ``manifest.json``; return the folder of the run's checkpoints.

    Raises:
        ConfigError: checkpoints of another configuration are there; then nothing was overwritten.
    """
    checkpoints = CheckpointFolder(out / "checkpoints", identity(config, backbone, data))
    earlier = None
    if done := checkpoints.rounds():
        checkpoints.load(done[-1])
        earlier = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
    write_atomic(out / "config.yaml", yaml.safe_dump(config.model_dump(), sort_keys=False).encode())
    write_json(out / "manifest.json", manifest(config, backbone, data, earlier))
    return checkpoints


def finish(
    out: Path,
    this: Run,
    state: State,
    memories: Mapping[str, Memory],
    observer: Observer,
    *,
    start: float,
    resumed: bool,
) -> dict[str, Plain]:
    """Write the models, ``metrics.json`` and the report of a run whose rounds are over.

    Args:
        out: folder of the run.
        this: what was run.
        state: after the last round.
        memories: what clients keep, as far as it is here.
        observer: told of progress.
        start: ``time.perf_counter()`` when the run began.
        resumed: then that was where it went on.

    Returns:
        What ``metrics.json`` holds.
    """
    write_models(out, this, state, memories)  # first: no failure to measure it costs the model
    metrics = evaluate_final(this, state, memories, observer)
    metrics["before"] = RoundLog(out / "rounds.jsonl").read()[0].get("evaluation")
    metrics["alignment"] = audit(state, memories, this.data)
    metrics |= peak_memory(this.bench.backbone.device)
    metrics["seconds"] = round(time.perf_counter() - start, 1)
    metrics["resumed"] = resumed
    write_json(out / "metrics.json", metrics)
    write_report(out)
    return metrics


def peak_memory(device: torch.device) -> dict[str, int]:
    """Return the most bytes that this process has held so far, and on a CUDA device the most that its tensors took."""
    unit = 1 if sys.platform == "darwin" else 1024
    peaks = {"peak_bytes": unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
    if device.type == "cuda":
        peaks["peak_device_bytes"] = torch.cuda.max_memory_allocated(device)
    return peaks


def write_models(out: Path, this: Run, state: State, memories: Mapping[str, Memory]) -> None:
    """Write the folders that ``models_of`` names."""
    config, method, bench = this.config, this.method, this.bench
    for folder, view in models_of(method, state, memories).items():
        bench.load(view.tensors, view.spec)
        save_model(
            out / folder,
            view,
            bench,
            provenance={
                "method": config.method.name,
                "paper": method.paper,
                "rounds": state.round,
                "seed": config.seed,
                "config": "config.yaml of the run",
            },
            max_length=config.data.max_length,
            experts=experts_of(state) if folder == "model" else (),
            routing=config.evaluation.routing[0],
        )


def models_of(method: Method, state: State, memories: Mapping[str, Memory]) -> dict[str, View]:
    """Return folder → model: the one for everyone, or where there is none, each client's own."""
    if (view := method.assembled(state, memories)) is not None:
        return {"model": view}
    return {f"models/{client}": method.personal_view(state, client, memories[client]) for client in memories}


def adapter_spec(config: Config, method: Method, backbone: Backbone) -> AdapterSpec:
    """Return what is grafted before round 1.

    Raises:
        ConfigError: a method for native experts is asked to train LoRA experts, or the other way round.
        AdapterError: clients are to hold some experts of a backbone that chooses groups of them.
    """
    adapter = config.adapter
    if method.native and not adapter.native:
        raise ConfigError(
            f"{method.title} trains a model's own experts: set adapter.native to 'full' or 'lora', and take a backbone "
            "that has experts (tiny-switch, Mixtral, OLMoE, Qwen-MoE, Switch Transformers)."
        )
    if adapter.native and not method.native:
        raise ConfigError(f"adapter.native is {adapter.native!r}, but {method.title} trains LoRA experts of its own.")
    if method.submodels:
        check_choosing(find_native(backbone.model).layers)
    targets = () if adapter.native else tuple(adapter.targets or default_targets(backbone.config))
    rank = adapter.rank or method.default_rank
    return AdapterSpec(targets, rank, adapter.alpha, adapter.dropout, native=adapter.native or "")
