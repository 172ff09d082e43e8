"""Mixers, frozen additions, several routers and centroids against loops over tokens and experts in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedloom.adapters.inject import Grafted, graft
from fedloom.adapters.state import expected_shapes
from fedloom.errors import AdapterError
from fedloom.types import AdapterSpec, Tensors, component

IN, OUT, HIDDEN = 6, 4, 5


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.v = nn.Linear(IN, OUT, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.v(x)


def grafted_with(spec: AdapterSpec) -> tuple[Grafted, Tensors]:
    grafted = graft(Model(), spec, HIDDEN)
    source = torch.Generator().manual_seed(3)
    shapes = expected_shapes(spec, {"v": (OUT, IN)}, HIDDEN)
    tensors = {name: torch.randn(shape, generator=source) for name, shape in shapes.items()}
    grafted.load(tensors)
    grafted.eval()
    return grafted, tensors


def expert(tensors: Tensors, m: int, scaling: float) -> Tensor:
    A, B = tensors[f"experts/{m}/v.lora_A"].double(), tensors[f"experts/{m}/v.lora_B"].double()
    return scaling * torch.einsum("or,ri->oi", B, A)


@pytest.mark.parametrize(("slots", "top"), [((0, 1), 0), ((1, 1, 1, 0, 2), 3), ((0, 0, 1, 2, 2), 2)])
def test_a_mixer_weighs_experts_per_token(slots: tuple[int, ...], top: int) -> None:
    spec = AdapterSpec(("v",), rank=2, alpha=6.0, dropout=0.0, experts=3, slots=slots, slot_top=top)
    grafted, tensors = grafted_with(spec)
    x = torch.randn(2, 3, IN, generator=torch.Generator().manual_seed(4))
    found = grafted.model(x)
    weight = grafted.layers["v"].base.weight.double()
    for b in range(2):
        for t in range(3):
            token = x[b, t].double()
            logits = tensors["mixers/v.weight"].double() @ token
            gates = torch.exp(logits) / torch.exp(logits).sum()
            order = sorted(range(len(slots)), key=lambda j: (-float(gates[j]), j))
            kept = order[: top or len(slots)]
            total = sum(float(gates[j]) for j in kept)
            expected = weight @ token
            for j in kept:
                expected = expected + float(gates[j]) / total * (expert(tensors, slots[j], 3.0) @ token)
            assert torch.allclose(found[b, t].double(), expected, atol=1e-4)


def test_a_frozen_addition_is_part_of_the_weight_and_is_not_trained() -> None:
    spec = AdapterSpec(("v",), rank=2, alpha=6.0, dropout=0.0, base_delta=True)
    grafted, tensors = grafted_with(spec)
    x = torch.randn(2, 3, IN, generator=torch.Generator().manual_seed(4))
    weight = grafted.layers["v"].base.weight.double() + tensors["base/v.delta"].double() + expert(tensors, 0, 3.0)
    y = grafted.model(x)
    assert torch.allclose(y.double(), x.double() @ weight.T, atol=1e-4)
    y.sum().backward()
    assert grafted.layers["v"].delta is not None
    assert grafted.layers["v"].delta.grad is None
    with grafted.routing(None):
        assert torch.allclose(grafted.model(x), x @ grafted.layers["v"].base.weight.T, atol=1e-5)
    assert all(torch.equal(t, tensors[name]) for name, t in grafted.read().items())


def test_gates_of_several_routers_are_averaged() -> None:
    spec = AdapterSpec(("v",), rank=2, experts=3, router_hidden=4, routers=2)
    grafted, tensors = grafted_with(spec)
    assert {component(n) for n in tensors} == {"experts/0", "experts/1", "experts/2", "routers/0", "routers/1"}
    features = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(4))
    gates = []
    for j in range(2):
        part = {n.removeprefix(f"routers/{j}/"): t.double() for n, t in tensors.items() if n.startswith(f"routers/{j}")}
        h = features.double() @ part["0.weight"].T + part["0.bias"]
        h = h * 0.5 * (1 + torch.erf(h / 2**0.5))
        logits = h @ part["2.weight"].T + part["2.bias"]
        gates.append(torch.exp(logits) / torch.exp(logits).sum(1, keepdim=True))
    mean = (gates[0] + gates[1]) / 2
    soft = grafted.route(features, "soft")
    assert soft is not None
    assert torch.allclose(soft.double(), mean, atol=1e-5)
    top1 = grafted.route(features, "top1")
    assert top1 is not None
    assert top1.tolist() == mean.argmax(1).tolist()


def test_centroids_send_an_example_to_the_nearest() -> None:
    spec = AdapterSpec(("v",), rank=2, experts=3, centroids=True)
    grafted, tensors = grafted_with(spec)
    features = 5 * torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(4))
    distances = torch.cdist(
        features.double() / features.double().norm(dim=1, keepdim=True), tensors["router/centroids"].double()
    )
    top1 = grafted.route(features, "top1")
    assert top1 is not None
    assert top1.tolist() == distances.argmin(1).tolist()
    assert grafted.router_parameters() == []


def test_slots_must_name_experts() -> None:
    with pytest.raises(AdapterError, match="do not fit 2 experts"):
        graft(Model(), AdapterSpec(("v",), rank=2, experts=2, slots=(0, 2)))
