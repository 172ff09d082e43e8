"""One run from configuration to model folder, report and metrics."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from fedloom.adapters.inject import default_targets, target_modules
from fedloom.backbones.load import Backbone, cache_dir, load_backbone
from fedloom.config import Config
from fedloom.data.partition import build_benchmark
from fedloom.data.sources import Example, read_examples
from fedloom.data.tasks import read_task_file
from fedloom.data.tokenize import encode, tokenizer_hash
from fedloom.errors import ConfigError, DataError
from fedloom.evaluation.alignment import alignment_report, purity
from fedloom.evaluation.losses import loss_per_task, routing_matrix
from fedloom.evaluation.scores import score_tasks
from fedloom.export import save_model
from fedloom.files import write_atomic, write_json
from fedloom.methods.base import Method
from fedloom.report import write_report
from fedloom.runtime.checkpoint import CheckpointFolder
from fedloom.runtime.client import Rows, Workbench
from fedloom.runtime.events import Observer, RoundLog
from fedloom.runtime.loop import Federation, federate
from fedloom.runtime.memory import MemoryFolder, check_client_name
from fedloom.runtime.simulate import Simulator
from fedloom.types import AdapterSpec, Plain, Setup, State
from fedloom.version import __version__


@dataclass
class Data:
    """Encoded rows by client and by test task, with the examples behind them and where they came from."""

    clients: dict[str, Rows]
    labels: dict[str, list[str]]  # client → task of each row; audit only
    test: dict[str, Rows]
    test_examples: dict[str, list[Example]]
    manifest: dict[str, Plain]


def run(config: Config, out: str | Path, *, resume: bool = False, observer: Observer | None = None) -> dict[str, Plain]:
    """Train, evaluate and write everything to ``out``.

    Args:
        config: see ``fedloom.config.load_config``.
        out: folder for ``config.yaml manifest.json rounds.jsonl metrics.json model/ report.html checkpoints/``.
        resume: go on from the newest checkpoint in ``out``.
        observer: told what happens.

    Returns:
        What ``metrics.json`` holds.

    Raises:
        FedloomError: see the message; what was written before stays usable with ``resume``.
    """
    start = time.perf_counter()
    observer, out = observer or Observer(), Path(out)
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file; give a folder.")
    if (out / "checkpoints").exists() and not resume:
        raise ConfigError(f"{out} already holds a run. Give --resume to go on with it, or another --out.")
    resumed = resume and bool(CheckpointFolder(out / "checkpoints", {}).rounds())
    if config.backbone.threads:
        torch.set_num_threads(config.backbone.threads)
    method = config.build_method()
    backbone = load_backbone(config.backbone.name, dtype=config.backbone.dtype, device=config.backbone.device)
    data = load_data(config, backbone, observer)
    targets = tuple(config.adapter.targets or default_targets(backbone.config))
    shapes = target_modules(backbone.model, targets)
    checkpoints = CheckpointFolder(out / "checkpoints", identity(config, backbone, data))
    if done := checkpoints.rounds():
        checkpoints.load(done[-1])  # refuses another configuration before anything of the run is overwritten
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / "config.yaml", yaml.safe_dump(config.model_dump(), sort_keys=False).encode())
    write_json(out / "manifest.json", manifest(config, backbone, data))

    rank = config.adapter.rank or method.default_rank
    spec = AdapterSpec(targets, rank, config.adapter.alpha, config.adapter.dropout)
    setup = Setup(
        seed=config.seed,
        spec=spec,
        shapes=shapes,
        hidden_size=backbone.hidden_size,
        clients=tuple(sorted(name for name, rows in data.clients.items() if len(rows))),
    )
    bench = Workbench(backbone, spec, cache_dir())
    if method.has_probe:
        observer.phase("features", sum(map(len, data.clients.values())) + sum(map(len, data.test.values())))
        for rows in [*data.clients.values(), *data.test.values()]:
            rows.features(bench, observer.advance)

    memory = MemoryFolder(out / "checkpoints" / "memory")
    simulator = Simulator(bench, data.clients, config.seed, memory, out / "checkpoints" / "spool")
    log = RoundLog(out / "rounds.jsonl")
    state = federate(
        method,
        simulator,
        setup,
        config.training.ordered(),
        Federation(**config.federation.model_dump()),
        checkpoints,
        log,
        observer,
        evaluate=lambda state: evaluate_round(config, method, bench, data, state, observer),
    )
    metrics = evaluate_final(config, method, bench, data, state, observer)
    metrics["before"] = log.read()[0].get("evaluation")
    metrics["alignment"] = audit(state, memory, data, out)
    metrics["seconds"] = round(time.perf_counter() - start, 1)
    metrics["resumed"] = resumed  # then seconds are those since the resume
    bench.load(method.view(state, None).tensors, method.view(state, None).spec)
    save_model(
        out / "model",
        method.view(state, None),
        bench,
        provenance={
            "method": config.method.name,
            "paper": method.paper,
            "rounds": state.round,
            "seed": config.seed,
            "config": "config.yaml of the run",
        },
        max_length=config.data.max_length,
        experts=experts_of(state),
        routing=config.evaluation.routing[0],
    )
    write_json(out / "metrics.json", metrics)
    write_report(out)
    return metrics


def load_data(config: Config, backbone: Backbone, observer: Observer) -> Data:
    """Read, draw and encode all rows; say what was left out."""
    data = config.data
    if data.benchmark is not None:
        bench = data.benchmark
        drawn = build_benchmark(seed=config.seed, **bench.model_dump())
        clients, record = drawn.clients, drawn.manifest
        test = drawn.test if config.evaluation.split == "test" else drawn.validation
    else:
        left_out: dict[str, Plain] = {}
        clients = {}
        for name, path in data.clients.items():
            clients[name], counts = read_examples(path, strict=data.strict)
            left_out[name] = dict(counts)
        test = {name: read_task_file(name, path, strict=data.strict) for name, path in data.test.items()}
        record = {"clients": data.clients, "test": data.test, "rows": left_out}
    if config.evaluation.limit:
        test = {task: examples[: config.evaluation.limit] for task, examples in test.items()}
    encoded = {}
    for kind, groups in (("client", clients), ("test", test)):
        for name, examples in groups.items():
            if kind == "client":
                check_client_name(name)
            kept, report = encode(examples, backbone.tokenizer, max_length=data.max_length, strict=data.strict)
            encoded[kind, name] = Rows(kept)
            if report.kept < len(examples) or report.truncated:
                observer.say(f"{name}: {report.summary()}.")
            if kind == "client" and not kept:
                observer.say(f"{name} holds no usable example: it takes no part and has weight 0.")
    result = Data(
        clients={name: encoded["client", name] for name in sorted(clients)},
        labels={
            name: [clients[name][e.index].task for e in encoded["client", name].encoded] for name in sorted(clients)
        },
        test={name: encoded["test", name] for name in sorted(test)},
        test_examples={name: [test[name][e.index] for e in encoded["test", name].encoded] for name in sorted(test)},
        manifest=record,
    )
    if not any(map(len, result.clients.values())):
        raise DataError("no client holds a usable example, so there is nothing to train on.")
    return result


def evaluate_round(
    config: Config, method: Method, bench: Workbench, data: Data, state: State, observer: Observer
) -> dict[str, Plain] | None:
    """Measure the loss before round 1, every ``evaluation.every`` rounds, and after the last."""
    every = config.evaluation.every
    wanted = state.round in (0, config.federation.rounds) or (every and state.round % every == 0)
    if not wanted or not any(map(len, data.test.values())):
        return None
    view = method.view(state, None)
    bench.load(view.tensors, view.spec)
    result: dict[str, Plain] = {"loss": loss_per_task(bench, data.test, config.evaluation.routing[0])}
    if state.round == 0:
        result["loss_backbone"] = loss_per_task(bench, data.test, "off")
        if config.evaluation.generate_before:
            result["score"] = score_tasks(bench, data.test, data.test_examples, "off")[0]
    return result


def evaluate_final(
    config: Config, method: Method, bench: Workbench, data: Data, state: State, observer: Observer
) -> dict[str, Plain]:
    """Measure loss and score under every asked routing, and the task × expert routing matrix."""
    metrics: dict[str, Plain] = {"method": config.method.name, "seed": config.seed, "experts": state.spec.experts}
    if not any(map(len, data.test.values())):
        return metrics
    view = method.view(state, None)
    bench.load(view.tensors, view.spec)
    modes = config.evaluation.routing if view.spec.experts > 1 else config.evaluation.routing[:1]
    total = sum(map(len, data.test.values())) * len(modes) * (2 if config.evaluation.generate else 1)
    observer.phase("evaluation", total)
    metrics["routing"] = {}
    for mode in modes:
        result: dict[str, Plain] = {"loss": loss_per_task(bench, data.test, mode, observer.advance)}
        if config.evaluation.generate:
            start = time.perf_counter()
            result["score"], result["each"] = score_tasks(bench, data.test, data.test_examples, mode, observer.advance)
            result["generation_seconds"] = round(time.perf_counter() - start, 2)
        metrics["routing"][mode] = result
    metrics["routing_matrix"] = routing_matrix(bench, data.test)
    return metrics


def audit(state: State, memory: MemoryFolder, data: Data, out: Path) -> dict[str, Plain] | None:
    """Compare buckets and experts with the task labels that training never saw (FedWeave, Appendix A)."""
    assignment = state.values.get("assignment")
    if assignment is None or not any(label for labels in data.labels.values() for label in labels):
        return None
    newest = max((out / "checkpoints").glob("round-*"))
    versions = json.loads((newest / "checkpoint.json").read_text())["memories"]
    buckets = {client: memory.read(versions[client]).values["buckets"] for client in sorted(assignment)}
    labels = {client: data.labels[client] for client in buckets}
    clients = {
        client: {
            "purity": purity(found, labels[client]),
            "buckets": [
                {"examples": found.count(c), "expert": m, "tasks": _counted(labels[client], found, c)}
                for c, m in enumerate(assignment[client])
            ],
        }
        for client, found in buckets.items()
    }
    return {**alignment_report(buckets, labels, assignment), "clients": clients}


def _counted(labels: list[str], buckets: list[int], bucket: int) -> dict[str, int]:
    counts: dict[str, int] = {}
    for label, found in zip(labels, buckets, strict=True):
        if found == bucket:
            counts[label] = counts.get(label, 0) + 1
    return dict(sorted(counts.items()))


def experts_of(state: State) -> list[dict[str, Plain]]:
    """Return for each expert the client buckets that share it and their examples."""
    assignment: Mapping[str, list[int]] = state.values.get("assignment", {})
    sizes: Mapping[str, list[int]] = state.values.get("sizes", {})
    found: list[dict[str, Any]] = [{"expert": m, "examples": 0, "buckets": {}} for m in range(state.spec.experts)]
    for client, experts in sorted(assignment.items()):
        for c, m in enumerate(experts):
            found[m]["examples"] += sizes[client][c]
            found[m]["buckets"].setdefault(client, []).append(c)
    return found


def identity(config: Config, backbone: Backbone, data: Data) -> dict[str, Plain]:
    """Return what must be the same for a run to be resumed: all but how often one looks and whether one generates."""
    sections = config.model_dump()
    sections["evaluation"] = {key: sections["evaluation"][key] for key in ("split", "limit", "routing")}
    return sections | {
        "backbone_hash": backbone.hash,
        "tokenizer_hash": tokenizer_hash(backbone.tokenizer),
        "rows": _hash([[[*e.ids, e.prompt_length] for e in rows.encoded] for rows in data.clients.values()]),
        "test_rows": _hash([[[*e.ids, e.prompt_length] for e in rows.encoded] for rows in data.test.values()]),
    }


def _hash(value: Plain) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def source_hash() -> str:
    """Return sha256 over the package's own Python files, so that a result says which code made it."""
    package = Path(__file__).parent
    parts = [[str(path.relative_to(package)), path.read_text("utf-8")] for path in sorted(package.rglob("*.py"))]
    return _hash(parts)


def manifest(config: Config, backbone: Backbone, data: Data) -> dict[str, Plain]:
    """Return what was run on what."""
    packages = ("torch", "transformers", "peft", "scikit-learn", "numpy", "safetensors", "tokenizers")
    return {
        "fedloom": __version__,
        "source_hash": source_hash(),
        "python": sys.version.split()[0],
        "packages": {name: importlib.metadata.version(name) for name in packages},
        "machine": {
            "processor": platform.machine(),
            "threads": torch.get_num_threads(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "backbone": {
            "name": backbone.name,
            "hash": backbone.hash,
            "tokenizer_hash": tokenizer_hash(backbone.tokenizer),
        },
        "seed": config.seed,
        "data": data.manifest,
    }
