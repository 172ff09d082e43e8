"""A client's step of FedWeave against the same step written naively.

fedloom: 4 rank-8 experts stacked, soft routing from cached features, logits at supervised positions, batches padded to
their own maximum. Naive: four PEFT adapters in a loop, router features from another pass of the frozen backbone in
every step, logits at every position, batches padded to the client's longest example. Both take the same optimiser
steps on the same mini-batches, drawn as FedWeave draws them.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from common import Comparison, clock_of, compare, mixed_rows, trained_like
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from fedloom.adapters.router import Router
from fedloom.backbones.load import Backbone, load_backbone
from fedloom.data.tokenize import Encoded, encode
from fedloom.methods.fedweave import members_of
from fedloom.numerics.cluster import bucketize
from fedloom.numerics.schedule import schedule
from fedloom.numerics.seeding import generator
from fedloom.runtime.batches import draw_batches
from fedloom.runtime.client import LocalClient, Rows, Workbench
from fedloom.runtime.memory import ClientMemory
from fedloom.types import AdapterSpec, Tensors, Training

REPEATS = 3
SEED, EXAMPLES, LONGEST = 42, 48, 256
SPEC = AdapterSpec(("q_proj", "v_proj"), rank=8, alpha=16, dropout=0.05, experts=4, router_hidden=512)
TRAINING = Training(steps=1, batch_size=8)


def measure(args: Namespace) -> list[Comparison]:
    bench = Workbench(load_backbone(args.backbone), SPEC, None)
    tensors = trained_like(SPEC, bench.grafted.shapes, bench.backbone.hidden_size)
    rows = client_rows(args, bench.backbone)
    buckets = bucketize(F.normalize(rows.features(bench), dim=1), seed=SEED)
    members = members_of(buckets.labels.tolist(), buckets.count)

    verify(args, bench, tensors, rows, members)

    ours, naive, unpadded = take_steps(args, SPEC, bench, tensors, rows, members, args.repeats + 1)
    seconds = {
        name: side.seconds[1:] for name, side in [("fedloom", ours), ("naive", naive), ("naive, own padding", unpadded)]
    }
    lengths = sorted(rows.lengths)
    results = [
        compare("FedWeave step, batch 8", seconds, "naive", "fedloom", ">= 2.5"),
        compare("the same, naive padding to the batch's own maximum", seconds, "naive, own padding", "fedloom"),
    ]
    results[0].note = (
        f"{len(rows)} rows of 4 tasks in {buckets.count} buckets, {lengths[0]} to {lengths[-1]} tokens, median "
        f"{lengths[len(rows) // 2]}; all gave the same losses to 1e-4 without dropout."
    )
    return results


def client_rows(args: Namespace, backbone: Backbone) -> Rows:
    """Return a client with equally many rows of each task."""
    by_task: dict[str, list] = {}
    for client in mixed_rows(args.data, 1).values():
        for row in client:
            by_task.setdefault(row.task, []).append(row)
    rows = [row for found in by_task.values() for row in found[: EXAMPLES // len(by_task)]]
    return Rows(encode(rows, backbone.tokenizer, max_length=LONGEST)[0])


@dataclass
class Side:
    """Losses and seconds of each step."""

    losses: list[float]
    seconds: list[float]


def take_steps(
    args: Namespace,
    spec: AdapterSpec,
    bench: Workbench,
    tensors: Tensors,
    rows: Rows,
    members: list[list[int]],
    steps: int,
) -> tuple[Side, Side, Side]:
    """Take ``steps`` steps with each side, in turn: the naive sides step whenever fedloom reports one of its own.

    Returns:
        fedloom; naive; naive but for the padding, which goes to the mini-batch's own maximum.
    """
    clock = clock_of(args)
    ours, *others = sides = [Side([], []) for _ in range(3)]
    pools = [members[c] for c in schedule([len(m) for m in members], steps)]
    batches = draw_batches(
        pools, rows.lengths, TRAINING.batch_size, generator(SEED, "batches", "fit", "client-00", 1), by_length=True
    )
    naives = [Naive(load_backbone(args.backbone), spec, tensors, rows.encoded, own) for own in (False, True)]
    start = clock()

    def on_step(loss: float) -> None:
        nonlocal start
        ours.seconds.append(clock() - start)
        ours.losses.append(loss)
        for side, naive in zip(others, naives, strict=True):
            start = clock()
            side.losses.append(naive.step(batches[len(side.losses)]))
            side.seconds.append(clock() - start)
        start = clock()

    client = LocalClient("client-00", rows, bench, ClientMemory(), run_seed=SEED, round=1, on_step=on_step)
    client.load(tensors, spec)
    start = clock()
    client.fit(pools, TRAINING, by_length=True)
    return sides[0], sides[1], sides[2]


def verify(args: Namespace, bench: Workbench, tensors: Tensors, rows: Rows, members: list[list[int]]) -> None:
    """Check without dropout that both sides have the same loss, and still have it after an optimiser step."""
    ours, *others = take_steps(args, replace(SPEC, dropout=0.0), bench, tensors, rows, members, 2)
    for other in others:
        if max(abs(a - b) for a, b in zip(ours.losses, other.losses, strict=True)) > 1e-4:
            raise SystemExit(f"The sides differ: {ours.losses} and {other.losses}.")


class Naive:
    """The step as one would first write it, on PEFT and with ``transformers``' defaults."""

    def __init__(
        self, backbone: Backbone, spec: AdapterSpec, tensors: Tensors, encoded: Sequence[Encoded], own_maximum: bool
    ) -> None:
        config = LoraConfig(
            r=spec.rank,
            lora_alpha=int(spec.alpha),
            lora_dropout=spec.dropout,
            target_modules=list(spec.targets),
        )
        self.names = [f"expert{m}" for m in range(spec.experts)]
        self.model: Any = get_peft_model(backbone.model, config, adapter_name=self.names[0])
        for name in self.names[1:]:
            self.model.add_adapter(name, config)
        self.gates: Tensor | None = None
        for path, layer in self.model.named_modules():
            if isinstance(layer, LoraLayer):
                layer.forward = MethodType(self.mixture, layer)  # type: ignore[attr-defined]
                for m, name in enumerate(self.names):
                    clean = path.removeprefix("base_model.model.")
                    layer.lora_A[name].weight.data.copy_(tensors[f"experts/{m}/{clean}.lora_A"])
                    layer.lora_B[name].weight.data.copy_(tensors[f"experts/{m}/{clean}.lora_B"])
                    layer.lora_A[name].requires_grad_(True)
                    layer.lora_B[name].requires_grad_(True)
        self.router = Router(backbone.hidden_size, spec.router_hidden, spec.experts)
        for name, parameter in self.router.named_parameters():
            parameter.data.copy_(tensors[f"router/{name}"])
        self.encoded, self.pad = encoded, backbone.tokenizer.pad_token_id
        self.longest = 0 if own_maximum else max(len(e.ids) for e in encoded)
        experts = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            [{"params": experts, "lr": TRAINING.lr}, {"params": self.router.parameters(), "lr": TRAINING.router_lr}],
            weight_decay=TRAINING.weight_decay,
        )
        self.parameters = [*experts, *self.router.parameters()]

    def mixture(self, layer: Any, x: Tensor) -> Tensor:
        """Add the experts one after another, each weighted by its gate of the example."""
        y = layer.base_layer(x)
        if self.gates is None:
            return y
        for m, name in enumerate(self.names):
            out = layer.lora_B[name](layer.lora_A[name](layer.lora_dropout[name](x))) * layer.scaling[name]
            y = y + self.gates[:, m, None, None] * out
        return y

    def step(self, indices: Sequence[int]) -> float:
        batch = [self.encoded[i] for i in indices]
        ids = torch.full((len(batch), self.longest or max(len(e.ids) for e in batch)), self.pad)
        mask, prompt = torch.zeros_like(ids), torch.zeros_like(ids)
        labels = torch.full_like(ids, -100)
        for row, example in enumerate(batch):
            n, p = len(example.ids), example.prompt_length
            ids[row, :n] = torch.tensor(example.ids)
            mask[row, :n] = 1
            prompt[row, :p] = 1
            labels[row, p:n] = ids[row, p:n]
        self.model.eval()
        self.gates = None
        with torch.no_grad():
            hidden = self.model.base_model.model.model(input_ids=ids, attention_mask=prompt).last_hidden_state
        features = (hidden * prompt[..., None]).sum(1) / prompt.sum(1, keepdim=True)
        self.model.train()
        self.gates = self.router(features).softmax(1)
        loss = self.model(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, TRAINING.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss)
