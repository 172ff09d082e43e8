"""Pre-train the tiny Switch Transformer that ships with fedloom, from MIT-licensed rows only.

Same rows and held-out rows as ``train_tiny_backbone.py``, whose tokenizer it takes over from ``--tokenizer`` and
extends by sentinels. Each step sees windows of text with spans to restore (Raffel et al. 2020, section 3.1.4) and short
text-to-text tasks made from the rows, in the plain prompt format of fedloom. The result is an ordinary transformers
folder with a model card that holds what was measured. With the same ``--steps``, ``--seed`` and one thread, a run
repeats bit for bit, also when it was interrupted and resumed.

The shipped card has a section more, "Measured once, by hand", which this script does not write: how often the model
gives the right topic of 400 AG News rows the highest probability of the four words. After a new training measure that
anew, or leave it out.
"""

from __future__ import annotations

import itertools
import json
import math
import platform
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer
from tiny_switch_examples import (
    NOISE,
    PROMPT,
    SECTIONS,
    SENTINELS,
    SUBJECTS,
    TASKS,
    WINDOW,
    WINDOWS,
    Batch,
    batches,
    collate,
    extend,
    held_out_pairs,
)
from tiny_training import (
    GSM8K_HELD_OUT,
    GSM8K_ROWS,
    MMLU_HELD_OUT,
    Data,
    Minutes,
    Out,
    Progressed,
    Resume,
    Row,
    Seed,
    Steps,
    Threads,
    Work,
    command,
    cpu_name,
    digest,
    export,
    load_split,
    make_optimizer,
    repeatable,
    train,
)
from torch.nn import functional as F
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
)

from fedloom.errors import BackboneError

WIDTH, EXPERTS, CAPACITY = 128, 16, 64
SIZE, SPREAD = 0.1, 0.03  # root mean square of embeddings and of matrices at the start
PEAK_LR, BALANCE, Z = 1e-3, 5e-2, 1e-3


def embeddings_of(rows: list[Row], tokenizer: PreTrainedTokenizerFast, seed: int) -> torch.Tensor:
    """Return token embeddings that say which tokens stand in the same rows: (tokens, WIDTH), root mean square SIZE.

    The positive pointwise mutual information of two tokens in one row, contexts smoothed by 3/4, and its largest
    singular vectors times the roots of the singular values (Levy and Goldberg 2014; Levy et al. 2015), turned at
    random, so that no axis is special. Of gsm8k, which is all of one kind, one row in three counts.
    """
    counts = torch.zeros(len(tokenizer), len(tokenizer))
    for i, row in enumerate(rows):
        if "choices" in row or i % 3 == 0:
            text = "\n".join([row["question"], *(row["choices"] if "choices" in row else [row["answer"]])])
            found = torch.tensor(sorted(set(tokenizer(text)["input_ids"])))
            counts[found[:, None], found] += 1
    context = counts.sum(0) ** 0.75
    information = torch.log(counts / (counts.sum(1, keepdim=True) * (context / context.sum())))
    information = torch.nan_to_num(information, 0.0, 0.0, 0.0).clamp_min(0)
    torch.manual_seed(seed)
    left, values, _ = torch.svd_lowrank(information, q=WIDTH + 32, niter=4)
    turn, _ = torch.linalg.qr(torch.randn(WIDTH, WIDTH))
    table = (left * values.sqrt())[:, :WIDTH] @ turn
    return table / table.square().mean().sqrt() * SIZE


def build_model(
    tokenizer: PreTrainedTokenizerFast, seed: int, embeddings: torch.Tensor | None = None
) -> SwitchTransformersForConditionalGeneration:
    """Return a fresh model, every second layer sparse.

    Matrices start at N(0, SPREAD²), so that blocks add little to the embeddings at first; T5's own start, which is
    drawn where ``embeddings`` (tokens, WIDTH) are not given, is the one that the card compares with.
    """
    torch.manual_seed(seed)
    config = SwitchTransformersConfig(
        vocab_size=len(tokenizer),
        d_model=WIDTH,
        d_kv=32,
        d_ff=160,
        num_heads=4,
        num_layers=4,
        num_sparse_encoder_layers=2,
        num_decoder_layers=2,
        num_sparse_decoder_layers=1,
        num_experts=EXPERTS,
        expert_capacity=CAPACITY,
        # Jitter would disturb what the experts read as well, in place; the two losses are added in loss_of.
        router_jitter_noise=0.0,
        router_aux_loss_coef=BALANCE,
        router_z_loss_coef=Z,
        dropout_rate=0.0,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    config.decoder_start_token_id = tokenizer.pad_token_id
    model = SwitchTransformersForConditionalGeneration(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("router.classifier.weight"):
                # transformers starts routers at N(0, 1), almost one-hot; Switch (section 2.4) at a tenth of 1/fan-in.
                weight.normal_(std=math.sqrt(0.1 / config.d_model))
            elif embeddings is not None and weight.ndim > 1:
                weight.normal_(std=SPREAD)
        if embeddings is not None:
            model.shared.weight.copy_(embeddings)
            # The tied output head divides by the root of the width, for T5's embeddings of size 1.
            model.decoder.final_layer_norm.weight.fill_(math.sqrt(config.d_model))
    return model


# --- losses -----------------------------------------------------------------------------------------------------------


def router_losses(logits: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one sparse layer's balance loss (Switch, equations 4-6) and z-loss (ST-MoE, equation 5), without padding.

    transformers joins the layers before it multiplies, so that imbalance may cancel, and counts padding.

    Args:
        logits: (b, t, experts).
        mask: (b, t), true where there is a token.
    """
    logits = logits[mask]
    share = F.one_hot(logits.argmax(-1), EXPERTS).float().mean(0)
    return EXPERTS * (share * logits.softmax(-1).mean(0)).sum(), logits.logsumexp(-1).square().mean()


def forward(model: SwitchTransformersForConditionalGeneration, batch: Batch) -> tuple[torch.Tensor, list[tuple]]:
    """Return logits (b, t, vocabulary), and of each sparse layer its router logits (b, ·, experts) and mask (b, ·)."""
    out = model(input_ids=batch.ids, attention_mask=batch.mask, labels=batch.labels, output_router_logits=True)
    if len(out.encoder_router_logits) != 2 or len(out.decoder_router_logits) != 1:
        raise BackboneError("transformers did not return the router logits of every sparse layer.")
    read, written = batch.mask.bool(), batch.labels != -100
    layers = [(x, read) for x in out.encoder_router_logits] + [(x, written) for x in out.decoder_router_logits]
    return out.logits, layers


def loss_of(model: SwitchTransformersForConditionalGeneration, step: tuple[Batch, ...]) -> torch.Tensor:
    """Return the sum of both batches' losses in nats per token, with the router losses of every layer."""
    total = torch.zeros(())
    for batch in step:
        logits, layers = forward(model, batch)
        total = total + F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=-100)
        for balance, z in itertools.starmap(router_losses, layers):
            total = total + BALANCE * balance + Z * z
    return total


# --- what the card says -----------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """Sums over held-out examples of one kind."""

    examples: int = 0
    tokens: int = 0
    nats: float = 0.0
    exact: int = 0


@torch.no_grad()
def measure(
    model: SwitchTransformersForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, rows: list[Row]
) -> tuple[dict[str, Tally], torch.Tensor, float]:
    """Return held-out tallies, expert shares (sparse layers, experts), and the share of tokens over capacity.

    An example is exact when each of its tokens is the most likely one, which is what greedy decoding would write.
    """
    model.eval()
    named = held_out_pairs(rows, tokenizer)
    tallies: dict[str, Tally] = defaultdict(Tally)
    counts, dropped = torch.zeros(3, EXPERTS), 0.0
    for start in range(0, len(named), 32):
        names, pairs = zip(*named[start : start + 32])
        batch = collate(pairs, tokenizer.pad_token_id)
        logits, layers = forward(model, batch)
        nats = F.cross_entropy(logits.transpose(1, 2), batch.labels, ignore_index=-100, reduction="none").sum(1)
        right = ((logits.argmax(-1) == batch.labels) | (batch.labels == -100)).all(1)
        for name, row_nats, row_right, labels in zip(names, nats.tolist(), right.tolist(), batch.labels):
            tally = tallies[name]
            tally.examples += 1
            tally.tokens += int((labels != -100).sum())
            tally.nats += row_nats
            tally.exact += row_right
        for layer, (router, mask) in enumerate(layers):
            chosen = F.one_hot(router.argmax(-1), EXPERTS) * mask[..., None]
            counts[layer] += chosen.sum((0, 1))
            dropped += float((chosen.sum(1) - CAPACITY).clamp_min(0).sum())
    return dict(tallies), counts / counts.sum(1, keepdim=True), dropped / float(counts.sum())


def card(
    model: SwitchTransformersForConditionalGeneration,
    before: dict[str, Tally],
    tallies: dict[str, Tally],
    usage: torch.Tensor,
    dropped: float,
    threads: int,
    rows: int,
    run: Progressed,
) -> str:
    """Write the model card with the measured figures."""
    parameters = model.num_parameters()
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    active = parameters - experts + experts // EXPERTS
    losses = "\n".join(
        f"| {name} | {v.examples:,} | {v.tokens:,} | {before[name].nats / v.tokens:.3f} | {v.nats / v.tokens:.3f} "
        f"| {v.exact / v.examples:.1%} |"
        for name, v in sorted(tallies.items())
    )
    places = ("encoder layer 2", "encoder layer 4", "decoder layer 2")
    shares = "\n".join(
        f"| {place} | {row.min():.1%} | {row.max():.1%} | {torch.special.entr(row).sum().exp():.1f} |"
        for place, row in zip(places, usage)
    )
    return f"""---
license: mit
language: en
library_name: transformers
---
# fedloom tiny Switch Transformer

A Switch Transformer (encoder-decoder, top-1 of {EXPERTS} experts in every second layer) with {parameters:,} parameters,
{active:,} of them active for a token: 4 encoder and 2 decoder layers (three of the six sparse), hidden
{model.config.d_model}, {model.config.num_heads} heads, MLP {model.config.d_ff}, {model.config.vocab_size:,} tied
embeddings, fp32. Trained from scratch on a CPU, so that tests and small federated benchmarks fine-tune a pretrained
mixture-of-experts model offline. It does not know facts.

The tokenizer is that of the tiny backbone with {SENTINELS} sentinels `<extra_id_0>` … more. It adds one BOS before a
text and no EOS. The encoder reads a prompt as it is; labels end with EOS; the decoder starts from the pad token. There
is no chat template, on purpose. Prompts had up to {PROMPT} tokens.

Router jitter and dropout are 0. `expert_capacity` is {CAPACITY} tokens of a sequence for each expert. Fine-tuning
should add the router losses: pass `output_router_logits=True` together with labels.

## Data

{rows:,} documents, all under the MIT licence:

- gsm8k (openai/grade-school-math), train rows 0..{GSM8K_HELD_OUT - 1};
- mmlu (hendrycks/test; validation, dev, and 7,000 rows of test), except one question in {MMLU_HELD_OUT} by a hash.

Held out for the figures below: gsm8k train rows {GSM8K_HELD_OUT}..{GSM8K_ROWS - 1} and the rest of mmlu. gsm8k train
rows from {GSM8K_ROWS} on, the gsm8k test rows and all other data were not used.

**Do not report mmlu scores of this model as knowledge: it was trained on mmlu, test rows included.**

## Objective and held-out figures

Embeddings start as singular vectors of the pointwise mutual information of tokens in one row. Each step then: {WINDOWS}
windows of {WINDOW} tokens with {NOISE:.0%} hidden in spans (`spans`), {SUBJECTS} rows whose subject is to be named
(`subject`), {SECTIONS} rows to be put into a section of a newspaper by the instruction that fedloom gives with AG News
(`section`: world, business and science are groups of mmlu's subjects, sports what has words of sports), and {TASKS}
other tasks made from the rows: choose the right answer, find a choice by its letter or the letter of a choice, repeat
the first words, copy the result of a worked calculation, say whether an answer belongs to a question. Exact: every
token of the response is the most likely one. Chance is 25% for `answer` and `section`, and about 50% for `belongs`.
`untrained` is the same architecture with the random weights that transformers gives a new T5.

| task | examples | tokens | nats per token, untrained | nats per token | exact |
|---|---|---|---|---|---|
{losses}

Tokens that the least and the most used expert get, and how many equally used experts would have the same entropy:

| sparse layer | least | most | effective experts |
|---|---|---|---|
{shares}

Tokens beyond the capacity of their expert, which pass by the residual only: {dropped:.2%}.

## Made with

`python scripts/train_tiny_switch.py --data DIR --out DIR --steps {run.steps} --threads {threads} --seed {run.seed}`

{run.steps:,} steps, AdamW, peak learning rate {PEAK_LR:g}, cosine with warm-up; balance loss × {BALANCE:g} and
z-loss × {Z:g} of each sparse layer, without padding. {run.seconds / 60:.1f} minutes on an {cpu_name()}
processor (threads: {threads}, shared with other work), with Python
{platform.python_version()}, torch {torch.__version__.split("+")[0]}, transformers {transformers.__version__}.

Licence: MIT, as the data.
"""


def check(model: SwitchTransformersForConditionalGeneration, batch: Batch, folder: Path) -> None:
    """Raise unless the folder, read back offline, gives the same logits."""
    again = AutoModelForSeq2SeqLM.from_pretrained(folder, local_files_only=True).eval()
    words = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    with torch.no_grad():
        same = torch.equal(forward(model.eval(), batch)[0], forward(again, batch)[0])
    if not same or len(words) != model.config.vocab_size:
        raise BackboneError("The exported folder does not give the same logits as the trained model.")


def main(
    data: Data,
    out: Out,
    tokenizer: Annotated[Path, typer.Option(help="Folder of the tiny backbone.")] = Path("src/fedloom/assets/tiny"),
    minutes: Minutes = 30.0,
    steps: Steps = None,
    threads: Threads = 1,
    seed: Seed = 0,
    work: Work = Path("runs/tiny-switch"),
    resume: Resume = False,
) -> None:
    """Train the tiny Switch Transformer and write it, with its model card, to OUT."""
    repeatable(threads)
    rows, held_out = load_split(data)
    words = extend(tokenizer)
    before, _, _ = measure(build_model(words, seed), words, held_out)
    model = build_model(words, seed, embeddings_of(rows, words, seed))
    run = train(
        model,
        make_optimizer(model, PEAK_LR),
        lambda: batches(rows, words, seed),
        loss_of,
        PEAK_LR,
        work,
        seed=seed,
        tokenizer=digest(words),
        steps=steps,
        minutes=minutes,
        resume=resume,
    )
    tallies, usage, dropped = measure(model, words, held_out)
    sample = next(batches(held_out, words, seed))[1]
    readme = card(model, before, tallies, usage, dropped, threads, len(rows), run)
    export(model, words, readme, out, lambda folder: check(model, sample, folder))
    figures = {name: vars(tally) for name, tally in tallies.items()}
    typer.echo(json.dumps({"steps": run.steps, "minutes": run.seconds / 60, "held_out": figures}, indent=1))


if __name__ == "__main__":
    command(main)
