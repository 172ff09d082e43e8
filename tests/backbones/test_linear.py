"""Frozen layers through oneDNN, against float64 and against PyTorch's own layer."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedloom.backbones.linear import BLOCK_ROWS, FrozenLinear, product, quicken
from fedloom.backbones.load import parameter_hash
from small_world import small_llama


def frozen(inputs: int, outputs: int, bias: bool) -> FrozenLinear:
    layer = nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)
    quicken(layer)
    assert isinstance(layer, FrozenLinear)
    return layer


@pytest.mark.parametrize("rows", [1, 2, 5, 16, 17, 100, BLOCK_ROWS, BLOCK_ROWS + 1, 3 * BLOCK_ROWS + 70])
@pytest.mark.parametrize("bias", [False, True])
def test_value_and_gradient_are_those_of_float64(rows: int, bias: bool) -> None:
    torch.manual_seed(rows)
    layer = frozen(240, 400, bias)
    x = torch.randn(rows, 240, requires_grad=True)
    exact_x = x.detach().double().requires_grad_()
    exact = F.linear(exact_x, layer.weight.double(), layer.bias.double() if bias else None)
    seen = layer(x)
    torch.testing.assert_close(seen.double(), exact, rtol=1e-5, atol=1e-5)
    grad = torch.randn(rows, 400)
    seen.backward(grad)
    exact.backward(grad.double())
    assert x.grad is not None
    torch.testing.assert_close(x.grad.double(), exact_x.grad, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(layer(x), seen)


@pytest.mark.parametrize("rows", [6, 16, 17])
@pytest.mark.parametrize("bias", [False, True])
def test_a_weight_that_is_not_transposed_gives_the_same(rows: int, bias: bool) -> None:
    torch.manual_seed(rows)
    layer = nn.Linear(240, 400, bias=bias).requires_grad_(False)
    assert layer.weight.is_contiguous()
    x = torch.randn(1, rows, 240)
    torch.testing.assert_close(product(x, layer.weight, layer.bias), layer(x), rtol=1e-5, atol=1e-5)
    assert product(x, layer.weight, layer.bias).is_contiguous()


def test_a_model_keeps_its_numbers_names_and_hash() -> None:
    model = small_llama()
    quick = copy.deepcopy(model)
    quicken(quick)
    ids = torch.randint(0, 250, (3, 90), generator=torch.Generator().manual_seed(0))
    assert sum(isinstance(m, FrozenLinear) for m in quick.modules()) == 2 * 7 + 1
    assert quick.lm_head.weight is quick.model.embed_tokens.weight
    assert list(quick.state_dict()) == list(model.state_dict())
    assert parameter_hash(quick) == parameter_hash(model)
    torch.testing.assert_close(quick(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


def test_what_trains_or_is_not_float32_is_left_alone() -> None:
    trained, half = nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.bfloat16).requires_grad_(False)
    for layer in (trained, half):
        quicken(layer)
        assert type(layer) is nn.Linear


def test_other_types_autocast_and_empty_inputs_take_the_usual_way() -> None:
    layer = frozen(4, 4, True)
    x = torch.randn(3, 4)
    assert layer(x[:0]).shape == (0, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
    assert torch.equal(layer.double()(x.double()), F.linear(x.double(), layer.weight, layer.bias))


def test_leading_dimensions_are_kept() -> None:
    layer = frozen(4, 6, False)
    x = torch.randn(2, 3, 5, 4)
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight))
