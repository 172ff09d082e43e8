"""Parameters and bytes of a method on an architecture, from the architecture alone; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from pydantic import ValidationError

from fedloom.adapters.inject import DEFAULT_TARGETS, default_targets, target_modules
from fedloom.adapters.native import ROUTERS, find_native
from fedloom.adapters.native_lora import graft_expert_lora
from fedloom.adapters.state import expected_shapes
from fedloom.config import explained
from fedloom.errors import AdapterError, ConfigError, nearest
from fedloom.methods import METHODS
from fedloom.methods.base import Method
from fedloom.types import AdapterSpec, Order, Setup, State, Training, component

#: What decides the number of parameters, as published in the models' configurations.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama-3.2-3b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "gemma-2-2b": {
        "model_type": "gemma2",
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
    },
    "smollm2-135m": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
    "switch-base-16": {
        "model_type": "switch_transformers",
        "vocab_size": 32128,
        "d_model": 768,
        "d_kv": 64,
        "d_ff": 3072,
        "num_layers": 12,
        "num_decoder_layers": 12,
        "num_heads": 12,
        "num_experts": 16,
        "expert_capacity": 64,
        "num_sparse_encoder_layers": 6,
        "num_sparse_decoder_layers": 6,
        "tie_word_embeddings": True,
    },
}


#: Hub name → the name here.
HUB_NAMES = {
    "meta-llama/Llama-3.2-3B": "llama-3.2-3b",
    "google/gemma-2-2b": "gemma-2-2b",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "smollm2-135m",
    "google/switch-base-16": "switch-base-16",
}


#: Whose traffic is counted; all clients' is alike.
CLIENT = "client"

#: Names of backbones that come with the package.
SHIPPED = ("tiny", "tiny-switch")


@dataclass(frozen=True)
class Budget:
    """Trainable parameters and float32 bytes (FedWeave, Table 5 and Appendix B).

    Attributes:
        experts: number of experts, of each mixture layer where the backbone comes with its own.
        rank: rank per expert; 0 where the backbone's own experts are trained whole.
        lora: parameters of all experts.
        router: parameters of all routers, and of whatever else is trained.
        total: parameters of the trained model's adapter, experts and everything else.
        signature: values of one bucket's signature, the B factors of one expert; 0 for methods that warm up none.
        probe: values that a client sends in the probe for each bucket: A and B of a warm-up, or a centroid.
        trained: parameters that one client trains in a round, at most.
        up: values that one client sends per round, at most.
        down: values that one client gets per round, at most.
    """

    backbone: str
    method: str
    experts: int
    rank: int
    backbone_parameters: int
    lora: int
    router: int
    total: int
    signature: int
    probe: int
    trained: int
    up: int
    down: int

    @property
    def round_bytes(self) -> int:
        return 4 * self.total

    def to_plain(self) -> dict[str, Any]:
        sent = {"up_bytes": 4 * self.up, "down_bytes": 4 * self.down, "probe_bytes": 4 * self.probe}
        return asdict(self) | {"round_bytes": self.round_bytes, "signature_bytes": 4 * self.signature} | sent


@dataclass(frozen=True)
class Payload:
    """Values per client and round, at most: see ``Budget``."""

    trained: int
    up: int
    down: int


def check_asked(method: str, experts: int | None, rank: int | None, native: str | None) -> None:
    """Refuse what ``budget`` would not look at; None stands for what nobody gave.

    Raises:
        ConfigError: a number of experts where the backbone has its own, ``native`` where LoRA experts are trained, or a
            rank where there is no LoRA.
    """
    if method not in METHODS:
        return  # ``budget`` names the known ones
    kind = METHODS[method]
    if not kind.native and native is not None:
        raise ConfigError(f"--native is {native!r}, but {kind.title} trains LoRA experts of its own: leave it out.")
    if native not in (None, "full", "lora"):
        raise ConfigError(f"--native is {native!r}: give full or lora.")
    if kind.native and experts is not None:
        raise ConfigError(f"{kind.title} trains the experts that the backbone has: leave --experts out.")
    if kind.native and native != "lora" and rank is not None:
        raise ConfigError(f"{kind.title} trains whole experts, without a rank: leave --rank out, or add --native lora.")


def budget(
    backbone: str,
    method: str,
    experts: int,
    rank: int | None = None,
    *,
    targets: Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
    native: str = "full",
) -> Budget:
    """Count parameters on the meta device.

    Args:
        backbone: a name of ``ARCHITECTURES``, or a folder or hub name whose configuration can be read.
        method: a registered method.
        experts: number of experts, for methods that have more than one.
        rank: rank per expert; default the method's own.
        targets: suffixes of the adapted modules; default the architecture's.
        options: the method's own options; default its defaults.
        native: how a backbone's own experts are trained, for methods that do: ``full`` or ``lora``.

    Raises:
        ConfigError: an unknown method or backbone, or options that the method does not have.
        AdapterError: a target matches nothing.
    """
    if method not in METHODS:
        raise ConfigError(f"unknown method {method!r}.{nearest(method, METHODS)}")
    if experts < 1:
        raise ConfigError(f"--experts is {experts}; it must be at least 1.")
    config, model = architecture(backbone)
    kind = METHODS[method]
    try:
        found = kind(kind.Options(**(options or {})))
    except ValidationError as error:
        raise explained(error, kind.Options, ("method",), method) from error
    if kind.native:
        return _native_budget(backbone, method, found, model, (rank or kind.default_rank) if native == "lora" else 0)
    if not targets and config.model_type in ROUTERS and config.model_type not in DEFAULT_TARGETS:
        raise ConfigError(
            f"{kind.title} trains LoRA experts, and no default targets are known for {config.model_type!r} models. "
            "This backbone has experts of its own: count with --method fcmoe, or another method for native experts."
        )
    chosen = tuple(targets or default_targets(config))
    shapes = target_modules(model, chosen)
    plain = AdapterSpec(chosen, rank or kind.default_rank)
    spec = found.deployed(plain, experts)
    sizes = {n: torch.Size(s).numel() for n, s in expected_shapes(spec, shapes, config.hidden_size).items()}
    lora = sum(n for name, n in sizes.items() if name.startswith("experts/"))
    router = sum(n for name, n in sizes.items() if not name.startswith("experts/"))
    first = {name: n for name, n in sizes.items() if name.startswith("experts/0/")}
    signature = sum(n for name, n in first.items() if name.endswith(".lora_B"))
    warms_up = found.warms_up() is not None
    sent = payload(found, plain, shapes, config.hidden_size, experts)
    return Budget(
        backbone=backbone,
        method=method,
        experts=spec.experts,
        rank=spec.rank,
        backbone_parameters=sum(p.numel() for p in model.parameters()),
        lora=lora,
        router=router,
        total=lora + router,
        signature=signature if warms_up else 0,
        probe=sum(first.values()) if warms_up else config.hidden_size if spec.centroids else 0,
        trained=sent.trained,
        up=sent.up,
        down=sent.down,
    )


def payload(
    method: Method, plain: AdapterSpec, shapes: Mapping[str, tuple[int, int]], hidden: int, experts: int
) -> Payload:
    """Count what the method's own ``view``, ``trains`` and ``sends`` make of a round, on the meta device.

    The larger of an odd and an even round, for methods that alternate. A method without a server gets and sends
    nothing, whatever a simulation puts into its orders.

    Args:
        method: one for LoRA experts.
        plain: one plain LoRA with the run's targets and rank.
        shapes: module path → (out, in) of every targeted module.
        hidden: width of the router's input.
        experts: number of experts, for methods that have more than one.
    """
    with torch.device("meta"):
        state = _state(method, plain, shapes, hidden, experts)
        rounds = [_round(method, replace(state, round=r), shapes, hidden) for r in (1, 2)]
    most = Payload(*(max(getattr(r, key) for r in rounds) for key in ("trained", "up", "down")))
    return most if most.up and not method.pooled else replace(most, up=0, down=0)


def _state(
    method: Method, plain: AdapterSpec, shapes: Mapping[str, tuple[int, int]], hidden: int, experts: int
) -> State:
    """Return a state after the probe in which the one client has as many buckets as it may, each an expert's own."""
    state = method.init(Setup(0, plain, dict(shapes), hidden, (CLIENT,)))
    if not method.has_probe:
        return state
    spec = method.deployed(plain, experts)
    tensors = {name: torch.empty(shape) for name, shape in expected_shapes(spec, shapes, hidden).items()}
    routing = {name: t for name, t in tensors.items() if name.startswith(("router/", "mixers/"))}
    for name, tensor in routing.items():  # a method with routers per cluster keeps them by the cluster's number
        tensors[f"routers/0/{name.removeprefix('router/')}"] = tensor
    warm = method.warms_up()
    buckets = min(warm.buckets if warm else 1, experts)
    values = state.values | {"assignment": {CLIENT: list(range(buckets))}, "sizes": {CLIENT: [1] * buckets}}
    return replace(state, tensors=tensors, spec=spec, values=values)


def _round(method: Method, state: State, shapes: Mapping[str, tuple[int, int]], hidden: int) -> Payload:
    view = method.view(state, CLIENT)
    grafted = expected_shapes(view.spec, shapes, hidden)
    # The state holds more routers than any one method has; a client's model has the one that its view names.
    tensors = {name: t for name, t in view.tensors.items() if name in grafted or not name.startswith("routers/")}
    order = Order("fit", CLIENT, state.round, tensors, view.spec, Training(), view.values)
    size = {name: tensor.numel() for name, tensor in tensors.items()}
    mine = {f"experts/{m}" for m in view.values.get("assignment", ())}
    idle = {name for name in size if mine and name.startswith("experts/") and component(name) not in mine}
    return Payload(
        trained=sum(n for name, n in size.items() if name in grafted and method.trains(name, order)),
        up=sum(n for name, n in size.items() if method.sends(name, order) and name not in idle),
        down=sum(size.values()),
    )


def held(method: Method, sizes: Mapping[str, int]) -> int:
    """Return how many of a native model's trained values, name → number, one client holds, at most."""
    experts: dict[str, int] = {}
    for name, size in sizes.items():
        if name.startswith("experts/"):
            experts[component(name)] = experts.get(component(name), 0) + size
    shared = sum(sizes.values()) - sum(experts.values())
    return shared + sum(sorted(experts.values(), reverse=True)[: method.held(experts)])


def _native_budget(backbone: str, name: str, method: Method, model: Any, rank: int) -> Budget:
    """Count a model whose own experts are trained, with everything around them, or by a LoRA of ``rank`` on each."""
    try:
        native = find_native(model)
    except AdapterError as error:
        raise ConfigError(f"{method.title} trains a model's own experts. {error}") from error
    layer, whole = native.layers[0].experts, sum(p.numel() for p in model.parameters())
    with torch.device("meta"):
        slots = graft_expert_lora(model, rank, 1.0, train_routers=True).slots() if rank else native.slots()
    sizes = {name: slot.value.numel() for name, slot in slots.items()}
    client = held(method, sizes)
    experts = sum(n for name, n in sizes.items() if name.startswith("experts/"))
    total = sum(sizes.values())
    return Budget(
        backbone=backbone,
        method=name,
        experts=layer,
        rank=rank,
        backbone_parameters=whole,
        lora=experts,
        router=total - experts,
        total=total,
        signature=0,
        probe=0,
        trained=client,
        up=client,
        down=client,
    )


def architecture(backbone: str) -> tuple[Any, Any]:
    """Return a backbone's transformers configuration and its model on the meta device.

    Raises:
        ConfigError: the name is unknown and no configuration can be read.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    config = _config(backbone, AutoConfig)
    kind: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with torch.device("meta"):
        return config, kind.from_config(config)


def _config(backbone: str, loader: Any) -> Any:
    backbone = HUB_NAMES.get(backbone, backbone)
    if backbone in ARCHITECTURES:
        fields = dict(ARCHITECTURES[backbone])
        return loader.for_model(fields.pop("model_type"), **fields)
    from fedloom.backbones.load import source_of

    try:
        return loader.from_pretrained(source_of(backbone) if backbone in SHIPPED else backbone)
    except (OSError, ValueError) as error:
        raise ConfigError(f"unknown backbone {backbone!r}.{nearest(backbone, [*ARCHITECTURES, *SHIPPED])}") from error
