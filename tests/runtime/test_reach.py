"""What a client can move in a round: each component no further than AdamW can, in the steps that it stands for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.methods import METHODS
from fedloom.methods.base import Method
from fedloom.methods.fcmoe import FCMoE, FCMoEOptions
from fedloom.methods.fedlease import FedLEASE, FedLEASEOptions
from fedloom.methods.fedweave import FedWeave, FedWeaveOptions
from fedloom.numerics.tree import norm
from fedloom.runtime.compression import compress, expand
from fedloom.runtime.leaving import Leaving, shaped
from fedloom.runtime.loop import Receipt
from fedloom.runtime.quarantine import ROUNDING, STEP, reach
from fedloom.runtime.wire import decode, encode
from fedloom.types import Order, Tensors, Training, component
from small_world import NATIVE, SPEC, TRAINING, Wire, World, world_of

EXPERT = "experts/encoder.block.1.layer.1.mlp.0"
#: One pass over the client's rows; 1000 is the most.
PASS = replace(TRAINING, epochs=1, steps=1000, lr=1e-3, router_lr=1e-3)


def test_no_gradients_move_adamw_further_and_some_nearly_as_far() -> None:
    """Cauchy and Schwarz hold with equality for gradients that grow by β₂ / β₁: more than 3.16 in the last steps."""
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.AdamW([weight], lr=1.0, weight_decay=0.0)
    steps, lengths = 1500, []
    for step in range(steps):
        before = weight.item()
        weight.grad = torch.full_like(weight, (0.999 / 0.9) ** step)
        optimizer.step()
        lengths.append(abs(weight.item() - before))
    # Independently: (1 − β₁) √(Σ (β₁² / β₂)^k / (1 − β₂)), with the correction for bias.
    series = sum((0.81 / 0.999) ** k for k in range(steps))
    last = 0.1 * math.sqrt(series / 0.001) * math.sqrt(1 - 0.999**steps) / (1 - 0.9**steps)
    assert lengths[-1] == pytest.approx(last, rel=1e-4)
    assert 6.4 < max(lengths) < STEP == pytest.approx(7.27, abs=1e-3)
    assert abs(weight.item()) < reach(Training(lr=1.0), steps, 1)


def test_reach_by_hand() -> None:
    training = Training(lr=1e-3, router_lr=2e-3, weight_decay=0.1)
    assert reach(replace(training, weight_decay=0.0), 5, 400) == pytest.approx(5 * 2e-3 * 7.27 * 20, rel=1e-4)
    assert reach(training, 5, 400, start=30.0) == pytest.approx(5 * 2e-3 * (7.27 * 20 + 0.1 * 30), rel=1e-4)


def fit(round: int, training: Training, **values: Any) -> Order:
    return Order("fit", "ann", round, {}, SPEC, training, values)


@pytest.mark.parametrize(
    ("method", "order", "unit", "steps"),
    [
        (Method(), fit(1, PASS), "experts/0", 4),  # 7 examples in batches of 2
        (Method(), fit(1, replace(PASS, epochs=3)), "experts/0", 12),
        (Method(), fit(1, replace(PASS, steps=3)), "experts/0", 3),
        (Method(), fit(1, TRAINING), "experts/0", 3),
        (FCMoE(), fit(1, PASS), EXPERT, 4),
        (FCMoE(), fit(3, PASS), EXPERT, 4 * (1 + 0.5 + 0.25)),
        (FCMoE(), fit(3, PASS), "shared", 4),
        (FCMoE(), fit(3, PASS), "router", 4),
        (FCMoE(FCMoEOptions(retention=1.0)), fit(3, PASS), EXPERT, 12),
        (FCMoE(FCMoEOptions(retention=0.0)), fit(3, PASS), EXPERT, 4),
        (FedLEASE(FedLEASEOptions(init="own", warmup_steps=10)), fit(1, PASS), "experts/0", 24),
        (FedLEASE(FedLEASEOptions(init="own", warmup_steps=10)), fit(2, PASS), "experts/0", 4),
        (FedWeave(FedWeaveOptions(warmup_steps=10)), replace(fit(0, PASS), kind="probe"), "buckets", 10),
        (METHODS["pfl_moe"](), fit(9, PASS), EXPERT, 4),  # its own head and gate are not sent
    ],
)
def test_steps_behind_a_component_by_hand(method: Method, order: Order, unit: str, steps: float) -> None:
    assert method.steps_behind(order, unit, 7) == steps


def all_in_one_expert(length: float) -> Any:
    """Let dan, who has one example, send nothing but one expert, moved by ``length``."""

    def change(orders: Sequence[Order], receipts: list[Receipt]) -> list[Receipt]:
        (receipt,) = [r for r in receipts if r.client == "dan"]
        tensors, header = decode(receipt.path.read_bytes())
        (order,) = [order for order in orders if order.client == "dan"]
        source = torch.Generator().manual_seed(1)
        units = {n: torch.randn(t.shape, generator=source) for n, t in order.tensors.items() if component(n) == EXPERT}
        found = {n: torch.zeros_like(t) for n, t in tensors.items()}
        found |= {n: t * (length / norm(units)) for n, t in units.items()}
        header["counts"][EXPERT] = 1
        header["values"]["activations"] |= {EXPERT: 512}
        receipt.path.write_bytes(encode(found, header))
        return receipts

    return change


def moved(world: World, tensors: Tensors) -> float:
    return norm({n: t - world.setup.initial[n] for n, t in tensors.items() if component(n) == EXPERT})


def test_one_example_moves_an_expert_no_further_than_its_one_step(tmp_path: Path) -> None:
    """wi and wo are 16 × 24 each: 7.27 · 10⁻³ · √768 = 0.2015, and 15% for rounding.

    The median of the round would let it move by 29: other clients' updates of the whole model are 0.3 long.
    """
    limit = 1.15 * 7.27013 * 1e-3 * math.sqrt(2 * 16 * 24)
    assert limit == pytest.approx(0.2317, abs=1e-4)

    def attacked(length: float) -> tuple[float, dict[str, str]]:
        world = World(tmp_path / str(length), spec=NATIVE)
        transport = Wire(world.simulator, all_in_one_expert(length))
        state = world.run(FCMoE(), rounds=1, training=PASS, transport=transport)
        return moved(world, state.tensors), world.log.read()[-1]["quarantined"]

    far, quarantined = attacked(1.01 * limit)
    assert list(quarantined) == ["dan"]
    assert f"in '{EXPERT}' exceeds 0.232, beyond what its optimiser steps (1) can reach" in quarantined["dan"]
    near, quarantined = attacked(0.99 * limit)
    assert quarantined == {}
    # Eq. 2–4 move an expert no further than its longest update, and what opposes the mean as far again.
    assert far < near < 2 * limit


@pytest.mark.parametrize(
    ("method", "training", "wire"),
    [
        (FCMoE(FCMoEOptions(retention=1.0)), {"weight_decay": 5.0, "optimizer_state": "keep", "epochs": 2}, "int8"),
        (METHODS["fedit"](), {"weight_decay": 20.0, "optimizer_state": "keep"}, "int8"),
        (METHODS["scaffold"](), {"epochs": 1, "steps": 1000, "clip": 0.0}, "bf16"),
    ],
)
def test_honest_clients_are_within_reach(method: Method, training: dict[str, Any], wire: Any, tmp_path: Path) -> None:
    world = world_of(method, tmp_path)
    world.simulator.leaving = Leaving(wire, feedback=method.summed and wire == "int8")
    world.run(method, training=replace(TRAINING, **training), wire=wire)
    assert [record["quarantined"] for record in world.log.read()[1:]] == [{}, {}, {}]


def test_rounding_to_int8_is_within_what_is_allowed_for_it() -> None:
    """One large value in a block and 255 that round up to one scale, with and without what earlier rounds left over."""
    update = {"x": torch.tensor([1.0] + [0.51 / 127] * 255)}
    once = norm(expand(compress(update, "int8"), "int8"))
    assert once == pytest.approx(math.sqrt(1 + 255 / 127**2), rel=1e-6)
    lengths, rest = [], dict[str, torch.Tensor]()
    for _ in range(8):
        packed, rest = shaped(update, rest, Leaving("int8", feedback=True))
        lengths.append(norm(expand(packed, "int8")))
    assert norm(update) < max(lengths) < ROUNDING * norm(update)
