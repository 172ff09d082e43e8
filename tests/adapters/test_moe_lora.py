"""The mixture layer against dense float64 algebra and against PEFT."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from fedloom.adapters import Gates, MoELoRALinear
from fedloom.adapters.moe_lora import dropout, dropped_positions
from fedloom.errors import AdapterError

IN, OUT, RANK, ALPHA = 7, 5, 3, 7.5  # non-square, scaling 2.5


def make_layer(experts: int, *, conv: bool = False, dropout: float = 0.0, seed: int = 0) -> MoELoRALinear:
    torch.manual_seed(seed)
    base = Conv1D(OUT, IN) if conv else nn.Linear(IN, OUT)
    base.requires_grad_(False)
    layer = MoELoRALinear(base, Gates(experts, RANK), ALPHA, dropout)
    nn.init.normal_(layer.A)
    nn.init.normal_(layer.B)
    return layer.eval()


def dense_weight(base: nn.Module) -> Tensor:
    """The base's (out, in) weight in float64."""
    return (base.weight.t() if isinstance(base, Conv1D) else base.weight).detach().double()


def dense_mixture(layer: MoELoRALinear, x: Tensor, A: Tensor, B: Tensor, gates: Tensor) -> Tensor:
    """y_b = x_b (W + s Σ_m g_bm B_m A_m)ᵀ + bias, with the weight of each example formed, in float64."""
    delta = torch.einsum("bm,mor,mri->boi", gates, B, A) * (ALPHA / RANK)
    return torch.einsum("bti,boi->bto", x, dense_weight(layer.base) + delta) + layer.base.bias.detach().double()


@pytest.mark.parametrize("conv", [False, True])
def test_soft_mixture_forward_and_all_gradients_match_dense_float64(conv: bool) -> None:
    layer = make_layer(4, conv=conv)
    x = torch.randn(3, 6, IN, requires_grad=True)
    gates = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.7, 0.0, 0.25, 0.05], [0.0, 0.0, 1.0, 0.0]], requires_grad=True)
    upstream = torch.randn(3, 6, OUT)
    layer.gates.set(gates)
    y = layer(x)
    y.backward(upstream)

    leaves = [t.detach().double().requires_grad_() for t in (x, layer.A, layer.B, gates)]
    y64 = dense_mixture(layer, *leaves)
    y64.backward(upstream.double())
    torch.testing.assert_close(y.double(), y64, rtol=1e-5, atol=1e-5)
    for ours, dense in zip((x, layer.A, layer.B, gates), leaves):
        torch.testing.assert_close(ours.grad.double(), dense.grad, rtol=1e-5, atol=1e-4)
    assert layer.base.weight.grad is None


@pytest.mark.parametrize("index", [[2, 0, 2], [1, 1, 1], [3]])
def test_top1_forward_and_gradients_match_dense_float64(index: list[int]) -> None:
    layer = make_layer(4)
    x = torch.randn(len(index), 6, IN, requires_grad=True)
    upstream = torch.randn(len(index), 6, OUT)
    layer.gates.set(torch.tensor(index))
    y = layer(x)
    y.backward(upstream)

    leaves = [t.detach().double().requires_grad_() for t in (x, layer.A, layer.B)]
    y64 = dense_mixture(layer, *leaves, nn.functional.one_hot(torch.tensor(index), 4).double())
    y64.backward(upstream.double())
    torch.testing.assert_close(y.double(), y64, rtol=1e-5, atol=1e-5)
    for ours, dense in zip((x, layer.A, layer.B), leaves):
        torch.testing.assert_close(ours.grad.double(), dense.grad, rtol=1e-5, atol=1e-4)


def test_two_dimensional_input_is_a_batch_of_examples() -> None:
    layer = make_layer(3)
    x, gates = torch.randn(4, IN), torch.rand(4, 3)
    layer.gates.set(gates)
    torch.testing.assert_close(layer(x), layer(x[:, None])[:, 0])
    layer.gates.set(torch.tensor([2, 0, 1, 1]))
    torch.testing.assert_close(layer(x), layer(x[:, None])[:, 0])


def test_one_expert_without_gates_equals_peft() -> None:
    torch.manual_seed(1)
    holder = nn.Sequential(nn.Linear(IN, OUT))
    layer = MoELoRALinear(holder[0], Gates(1, RANK), ALPHA)
    nn.init.normal_(layer.A)
    nn.init.normal_(layer.B)
    theirs = get_peft_model(holder, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["0"]))
    lora = theirs.base_model.model[0]
    with torch.no_grad():
        lora.lora_A["default"].weight.copy_(layer.A[0])
        lora.lora_B["default"].weight.copy_(layer.B[0])
    x, upstream = torch.randn(3, 6, IN), torch.randn(3, 6, OUT)
    ours = layer(x)
    torch.testing.assert_close(ours, theirs(x))
    ours.backward(upstream)
    theirs(x).backward(upstream)
    torch.testing.assert_close(layer.A.grad[0], lora.lora_A["default"].weight.grad)
    torch.testing.assert_close(layer.B.grad[0], lora.lora_B["default"].weight.grad)


def one_hot(index: Tensor, experts: int) -> Tensor:
    """Gates that need a gradient, so that they take the soft path."""
    return nn.functional.one_hot(index, experts).float().requires_grad_()


@pytest.mark.parametrize("expert", range(4))
def test_m5_one_hot_weights_equal_that_adapter_bitwise(expert: int) -> None:
    mixture = make_layer(4)
    single = MoELoRALinear(mixture.base, Gates(1, RANK), ALPHA).eval()
    with torch.no_grad():
        single.A.copy_(mixture.A[expert : expert + 1])
        single.B.copy_(mixture.B[expert : expert + 1])
    x, chosen = torch.randn(2, 6, IN), torch.tensor([expert, expert])
    alone = single(x)
    single.gates.set(torch.ones(2, 1, requires_grad=True))
    assert torch.equal(single(x), alone)
    for routing in (chosen, one_hot(chosen, 4).detach(), one_hot(chosen, 4)[:1].detach()):
        mixture.gates.set(routing)
        assert torch.equal(mixture(x), alone)
    # Gates in training keep all experts in the product. The others add exact zeros, but the wider matrix product may
    # round the same terms in another order.
    mixture.gates.set(one_hot(chosen, 4))
    torch.testing.assert_close(mixture(x), alone, rtol=1e-6, atol=1e-6)


def test_m5_one_hot_weights_in_training_equal_that_adapter_in_exact_arithmetic() -> None:
    """On small integers every product and sum is exact, so no order of rounding can hide a leak: equal bit by bit."""
    mixture = make_layer(4)
    with torch.no_grad():
        for p in (mixture.A, mixture.B, mixture.base.weight, mixture.base.bias):
            p.copy_(torch.randint(-4, 5, p.shape))
    x = torch.randint(-4, 5, (2, 6, IN)).float()
    mixture.gates.set(one_hot(torch.tensor([0, 2]), 4))
    soft = mixture(x)
    mixture.gates.set(torch.tensor([0, 2]))
    assert torch.equal(soft, mixture(x))


def test_gates_of_zeros_and_ones_that_are_not_one_hot_stay_a_mixture() -> None:
    gates = Gates(3, RANK)
    for rows in ([[1.0, 1.0, 0.0]], [[0.0, 0.0, 0.0]], [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]], [[2.0, -1.0, 0.0]]):
        gates.set(torch.tensor(rows))
        assert gates.mode == "soft"


@settings(max_examples=40, deadline=None)
@given(experts=st.integers(1, 5), index=st.lists(st.integers(0, 4), min_size=1, max_size=4), seed=st.integers(0, 999))
def test_property_soft_one_hot_is_top1(experts: int, index: list[int], seed: int) -> None:
    layer = make_layer(experts, seed=seed)
    chosen = torch.tensor([i % experts for i in index])
    x = torch.randn(len(index), 3, IN)
    layer.gates.set(one_hot(chosen, experts))
    soft = layer(x)
    layer.gates.set(chosen)
    torch.testing.assert_close(soft, layer(x), rtol=1e-5, atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(order=st.permutations(range(4)), seed=st.integers(0, 999))
def test_property_permuting_experts_with_their_gates_changes_nothing(order: list[int], seed: int) -> None:
    layer = make_layer(4, seed=seed)
    x, gates = torch.randn(2, 3, IN), torch.rand(2, 4).softmax(-1)
    layer.gates.set(gates)
    before = layer(x)
    with torch.no_grad():
        layer.A.copy_(layer.A[list(order)].clone())
        layer.B.copy_(layer.B[list(order)].clone())
    layer.gates.set(gates[:, list(order)])
    torch.testing.assert_close(layer(x), before, rtol=1e-5, atol=1e-5)


def test_off_is_the_base_bitwise() -> None:
    layer = make_layer(4)
    x = torch.randn(2, 3, IN)
    layer.gates.set(None)
    assert torch.equal(layer(x), layer.base(x))


def test_gates_serve_one_row_for_all_examples() -> None:
    layer = make_layer(3)
    x, row = torch.randn(4, 2, IN), torch.tensor([[0.2, 0.5, 0.3]])
    layer.gates.set(row)
    shared = layer(x)
    layer.gates.set(row.expand(4, 3))
    torch.testing.assert_close(shared, layer(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("routing", [torch.tensor([0, 2]), torch.tensor([[0.2, 0.3, 0.5]])])
def test_m4_half_base_runs_the_experts_in_float32(dtype: torch.dtype, routing: Tensor) -> None:
    layer = make_layer(3)
    layer.base.to(dtype)
    x = torch.randn(2, 4, IN, dtype=dtype)
    layer.gates.set(routing)
    y = layer(x)
    assert y.dtype == dtype
    assert layer.A.dtype == layer.B.dtype == torch.float32
    gates = routing.double().expand(2, 3) if routing.dim() == 2 else nn.functional.one_hot(routing, 3).double()
    delta = torch.einsum("bm,mor,mri,bti->bto", gates, layer.B.double(), layer.A.double(), x.double()) * ALPHA / RANK
    # One rounding to half precision of base output + exact experts, whatever their size.
    torch.testing.assert_close(y, (layer.base(x).double() + delta).to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)
    y.float().sum().backward()
    assert layer.B.grad.dtype == torch.float32


def test_m4_autocast_leaves_the_experts_in_float32() -> None:
    layer = make_layer(2)
    x = torch.randn(2, 4, IN)
    layer.gates.set(torch.tensor([[0.25, 0.75]]))
    with torch.autocast("cpu", torch.bfloat16):
        base, y = layer.base(x), layer(x)
    gates, A, B = torch.tensor([[0.25, 0.75]]), layer.A, layer.B
    delta = torch.einsum("bm,mor,mri,bti->bto", gates.expand(2, 2), B, A, x) * ALPHA / RANK
    torch.testing.assert_close(y, (base.float() + delta).to(torch.bfloat16), rtol=2**-7, atol=1e-6)


def test_dropout_acts_on_the_lora_path_only_and_in_training_only() -> None:
    layer = make_layer(2, dropout=0.2)
    x = torch.randn(2, 200, IN)
    layer.gates.set(torch.tensor([[0.5, 0.5]]))
    clean = layer(x)
    assert torch.equal(clean, layer(x))
    layer.train()
    assert not torch.equal(clean, layer(x))
    mean = torch.stack([layer(x) for _ in range(300)]).mean(0)
    assert (mean - clean).abs().mean() < 0.1 * (clean - layer.base(x)).abs().mean()
    layer.gates.set(None)
    assert torch.equal(layer(x), layer.base(x))


def test_dropout_gradient_follows_the_mask() -> None:
    x = torch.ones(40, 50, requires_grad=True)
    y, scale = dropout(x, 0.1)
    (y * scale).sum().backward()
    assert torch.equal(x.grad, (y.detach() != 0) * scale)
    assert scale == pytest.approx(1 / 0.9)


@pytest.mark.parametrize("p", [0.01, 0.05, 0.2])
def test_dropped_positions_are_independent_bernoulli(p: float) -> None:
    """Counts, gaps, both edges and neighbouring pairs have the moments of an i.i.d. Bernoulli(p) mask (5 sigma)."""
    n, repeats = 400, 4000
    masks = torch.zeros(repeats, n)
    for row in masks:
        row[dropped_positions(n, p)] = 1.0
    counts = masks.sum(1)
    sigma = (n * p * (1 - p)) ** 0.5
    assert abs(counts.mean() - n * p) < 5 * sigma / repeats**0.5
    assert abs(counts.std() / sigma - 1) < 5 / (2 * repeats) ** 0.5
    rate_error = 5 * (p * (1 - p) / repeats) ** 0.5
    for position in (0, 1, n // 2, n - 1):
        assert abs(masks[:, position].mean() - p) < rate_error
    pairs = (masks[:, :-1] * masks[:, 1:]).mean()
    assert abs(pairs - p * p) < 5 * p / (repeats * (n - 1)) ** 0.5


def test_dropped_positions_of_nothing_and_of_one() -> None:
    assert dropped_positions(0, 0.1).numel() == 0
    hits = sum(dropped_positions(1, 0.1).numel() for _ in range(2000))
    assert abs(hits - 200) < 5 * (2000 * 0.09) ** 0.5


def test_wrong_routing_is_refused() -> None:
    layer = make_layer(3)
    with pytest.raises(AdapterError, match="needs gates"):
        layer(torch.randn(2, 4, IN))
    with pytest.raises(AdapterError, match=r"\(batch, 3\)"):
        layer.gates.set(torch.rand(2, 4))
    with pytest.raises(AdapterError, match="outside 0…2"):
        layer.gates.set(torch.tensor([0, 3]))
    with pytest.raises(AdapterError, match="must be"):
        layer.gates.set(torch.tensor(1))
    for routing in (torch.rand(3, 3), torch.tensor([0, 1, 2])):
        layer.gates.set(routing)
        with pytest.raises(AdapterError, match="3 examples, the batch has 2"):
            layer(torch.randn(2, 4, IN))


def test_only_linear_layers_and_proper_dropout() -> None:
    with pytest.raises(AdapterError, match="Embedding"):
        MoELoRALinear(nn.Embedding(3, 4), Gates(1, 2), 1.0)
    with pytest.raises(AdapterError, match="dropout"):
        MoELoRALinear(nn.Linear(3, 4), Gates(1, 2), 1.0, dropout=1.0)


def test_repr_tells_the_sizes() -> None:
    assert "experts=4, rank=3, scaling=2.5, dropout=0" in repr(make_layer(4))
