"""LoRA on native experts, against PEFT with the same factors and against dense weights in float64."""

import pytest
import torch
from native_models import EXPERTS, FAMILIES, HIDDEN, WIDTH, inputs, layers_of, logits, make_native
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from fedloom.adapters.native import find_native
from fedloom.adapters.native_graft import NativeGraft
from fedloom.adapters.native_lora import graft_expert_lora
from fedloom.errors import AdapterError
from fedloom.methods.base import Method
from fedloom.numerics.seeding import generator
from fedloom.types import AdapterSpec, Setup, Tensors, component
from small_world import same

RANK, ALPHA = 3, 5.0
SHAPES = {
    "switch_transformers": {"wi.weight": (WIDTH, HIDDEN), "wo.weight": (HIDDEN, WIDTH)},
}
FUSED_SHAPES = {"gate_up_proj": (2 * WIDTH, HIDDEN), "down_proj": (HIDDEN, WIDTH)}


def random_factors(shapes: dict[str, tuple[int, ...]], seed: int = 5) -> Tensors:
    draw = torch.Generator().manual_seed(seed)
    return {name: 0.3 * torch.randn(shape, generator=draw) for name, shape in shapes.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_shapes(family: str) -> None:
    lora = graft_expert_lora(make_native(family), RANK, ALPHA)
    expected: dict[str, tuple[int, ...]] = {}
    for path in layers_of(family):
        for e in range(EXPERTS):
            for name, (out, width) in SHAPES.get(family, FUSED_SHAPES).items():
                expected[f"experts/{path}.{e}/{name}.lora_A"] = (RANK, width)
                expected[f"experts/{path}.{e}/{name}.lora_B"] = (out, RANK)
    assert list(lora.shapes().items()) == list(expected.items())
    assert {component(n) for n in expected} == {f"experts/{p}.{e}" for p in layers_of(family) for e in range(EXPERTS)}


@pytest.mark.parametrize("family", FAMILIES)
def test_starts_as_the_model_and_comes_off_bitwise(family: str) -> None:
    model = make_native(family)
    model.get_input_embeddings().weight.requires_grad_(False)
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    names = list(model.state_dict())
    tensors = find_native(model).read()
    before = logits(model, family)
    lora = graft_expert_lora(model, RANK, ALPHA)
    torch.testing.assert_close(logits(model, family), before)
    A = [t for n, t in lora.read().items() if n.endswith("lora_A")]
    assert all(bool(a.any()) for a in A)
    assert len({float(a.sum()) for a in A}) == len(A)  # each its own draw

    factors = random_factors(lora.shapes())
    lora.load(factors)
    assert all(torch.equal(t, factors[n]) for n, t in lora.read().items())
    assert not torch.allclose(logits(model, family), before)
    assert lora.remove() is model
    assert torch.equal(logits(model, family), before)
    assert list(model.state_dict()) == names
    assert {name: p.requires_grad for name, p in model.named_parameters()} == trained
    assert all(torch.equal(t, tensors[n]) for n, t in find_native(model).read().items())
    with pytest.raises(AdapterError, match="graft it again"):
        lora.read()


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_dense_weights_in_float64(family: str) -> None:
    dense, model = make_native(family).double(), make_native(family).double()
    if family != "switch_transformers":
        for m in (dense, model):
            m.set_experts_implementation("eager")  # the grouped kernel knows no float64
    lora = graft_expert_lora(model, RANK, ALPHA)
    factors = random_factors(lora.shapes())
    lora.load(factors)
    parameters = dict(dense.named_parameters())
    with torch.no_grad():
        for path in layers_of(family):
            for e in range(EXPERTS):
                for name in SHAPES.get(family, FUSED_SHAPES):
                    A, B = (factors[f"experts/{path}.{e}/{name}.lora_{f}"].double() for f in "AB")
                    delta = (ALPHA / RANK) * (B @ A)
                    if family == "switch_transformers":
                        parameters[f"{path}.experts.expert_{e}.{name}"] += delta
                    else:
                        parameters[f"{path}.experts.{name}"][e] += delta
    torch.testing.assert_close(logits(model, family), logits(dense, family), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "deepseek_v3"])
def test_fused_equals_peft_target_parameters(family: str, implementation: str) -> None:
    ours, theirs = make_native(family), make_native(family)
    for m in (ours, theirs):
        m.set_experts_implementation(implementation)
    lora = graft_expert_lora(ours, RANK, ALPHA)
    factors = random_factors(lora.shapes())
    lora.load(factors)
    config = LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=[], target_parameters=[f"mlp.experts.{n}" for n in FUSED_SHAPES]
    )
    peft = get_peft_model(theirs, config)
    modules = dict(peft.named_modules())
    adapted = {
        (path, name): modules[f"base_model.model.{path}.experts{inner}"]
        for path in layers_of(family)
        for inner, name in (("", "down_proj"), (".base_layer", "gate_up_proj"))
    }
    if next(iter(adapted.values())).parameter_name != "down_proj":
        adapted = {(path, _other(name)): module for (path, name), module in adapted.items()}
    grads = _train_both(family, ours, peft, adapted, factors)
    for (path, name), (grad_A, grad_B) in grads.items():
        for e in range(EXPERTS):
            slot_A, slot_B = (lora.slots()[f"experts/{path}.{e}/{name}.lora_{f}"] for f in "AB")
            torch.testing.assert_close(slot_A.grad, grad_A[e * RANK : (e + 1) * RANK])  # rows expert-major
            torch.testing.assert_close(slot_B.grad, grad_B[:, e::EXPERTS])  # columns rank-major


def _other(name: str) -> str:
    return "gate_up_proj" if name == "down_proj" else "down_proj"


def _train_both(
    family: str, ours: nn.Module, peft: nn.Module, adapted: dict[tuple[str, str], nn.Module], factors: Tensors
) -> dict[tuple[str, str], tuple[Tensor, Tensor]]:
    """Load PEFT's factors, compare logits, go backward through both, and return PEFT's gradients."""
    with torch.no_grad():
        for (path, name), module in adapted.items():
            assert module.parameter_name == name
            A, B = module.lora_A["default"].weight, module.lora_B["default"].weight
            for e in range(EXPERTS):
                A[e * RANK : (e + 1) * RANK] = factors[f"experts/{path}.{e}/{name}.lora_A"]
                B[:, e::EXPERTS] = factors[f"experts/{path}.{e}/{name}.lora_B"]
    mine, reference = logits(ours, family), logits(peft, family)  # type: ignore[arg-type]
    torch.testing.assert_close(mine, reference)
    mine.square().mean().backward()
    reference.square().mean().backward()
    return {
        key: (module.lora_A["default"].weight.grad, module.lora_B["default"].weight.grad)
        for key, module in adapted.items()
    }


def test_separate_equals_peft_target_modules() -> None:
    family = "switch_transformers"
    ours, theirs = make_native(family), make_native(family)
    lora = graft_expert_lora(ours, RANK, ALPHA)
    factors = random_factors(lora.shapes())
    lora.load(factors)
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=r".*\.experts\.expert_\d+\.(wi|wo)")
    peft = get_peft_model(theirs, config)
    modules = dict(peft.named_modules())
    pairs = {}
    for path in layers_of(family):
        for e in range(EXPERTS):
            for name in ("wi", "wo"):
                module = modules[f"base_model.model.{path}.experts.expert_{e}.{name}"]
                for factor in "AB":
                    flat = f"experts/{path}.{e}/{name}.weight.lora_{factor}"
                    pairs[flat] = getattr(module, f"lora_{factor}")["default"].weight
                    pairs[flat].data.copy_(factors[flat])
    assert set(pairs) == set(factors)
    mine, reference = logits(ours, family), logits(peft, family)
    torch.testing.assert_close(mine, reference)
    mine.square().mean().backward()
    reference.square().mean().backward()
    reached = 0
    for flat, parameter in pairs.items():
        grad = lora.slots()[flat].grad
        if parameter.grad is None:
            assert grad is None
        else:
            torch.testing.assert_close(grad, parameter.grad)
            reached += 1
    assert reached > 0


@pytest.mark.parametrize("family", ["switch_transformers", "mixtral"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_only_the_factors_train(family: str, checkpointing: bool) -> None:
    model = make_native(family).train()
    base = find_native(model).slots()
    values = {name: slot.value.clone() for name, slot in base.items()}
    lora = graft_expert_lora(model, RANK, ALPHA)
    if checkpointing:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    lora.load(random_factors(lora.shapes()))
    trained = [p for p in model.parameters() if p.requires_grad]
    assert {id(p) for p in trained} == {id(slot.parameter) for slot in lora.slots().values()}
    before = lora.read()
    model(**inputs(family), use_cache=False).logits.square().mean().backward()
    torch.optim.SGD(trained, lr=1.0).step()
    moved = {component(name) for name, t in lora.read().items() if not torch.equal(t, before[name])}
    assert moved
    assert all(torch.equal(slot.value, values[name]) for name, slot in base.items())
    assert all(slot.grad is None for slot in base.values())


def test_slots_are_views() -> None:
    model = make_native("mixtral")
    lora = graft_expert_lora(model, RANK, ALPHA)
    slot = lora.slots()["experts/model.layers.0.mlp.2/down_proj.lora_B"]
    slot.value.fill_(2.0)
    stacked = next(p for n, p in model.named_parameters() if n == "model.layers.0.mlp.experts.B.1")
    assert stacked.shape == (EXPERTS, HIDDEN, RANK)
    assert (stacked[2] == 2).all()
    assert not stacked[[0, 1, 3]].any()


def test_wrong_use_is_refused() -> None:
    model = make_native("mixtral")
    with pytest.raises(AdapterError, match="rank ≥ 1"):
        graft_expert_lora(model, 0, ALPHA)
    lora = graft_expert_lora(model, RANK, ALPHA)
    for again in (find_native, lambda m: graft_expert_lora(m, RANK, ALPHA)):
        with pytest.raises(AdapterError, match=r"remove\(\) it first"):
            again(model)
    tensors = lora.read()
    tensors["experts/model.layers.0.mlp.0/down_proj.lora_A"] = torch.zeros(WIDTH, RANK)
    with pytest.raises(AdapterError, match=r"down_proj.lora_A is \(12, 3\), expected \(3, 12\)"):
        lora.load(tensors)
    switch = make_native("switch_transformers")
    graft_expert_lora(switch, RANK, ALPHA)
    with pytest.raises(AdapterError, match=r"remove\(\) it first"):
        find_native(switch)


def test_bfloat16_model_has_float32_factors() -> None:
    model = make_native("mixtral").to(torch.bfloat16)
    model.set_experts_implementation("eager")  # the grouped kernel wants rows of 16 bytes
    lora = graft_expert_lora(model, RANK, ALPHA)
    lora.load(random_factors(lora.shapes()))
    assert {slot.parameter.dtype for slot in lora.slots().values()} == {torch.float32}
    out = logits(model, "mixtral")
    assert out.dtype == torch.bfloat16
    out.float().square().mean().backward()
    assert all(s.grad is not None and s.grad.dtype == torch.float32 for s in lora.slots().values())


@pytest.mark.parametrize("family", FAMILIES)
def test_m9_adapters_of_two_experts_load_in_either_order(family: str) -> None:
    """Where experts are slices of one tensor, an adapter must reach its own expert, whatever came before it."""
    model = make_native(family)
    lora = graft_expert_lora(model, RANK, ALPHA)
    start = {name: torch.zeros(shape) for name, shape in lora.shapes().items()}
    path = next(iter(layers_of(family)))
    factors = random_factors(lora.shapes())
    first, second = (
        {name: t for name, t in factors.items() if component(name) == f"experts/{path}.{e}"} for e in (0, 1)
    )
    found = []
    for pair in ((first, second), (second, first)):
        lora.load(start)
        for adapter in pair:
            lora.load(lora.read() | adapter)
        assert all(torch.equal(t, (start | first | second)[name]) for name, t in lora.read().items())
        found.append(logits(model, family))
    lora.load(dict(reversed((start | first | second).items())))
    found.append(logits(model, family))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    lora.load(start | first)
    assert not torch.equal(logits(model, family), found[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_seed_of_a_run_draws_the_first_factors(family: str) -> None:
    """A is U(-1/√in, 1/√in), drawn name by name in the order of the model; all else is as the backbone has it."""
    spec = AdapterSpec((), native="lora", rank=RANK, alpha=ALPHA)
    initial = NativeGraft(make_native(family), spec).read()

    def start(seed: int) -> Tensors:
        return Method().init(Setup(seed, spec, {}, HIDDEN, ("ann",), initial)).tensors

    found, other = start(1), start(2)
    assert same(found, start(1))
    assert list(found) == list(initial)
    draw = generator(1, "adapter-init")
    for name, tensor in found.items():
        if name.endswith(".lora_A"):
            bound = tensor.shape[1] ** -0.5
            assert torch.equal(tensor, torch.empty(tensor.shape).uniform_(-bound, bound, generator=draw))
            assert not torch.equal(tensor, other[name])
            assert not torch.equal(tensor, initial[name])
        else:
            assert torch.equal(tensor, initial[name])
            assert torch.equal(tensor, other[name])
