"""Train the tiny Llama backbone that ships with fedloom, from MIT-licensed rows only.

Data: gsm8k train rows 0..4972 and mmlu (validation, dev, test). Later gsm8k train rows, and the gsm8k test file, are
kept for the federated benchmark and are never read here. The result is an ordinary transformers folder with a model
card that holds the measured losses. With the same ``--steps``, ``--seed`` and one thread, a run repeats bit for bit,
also when it was interrupted and resumed.
"""

from __future__ import annotations

import itertools
import json
import platform
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import transformers
import typer
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
    epoch_tokens,
    export,
    load_split,
    make_optimizer,
    render,
    repeatable,
    train,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from fedloom.errors import BackboneError

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
VOCABULARY, POSITIONS = 4096, 1024
SEQUENCE, BATCH = 512, 4
PEAK_LR = 3e-3


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE with single digits; encoding adds one BOS and no EOS, decoding gives the text back exactly."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, bpe.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """Return a fresh model of about two million parameters."""
    torch.manual_seed(seed)
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=384,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        **ids,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = transformers.GenerationConfig(**ids)
    return model


def batches(rows: list[Row], tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[torch.Tensor]:
    """Yield token ids (BATCH, SEQUENCE) without end."""
    size = BATCH * SEQUENCE
    for epoch in itertools.count():
        stream = epoch_tokens(rows, tokenizer, seed, epoch)
        yield from stream[: len(stream) // size * size].view(-1, BATCH, SEQUENCE)


def loss_of(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Return the loss of ``ids`` (batch, sequence) in nats per token."""
    logits = model(input_ids=ids[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def held_out_losses(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: list[str], training: torch.Tensor
) -> dict[str, float]:
    """Compare the model with a unigram on the same tokens; EOS counts as a token to predict, BOS does not.

    The unigram has the token frequencies of ``training`` (any shape) with add-one smoothing.
    """
    counts = torch.bincount(training[training != tokenizer.bos_token_id].flatten(), minlength=VOCABULARY).double() + 1
    unigram = -(counts / counts.sum()).log()
    model.eval()
    nats = unigram_nats = 0.0
    tokens = size = 0
    for text in texts:
        body = tokenizer(text, truncation=True, max_length=POSITIONS - 1)["input_ids"]
        ids = torch.tensor([[*body, tokenizer.eos_token_id]])
        nats += F.cross_entropy(model(input_ids=ids[:, :-1]).logits[0], ids[0, 1:], reduction="sum").item()
        unigram_nats += unigram[ids[0, 1:]].sum().item()
        tokens += ids.shape[1] - 1
        size += len(str(tokenizer.decode(body, skip_special_tokens=True)).encode())
    return {
        "documents": len(texts),
        "tokens": tokens,
        "bytes": size,
        "nats_per_token": nats / tokens,
        "nats_per_byte": nats / size,
        "unigram_nats_per_token": unigram_nats / tokens,
        "unigram_nats_per_byte": unigram_nats / size,
    }


def card(losses: dict[str, dict[str, float]], parameters: int, threads: int, rows: int, run: Progressed) -> str:
    """Write the model card with the measured figures."""
    table = "\n".join(
        f"| {name} | {v['documents']:,} | {v['tokens']:,} | {v['nats_per_token']:.3f} | "
        f"{v['unigram_nats_per_token']:.3f} | {v['nats_per_byte']:.3f} | {v['unigram_nats_per_byte']:.3f} |"
        for name, v in losses.items()
    )
    return f"""---
license: mit
language: en
library_name: transformers
---
# fedloom tiny backbone

A Llama-architecture causal language model with {parameters:,} parameters (4 layers, hidden 192, 6 heads, 2 KV heads,
MLP 384, tied embeddings, {VOCABULARY:,} byte-level BPE tokens, {POSITIONS:,} positions, fp32), trained from scratch
on a CPU. It exists so that tests and small federated benchmarks train on a real pretrained model in seconds, offline.
It knows the look of English questions and worked answers; it does not know facts and cannot calculate reliably.

The tokenizer adds one BOS and no EOS, gives any text back exactly, and has a pad token of its own. There is no chat
template, on purpose. Training sequences had {SEQUENCE} tokens, so positions beyond that were never trained.

## Data

{rows:,} documents, all under the MIT licence:

- gsm8k (openai/grade-school-math), train rows 0..{GSM8K_HELD_OUT - 1}, with their calculator marks;
- mmlu (hendrycks/test; validation, dev, and 7,000 rows of test), except one question in {MMLU_HELD_OUT} by a hash.

Held out for the losses below: gsm8k train rows {GSM8K_HELD_OUT}..{GSM8K_ROWS - 1} and the rest of mmlu. gsm8k train
rows from {GSM8K_ROWS} on, the gsm8k test rows and all other data were not used.

**Do not report mmlu scores of this model: it was trained on mmlu, test rows included.**

## Held-out loss

Nats; the unigram has the training tokens' frequencies with add-one smoothing and is scored on the same tokens.

| text | documents | tokens | per token | unigram, per token | per byte | unigram, per byte |
|---|---|---|---|---|---|---|
{table}

## Made with

`python scripts/train_tiny_backbone.py --data DIR --out DIR --steps {run.steps} --threads {threads} --seed {run.seed}`

{run.steps:,} steps of {BATCH} × {SEQUENCE} tokens ({run.steps * BATCH * SEQUENCE / 1e6:.1f} M tokens in all), AdamW,
peak learning rate {PEAK_LR:g}, cosine with warm-up; {run.seconds / 60:.1f} minutes on an {cpu_name()} processor
(threads: {threads}), with Python {platform.python_version()}, torch {torch.__version__.split("+")[0]}, transformers
{transformers.__version__}.

Licence: MIT, as the data.
"""


def check(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Raise unless the folder, read back offline, gives the same ids, the same logits and the text back."""
    again = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    words = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    text = "Question: What is  2 + 15?\n\tÜber 🙂 naïve\u200b 漢字 "
    ids = words(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        same = torch.equal(model.eval()(input_ids=ids).logits, again(input_ids=ids).logits)
    if not same or ids[0].tolist() != tokenizer(text)["input_ids"]:
        raise BackboneError("The exported folder does not give the same logits as the trained model.")
    if ids[0].tolist().count(words.bos_token_id) != 1 or words.decode(ids[0, 1:]) != text:
        raise BackboneError("The exported tokenizer does not give the text back.")


def main(
    data: Data,
    out: Out,
    minutes: Minutes = 25.0,
    steps: Steps = None,
    threads: Threads = 1,
    seed: Seed = 0,
    work: Work = Path("runs/tiny-backbone"),
    resume: Resume = False,
) -> None:
    """Train the tiny backbone and write it, with its model card, to OUT."""
    repeatable(threads)
    rows, held_out = load_split(data)
    tokenizer = train_tokenizer(render(row, random.Random(f"{seed}:{i}")) for i, row in enumerate(rows))
    model = build_model(tokenizer, seed)
    run = train(
        model,
        make_optimizer(model, PEAK_LR),
        lambda: batches(rows, tokenizer, seed),
        loss_of,
        PEAK_LR,
        work,
        seed=seed,
        tokenizer=digest(tokenizer),
        steps=steps,
        minutes=minutes,
        resume=resume,
    )
    first_epoch = epoch_tokens(rows, tokenizer, seed, 0)
    groups = {
        "gsm8k": [render(row) for row in held_out if "choices" not in row],
        "mmlu": [render(row) for row in held_out if "choices" in row],
    }
    groups["both"] = groups["gsm8k"] + groups["mmlu"]
    losses = {name: held_out_losses(model, tokenizer, texts, first_epoch) for name, texts in groups.items()}
    readme = card(losses, model.num_parameters(), threads, len(rows), run)
    export(model, tokenizer, readme, out, lambda folder: check(model, tokenizer, folder))
    typer.echo(json.dumps({"steps": run.steps, "minutes": run.seconds / 60, "held_out": losses}, indent=1))


if __name__ == "__main__":
    command(main)
