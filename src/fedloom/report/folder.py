"""Reading a run folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fedloom.errors import DataError
from fedloom.runtime.checkpoint import CheckpointFolder
from fedloom.runtime.events import RoundLog
from fedloom.types import AdapterSpec, Plain


@dataclass(frozen=True)
class Bucket:
    """A group of similar examples inside one client, and the expert that it trains.

    Attributes:
        examples: how many.
        expert: index of the expert.
        tasks: task → examples, where labels were there to audit with.
    """

    examples: int
    expert: int
    tasks: dict[str, int]


@dataclass(frozen=True)
class RunFolder:
    """What the files of a run say.

    Attributes:
        out: the folder.
        config: ``config.yaml``.
        manifest: ``manifest.json``.
        rounds: the lines of ``rounds.jsonl``; the first is round 0, before any training.
        metrics: ``metrics.json``.
        buckets: client → its buckets; empty for a method without buckets.
    """

    out: Path
    config: dict[str, Plain]
    manifest: dict[str, Plain]
    rounds: list[dict[str, Plain]]
    metrics: dict[str, Plain]
    buckets: dict[str, list[Bucket]]


def read_run(out: Path, *, unfinished: bool = False) -> RunFolder:
    """Read a run folder.

    Args:
        out: the folder.
        unfinished: without ``metrics.json``, take what the log and the newest checkpoint say.

    Raises:
        DataError: a file is missing or cannot be read.
    """
    rounds = _read(out / "rounds.jsonl", lambda _: RoundLog(out / "rounds.jsonl").read())
    if not rounds:
        raise DataError(f"{out / 'rounds.jsonl'} holds no round. Run it again with --resume.")
    config = _read(out / "config.yaml", yaml.safe_load)
    if unfinished and not (out / "metrics.json").is_file():
        metrics = _so_far(out, config, rounds)
    else:
        metrics = _read(out / "metrics.json", json.loads)
    return RunFolder(
        out,
        config,
        _read(out / "manifest.json", json.loads),
        rounds,
        metrics,
        _buckets(out, metrics),
    )


def _so_far(out: Path, config: dict[str, Plain], rounds: list[dict[str, Plain]]) -> dict[str, Plain]:
    """Return what ``metrics.json`` will hold, as far as it is known during a run."""
    checkpoints = CheckpointFolder(out / "checkpoints", {})
    experts = checkpoints.state(checkpoints.rounds()[-1]).spec.experts if checkpoints.rounds() else 1
    seconds = round(sum(record.get("seconds", 0.0) for record in rounds), 1)
    return {"seed": config["seed"], "experts": experts, "seconds": seconds, "before": rounds[0].get("evaluation")}


def a_model(out: Path) -> Path:
    """Return a model folder of a run: the one for everyone or, where every client has its own, the first."""
    models = sorted((out / "models").iterdir()) if (out / "models").is_dir() else []
    return models[0] if models and not (out / "model").is_dir() else out / "model"


def is_routed(model: Path) -> bool:
    """Return whether a model folder holds experts that a prompt chooses among; not where none is written yet."""
    about = model / "fedloom.json"
    return about.is_file() and AdapterSpec.from_plain(_read(about, json.loads)["adapter"]).routed


def _read(path: Path, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror}. A report needs a finished run; finish it with --resume."
        ) from error
    except (ValueError, yaml.YAMLError) as error:
        raise DataError(f"{path} is damaged: {error}. Run it again with --resume.") from error


def _buckets(out: Path, metrics: dict[str, Plain]) -> dict[str, list[Bucket]]:
    """Return the audited buckets; without labels, the sizes in the newest checkpoint."""
    alignment = metrics.get("alignment")
    if alignment:
        return {client: [Bucket(**b) for b in found["buckets"]] for client, found in alignment["clients"].items()}
    checkpoints = CheckpointFolder(out / "checkpoints", {})
    rounds = checkpoints.rounds()
    if metrics["experts"] == 1 or not rounds:
        return {}
    values = checkpoints.state(rounds[-1]).values
    return {
        client: [Bucket(n, m, {}) for n, m in zip(values["sizes"][client], experts, strict=True)]
        for client, experts in sorted(values.get("assignment", {}).items())
    }
