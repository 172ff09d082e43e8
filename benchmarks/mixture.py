"""One forward and backward pass: soft mixture of 4 rank-8 experts against PEFT's single rank-32 LoRA.

Both have the same number of adapter parameters, dropout 0.05, the same batch and the same loss (logits at supervised
positions only).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from common import Comparison, compare, mixed_rows, take_turns, trained_like
from peft import LoraConfig, get_peft_model
from torch import nn

from fedloom.adapters.moe_lora import Gates, MoELoRALinear
from fedloom.backbones.linear import quicken
from fedloom.backbones.load import Backbone, load_backbone
from fedloom.backbones.loss import token_losses
from fedloom.data.tokenize import Batch, collate, encode
from fedloom.runtime.client import Workbench
from fedloom.types import AdapterSpec

REPEATS = 3
SPEC = AdapterSpec(("q_proj", "v_proj"), rank=8, alpha=16, dropout=0.05, experts=4, router_hidden=512)
SINGLE = LoraConfig(r=32, lora_alpha=64, lora_dropout=0.05, target_modules=["q_proj", "v_proj"])


def measure(args: Namespace) -> list[Comparison]:
    stock = load_backbone(args.backbone)
    batch = collate_batch(args, stock)
    bench = Workbench(load_backbone(args.backbone), SPEC, None)
    bench.load(trained_like(SPEC, bench.grafted.shapes, stock.hidden_size), SPEC)
    bench.grafted.train()
    features = torch.randn(len(batch.ids), stock.hidden_size, generator=torch.Generator().manual_seed(0))

    def mixture() -> None:
        with bench.grafted.routing(bench.grafted.route(features, "soft")):
            token_losses(bench.backbone, batch).mean().backward()

    def single(backbone: Backbone) -> Callable[[], None]:
        model: Any = get_peft_model(backbone.model, SINGLE).train()
        inner = replace(backbone, model=model.base_model.model)
        return lambda: token_losses(inner, batch).mean().backward()

    same = load_backbone(args.backbone)
    quicken(same.model)
    size = f"batch {tuple(batch.ids.shape)}"
    size = f"{batch.ids.shape[0]} x {batch.ids.shape[1]} tokens"
    ours, alike, naive = "4 x rank 8", "PEFT rank 32", "PEFT rank 32, stock"
    seconds = take_turns({ours: mixture, alike: single(same), naive: single(stock)}, args)
    return [
        compare(f"full model, {size}, frozen layers through oneDNN on both sides", seconds, ours, alike, "<= 1.05"),
        compare(f"full model, {size}, against the stock backbone", seconds, ours, naive, "<= 1.05"),
        *(layer(args, out, tokens) for out in (576, 192) for tokens in (64, 256)),
    ]


def collate_batch(args: Namespace, backbone: Backbone) -> Batch:
    rows = [row for client in mixed_rows(args.data, 2).values() for row in client]
    encoded, _ = encode(rows, backbone.tokenizer)
    return collate(encoded[:8], backbone.tokenizer.pad_token_id)


def layer(args: Namespace, out: int, tokens: int) -> Comparison:
    """Compare one adapted layer, 576 → out, on 8 examples of ``tokens`` tokens, with a gradient for its input."""
    torch.manual_seed(0)

    def base() -> Any:
        holder = nn.ModuleDict({"proj": nn.Linear(576, out, bias=False)}).requires_grad_(False)
        quicken(holder)
        return holder

    gates = Gates(4, 8)
    ours = MoELoRALinear(base()["proj"], gates, alpha=16, dropout=0.05).train()
    config = LoraConfig(r=32, lora_alpha=64, lora_dropout=0.05, target_modules=["proj"])
    theirs = get_peft_model(base(), config).train().base_model.model["proj"]
    nn.init.normal_(ours.A), nn.init.normal_(ours.B)
    x = torch.randn(8, tokens, 576, requires_grad=True)
    grad = torch.randn(8, tokens, out)
    logits = torch.randn(8, 4, requires_grad=True)

    def mixture() -> None:
        for _ in range(20):
            gates.set(logits.softmax(1))
            ours(x).backward(grad)

    def single() -> None:
        for _ in range(20):
            theirs(x).backward(grad)

    seconds = take_turns({"4 x rank 8": mixture, "PEFT rank 32": single}, args)
    name = f"layer 576 to {out}, 8 x {tokens} tokens, 20 passes"
    return compare(name, seconds, "4 x rank 8", "PEFT rank 32")
