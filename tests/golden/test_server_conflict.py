"""FC-MoE's rules (arXiv 2606.15625, Eq. 1–4) for the LoRA experts of other methods, against dense float64 vectors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedloom.config import parse_config
from fedloom.errors import ConfigError
from fedloom.methods.fedit import FedIT
from fedloom.methods.fedweave import FedWeave
from fedloom.methods.flora import FLoRA
from fedloom.methods.server import ServerStep, server_step
from fedloom.numerics.aggregate import project_conflicts
from fedloom.types import AdapterSpec, Reply, State, Tensors
from small_world import World

SPEC = AdapterSpec(("v",), rank=2, alpha=6.0, experts=2, router_hidden=3)
PARTS = {"v.lora_A": (2, 3), "v.lora_B": (5, 2)}
#: client → examples of each expert; "cid" has no bucket of the second.
CLIENTS = {"ann": {"experts/0": 30, "experts/1": 5}, "bob": {"experts/0": 4, "experts/1": 9}, "cid": {"experts/0": 7}}


def draw(source: torch.Generator, units: list[str], scale: float) -> Tensors:
    names = {f"{unit}/{part}": shape for unit in units for part, shape in PARTS.items()} | {"router/0.weight": (3, 4)}
    return {name: scale * torch.randn(shape, generator=source) for name, shape in names.items()}


def scene() -> tuple[State, list[Reply]]:
    source = torch.Generator().manual_seed(1)
    state = State(2, draw(source, ["experts/0", "experts/1"], 1.0), SPEC)
    replies = []
    for client, counts in CLIENTS.items():
        send = draw(source, list(counts), 0.1)
        if client != "ann":  # the others oppose ann, each also in a way of its own
            send = {n: t - 1.5 * replies[0].send[n] for n, t in send.items()}
        whole = sum(counts.values())
        replies.append(Reply(client, send, {"examples": whole, "router": whole, **counts}))
    return state, replies


def vector(found: Tensors, unit: str) -> Tensor:
    return torch.cat([found[f"{unit}/{part}"].double().flatten() for part in PARTS])


@pytest.mark.parametrize("conflict", ["none", "project"])
@pytest.mark.parametrize("importance", ["samples", "norm"])
def test_each_expert_follows_the_dense_rule_and_the_router_the_mean(conflict: str, importance: str) -> None:
    state, replies = scene()
    step = ServerStep(conflict=conflict, importance=importance)  # type: ignore[arg-type]
    merged = server_step(FedWeave(), state, replies, step).tensors
    opposed = 0
    for unit in ("experts/0", "experts/1"):
        there = [r for r in replies if unit in r.counts]
        updates = [vector(r.send, unit) for r in there]
        weights = [r.counts[unit] * (float(u.norm()) if importance == "norm" else 1.0) for r, u in zip(there, updates)]
        consensus = sum((c / sum(weights) * u for c, u in zip(weights, updates)), torch.zeros(16, dtype=torch.float64))
        projected = project_conflicts(updates, consensus) if conflict == "project" else updates
        opposed += sum(float(torch.dot(u, consensus)) < 0 for u in updates)
        expected = sum((c / sum(weights) * u for c, u in zip(weights, projected)), vector(state.tensors, unit))
        assert torch.allclose(vector(merged, unit), expected, atol=1e-6), unit
    assert opposed  # so that projecting says something
    shares = torch.tensor([float(r.counts["router"]) for r in replies], dtype=torch.float64)
    stacked = torch.stack([r.send["router/0.weight"].double() for r in replies])
    mean = (shares[:, None, None] * stacked).sum(0) / shares.sum()
    assert torch.allclose(merged["router/0.weight"].double(), state.tensors["router/0.weight"].double() + mean)


def test_two_clients_by_hand() -> None:
    """Updates (2, 0) of 6 examples and (−1, 0) of 2: Δ̄ = (1.25, 0), the second is projected to 0, so 6/8 · 2 = 1.5."""
    name = "experts/0/v.lora_A"
    state = State(1, {name: torch.tensor([[10.0, 10.0]])}, SPEC)
    replies = [
        Reply("a", {name: torch.tensor([[2.0, 0.0]])}, {"examples": 6, "experts/0": 6}),
        Reply("b", {name: torch.tensor([[-1.0, 0.0]])}, {"examples": 2, "experts/0": 2}),
    ]
    merged = server_step(FedWeave(), state, replies, ServerStep(conflict="project"))
    assert merged.tensors[name].tolist() == [[11.5, 10.0]]
    assert merged.values["log"]["conflict"]["experts/0"]["length"] == pytest.approx(1.2)
    # Eq. 1 with examples for activations: 6·2 and 2·1, so Δ̄ = (12·2 − 2·1)/14.
    weighed = server_step(FedWeave(), state, replies, ServerStep(importance="norm"))
    assert weighed.tensors[name][0, 0].item() == pytest.approx(10 + 22 / 14)


def test_a_method_with_a_rule_of_its_own_refuses() -> None:
    for step in (ServerStep(conflict="project"), ServerStep(importance="norm")):
        step.check(FedIT())
        with pytest.raises(ConfigError, match="merges by a rule of its own"):
            step.check(FLoRA())
    with pytest.raises(ConfigError, match="product-svd replaces"):
        ServerStep(conflict="project", aggregation="product-svd").check(FedIT())
    plain = {"data": {"clients": {"a": "a.jsonl"}}, "server": {"conflict": "project", "importance": "norm"}}
    assert parse_config(plain).server == ServerStep(conflict="project", importance="norm")


def test_a_run_with_both(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.run(FedWeave(), rounds=2, server=ServerStep(conflict="project", importance="norm"))
    record = world.log.read()[-1]
    assert record["quarantined"] == {}
    assert all(found["length"] >= 1 for found in record["method"]["conflict"].values())
