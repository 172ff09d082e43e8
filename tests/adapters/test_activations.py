"""Tokens per native expert, against argmax and top-k over router logits by hand, with padding and capacity."""

import pytest
import torch
from native_models import EXPERTS, FUSED, inputs, layers_of, make_native
from torch import Tensor, nn

from fedloom.adapters.activations import Activations
from fedloom.adapters.native import find_native
from fedloom.adapters.native_lora import graft_expert_lora
from fedloom.errors import AdapterError

SWITCH = "switch_transformers"


def masks(family: str) -> dict[str, Tensor]:
    batch = inputs(family)
    if family == SWITCH:
        return {"encoder": batch["attention_mask"], "decoder": batch["decoder_attention_mask"]}
    return {"causal": batch["attention_mask"]}


def by_hand_switch(logits_btE: Tensor, mask_bt: Tensor, capacity: int) -> tuple[list[int], int]:
    """Return (tokens per expert, dropped): each sequence fills its experts from the left, padding fills them too."""
    counts, dropped = [0] * EXPERTS, 0
    for logits_tE, mask_t in zip(logits_btE, mask_bt, strict=True):
        filled = [0] * EXPERTS
        for scores, valid in zip(logits_tE.tolist(), mask_t.tolist(), strict=True):
            expert = scores.index(max(scores))
            filled[expert] += 1
            if valid and filled[expert] <= capacity:
                counts[expert] += 1
            elif valid:
                dropped += 1
    return counts, dropped


def expected(counts: dict[str, list[int]]) -> dict[str, int]:
    return {f"experts/{path}.{e}": n for path, per_expert in counts.items() for e, n in enumerate(per_expert)}


@pytest.mark.parametrize("capacity", [1, 2, 64])
def test_switch_counts_what_capacity_lets_through(capacity: int) -> None:
    model = make_native(SWITCH, expert_capacity=capacity)
    batch = inputs(SWITCH)
    with torch.no_grad(), Activations(find_native(model)) as seen:
        seen.masks(**masks(SWITCH))
        out = model(**batch, output_router_logits=True)
    recorded = {
        "encoder": [x for x in out.encoder_router_logits if x.dim() == 3],
        "decoder": [x for x in out.decoder_router_logits if x.dim() == 3],
    }
    assert [len(x) for x in recorded.values()] == [1, 1]
    counts, dropped = {}, {}
    for path, side in layers_of(SWITCH).items():
        counts[path], dropped[path] = by_hand_switch(recorded[side][0], masks(SWITCH)[side], capacity)
    assert seen.counts() == expected(counts)
    assert seen.dropped() == dropped
    tokens = {path: int(masks(SWITCH)[side].sum()) for path, side in layers_of(SWITCH).items()}
    assert {path: sum(counts[path]) + dropped[path] for path in counts} == tokens
    assert (sum(dropped.values()) > 0) == (capacity < 64)


def test_dropped_tokens_get_no_expert_and_logits_are_raw() -> None:
    """What transformers before its fix of 2026 did not do: capacity drops tokens, recorded logits are no softmax."""
    model = make_native(SWITCH, expert_capacity=1)
    layer = find_native(model).layers[0]
    x = torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(0)).expand(2, 5, 16)[:, [0, 0, 0, 1, 1]]
    dispatch, _, raw = layer.router(x)
    torch.testing.assert_close(raw, x @ layer.router.classifier.weight.T)
    assert dispatch[:, 1:3].sum() == 0
    assert layer.block(x)[:, 1:3].abs().sum() == 0


@pytest.mark.parametrize("family", FUSED)
def test_every_chosen_expert_counts(family: str) -> None:
    model = make_native(family)
    native = find_native(model)
    features: dict[str, Tensor] = {}
    for layer in native.layers:
        layer.block.register_forward_pre_hook(lambda m, args, p=layer.path: features.__setitem__(p, args[0]))
    with torch.no_grad(), Activations(native) as seen:
        seen.masks(masks(family)["causal"])
        model(**inputs(family))
    counts = {}
    for layer in native.layers:
        tokens = features[layer.path][masks(family)["causal"].bool()]
        scores = tokens @ layer.router.weight.T  # softmax and sigmoid keep the order; both groups are open
        chosen = [sorted(range(EXPERTS), key=lambda e, s=s: -s[e])[:2] for s in scores.tolist()]
        counts[layer.path] = [sum(e in pair for pair in chosen) for e in range(EXPERTS)]
        assert sum(counts[layer.path]) == 2 * 19
    assert seen.counts() == expected(counts)
    assert set(seen.dropped().values()) == {0}


@pytest.mark.parametrize("family", [SWITCH, "mixtral"])
def test_passes_add_up_and_all_is_let_go(family: str) -> None:
    model = make_native(family)
    native = find_native(model)
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    once, twice = Activations(native), Activations(native)
    with once:
        once.masks(**masks(family))
        model(**inputs(family))
    with twice:
        for _ in range(2):
            twice.masks(**masks(family))
            model(**inputs(family))
    assert twice.counts() == {name: 2 * n for name, n in once.counts().items()}
    assert sum(once.counts().values()) > 0
    model(**inputs(family))
    assert twice.counts() == {name: 2 * n for name, n in once.counts().items()}
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) == hooks


@pytest.mark.parametrize("family", [SWITCH, "mixtral"])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_checkpointed_layers_count_once(family: str, reentrant: bool | None) -> None:
    model = make_native(family)
    native = find_native(model)
    with torch.no_grad(), Activations(native) as plain:
        plain.masks(**masks(family))
        model(**inputs(family))
    runs: list[str] = []
    native.layers[-1].router.register_forward_hook(lambda *_: runs.append("router"))
    model.train()
    if reentrant is not None:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": reentrant})
        model.enable_input_require_grads()
    with Activations(native) as seen:
        seen.masks(**masks(family))
        model(**inputs(family), use_cache=False).logits.sum().backward()
    assert len(runs) == (1 if reentrant is None else 2)
    assert seen.counts() == plain.counts()


@pytest.mark.parametrize("family", [SWITCH, "mixtral"])
def test_counts_with_lora_on_the_experts(family: str) -> None:
    model = make_native(family)
    with Activations(find_native(model)) as plain:
        plain.masks(**masks(family))
        model(**inputs(family))
    with Activations(graft_expert_lora(model, 2, 4.0)) as seen:
        seen.masks(**masks(family))
        model(**inputs(family))
    assert seen.counts() == plain.counts()


def test_the_inner_model_counts_too() -> None:
    """Losses that need few logits call the model without its head."""
    model = make_native("mixtral")
    with Activations(find_native(model)) as seen:
        seen.masks(masks("mixtral")["causal"])
        model.model(**inputs("mixtral"))
    assert sum(seen.counts().values()) == 2 * 2 * 19


def test_misuse_is_named() -> None:
    model = make_native("mixtral")
    native = find_native(model)
    mask = masks("mixtral")["causal"]
    with Activations(native) as seen:
        with pytest.raises(AdapterError, match="without its causal mask"):
            model(**inputs("mixtral"))
        seen.masks(mask)
        model(**inputs("mixtral"))
        with pytest.raises(AdapterError, match="without its causal mask"):
            model(**inputs("mixtral"))  # the mask of one pass does not serve another
        seen.masks(mask[:, :4])
        with pytest.raises(AdapterError, match=r"mask is \(3, 4\), model.layers.0.mlp has tokens \(27,\)"):
            model(**inputs("mixtral"))
        for wrong in ({}, {"encoder": mask}):
            with pytest.raises(AdapterError, match="the mixture layers are: causal"):
                seen.masks(**wrong)
        with pytest.raises(AdapterError, match=r"must be \(batch, tokens\)"):
            seen.masks(mask[0])
    with Activations(find_native(make_native(SWITCH))) as seen, pytest.raises(AdapterError, match="decoder, encoder"):
        seen.masks(mask)
    compiled: nn.Module = torch.compile(model, backend="eager")  # type: ignore[assignment]
    with pytest.raises(AdapterError, match="compiled"), Activations(find_native(compiled)):
        pass
