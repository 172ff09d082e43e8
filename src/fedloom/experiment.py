"""One run from configuration to model folder, report and metrics."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch
import yaml

from fedloom.adapters.inject import default_targets, target_modules
from fedloom.adapters.native import find_native
from fedloom.adapters.native_mask import check_choosing
from fedloom.backbones.load import Backbone, cache_dir, load_backbone
from fedloom.config import Config
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
from fedloom.workload import cut_epochs, load_data


def run(config: Config, out: str | Path, *, resume: bool = False, observer: Observer | None = None) -> dict[str, Plain]:
    """Train, evaluate and write everything to ``out``.

    Args:
        config: see ``fedloom.config.load_config``.
        out: folder for ``config.yaml manifest.json rounds.jsonl metrics.json model/ report.html checkpoints/``. Without
            a global model there is ``models/<client>/`` in place of ``model/``.
        resume: go on from the newest checkpoint in ``out``.
        observer: told what happens.

    Returns:
        What ``metrics.json`` holds.

    Raises:
        FedloomError: see the message; what was written before stays usable with ``resume``.
    """
    out = Path(out)
    with alone(out, f"is writing this run, {out}. Wait for it, stop it, or give another --out."):
        return _run(config, out, resume, observer or Observer())


def _run(config: Config, out: Path, resume: bool, observer: Observer) -> dict[str, Plain]:
    start = time.perf_counter()
    if (out / "checkpoints").exists() and not resume:
        raise ConfigError(f"{out} already holds a run. Give --resume to go on with it, or another --out.")
    resumed = resume and bool(CheckpointFolder(out / "checkpoints", {}).rounds())
    if config.backbone.threads:
        torch.set_num_threads(config.backbone.threads)
    method = config.build_method()
    backbone = load_backbone(config.backbone.name, dtype=config.backbone.dtype, device=config.backbone.device)
    data = load_data(config, backbone, observer, pooled=method.pooled)
    method.check_clients(sorted(data.clients))
    if cut := cut_epochs(config.training.ordered(), data.sizes):
        observer.say(cut)
    spec = adapter_spec(config, method, backbone)
    shapes = {} if spec.native else target_modules(backbone.model, spec.targets)
    checkpoints = CheckpointFolder(out / "checkpoints", identity(config, backbone, data))
    if done := checkpoints.rounds():
        checkpoints.load(done[-1])  # refuses another configuration before anything of the run is overwritten
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / "config.yaml", yaml.safe_dump(config.model_dump(), sort_keys=False).encode())
    earlier = json.loads((out / "manifest.json").read_text(encoding="utf-8")) if done else None
    write_json(out / "manifest.json", manifest(config, backbone, data, earlier))

    bench = Workbench(backbone, spec, cache_dir())
    setup = Setup(
        seed=config.seed,
        spec=spec,
        shapes=shapes,
        hidden_size=backbone.hidden_size,
        clients=tuple(sorted(name for name, rows in data.clients.items() if len(rows))),
        initial=bench.grafted.read() if spec.native else {},
    )
    if method.has_probe and not spec.native:
        observer.phase("features", sum(map(len, data.clients.values())) + sum(map(len, data.test.values())))
        for rows in [*data.clients.values(), *data.test.values()]:
            rows.features(bench, observer.advance)

    memory = MemoryFolder(out / "checkpoints" / "memory")
    leaving = leaving_of(config, method)
    simulator = Simulator(bench, data.clients, config.seed, memory, out / "checkpoints" / "spool", leaving)
    log = RoundLog(out / "rounds.jsonl")
    state = federate(
        method,
        simulator,
        setup,
        config.training.ordered(cohort_size(len(data.sizes), config.federation.participation) if method.pooled else 1),
        federation_of(config),
        checkpoints,
        log,
        observer,
        evaluate=lambda state, versions: evaluate_round(config, method, bench, data, state, Memories(memory, versions)),
    )
    memories = Memories(memory, checkpoints.load(state.round).memories)
    write_models(out, config, method, bench, state, memories)  # first: no failure to measure it costs the model
    metrics = evaluate_final(config, method, bench, data, state, memories, observer)
    metrics["before"] = log.read()[0].get("evaluation")
    metrics["alignment"] = audit(state, memories, data)
    metrics |= peak_memory(backbone.device)
    metrics["seconds"] = round(time.perf_counter() - start, 1)
    metrics["resumed"] = resumed  # then seconds are those since the resume
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


def write_models(
    out: Path, config: Config, method: Method, bench: Workbench, state: State, memories: Mapping[str, Memory]
) -> None:
    """Write the folders that ``models_of`` names."""
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
