"""Where a run stands, from the files of its folder: rounds, sites, experts. Works while it runs, and after."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import yaml

from fedloom.errors import DataError
from fedloom.runtime.checkpoint import CheckpointFolder
from fedloom.runtime.events import RoundLog
from fedloom.types import Plain, State, component


@dataclass
class SiteStatus:
    """What a run's files tell of one client.

    Attributes:
        last_seen: when it last said anything, in UTC; only a server across sites writes that down.
        last_round: the last round in which it answered.
        examples: as it counts them.
        rounds: rounds in which its reply was used.
        bytes_up, bytes_down: in all rounds.
        quarantined: round → why.
        absent: rounds in which it did not answer.
    """

    last_seen: str | None = None
    last_round: int | None = None
    examples: int = 0
    rounds: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    quarantined: dict[int, str] = field(default_factory=dict)
    absent: list[int] = field(default_factory=list)

    def last_seen_words(self, now: datetime | None = None) -> str:
        """Return how long ago that was, or nothing."""
        if self.last_seen is None:
            return ""
        seconds = int(((now or datetime.now(UTC)) - datetime.fromisoformat(self.last_seen)).total_seconds())
        for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
            if seconds >= 2 * size:
                return f"{seconds // size} {unit} ago"
        return f"{max(0, seconds)} s ago"


@dataclass(frozen=True)
class RunStatus:
    """Where a run stands.

    Attributes:
        method, rounds_wanted: of the configuration.
        round: the last one that is finished; None before round 0.
        finished: whether all that a run writes is there.
        updated: when the log was last written, in UTC.
        rounds: what the log says of each, without its clients.
        sites: client → see there.
        experts: component → client → examples of the buckets that train it, or what it counted in the last round.
        refused: what a server across sites said of nodes that it did not let in.
        waiting_for: whom it waits for now.
        unnamed: component → examples in the last round of sites that the log does not name.
    """

    method: str
    rounds_wanted: int
    round: int | None
    finished: bool
    updated: str | None
    rounds: list[dict[str, Plain]]
    sites: dict[str, SiteStatus]
    experts: dict[str, dict[str, int]]
    refused: dict[str, str]
    waiting_for: list[str]
    unnamed: dict[str, int] = field(default_factory=dict)

    def to_plain(self) -> dict[str, Plain]:
        return asdict(self)


def read_status(out: Path) -> RunStatus:
    """Read where a run stands.

    Raises:
        DataError: ``out`` is no run folder, or a file of it is damaged.
    """
    method, rounds = _read_config(out / "config.yaml")
    log = RoundLog(out / "rounds.jsonl")
    records = log.read()
    presence = _read_presence(out / "presence.json")
    sites = sites_of(records)
    for name, seen in presence.get("last_seen", {}).items():
        sites.setdefault(name, SiteStatus()).last_seen = seen
    for name, examples in presence.get("examples", {}).items():
        site = sites.setdefault(name, SiteStatus())
        site.examples = site.examples or examples
    experts, unnamed = _experts(out, records)
    return RunStatus(
        method=method,
        rounds_wanted=rounds,
        round=records[-1]["round"] if records else None,
        finished=(out / "metrics.json").is_file(),
        updated=_when(log.path.stat().st_mtime) if log.path.is_file() else None,
        rounds=[{key: r[key] for key in ROUND_KEYS if key in r} for r in records],
        sites=dict(sorted(sites.items())),
        experts=experts,
        refused=presence.get("refused", {}),
        waiting_for=presence.get("waiting_for", []),
        unnamed=unnamed,
    )


ROUND_KEYS = ("round", "train_loss", "bytes_up", "bytes_down", "seconds", "quarantined", "absent", "weights", "privacy")


def sites_of(records: list[dict[str, Plain]]) -> dict[str, SiteStatus]:
    """Sum up the log by client."""
    sites: dict[str, SiteStatus] = {}
    for record in records:
        number = record["round"]
        for name, entry in record.get("clients", {}).items():
            site = sites.setdefault(name, SiteStatus())
            site.last_round = number
            site.examples = max(site.examples, entry["examples"])
            site.bytes_up += entry["bytes_up"]
            site.bytes_down += entry["bytes_down"]
            site.rounds += number > 0 and name not in record["quarantined"]
        for name, entry in record.get("joined", {}).items():
            site = sites.setdefault(name, SiteStatus())
            site.bytes_up += entry.get("bytes_up", 0)
            site.bytes_down += entry.get("bytes_down", 0)
        for name, why in record.get("quarantined", {}).items():
            sites.setdefault(name, SiteStatus()).quarantined[number] = why
        for name in record.get("absent", []):
            sites.setdefault(name, SiteStatus()).absent.append(number)
    return sites


def experts_of(state: State) -> dict[str, dict[str, int]]:
    """Return expert → client → examples of the buckets that the server assigned to it."""
    sizes = state.values.get("sizes", {})
    found: dict[str, dict[str, int]] = {f"experts/{m}": {} for m in range(state.spec.experts)}
    for client, experts in sorted(state.values.get("assignment", {}).items()):
        for m, size in zip(experts, sizes.get(client, []), strict=False):
            own = found.setdefault(f"experts/{m}", {})
            own[client] = own.get(client, 0) + size
    return found


def _experts(out: Path, records: list[dict[str, Plain]]) -> tuple[dict[str, dict[str, int]], dict[str, int]]:
    """Return ``RunStatus.experts`` and ``unnamed``."""
    checkpoints = CheckpointFolder(out / "checkpoints", {})
    done = checkpoints.rounds()
    state = checkpoints.state(done[-1]) if done else None
    if state is not None and state.values.get("assignment"):
        return experts_of(state), {}
    last = records[-1] if records else {}
    weights = {unit: n for unit, n in last.get("weights", {}).items() if unit.startswith("experts/")}
    if not weights:
        return {}, {}
    native = state.tensors if state is not None and state.spec.native else ()
    units = {component(name) for name in native if name.startswith("experts/")} | weights.keys()
    everyone = {name: c["examples"] for name, c in last["clients"].items() if name not in last["quarantined"]}
    experts: dict[str, dict[str, int]] = {}
    unnamed: dict[str, int] = {}
    for unit in sorted(units, key=_natural):
        shares = last.get("shares", {}).get(unit)
        if unit not in weights or shares is not None:
            experts[unit] = shares or {}
        elif weights[unit] == last["weights"].get("examples"):
            experts[unit] = everyone
        else:
            unnamed[unit] = weights[unit]
    return experts, unnamed


def expert_lines(status: RunStatus) -> list[str]:
    """Say who trains which expert: a line per LoRA expert; of native experts, per layer and those who train alike."""
    words = {unit: ", ".join(f"{c} ({n})" for c, n in by.items()) or "nobody" for unit, by in status.experts.items()}
    words |= {unit: f"sites that the log does not name ({examples})" for unit, examples in status.unnamed.items()}
    lines: list[str] = []
    layers: dict[str, dict[str, list[int]]] = {}
    for unit in sorted(words, key=_natural):
        path, _, expert = unit.removeprefix("experts/").rpartition(".")
        if path:
            layers.setdefault(path, {}).setdefault(words[unit], []).append(int(expert))
        else:
            lines.append(f"{unit}: {words[unit]}")
    for path, groups in layers.items():
        count = sum(map(len, groups.values()))
        for who, found in groups.items():
            lines.append(f"{path}: expert{'s' * (len(found) > 1)} {_ranges(found)} of {count}: {who}")
    return lines


def _natural(name: str) -> list[tuple[int, str]]:
    """Order names with numbers by the numbers: 2 before 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def _ranges(numbers: list[int]) -> str:
    """Return ascending numbers in words, three or more in a row as a range: ``0–5, 7, 8``."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(f"{r[0]}–{r[-1]}" if len(r) > 2 else ", ".join(map(str, r)) for r in runs)


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _read_config(path: Path) -> tuple[str, int]:
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        return str(config["method"]["name"]), int(config["federation"]["rounds"])
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}. Give the folder that a run writes.") from error
    except (yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} is not the configuration of a run: {error}") from error


def _read_presence(path: Path) -> dict[str, Plain]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        seen, examples, refused = (found.get(key, {}) for key in ("last_seen", "examples", "refused"))
        for when in seen.values():
            SiteStatus(when).last_seen_words()  # raises where this is no time, or one without a zone
        texts = [*refused.values(), *found.get("waiting_for", [])]
        if not all(isinstance(text, str) for text in texts) or not all(type(n) is int for n in examples.values()):
            raise ValueError("it holds other values than a server writes")
    except (ValueError, RecursionError, AttributeError, TypeError) as error:
        raise DataError(f"{path} is damaged: {error}. The next message of a site writes it anew.") from error
    return dict(found)
