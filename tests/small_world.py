"""A federation small enough for a test: a random Llama of two layers, a byte tokenizer, a handful of clients.

Child processes import it too, so it does not know pytest.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
)

from byte_tokenizer import byte_tokenizer
from fedloom.adapters.inject import target_modules
from fedloom.backbones.load import Backbone, parameter_hash
from fedloom.data.sources import Example, conversation
from fedloom.data.tokenize import encode
from fedloom.export import save_model
from fedloom.methods.base import Method
from fedloom.runtime.checkpoint import CheckpointFolder
from fedloom.runtime.client import LocalClient, Rows, Workbench
from fedloom.runtime.events import Observer, RoundLog
from fedloom.runtime.joining import Newcomers, nobody
from fedloom.runtime.loop import Federation, Receipt, federate
from fedloom.runtime.memory import ClientMemory, MemoryFolder
from fedloom.runtime.simulate import Simulator
from fedloom.types import AdapterSpec, Order, Plain, Setup, State, Tensors, Training

TARGETS = ("q_proj", "v_proj")
SPEC = AdapterSpec(TARGETS, rank=2, alpha=6.0, dropout=0.05)
NATIVE = AdapterSpec((), native="full")
TRAINING = Training(steps=3, batch_size=2, lr=1e-2, router_lr=5e-3)

#: Words that stand in rows only, so that a test can look for them in what leaves a client.
SECRET = "zebrafinch"


def small_tokenizer() -> PreTrainedTokenizerFast:
    """One id per byte, then ``</s>`` (256) and ``<pad>`` (257)."""
    return byte_tokenizer(special=("</s>", "<pad>"))


def small_llama(seed: int = 7) -> LlamaForCausalLM:
    """Random, but with weights large enough that its next tokens differ from prompt to prompt."""
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=256,
        pad_token_id=257,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval().requires_grad_(False)


def small_switch(seed: int = 7) -> SwitchTransformersForConditionalGeneration:
    """One mixture layer of four experts in the encoder, one in the decoder; routers that do not favour one expert."""
    config = SwitchTransformersConfig(
        vocab_size=258,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=2,
        num_experts=4,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        expert_capacity=64,
        router_jitter_noise=0.0,
        pad_token_id=257,
        eos_token_id=256,
        decoder_start_token_id=257,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = SwitchTransformersForConditionalGeneration(config).eval().requires_grad_(False)
        for name, parameter in model.named_parameters():
            if name.endswith("router.classifier.weight"):
                torch.nn.init.normal_(parameter)
    return model


def small_backbone(seed: int = 7, *, native: bool = False) -> Backbone:
    """Return a random Llama or, with experts of its own, a random Switch Transformer."""
    model = small_switch(seed) if native else small_llama(seed)
    return Backbone("small", model, small_tokenizer(), parameter_hash(model))


def save_backbone(folder: Path, seed: int = 7, *, native: bool = False) -> Path:
    """Write the small backbone as a folder that ``load_backbone`` reads."""
    (small_switch(seed) if native else small_llama(seed)).save_pretrained(folder)
    small_tokenizer().save_pretrained(folder)
    return folder


def examples(pattern: str, count: int, start: int = 0) -> list[Example]:
    """Return rows of one of two patterns, all different, of several lengths."""
    found = []
    for i in range(start, start + count):
        if pattern == "sums":
            prompt, response = f"{i}+{7 * i}=? {SECRET}", f"{8 * i}"
        else:
            prompt, response = f"SHOUT THE WORD {SECRET.upper()} {'VERY ' * (i % 3)}LOUD {i}", "YES " * (1 + i % 2)
        found.append(Example(conversation(prompt, response), task=pattern))
    return found


def rows(found: Sequence[Example]) -> Rows:
    return Rows(encode(found, small_tokenizer())[0])


@functools.cache
def client_rows() -> Mapping[str, list[Example]]:
    """Four clients: mixed, one pattern only, and the smallest there are, with two examples and with one."""
    return {
        "ann": examples("sums", 5) + examples("shout", 3),
        "bob": examples("shout", 5, start=10),
        "cyd": examples("sums", 2, start=20),
        "dan": examples("sums", 1, start=30),
    }


class World:
    """One federation in one folder. Another ``World`` on the same folder is the same federation after a restart."""

    def __init__(
        self,
        out: Path,
        *,
        clients: Mapping[str, Sequence[Example]] | None = None,
        seed: int = 42,
        spec: AdapterSpec = SPEC,
    ) -> None:
        self.out = out
        out.mkdir(parents=True, exist_ok=True)
        self.spec = spec
        self.bench = self.fresh_bench()
        self.clients = {name: rows(found) for name, found in (clients or client_rows()).items()}
        self.setup = Setup(
            seed=seed,
            spec=spec,
            shapes={} if spec.native else target_modules(small_llama(), spec.targets),
            hidden_size=self.bench.backbone.hidden_size,
            clients=tuple(sorted(self.clients)),
            initial=self.bench.grafted.read() if spec.native else {},
        )
        self.memory = MemoryFolder(out / "checkpoints" / "memory")
        self.simulator = Simulator(self.bench, self.clients, seed, self.memory, out / "checkpoints" / "spool")
        self.checkpoints = CheckpointFolder(out / "checkpoints", {"seed": seed})
        self.log = RoundLog(out / "rounds.jsonl")

    def fresh_bench(self) -> Workbench:
        """Return a graft on a backbone that nobody used."""
        return Workbench(small_backbone(native=bool(self.spec.native)), self.spec, None)

    def run(
        self,
        method: Method,
        *,
        rounds: int = 3,
        training: Training = TRAINING,
        transport: Any = None,
        observer: Observer | None = None,
        evaluate: Callable[[State, dict[str, str]], dict[str, Plain] | None] = lambda state, memories: None,
        newcomers: Newcomers = nobody,
        **federation: Any,
    ) -> State:
        return federate(
            method,
            transport or self.simulator,
            self.setup,
            training,
            Federation(rounds=rounds, **federation),
            self.checkpoints,
            self.log,
            observer or Observer(),
            evaluate=evaluate,
            newcomers=newcomers,
        )

    def client(self, name: str, *, round: int = 1, memory: ClientMemory | None = None) -> LocalClient:
        return LocalClient(name, self.clients[name], self.bench, memory or ClientMemory(), self.setup.seed, round)

    def export(self, method: Method, state: State) -> None:
        view = method.view(state, None)
        self.bench.load(view.tensors, view.spec)
        save_model(self.out / "model", view, self.bench, provenance={"rounds": state.round})


def world_of(method: Method, out: Path, **more: Any) -> World:
    """Return a world whose backbone a method can train."""
    return World(out, spec=NATIVE if method.native else SPEC, **more)


class Wire:
    """A transport around another one: ``change`` may drop receipts, or rewrite the files they name."""

    def __init__(self, inner: Any, change: Callable[[Sequence[Order], list[Receipt]], list[Receipt]]) -> None:
        self.inner, self.change = inner, change

    def exchange(
        self, method: Method, orders: Sequence[Order], memories: dict[str, str], observer: Any
    ) -> list[Receipt]:
        return self.change(orders, self.inner.exchange(method, orders, memories, observer))

    def committed(self, memory_versions: set[str]) -> None:
        self.inner.committed(memory_versions)


def tree(folder: Path) -> dict[str, bytes]:
    """Return relative path → content of every file under ``folder``."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def without_seconds(record: Any) -> Any:
    """Return a log record without what no two runs share: wall-clock time and whether it was interrupted."""
    if isinstance(record, dict):
        return {
            k: without_seconds(v)
            for k, v in record.items()
            if not k.endswith("seconds") and k not in ("resumed", "peak_bytes", "peak_device_bytes")
        }
    return [without_seconds(v) for v in record] if isinstance(record, list) else record


def outcome(out: Path) -> dict[str, Any]:
    """Return all that a run leaves behind and that must not depend on how often it was interrupted."""
    lines = (out / "rounds.jsonl").read_text().splitlines()
    return {
        "checkpoints": {n: c for n, c in tree(out / "checkpoints").items() if n.startswith("round-")},
        "memory": tree(out / "checkpoints" / "memory"),
        "log": [without_seconds(json.loads(line)) for line in lines],
        "model": tree(out / "model"),
    }


def same(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(torch.equal(t, b[n]) and t.dtype == b[n].dtype for n, t in a.items())


def random_tensors(like: Mapping[str, torch.Tensor], seed: int = 0, scale: float = 0.1) -> Tensors:
    """Return normal draws of the same names and shapes, so that no factor is zero."""
    source = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(t.shape, generator=source) for name, t in sorted(like.items())}
