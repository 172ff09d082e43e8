"""Native experts by name: exact names and shapes, live views, round trips, gradients, in every family."""

import pytest
import torch
from native_models import (
    EXPERTS,
    FAMILIES,
    FUSED,
    HIDDEN,
    WIDTH,
    layers_of,
    logits,
    make_native,
)
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from fedloom.adapters.native import find_native
from fedloom.errors import AdapterError
from fedloom.types import component

TOP_K = {"switch_transformers": 1}
WEIGHTS = {"switch_transformers": {"wi.weight": (WIDTH, HIDDEN), "wo.weight": (HIDDEN, WIDTH)}}
FUSED_WEIGHTS = {"gate_up_proj": (2 * WIDTH, HIDDEN), "down_proj": (HIDDEN, WIDTH)}


def expert_shapes(family: str) -> dict[str, tuple[int, ...]]:
    weights = WEIGHTS.get(family, FUSED_WEIGHTS)
    return {
        f"experts/{path}.{e}/{name}": shape
        for path in layers_of(family)
        for e in range(EXPERTS)
        for name, shape in weights.items()
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_names_and_shapes(family: str) -> None:
    model = make_native(family)
    native = find_native(model)
    assert {layer.path: layer.side for layer in native.layers} == layers_of(family)
    assert {(layer.experts, layer.top_k) for layer in native.layers} == {(EXPERTS, TOP_K.get(family, 2))}

    shapes = native.shapes()
    gate = "router.classifier.weight" if family == "switch_transformers" else "gate.weight"
    experts = expert_shapes(family)
    routers = {f"router/{path}.{gate}": (EXPERTS, HIDDEN) for path in layers_of(family)}
    assert {n: s for n, s in shapes.items() if n.startswith("experts/")} == experts
    assert {n: s for n, s in shapes.items() if n.startswith("router/")} == routers
    assert list(shapes)[: len(experts)] == list(experts)
    rest = {
        f"shared/{n}": tuple(p.shape)
        for n, p in model.named_parameters()
        if ".mlp.experts." not in n and not n.endswith(f".mlp.{gate}")
    }
    assert {n: s for n, s in shapes.items() if n.startswith("shared/")} == rest
    assert len(shapes) == len(experts) + len(routers) + len(rest)
    assert sum(torch.Size(s).numel() for s in shapes.values()) == sum(p.numel() for p in model.parameters())


def test_components_are_experts_router_and_the_rest() -> None:
    units = {component(name) for name in find_native(make_native("switch_transformers")).slots()}
    layers = ("encoder.block.1.layer.1.mlp", "decoder.block.1.layer.2.mlp")
    assert units == {f"experts/{path}.{e}" for path in layers for e in range(4)} | {"router", "shared"}


@pytest.mark.parametrize(
    ("family", "shared"),
    [
        (
            "qwen2_moe",
            ("shared_expert.gate_proj.weight", "shared_expert.down_proj.weight", "shared_expert_gate.weight"),
        ),
        ("deepseek_v2", ("shared_experts.gate_proj.weight", "shared_experts.down_proj.weight")),
        ("deepseek_v3", ("shared_experts.up_proj.weight",)),
    ],
)
def test_experts_of_every_token_are_shared(family: str, shared: tuple[str, ...]) -> None:
    names = find_native(make_native(family)).slots()
    assert all(f"shared/model.layers.1.mlp.{name}" in names for name in shared)


@pytest.mark.parametrize(
    ("family", "first", "other"),
    [
        ("mixtral", "model.embed_tokens.weight", "lm_head.weight"),
        ("switch_transformers", "shared.weight", "encoder.embed_tokens.weight"),
    ],
)
def test_tied_parameters_come_once(family: str, first: str, other: str) -> None:
    model = make_native(family)
    names = find_native(model).slots()
    assert f"shared/{first}" in names
    assert f"shared/{other}" not in names
    assert model.get_parameter(first) is model.get_parameter(other)


@pytest.mark.parametrize("family", FAMILIES)
def test_slots_are_views(family: str) -> None:
    model = make_native(family)
    native = find_native(model)
    before = logits(model, family)
    for name, slot in native.slots().items():
        assert slot.value.untyped_storage().data_ptr() == slot.parameter.untyped_storage().data_ptr(), name
    busiest = _busiest(model, family)
    name = next(n for n in native.slots() if n.startswith(busiest))
    native.slots()[name].value.mul_(3)
    assert not torch.equal(logits(model, family), before)
    native.slots()[name].value.div_(3)
    torch.testing.assert_close(logits(model, family), before)


def _busiest(model: nn.Module, family: str) -> str:
    """Name an expert that gets tokens: one with a gradient."""
    native = find_native(model)
    logits(model, family).square().sum().backward()  # type: ignore[arg-type]
    found = next(n for n, s in native.slots().items() if s.grad is not None and bool(s.grad.any()))
    model.zero_grad()
    return component(found)


@pytest.mark.parametrize("family", FAMILIES)
def test_read_and_load_carry_a_model_over(family: str) -> None:
    model, other = make_native(family, seed=1), make_native(family, seed=2)
    tensors = find_native(model).read()
    assert not torch.equal(logits(model, family), logits(other, family))
    find_native(other).load(tensors)
    assert torch.equal(logits(model, family), logits(other, family))
    for name, slot in find_native(model).slots().items():
        assert torch.equal(tensors[name], slot.value)
        assert tensors[name].data_ptr() != slot.value.data_ptr()


def test_half_precision_is_read_as_float32_and_comes_back_exactly() -> None:
    model = make_native("mixtral").to(torch.bfloat16)
    model.set_experts_implementation("eager")  # the grouped kernel wants rows of 16 bytes
    native = find_native(model)
    tensors = native.read()
    assert {t.dtype for t in tensors.values()} == {torch.float32}
    before = logits(model, "mixtral")
    native.load({name: torch.zeros_like(t) for name, t in tensors.items()})
    assert not logits(model, "mixtral").any()
    native.load(tensors)
    assert torch.equal(logits(model, "mixtral"), before)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_slices_of_the_parameters(family: str) -> None:
    model = make_native(family)
    native = find_native(model)
    logits(model, family).square().mean().backward()
    parameters = dict(model.named_parameters())
    for path in layers_of(family):
        for e in range(EXPERTS):
            for name in WEIGHTS.get(family, FUSED_WEIGHTS):
                grad = native.slots()[f"experts/{path}.{e}/{name}"].grad
                if family == "switch_transformers":
                    expected = parameters[f"{path}.experts.expert_{e}.{name}"].grad
                    assert grad is expected
                else:
                    expected = parameters[f"{path}.experts.{name}"].grad
                    assert expected is not None
                    assert torch.equal(grad, expected[e])
                    assert grad.data_ptr() == expected[e].data_ptr()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_moves_only_the_chosen_component(family: str) -> None:
    model = make_native(family)
    native = find_native(model)
    chosen = _busiest(model, family)
    before = native.read()
    logits(model, family).square().sum().backward()
    for name, slot in native.slots().items():
        if component(name) != chosen and slot.grad is not None:
            slot.grad.zero_()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    moved = {component(name) for name, tensor in native.read().items() if not torch.equal(tensor, before[name])}
    assert moved == {chosen}


def test_experts_without_tokens_do_not_move() -> None:
    model = make_native("mixtral")
    native = find_native(model)
    for name, slot in native.slots().items():
        if name.startswith("router/"):
            slot.value.zero_()  # equal logits: top-2 takes the same two experts for every token
    before = native.read()
    logits(model, "mixtral").square().sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    after = native.read()
    for path in layers_of("mixtral"):
        moved = [
            not torch.equal(after[f"experts/{path}.{e}/down_proj"], before[f"experts/{path}.{e}/down_proj"])
            for e in range(EXPERTS)
        ]
        assert sum(moved) == 2


def test_wrong_tensors_are_named_and_change_nothing() -> None:
    model = make_native("mixtral")
    native = find_native(model)
    before = native.read()
    bad = {name: torch.zeros_like(t) for name, t in before.items()}
    del bad["experts/model.layers.0.mlp.2/gate_up_proj"]
    bad["experts/model.layers.0.mlp.9/gate_up_proj"] = torch.zeros(24, 16)
    bad["router/model.layers.1.mlp.gate.weight"] = torch.zeros(16, 4)
    with pytest.raises(AdapterError) as caught:
        native.load(bad)
    for part in (
        "missing: experts/model.layers.0.mlp.2/gate_up_proj",
        "unknown: experts/model.layers.0.mlp.9/gate_up_proj",
        "router/model.layers.1.mlp.gate.weight is (16, 4), expected (4, 16)",
    ):
        assert part in str(caught.value)
    assert all(torch.equal(t, before[n]) for n, t in native.read().items())


def test_models_without_native_experts_are_refused() -> None:
    config = AutoConfig.for_model(
        "llama", vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    for model in (AutoModelForCausalLM.from_config(config), nn.Linear(2, 2)):
        with pytest.raises(
            AdapterError,
            match=r"switch_transformers, mixtral, olmoe, qwen2_moe.* leave adapter\.native out",
        ):
            find_native(model)
    dense = make_native("qwen3_moe", mlp_only_layers=[0, 1])
    with pytest.raises(AdapterError, match="every layer dense"):
        find_native(dense)


@pytest.mark.parametrize("family", ["switch_transformers", "mixtral"])
def test_names_do_not_show_wrappers(family: str) -> None:
    model = make_native(family)
    wrapped = torch.compile(make_native(family), backend="eager")
    assert find_native(wrapped).shapes() == find_native(model).shapes()


@pytest.mark.parametrize("family", FUSED)
def test_fused_halves_are_gate_then_up(family: str) -> None:
    """The layout that FC-MoE and export rely on, checked by hand on one token of one expert."""
    model = make_native(family).double()
    model.set_experts_implementation("eager")  # the grouped kernel knows no float64
    native = find_native(model)
    layer = native.layers[0]
    slots = native.slots()
    x = torch.randn(1, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    got = layer.block.experts(x, torch.tensor([[2]]), torch.tensor([[0.7]], dtype=torch.float64))
    gate, up = slots[f"{layer.component(2)}/gate_up_proj"].value.split(WIDTH)
    down = slots[f"{layer.component(2)}/down_proj"].value
    expected = 0.7 * (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
