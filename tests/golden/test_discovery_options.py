"""Discovery's options change the clustered embedding and nothing else."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.methods.discovery import DiscoveryOptions, find_buckets
from fedloom.numerics.cluster import bucketize
from fedloom.runtime.client import LocalClient
from fedloom.runtime.memory import ClientMemory
from small_world import World, examples, rows


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"layer": 1},
        {"layer": 0.5, "pooling": "last"},
        {"standardise": True},
        {"layer": 0, "standardise": True, "buckets": "max", "max_buckets": 4},
        {"buckets": "gap", "restarts": 2},
    ],
)
def test_buckets_are_those_of_the_embedding_made_by_hand(options: dict[str, Any], tmp_path: Path) -> None:
    bench = World(tmp_path).bench
    mine = rows(examples("sums", 6) + examples("shout", 6))
    client = LocalClient("ann", mine, bench, ClientMemory(), run_seed=42, round=0)
    found = find_buckets(client, DiscoveryOptions(**options))

    index = {"last": 2, 0: 0, 1: 1, 0.5: 1}[options.get("layer", "last")]
    embedding = []
    for row in mine.encoded:
        prompt = torch.tensor([row.ids[: row.prompt_length]])
        with torch.no_grad(), bench.grafted.routing(None):
            states = bench.backbone.model(prompt, output_hidden_states=True).hidden_states[index][0].double()
        embedding.append((states[-1] if options.get("pooling") == "last" else states.mean(dim=0)).numpy())
    values = np.stack(embedding)
    if options.get("standardise"):
        deviation = values.std(axis=0)
        values = (values - values.mean(axis=0)) / np.where(deviation > 0, deviation, 1.0)
    values /= np.linalg.norm(values, axis=1, keepdims=True)
    expected = bucketize(
        values,
        max_buckets=options.get("max_buckets", 8),
        restarts=options.get("restarts", 10),
        choose=options.get("buckets", "silhouette"),
        seed=client.seed("buckets"),
    )
    assert np.array_equal(found.labels, expected.labels)
    assert found.scores == pytest.approx(expected.scores, abs=1e-4)
