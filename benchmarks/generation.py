"""Generation: a mixture, routing included, against the bare backbone's own ``generate``; soft against top-1.

The bare side is the stock ``transformers`` model. fedloom's side is a model folder as ``fedloom run`` writes it, loaded
by ``load_model``: frozen features of the prompt, router, greedy decoding. No stop token is given, so both sides make
the same number of tokens.
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from pathlib import Path

import torch
from common import Comparison, compare, mixed_rows, take_turns, trained_like

from fedloom.adapters.inject import target_modules
from fedloom.backbones.features import prompt_features
from fedloom.backbones.linear import quicken
from fedloom.backbones.load import load_backbone
from fedloom.data.sources import Example
from fedloom.data.tokenize import encode_prompt, end_token_id
from fedloom.evaluation.generate import greedy
from fedloom.export import save_model
from fedloom.model import LoadedModel, load_model
from fedloom.runtime.client import Workbench
from fedloom.types import AdapterSpec, View

REPEATS = 3
PROMPT, NEW = 64, 64


def measure(args: Namespace) -> list[Comparison]:
    bare = load_backbone(args.backbone).model
    quick = load_backbone(args.backbone).model
    quicken(quick)
    rows = [row for client in mixed_rows(args.data, 4).values() for row in client]
    with tempfile.TemporaryDirectory() as folder:
        model, prompts = trained_model(args, Path(folder) / "model", rows)

    def mixture(batch: int, routing: str) -> list[list[int]]:
        chosen = model._route(prompts[:batch], routing)
        return greedy(model.bench, prompts[:batch], chosen, NEW, [])

    def plain(backbone: torch.nn.Module, batch: int) -> list[list[int]]:
        ids = torch.tensor(prompts[:batch])
        with torch.no_grad():
            out = backbone.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=NEW, max_new_tokens=NEW
            )
        return out[:, PROMPT:].tolist()

    # generate() suppresses the end token to reach 64 tokens, so the sides are the same up to where it would stand.
    end = end_token_id(model.bench.backbone.tokenizer)
    for ours, theirs in zip(mixture(2, "off"), plain(quick, 2), strict=True):
        length = ours.index(end) if end in ours else NEW
        if len(ours) != len(theirs) or ours[:length] != theirs[:length]:
            raise SystemExit("Without adapters the two sides give different tokens.")
    results = []
    for batch in (1, 8):
        seconds = take_turns(
            {
                "top-1": lambda b=batch: mixture(b, "top1"),
                "soft": lambda b=batch: mixture(b, "soft"),
                "bare": lambda b=batch: plain(bare, b),
                "bare, quick": lambda b=batch: plain(quick, b),
            },
            args,
        )
        name = f"generation, batch {batch}"
        results += [
            compare(name, seconds, "top-1", "bare", "<= 1.15"),
            compare(name, seconds, "soft", "top-1", "<= 1.10"),
            compare(f"{name}, frozen layers through oneDNN on both sides", seconds, "top-1", "bare, quick"),
        ]
        chosen = model._route(prompts[:batch], "top1").tolist()
        results[-3].note = f"experts chosen: {chosen}."
    return results


def trained_model(args: Namespace, folder: Path, rows: list[Example]) -> tuple[LoadedModel, list[list[int]]]:
    """Write and load a model of 4 experts whose router tells prompts apart; return it with prompts of 64 tokens."""
    backbone = load_backbone(args.backbone)
    spec = AdapterSpec(("q_proj", "v_proj"), rank=8, experts=4, router_hidden=512)
    tensors = trained_like(spec, target_modules(backbone.model, spec.targets), backbone.hidden_size)
    found = [encode_prompt(row.messages[:-1], backbone.tokenizer) for row in rows[:64]]
    prompts = [ids[-PROMPT:] for ids in found if len(ids) >= PROMPT][:8]
    bench = Workbench(backbone, spec, None)
    bench.load(tensors, spec)
    with torch.no_grad(), bench.grafted.routing(None):
        logits = bench.grafted.router(prompt_features(backbone, prompts))
    tensors["router/2.bias"] = tensors["router/2.bias"] - logits.mean(0)  # else one expert may get every prompt
    save_model(folder, View(tensors, spec), bench, provenance={"method": "none: random tensors"})
    return load_model(folder), prompts
