"""Where a run stands, as numbers in Prometheus' text format.

See https://prometheus.io/docs/instrumenting/exposition_formats. The file is meant for the textfile collector of
node_exporter, so that no server of ours listens anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from fedloom.files import write_atomic
from fedloom.report.status import RunStatus, SiteStatus, read_status

#: What to call it, what it is, and its value for a site; None leaves the site out.
PER_SITE: Sequence[tuple[str, str, str, Callable[[SiteStatus], float | None]]] = (
    ("site_examples", "gauge", "Examples of a site.", lambda site: site.examples),
    ("site_last_round", "gauge", "Last round that a site answered.", lambda site: site.last_round),
    ("site_last_seen_seconds", "gauge", "Unix time of a site's last word.", lambda site: _seconds(site.last_seen)),
    ("site_bytes_up_total", "counter", "Bytes from a site.", lambda site: site.bytes_up),
    ("site_bytes_down_total", "counter", "Bytes to a site.", lambda site: site.bytes_down),
    ("site_quarantined_total", "counter", "Replies of a site that were refused.", lambda site: len(site.quarantined)),
    ("site_absent_total", "counter", "Rounds that a site missed.", lambda site: len(site.absent)),
)


def write_metrics(out: Path) -> Path:
    """Write ``out/metrics.prom`` from what the run folder holds; return its path.

    Raises:
        DataError: see ``read_status``.
    """
    path = out / "metrics.prom"
    write_atomic(path, exposition(read_status(out)).encode())
    return path


def exposition(status: RunStatus) -> str:
    """Return the numbers of a run, a metric after the other."""
    loss = _last(status, "train_loss")
    families: list[tuple[str, str, str, list[tuple[str, float]]]] = [
        ("round", "gauge", "The last finished round.", _one(status.round)),
        ("rounds_wanted", "gauge", "Rounds that the run is to have.", _one(status.rounds_wanted)),
        ("finished", "gauge", "1 when the run has ended well.", _one(int(status.finished))),
        ("train_loss", "gauge", "Training loss of the last round.", _one(loss)),
        ("privacy_epsilon", "gauge", "ε that is spent.", _one((_last(status, "privacy") or {}).get("epsilon"))),
        ("round_duration_seconds", "gauge", "Time of the last round's exchange.", _one(_last(status, "seconds"))),
    ]
    for name, kind, words, value in PER_SITE:
        found = [(_label("site", site), value(about)) for site, about in status.sites.items()]
        families.append((name, kind, words, [(label, number) for label, number in found if number is not None]))
    trained = [(_label("expert", expert), float(len(clients))) for expert, clients in status.experts.items()]
    families.append(("expert_contributors", "gauge", "Clients that train an expert.", trained))
    lines = []
    for name, kind, words, values in families:
        lines += [f"# HELP fedloom_{name} {words}", f"# TYPE fedloom_{name} {kind}"]
        lines += [f"fedloom_{name}{label} {number}" for label, number in values]
    return "\n".join(lines) + "\n"


def _one(value: float | None) -> list[tuple[str, float]]:
    return [] if value is None else [("", value)]


def _last(status: RunStatus, key: str) -> Any:
    return status.rounds[-1].get(key) if status.rounds else None


def _label(name: str, value: str) -> str:
    escaped = value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return f'{{{name}="{escaped}"}}'


def _seconds(when: str | None) -> float | None:
    return None if when is None else datetime.fromisoformat(when).timestamp()
