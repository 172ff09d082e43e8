"""Grafting: what is matched, what is restored, what loading and routing do."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fedloom.adapters import default_targets, graft, target_modules
from fedloom.adapters.moe_lora import MoELoRALinear
from fedloom.errors import AdapterError
from fedloom.types import AdapterSpec

SPEC = AdapterSpec(("q_proj", "v_proj"), rank=3, alpha=6.0, dropout=0.0, experts=2, router_hidden=5)
SHAPES = {
    "model.layers.0.self_attn.q_proj": (32, 32),
    "model.layers.0.self_attn.v_proj": (16, 32),
    "model.layers.1.self_attn.q_proj": (32, 32),
    "model.layers.1.self_attn.v_proj": (16, 32),
}


def random_like(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.randn_like(t) * 0.1 for name, t in tensors.items()}


def test_targets_match_whole_dotted_endings_in_model_order(tiny) -> None:
    model = tiny("llama")
    assert target_modules(model, ("v_proj", "q_proj")) == SHAPES
    assert list(target_modules(model, ("v_proj", "q_proj"))) == list(SHAPES)
    assert list(target_modules(model, ("0.self_attn.q_proj",))) == ["model.layers.0.self_attn.q_proj"]
    with pytest.raises(AdapterError, match="'proj' matches no linear layer"):
        target_modules(model, ("proj",))


def test_m2_a_target_that_matches_nothing_is_an_error_with_the_nearest_names(tiny) -> None:
    model = tiny("llama")
    with pytest.raises(AdapterError, match=r"'q_porj' matches no linear layer.* Did you mean 'q_proj'"):
        target_modules(model, ("q_porj", "v_proj"))
    with pytest.raises(AdapterError, match="one or more"):
        target_modules(model, ())
    with pytest.raises(AdapterError, match="must be a list"):
        target_modules(model, "q_proj")
    with pytest.raises(AdapterError, match="'lm_head' is the output embedding"):
        target_modules(model, ("lm_head",))
    with pytest.raises(AdapterError, match="'self_attn' matches no"):
        graft(model, AdapterSpec(("self_attn",)))
    assert all(p.requires_grad for p in model.parameters())


def test_default_targets_know_seven_architectures_and_refuse_others(tiny) -> None:
    assert default_targets(tiny("llama").config) == ("q_proj", "v_proj")
    assert default_targets(tiny("gpt2").config) == ("c_attn",)
    with pytest.raises(AdapterError, match=r"'bloom' models .* Name them yourself"):
        default_targets(SimpleNamespace(model_type="bloom"))


def test_a_fresh_graft_and_adapters_off_leave_the_bare_logits_bitwise(tiny, token_ids) -> None:
    model = tiny("llama")
    bare = model(token_ids).logits
    grafted = graft(model, SPEC)
    with grafted.routing(torch.full((4, 2), 0.5)):
        torch.testing.assert_close(model(token_ids).logits, bare)  # B is zero
    grafted.load(random_like(grafted.read()))
    with grafted.routing(None):
        assert torch.equal(model(token_ids).logits, bare)
    with grafted.routing(torch.full((4, 2), 0.5)):
        assert not torch.allclose(model(token_ids).logits, bare, atol=1e-4)


def test_ungraft_restores_modules_flags_and_logits(tiny, token_ids) -> None:
    model = tiny("llama")
    model.model.embed_tokens.weight.requires_grad_(False)
    before = dict(model.named_modules())
    bare = model(token_ids).logits
    grafted = graft(model, SPEC)
    assert all(p.requires_grad == n.endswith((".A", ".B")) for n, p in model.named_parameters())
    assert grafted.ungraft() is model
    assert dict(model.named_modules()) == before
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["model.embed_tokens.weight"]
    assert torch.equal(model(token_ids).logits, bare)
    with pytest.raises(AdapterError, match="graft it again"):
        grafted.respec(AdapterSpec(SPEC.targets))
    graft(model, SPEC).ungraft()


def test_a_refused_spec_leaves_the_model_as_it_was(tiny) -> None:
    model = tiny("llama")
    for spec in (AdapterSpec(SPEC.targets, dropout=1.0), AdapterSpec(SPEC.targets, experts=0)):
        with pytest.raises(AdapterError):
            graft(model, spec)
    assert all(p.requires_grad for p in model.parameters())
    graft(model, SPEC)


def test_generation_with_a_cache_routes_each_example_as_if_alone(tiny, token_ids) -> None:
    grafted = graft(tiny("llama"), SPEC)
    grafted.load({name: t * 10 for name, t in random_like(grafted.read()).items()})
    index = torch.tensor([0, 1, 1, 0])
    sizes = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    with grafted.routing(index):
        together = grafted.model.generate(token_ids, **sizes)
    for row, expert in enumerate(index):
        with grafted.routing(expert[None]):
            alone = grafted.model.generate(token_ids[row : row + 1], **sizes)
        assert together[row].tolist() == alone[0].tolist()


def test_a_second_graft_is_refused(tiny) -> None:
    model = tiny("llama")
    graft(model, SPEC)
    with pytest.raises(AdapterError, match="already carries experts"):
        graft(model, AdapterSpec(("k_proj",)))


def test_load_and_read_are_inverse_and_copy(tiny) -> None:
    grafted = graft(tiny("llama"), SPEC)
    tensors = random_like(grafted.read())
    grafted.load(tensors)
    read = grafted.read()
    assert list(read) == list(tensors)
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    read["experts/0/model.layers.0.self_attn.q_proj.lora_A"].zero_()
    assert torch.equal(
        grafted.layers["model.layers.0.self_attn.q_proj"].A[0],
        tensors["experts/0/model.layers.0.self_attn.q_proj.lora_A"],
    )


def test_m7_the_same_state_loads_twice_and_stays_unchanged(tiny) -> None:
    grafted = graft(tiny("llama"), SPEC)
    tensors = random_like(grafted.read())
    prefixed = {name.replace("model.layers", "_orig_mod.model.layers"): t for name, t in tensors.items()}
    names, copies = list(prefixed), [t.clone() for t in prefixed.values()]
    for _ in range(2):
        grafted.load(prefixed)
        for parameter in grafted.expert_parameters():
            parameter.data.add_(1.0)  # training on must not reach back into the loaded tensors
        assert list(prefixed) == names
        assert all(torch.equal(a, b) for a, b in zip(prefixed.values(), copies))


def test_m2_load_names_what_does_not_fit_and_changes_nothing(tiny) -> None:
    grafted = graft(tiny("llama"), SPEC)
    before = grafted.read()
    broken = random_like(before)
    del broken["router/2.bias"]
    with pytest.raises(AdapterError, match=r"missing: router/2\.bias"):
        grafted.load(broken)
    assert all(torch.equal(t, before[name]) for name, t in grafted.read().items())


def test_m1_a_compiled_model_grafts_reads_and_loads_under_clean_names(tiny, token_ids) -> None:
    compiled = torch.compile(tiny("llama"), backend="eager")
    grafted = graft(compiled, SPEC)
    assert list(grafted.shapes) == list(SHAPES)
    tensors = random_like(grafted.read())
    grafted.load(tensors)
    plain = graft(tiny("llama"), SPEC)
    plain.load(grafted.read())
    assert all(layer.B.any() for layer in plain.layers.values())
    gates = torch.tensor([[0.3, 0.7]])
    with grafted.routing(gates), plain.routing(gates), torch.no_grad():
        torch.testing.assert_close(compiled(token_ids).logits, plain.model(token_ids).logits)
    with grafted.routing(torch.tensor([1, 0, 1, 1])), plain.routing(torch.tensor([1, 0, 1, 1])), torch.no_grad():
        torch.testing.assert_close(compiled(token_ids).logits, plain.model(token_ids).logits)


def test_m1_a_compiled_block_and_a_ddp_model_graft_under_clean_names(tiny, tmp_path) -> None:
    model = tiny("llama")
    model.model.layers[1] = torch.compile(model.model.layers[1], backend="eager")
    assert list(graft(model, SPEC).shapes) == list(SHAPES)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        ddp = nn.parallel.DistributedDataParallel(tiny("llama"))
        grafted = graft(ddp, SPEC)
        assert list(grafted.shapes) == list(SHAPES)
        assert all(not name.startswith("module") for name in grafted.read())
        grafted.ungraft()
    finally:
        torch.distributed.destroy_process_group()


def test_m1_prefixed_tensors_load_with_nonzero_b(tiny) -> None:
    grafted = graft(tiny("llama"), SPEC)
    tensors = random_like(grafted.read())
    grafted.load({name.replace("/model.", "/module._orig_mod.model."): t for name, t in tensors.items()})
    assert all(torch.equal(t, tensors[name]) for name, t in grafted.read().items())
    assert all(layer.B.any() for layer in grafted.layers.values())


def test_respec_changes_experts_without_touching_the_base(tiny, token_ids) -> None:
    model = tiny("llama")
    bare = model(token_ids).logits
    grafted = graft(model, SPEC)
    base = {path: layer.base for path, layer in grafted.layers.items()}
    wide = AdapterSpec(SPEC.targets, rank=4, alpha=8.0, experts=5, router_hidden=6)
    grafted.respec(wide)
    assert grafted.layers["model.layers.0.self_attn.q_proj"].A.shape == (5, 4, 32)
    assert grafted.read()["router/2.weight"].shape == (5, 6)
    assert all(grafted.layers[path].base is module for path, module in base.items())
    assert sum(isinstance(m, MoELoRALinear) for m in model.modules()) == 4
    grafted.respec(AdapterSpec(SPEC.targets, rank=3))
    assert grafted.router is None
    assert torch.equal(model(token_ids).logits, bare)  # one expert needs no gates
    with pytest.raises(AdapterError, match="Targets are fixed"):
        grafted.respec(AdapterSpec(("k_proj",)))
    with pytest.raises(AdapterError, match="rank ≥ 1"):
        grafted.respec(AdapterSpec(SPEC.targets, rank=0))


def test_respec_of_alpha_and_dropout_keeps_the_parameters(tiny) -> None:
    grafted = graft(tiny("llama"), SPEC)
    parameters = grafted.expert_parameters()
    grafted.respec(AdapterSpec(SPEC.targets, rank=3, alpha=12.0, dropout=0.5, experts=2, router_hidden=5))
    assert all(a is b for a, b in zip(grafted.expert_parameters(), parameters))
    layer = grafted.layers["model.layers.0.self_attn.q_proj"]
    assert (layer.scaling, layer.dropout, grafted.spec.alpha) == (4.0, 0.5, 12.0)


def test_parameters_by_name_are_live_views_of_values_and_gradients(tiny, token_ids) -> None:
    grafted = graft(tiny("llama"), SPEC)
    slots = grafted.parameters_by_name()
    assert list(slots) == list(grafted.read())
    slot = slots["experts/1/model.layers.0.self_attn.v_proj.lora_B"]
    assert slot.grad is None
    slot.value.fill_(0.5)
    layer = grafted.layers["model.layers.0.self_attn.v_proj"]
    assert not layer.B[0].any()
    assert (layer.B[1] == 0.5).all()
    with grafted.routing(torch.tensor([1, 1, 1, 1])):
        grafted.model(token_ids, labels=token_ids).loss.backward()
    assert slot.grad.any()
    slot.grad.zero_()
    assert not layer.B.grad.any()
    assert slots["router/0.bias"].parameter is grafted.router[0].bias


def test_routing_is_per_example_and_is_undone_on_leaving(tiny, token_ids) -> None:
    grafted = graft(tiny("llama"), SPEC)
    grafted.load(random_like(grafted.read()))
    with torch.no_grad(), grafted.routing(torch.tensor([0, 1, 1, 0])):
        mixed = grafted.model(token_ids).logits
        with grafted.routing(torch.tensor([0, 0, 0, 0])):
            zero = grafted.model(token_ids).logits
        with grafted.routing(torch.tensor([1, 1, 1, 1])):
            one = grafted.model(token_ids).logits
        assert torch.equal(grafted.model(token_ids).logits, mixed)
    torch.testing.assert_close(mixed, torch.stack([zero[0], one[1], one[2], zero[3]]), rtol=1e-5, atol=1e-6)
    with pytest.raises(AdapterError, match="needs gates"):
        grafted.model(token_ids)


def test_route_uses_the_router_or_the_single_expert(tiny) -> None:
    grafted = graft(tiny("llama"), SPEC)
    features = torch.randn(3, 32)
    torch.testing.assert_close(grafted.route(features, "soft"), grafted.router(features).softmax(-1))
    grafted.respec(AdapterSpec(SPEC.targets))
    assert grafted.route(features, "top1").tolist() == [0, 0, 0]
    assert grafted.route(features, "soft").tolist() == [[1.0]] * 3
    grafted.respec(AdapterSpec(SPEC.targets, experts=2))
    with pytest.raises(AdapterError, match="without a router"):
        grafted.route(features, "soft")


@pytest.mark.parametrize(("name", "targets"), [("gpt2", ("c_attn",)), ("opt", ("q_proj", "v_proj"))])
def test_training_mode_leaves_the_backbone_s_own_dropout_off(
    tiny, token_ids, name: str, targets: tuple[str, ...]
) -> None:
    """Both models drop out a tenth: GPT-2 in modules of their own, OPT also in each block, by the block's mode."""
    grafted = graft(tiny(name), AdapterSpec(targets, rank=2, dropout=0.0))
    grafted.load(random_like(grafted.read()))
    evaluated = grafted.model(token_ids).logits
    grafted.train()
    assert torch.equal(grafted.model(token_ids).logits, evaluated)
    grafted.respec(AdapterSpec(targets, rank=2, dropout=0.5))
    grafted.train()
    assert not torch.equal(grafted.model(token_ids).logits, evaluated)
    grafted.eval()
    assert torch.equal(grafted.model(token_ids).logits, evaluated)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
def test_m3_gradient_checkpointing_with_a_frozen_base_moves_every_b(
    tiny, token_ids, name: str, reentrant: bool
) -> None:
    """A frozen block computes as in evaluation, in which ``transformers`` does not checkpoint: no gradient is lost."""

    def after_a_step(checkpointed: bool) -> dict[str, torch.Tensor]:
        model = tiny(name)
        if checkpointed:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
        targets = ("q_proj", "v_proj") if name == "opt" else default_targets(model.config)
        grafted = graft(model, AdapterSpec(targets, rank=3, alpha=6.0, dropout=0.1))
        grafted.train()
        torch.manual_seed(0)
        model(token_ids, labels=token_ids).loss.backward()
        torch.optim.SGD(grafted.expert_parameters(), lr=1.0).step()
        return grafted.read()

    moved = after_a_step(True)
    second = [tensor for key, tensor in moved.items() if key.endswith("lora_B")]
    assert len(second) == len(moved) / 2
    assert all(tensor.any() for tensor in second)
    plain = after_a_step(False)
    assert moved.keys() == plain.keys()
    assert all(torch.equal(moved[key], plain[key]) for key in plain)


def test_m4_bf16_base_trains_float32_experts_under_a_grad_scaler(tiny, token_ids) -> None:
    model = tiny("llama", torch.bfloat16)
    grafted = graft(model, SPEC)
    grafted.train()
    parameters = [*grafted.expert_parameters(), *grafted.router_parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with grafted.routing(grafted.route(torch.randn(4, 32, dtype=torch.bfloat16), "soft")):
        scaler.scale(model(token_ids, labels=token_ids).loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    scaler.step(optimizer)
    assert {p.dtype for p in parameters} == {torch.float32}
    assert {t.dtype for s in optimizer.state.values() for k, t in s.items() if k != "step"} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert all(layer.B.any() for layer in grafted.layers.values())


def test_the_hidden_size_comes_from_the_config_or_the_caller(tiny) -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(3, 4)

    spec = AdapterSpec(("proj",), experts=2, router_hidden=5)
    with pytest.raises(AdapterError, match="hidden_size"):
        graft(Bare(), spec)
    assert graft(Bare(), spec, hidden_size=9).read()["router/0.weight"].shape == (5, 9)
    assert graft(tiny("gpt2"), AdapterSpec(("c_attn",), router_hidden=5)).hidden_size == 32


def test_shapes_need_no_memory(tiny) -> None:
    with torch.device("meta"):
        model = tiny("llama")
    assert target_modules(model, SPEC.targets) == SHAPES
