"""How well each way of finding buckets recovers the tasks inside clients. Features only: nothing is trained.

usage: python experiments/discovery/study.py --data DIR [--backbone tiny] [--clients N] [--rows N]

The clients are those of the tiny protocol (four tasks, 20 clients, α = 0.3, seed 42). All hidden layers come from one
pass over each prompt; the buckets from ``fedloom.methods.discovery.find_buckets``, as in a run.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedloom.backbones.features import batches_by_length, layer_index
from fedloom.backbones.load import Backbone, load_backbone
from fedloom.data.partition import build_benchmark
from fedloom.data.tokenize import encode
from fedloom.evaluation.alignment import ari, nmi, purity
from fedloom.methods.discovery import DiscoveryOptions, find_buckets
from fedloom.numerics.seeding import derive_seed

HERE = Path(__file__).resolve().parent
TASKS = ["text_edit", "gsm8k", "tweet_eval_sentiment", "arc_challenge"]
SEED = 42

LAYERS = ("last", 0, 0.33, 0.5, 0.66, 0.83)
OPTIONS: dict[str, dict[str, Any]] = {
    "paper (last layer, mean, silhouette)": {},
    "layer 0 (embeddings)": {"layer": 0},
    "layer 0.33": {"layer": 0.33},
    "layer 0.5": {"layer": 0.5},
    "layer 0.66": {"layer": 0.66},
    "layer 0.83": {"layer": 0.83},
    "last token": {"pooling": "last"},
    "last token, layer 0.66": {"pooling": "last", "layer": 0.66},
    "standardised": {"standardise": True},
    "standardised, layer 0.66": {"standardise": True, "layer": 0.66},
    "max": {"buckets": "max"},
    "max, layer 0.66": {"buckets": "max", "layer": 0.66},
    "max, standardised, layer 0.66": {"buckets": "max", "layer": 0.66, "standardise": True},
    "gap": {"buckets": "gap", "restarts": 2},
    "gap, layer 0.66": {"buckets": "gap", "layer": 0.66, "restarts": 2},
    "gap, standardised, layer 0.66": {"buckets": "gap", "layer": 0.66, "standardise": True, "restarts": 2},
}


class Embedded:
    """As much of a client as ``find_buckets`` asks for, with all kinds of features at hand."""

    def __init__(self, name: str, features: dict[tuple[int, str], torch.Tensor], layers: int) -> None:
        self.name, self._features, self._layers = name, features, layers
        self.size = len(next(iter(features.values())))

    def features(self, layer: Any = "last", pooling: str = "mean") -> torch.Tensor:
        return self._features[layer_index(layer, self._layers), pooling]

    def seed(self, purpose: str) -> int:
        return derive_seed(SEED, purpose, self.name, 0)


@torch.no_grad()
def embed(backbone: Backbone, prompts: list[tuple[int, ...]]) -> dict[tuple[int, str], torch.Tensor]:
    """Return (layer, pooling) → features (n, hidden) of all ``LAYERS``."""
    wanted = sorted({layer_index(layer, backbone.layers) for layer in LAYERS})
    found = {(k, p): torch.empty(len(prompts), backbone.hidden_size) for k in wanted for p in ("mean", "last")}
    lengths = [len(p) for p in prompts]
    for group in batches_by_length(lengths):
        ids = torch.zeros(len(group), max(lengths[i] for i in group), dtype=torch.int64)
        for row, i in enumerate(group):
            ids[row, : lengths[i]] = torch.tensor(prompts[i])
        states = backbone.model.base_model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
        for row, i in enumerate(group):
            for k in wanted:
                own = states[k][row, : lengths[i]].float()
                found[k, "mean"][i], found[k, "last"][i] = own.mean(0), own[-1]
    return found


def study(backbone: Backbone, root: str, clients: int, rows: int) -> dict[str, Any]:
    drawn = build_benchmark(TASKS, seed=SEED, clients=20, alpha=0.3, root=root, skip={"gsm8k/train": 4973})
    chosen = {name: examples[:rows] for name, examples in list(drawn.clients.items())[:clients] if examples}
    embedded: dict[str, Embedded] = {}
    labels: dict[str, list[str]] = {}
    for name, examples in chosen.items():
        encoded, _ = encode(examples, backbone.tokenizer)
        labels[name] = [examples[e.index].task for e in encoded]
        features = embed(backbone, [e.ids[: e.prompt_length] for e in encoded])
        embedded[name] = Embedded(name, features, backbone.layers)
        print(f"embedded {name}: {dict(Counter(labels[name]))}", flush=True)
    result: dict[str, Any] = {
        "backbone": {"name": backbone.name, "hash": backbone.hash, "layers": backbone.layers},
        "seed": SEED,
        "rows_per_client": rows,
        "clients": {name: dict(sorted(Counter(found).items())) for name, found in labels.items()},
        "options": {},
    }
    sizes = np.array([len(found) for found in labels.values()], dtype=float)
    for title, options in OPTIONS.items():
        start = time.process_time()
        each = {}
        for name, client in embedded.items():
            buckets = find_buckets(client, DiscoveryOptions(**options))  # type: ignore[arg-type]
            found = buckets.labels.tolist()
            each[name] = {
                "buckets": buckets.count,
                "tasks": sum(n >= 0.05 * len(found) for n in Counter(labels[name]).values()),
                "purity": purity(found, labels[name]),
                "nmi": nmi(found, labels[name]),
                "ari": ari(found, labels[name]),
            }
        mean = {
            key: float(np.average([e[key] for e in each.values()], weights=sizes)) for key in ("purity", "nmi", "ari")
        }
        result["options"][title] = {
            "options": options,
            **mean,
            "worst_purity": min(e["purity"] for e in each.values()),
            "buckets": sum(e["buckets"] for e in each.values()),
            "too_few": sum(e["buckets"] < e["tasks"] for e in each.values()),
            "processor_seconds": round(time.process_time() - start, 1),
            "clients": each,
        }
        print(row(title, result["options"][title]), flush=True)
    return result


def row(title: str, found: dict[str, Any]) -> str:
    numbers = [f"{found[key]:.3f}" for key in ("purity", "worst_purity", "nmi", "ari")]
    return "| " + " | ".join([title, *numbers, str(found["buckets"]), str(found["too_few"])]) + " |"


def table(result: dict[str, Any]) -> str:
    """Return the table; the last column counts clients with fewer buckets than tasks of at least 5 % of their rows."""
    clients = result["clients"]
    tasks = sum(e["tasks"] for e in next(iter(result["options"].values()))["clients"].values())
    rows = sum(sum(counts.values()) for counts in clients.values())
    head = (
        f"{result['backbone']['name']}, seed {result['seed']}: {len(clients)} clients, {rows} rows (at most "
        f"{result['rows_per_client']} a client), {tasks} tasks in all that hold at least 5 % of a client's rows."
    )
    lines = [
        head,
        "",
        "| | purity | worst client | NMI | ARI | buckets in all | clients with too few |",
        "|---|---|---|---|---|---|---|",
    ]
    return "\n".join(lines + [row(title, found) for title, found in result["options"].items()]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--backbone", default="tiny")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--rows", type=int, default=150)
    given = parser.parse_args()
    torch.set_num_threads(1)
    result = study(load_backbone(given.backbone), given.data, given.clients, given.rows)
    (HERE / "results").mkdir(exist_ok=True)
    name = given.backbone.replace("/", "-")
    (HERE / "results" / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    (HERE / "results" / f"{name}.md").write_text(table(result))


if __name__ == "__main__":
    main()
