"""FedProx (arXiv 1812.06127): the minimiser of F + μ/2 ‖w − wᵗ‖², its steps, and μ = 0."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from dense_world import order_of, setup_of
from quadratic_client import QuadraticClient

from fedloom.methods.fedit import FedIT
from fedloom.methods.fedprox import FedProx, FedProxOptions
from fedloom.types import Training
from small_world import World, random_tensors, same


def trained(mu: float, training: Training, curvature: float) -> tuple[dict, dict, dict]:
    """Return start, target and end of a client's round."""
    method = FedProx(FedProxOptions(mu=mu))
    state = replace(method.init(setup_of()), round=1)
    start, target = random_tensors(state.tensors, seed=1, scale=1.0), random_tensors(state.tensors, seed=2, scale=1.0)
    order = replace(order_of(method, state, "a"), tensors=start, training=training)
    client = QuadraticClient("a", 7, target, curvature)
    reply = method.local(client, order)
    end = client.read()
    assert all(torch.allclose(reply.send[name], end[name] - start[name]) for name in start)
    return start, target, end


@pytest.mark.parametrize("mu", [0.0, 0.5, 2.0])
def test_a_client_that_trains_to_the_end_stops_at_the_proximal_point(mu: float) -> None:
    """∇ = h (w − t) + μ (w − wᵗ) = 0 at w = (h t + μ wᵗ) / (h + μ)."""
    start, target, end = trained(mu, Training(steps=200, lr=0.2), curvature=1.5)
    for name in start:
        torch.testing.assert_close(end[name], (1.5 * target[name] + mu * start[name]) / (1.5 + mu))


def test_three_steps_of_a_plain_loop() -> None:
    start, target, end = trained(0.7, Training(steps=3, lr=0.1), curvature=2.0)
    for name in start:
        w0, t = start[name].double().numpy(), target[name].double().numpy()
        w = w0.copy()
        for _ in range(3):
            w = w - 0.1 * (2.0 * (w - t) + 0.7 * (w - w0))
        np.testing.assert_allclose(end[name].numpy(), w, rtol=1e-5, atol=1e-6)


def test_without_mu_it_is_fedit_and_with_it_a_run_stays_nearer_to_its_start(tmp_path: Path) -> None:
    plain = World(tmp_path / "fedit").run(FedIT(), rounds=2)
    zero = World(tmp_path / "zero").run(FedProx(FedProxOptions(mu=0.0)), rounds=2)
    strong = World(tmp_path / "strong").run(FedProx(FedProxOptions(mu=100.0)), rounds=2)
    assert same(plain.tensors, zero.tensors)
    name = next(n for n in plain.tensors if n.endswith("lora_B"))  # starts at zero
    assert strong.tensors[name].norm() < 0.8 * plain.tensors[name].norm()
