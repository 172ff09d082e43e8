"""The router: torch's own initialisation, and routing rules by hand."""

import math

import pytest
import torch
from torch import nn

from fedloom.adapters import Router, route
from fedloom.errors import AdapterError
from fedloom.numerics.init import router_init


def test_init_is_nn_linear_s_default_bitwise() -> None:
    tensors = router_init(24, 16, 3, torch.Generator().manual_seed(5))
    torch.manual_seed(5)
    first, second = nn.Linear(24, 16), nn.Linear(16, 3)
    assert list(tensors) == ["router/0.weight", "router/0.bias", "router/2.weight", "router/2.bias"]
    for ours, torchs in zip(tensors.values(), (first.weight, first.bias, second.weight, second.bias)):
        assert torch.equal(ours, torchs)


def test_forward_is_a_gelu_perceptron() -> None:
    tensors = router_init(6, 5, 3, torch.Generator().manual_seed(0))
    router = Router(6, 5, 3)
    router.load_state_dict({name.removeprefix("router/"): t for name, t in tensors.items()})
    x = torch.randn(4, 6)
    h = x.double() @ tensors["router/0.weight"].double().T + tensors["router/0.bias"].double()
    h = h * 0.5 * (1 + torch.erf(h / math.sqrt(2)))
    logits = h @ tensors["router/2.weight"].double().T + tensors["router/2.bias"].double()
    torch.testing.assert_close(router(x).double(), logits, rtol=1e-5, atol=1e-6)


LOGITS = torch.tensor([[math.log(1.0), math.log(2.0), math.log(5.0)], [math.log(4.0), math.log(4.0), math.log(2.0)]])


def test_soft_is_softmax() -> None:
    torch.testing.assert_close(route(LOGITS, "soft"), torch.tensor([[1 / 8, 2 / 8, 5 / 8], [0.4, 0.4, 0.2]]))


def test_top1_is_the_lowest_index_of_the_largest() -> None:
    assert route(LOGITS, "top1").tolist() == [2, 0]
    assert route(torch.zeros(2, 5), "top1").tolist() == [0, 0]


def test_topk_renormalises_and_breaks_ties_by_lowest_index() -> None:
    torch.testing.assert_close(route(LOGITS, "top2"), torch.tensor([[0, 2 / 7, 5 / 7], [0.5, 0.5, 0]]))
    assert route(torch.zeros(1, 5), "top2").tolist() == [[0.5, 0.5, 0, 0, 0]]
    torch.testing.assert_close(route(LOGITS, "top3"), route(LOGITS, "soft"))
    torch.testing.assert_close(route(LOGITS, "top9"), route(LOGITS, "soft"))


def test_gates_carry_gradients_to_kept_logits_only() -> None:
    logits = LOGITS.clone().requires_grad_()
    route(logits, "top2")[:, 0].sum().backward()
    # d softmax_0 = p0 (1 − p0) on its own logit, −p0 p1 on the other kept one; row 0 does not keep expert 0
    torch.testing.assert_close(logits.grad, torch.tensor([[0.0, 0.0, 0.0], [0.25, -0.25, 0.0]]))


def test_off_and_unknown_modes() -> None:
    assert route(LOGITS, "off") is None
    for mode in ("top0", "top", "hard", "top-1"):
        with pytest.raises(AdapterError, match="Unknown routing"):
            route(LOGITS, mode)
