"""From a finished run's folder to the record that tables and figures are made of."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedloom.bench.suite import Cell, flat
from fedloom.config import Config
from fedloom.runtime.events import RoundLog
from fedloom.types import AdapterSpec, Plain

#: What is per example goes to a file of its own.
PER_EXAMPLE = ("each", "each_loss")


def make_record(cell: Cell, folder: Path, command: str) -> tuple[dict[str, Plain], dict[str, Plain]]:
    """Return (record, per-example numbers) of a finished cell; the record has neither paths nor text of rows."""
    metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    rounds = RoundLog(folder / "rounds.jsonl").read()
    config = cell.config
    method = config.build_method()
    rank = config.adapter.rank or method.default_rank
    routing, examples = {}, {}
    for mode, found in metrics.get("routing", {}).items():
        routing[mode] = {key: value for key, value in found.items() if key not in PER_EXAMPLE}
        examples[mode] = {key: value for key, value in found.items() if key in PER_EXAMPLE}
    alignment = metrics.get("alignment")
    record = {
        "cell": cell.name,
        "label": cell.label,
        "title": cell.title,
        "method": config.method.name,
        "seed": config.seed,
        **cell.axes,
        "backbone": config.backbone.name,
        "config_hash": cell.config_hash,
        "config": whole_configuration(config),
        "source_hash": manifest["source_hash"],
        "source_hashes": manifest["source_hashes"],
        "fedloom": manifest["fedloom"],
        "python": manifest["python"],
        "packages": manifest["packages"],
        "machine": manifest["machine"],
        "backbone_hash": manifest["backbone"]["hash"],
        "rows": manifest["rows"],
        "test_rows": manifest["test_rows"],
        "test_rows_too_long": manifest["data"].get("test_rows_too_long"),
        "global_model": method.global_model,
        "personal": method.personal,
        "experts": metrics["experts"],
        "rank": None if method.native else method.deployed(AdapterSpec((), rank), 1).rank,
        "routing": routing,
        "routing_matrix": metrics.get("routing_matrix", {}),
        "personalised": metrics.get("personalised"),
        "alignment": {k: alignment[k] for k in ("local", "global", "prototypes")} if alignment else None,
        "before": metrics.get("before"),
        "curve": curve(rounds, "loss"),
        "score_curve": curve(rounds, "score_model"),
        "conflict": conflict(rounds),
        "costs": costs(rounds, metrics),
        "seconds": metrics["seconds"],
        "resumed": metrics["resumed"],
        "command": command,
    }
    return record, examples


def whole_configuration(config: Config) -> dict[str, Plain]:
    """Return a configuration with all defaults, also the method's, and in place of paths what the files hold.

    Returns:
        Sections as in the configuration; a file of a user's own rows is the sha256 of its bytes, and left out where it
        is missing. A benchmark's root is left out, too: ``rows`` of a record says what was drawn from it.
    """
    method = config.build_method()
    plain = config.model_dump(mode="json")
    plain["method"] = {"name": config.method.name, **method.options.model_dump(mode="json")}
    plain["adapter"]["rank"] = config.adapter.rank or method.default_rank
    (plain["data"]["benchmark"] or {}).pop("root", None)
    for part in ("clients", "test"):
        files = {name: Path(path) for name, path in plain["data"][part].items()}
        hashes = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items() if path.is_file()}
        plain["data"][part] = hashes
    return plain


def difference(record: Mapping[str, Plain], cell: Cell) -> str:
    """Say in what a finished cell's record differs from the suite's cell; nothing if it does not, as far as is known.

    Records of older versions have the hash only, of what a suite says beyond defaults; and a version knows no keys of
    later ones.
    """
    before, now = flat(record.get("config") or {}), flat(whole_configuration(cell.config))
    known = sorted(before.keys() & now.keys())
    keys = [f"{key} was {before[key]!s:.40}, is {now[key]!s:.40}" for key in known if before[key] != now[key]]
    if record.get("config_hash") == cell.config_hash and not keys:
        return ""
    return "is from another configuration than the suite has now" + (f": {'; '.join(keys)}" if keys else "")


def curve(rounds: Sequence[dict[str, Plain]], measure: str) -> list[list[float]]:
    """Return [round, macro ``measure``] wherever it was measured."""
    found = [(r["round"], ((r.get("evaluation") or {}).get(measure) or {}).get("macro")) for r in rounds]
    return [[number, value] for number, value in found if value is not None]


def conflict(rounds: Sequence[dict[str, Plain]]) -> list[list[float | None]]:
    """Return how native experts' updates stand to their consensus, as FC-MoE logs it; empty for other methods.

    Returns:
        For each round: its number; the share of pairs of a client and an expert with a negative cosine; the mean cosine
        over all pairs, in conflict or not; and the mean over experts of the factor by which projection lengthens the
        consensus. Experts whose updates have no direction in common (length 0) have no factor.
    """
    found: list[list[float | None]] = []
    for record in rounds:
        units = list((record.get("method") or {}).get("conflict", {}).values())
        if pairs := sum(unit["clients"] for unit in units):
            means = [sum(unit["clients"] * unit[key] for unit in units) / pairs for key in ("conflicting", "cosine")]
            lengths = [unit["length"] for unit in units if unit["length"] > 0]
            found.append([record["round"], *means, sum(lengths) / len(lengths) if lengths else None])
    return found


def costs(rounds: Sequence[dict[str, Plain]], metrics: dict[str, Plain]) -> dict[str, Plain]:
    """Return bytes, steps, seconds and memory (FedWeave, Appendix B): means per client and round; the probe apart.

    What a run did not measure is null: the server's time where a line of the log lacks it, the clustering of examples
    for methods without, an accelerator's memory on a CPU.
    """
    probe, after = rounds[0].get("clients", {}), [r for r in rounds if r["round"] > 0]
    entries = [entry for r in after for entry in r["clients"].values()]

    def mean(key: str, found: Sequence[dict[str, Plain]]) -> float:
        return sum(entry.get(key, 0) for entry in found) / len(found) if found else 0.0

    seconds = [r["seconds"] for r in after]
    server = [r.get("server_seconds") for r in rounds if "seconds" in r]
    clustered = [entry for entry in probe.values() if "cluster_seconds" in entry]
    return {
        "rounds": len(after),
        "clients": max((len(r["clients"]) for r in after), default=0),
        "bytes_up": mean("bytes_up", entries),
        "bytes_down": mean("bytes_down", entries),
        "probe_bytes_up": mean("bytes_up", list(probe.values())),
        "probe_bytes_down": mean("bytes_down", list(probe.values())),
        "steps": sum(entry.get("steps", 0) for entry in entries),
        "probe_steps": sum(entry.get("steps", 0) for entry in probe.values()),
        "probe_seconds": rounds[0].get("seconds", 0.0),
        "round_seconds": sum(seconds) / len(seconds) if seconds else 0.0,
        "train_seconds": sum(seconds) + rounds[0].get("seconds", 0.0),
        "cluster_seconds": mean("cluster_seconds", clustered) if clustered else None,
        "probe_server_seconds": rounds[0].get("server_seconds"),
        "server_seconds": None if None in server else sum(server),
        "peak_bytes": metrics["peak_bytes"],
        "peak_device_bytes": metrics.get("peak_device_bytes"),
    }
