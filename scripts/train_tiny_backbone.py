"""Train the tiny Llama backbone that ships with fedloom, from MIT-licensed rows only.

Data: gsm8k train rows 0..4972 and mmlu (validation, dev, test). Later gsm8k train rows, and the gsm8k test file, are
kept for the federated benchmark and are never read here. The result is an ordinary transformers folder with a model
card that holds the measured losses. With the same ``--steps``, ``--seed`` and one thread, a run repeats bit for bit,
also when it was interrupted and resumed.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import math
import os
import platform
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from fedloom.errors import BackboneError, DataError, FedloomError

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
VOCABULARY, POSITIONS = 4096, 1024
SEQUENCE, BATCH = 512, 4
PEAK_LR, FLOOR, WARMUP, WEIGHT_DECAY, CLIP = 3e-3, 0.05, 100, 0.1, 1.0
GSM8K_ROWS, GSM8K_HELD_OUT = 4973, 4700  # rows 4700..4972 are held out, rows from 4973 on are never used
MMLU_HELD_OUT = 50  # one question in fifty
CHECKPOINT_EVERY = 200
Row = dict[str, Any]


def read_rows(path: Path, limit: int | None = None) -> list[Row]:
    """Return the first ``limit`` rows of a JSON Lines file."""
    if not path.is_file():
        raise DataError(f"{path} is missing. --data needs gsm8k/train.jsonl and mmlu/{{validation,dev,test}}.jsonl.")
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in itertools.islice(lines, limit)]


def is_held_out(question: str) -> bool:
    """Split mmlu by a hash of the question, so that a question asked twice falls on one side only."""
    plain = " ".join(question.lower().split())
    return int.from_bytes(hashlib.sha256(plain.encode()).digest()[:8]) % MMLU_HELD_OUT == 0


def load_split(data: Path) -> tuple[list[Row], list[Row]]:
    """Return the training rows and the held-out rows of both sources."""
    gsm8k = read_rows(data / "gsm8k" / "train.jsonl", GSM8K_ROWS)
    if len(gsm8k) < GSM8K_ROWS:
        raise DataError(f"gsm8k/train.jsonl has {len(gsm8k)} rows; at least {GSM8K_ROWS} are needed.")
    mmlu = [row for split in ("validation", "dev", "test") for row in read_rows(data / "mmlu" / f"{split}.jsonl")]
    train = gsm8k[:GSM8K_HELD_OUT] + [row for row in mmlu if not is_held_out(row["question"])]
    held_out = gsm8k[GSM8K_HELD_OUT:] + [row for row in mmlu if is_held_out(row["question"])]
    return train, held_out


def render(row: Row, rng: random.Random | None = None) -> str:
    """Write a row as plain text: in the plainest form, or with ``rng`` in one of several."""

    def pick(*options: str) -> str:
        return options[0] if rng is None or rng.random() < 0.4 else rng.choice(options)

    question = row["question"].strip()
    if "choices" not in row:
        frame = pick(
            "Question: {}\nAnswer: {}", "Q: {}\nA: {}", "Problem: {}\n\nSolution: {}", "{}\n{}", "{}\n\nAnswer: {}"
        )
        return frame.format(question, row["answer"].strip())
    letter, text = "ABCD"[row["answer"]], row["choices"][row["answer"]]
    subject = row["subject"].replace("_", " ")
    mark = pick("{}. ", "{}) ", "({}) ")
    choices = "\n".join(mark.format(name) + choice for name, choice in zip("ABCD", row["choices"], strict=True))
    head = pick("Question: ", "Q: ", "", f"Subject: {subject}\n\n", f"A question about {subject}.\n")
    answer = pick(f"Answer: {letter}", f"Answer: {letter}. {text}", f"The answer is {letter}.", f"Answer: {text}")
    return head + question + pick("\n", "\nChoices:\n", "\nOptions:\n", "\n\n") + choices + "\n" + answer


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


def epoch_tokens(rows: list[Row], tokenizer: PreTrainedTokenizerFast, seed: int, epoch: int) -> torch.Tensor:
    """Return one epoch's documents, ``BOS text EOS`` end to end, in an order and wording of its own: (tokens,)."""
    rng = random.Random(f"{seed}:{epoch}")
    texts = [render(row, rng) for row in rows]
    rng.shuffle(texts)
    return torch.tensor([i for ids in tokenizer(texts)["input_ids"] for i in [*ids, tokenizer.eos_token_id]])


def batches(rows: list[Row], tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[torch.Tensor]:
    """Yield token ids (BATCH, SEQUENCE) without end."""
    size = BATCH * SEQUENCE
    for epoch in itertools.count():
        stream = epoch_tokens(rows, tokenizer, seed, epoch)
        yield from stream[: len(stream) // size * size].view(-1, BATCH, SEQUENCE)


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to ``FLOOR`` of the peak."""
    warmup = min(WARMUP, steps // 10 + 1)
    if step < warmup:
        return PEAK_LR * (step + 1) / warmup
    return PEAK_LR * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))))


def make_optimizer(model: LlamaForCausalLM) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices only."""
    groups = [{"params": [p], "weight_decay": WEIGHT_DECAY if p.ndim > 1 else 0.0} for p in model.parameters()]
    return torch.optim.AdamW(groups, lr=PEAK_LR, betas=(0.9, 0.95), fused=True)


def train_step(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, ids: torch.Tensor, lr: float) -> float:
    """Take one step on ``ids`` (batch, sequence) and return the loss in nats per token."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    logits = model(input_ids=ids[:, :-1]).logits
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    return loss.item()


def steps_in(minutes: float, model: LlamaForCausalLM, ids: torch.Tensor) -> int:
    """Measure on a copy how many steps fit into ``minutes``."""
    trial = copy.deepcopy(model)
    optimizer, seconds = make_optimizer(trial), []
    for _ in range(8):
        start = time.perf_counter()
        train_step(trial, optimizer, ids, 0.0)
        seconds.append(time.perf_counter() - start)
    return max(1, int(minutes * 60 / sorted(seconds[2:])[3]))


@dataclass(frozen=True)
class Progressed:
    """What a checkpoint says about the run that wrote it."""

    step: int
    steps: int
    seed: int
    seconds: float
    tokenizer: str


def save_checkpoint(path: Path, model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, run: Progressed) -> None:
    """Write weights, AdamW moments and progress into one file, whole or not at all."""
    tensors = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    for index, moments in optimizer.state_dict()["state"].items():
        tensors |= {f"adamw.{index}.{name}": value for name, value in moments.items()}
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata={"progress": json.dumps(vars(run))})
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.replace(path)


def load_checkpoint(path: Path, model: LlamaForCausalLM, optimizer: torch.optim.Optimizer) -> Progressed:
    """Put the checkpoint at ``path`` into ``model`` and ``optimizer``."""
    if not path.is_file():
        raise BackboneError(
            f"There is no checkpoint at {path}. Start without --resume, or name its folder with --work."
        )
    state: dict[int, dict[str, torch.Tensor]] = {}
    parameters = dict(model.named_parameters())
    with safe_open(path, framework="pt") as file:
        run = Progressed(**json.loads(file.metadata()["progress"]))
        for key in file.keys():  # noqa: SIM118 - not a dict
            kind, rest = key.split(".", 1)
            if kind == "model":
                parameters[rest].data.copy_(file.get_tensor(key))
            else:
                index, name = rest.split(".")
                state.setdefault(int(index), {})[name] = file.get_tensor(key)
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    return run


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


def cpu_name() -> str:
    """Return the processor's model name, without anything that names the machine."""
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


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


def export(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, readme: str, out: Path) -> None:
    """Write the folder, after checking that a copy read back offline gives the same ids and the same logits."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as name:
        folder = Path(name)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "README.md").write_text(readme, encoding="utf-8")
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
        for file in sorted(folder.iterdir()):
            shutil.copyfile(file, out / f".{file.name}.partial")
            (out / f".{file.name}.partial").replace(out / file.name)


def main(
    data: Annotated[Path, typer.Option(help="Folder with gsm8k/ and mmlu/.")],
    out: Annotated[Path, typer.Option(help="Folder of the finished model.")],
    minutes: Annotated[float, typer.Option(help="Training time to aim at; ignored with --steps.")] = 25.0,
    steps: Annotated[int | None, typer.Option(help="Exact number of steps, for a repeatable run.")] = None,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of weights, order and wording.")] = 0,
    work: Annotated[Path, typer.Option(help="Folder of the checkpoint.")] = Path("runs/tiny-backbone"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint in --work.")] = False,
) -> None:
    """Train the tiny backbone and write it, with its model card, to OUT."""
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    train, held_out = load_split(data)
    tokenizer = train_tokenizer(render(row, random.Random(f"{seed}:{i}")) for i, row in enumerate(train))
    digest = hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()
    model = build_model(tokenizer, seed)
    optimizer = make_optimizer(model)
    work.mkdir(parents=True, exist_ok=True)
    checkpoint = work / "checkpoint.safetensors"
    if resume:
        run = load_checkpoint(checkpoint, model, optimizer)
        if (run.seed, run.tokenizer, run.steps) != (seed, digest, steps or run.steps):
            raise BackboneError(f"{checkpoint} is of a run with other data, --seed or --steps. Start without --resume.")
    else:
        total = steps or steps_in(minutes, model, next(batches(train, tokenizer, seed)))
        run = Progressed(0, total, seed, 0.0, digest)
    model.train()
    columns = TextColumn("step {task.completed:.0f}/{task.total:.0f}"), BarColumn(), TimeRemainingColumn()
    with Progress(*columns, TextColumn("loss {task.fields[loss]:.3f}")) as bar:
        task, mean = bar.add_task("train", total=run.steps, completed=run.step, loss=math.nan), math.nan
        start, already = time.perf_counter(), run.seconds
        for step, ids in enumerate(itertools.islice(batches(train, tokenizer, seed), run.step, run.steps), run.step):
            loss = train_step(model, optimizer, ids, learning_rate(step, run.steps))
            mean = loss if math.isnan(mean) else 0.95 * mean + 0.05 * loss
            bar.update(task, advance=1, loss=mean)
            if (step + 1) % CHECKPOINT_EVERY == 0 or step + 1 == run.steps:
                run = Progressed(step + 1, run.steps, seed, already + time.perf_counter() - start, digest)
                save_checkpoint(checkpoint, model, optimizer, run)
    first_epoch = epoch_tokens(train, tokenizer, seed, 0)
    groups = {
        "gsm8k": [render(row) for row in held_out if "choices" not in row],
        "mmlu": [render(row) for row in held_out if "choices" in row],
    }
    groups["both"] = groups["gsm8k"] + groups["mmlu"]
    losses = {name: held_out_losses(model, tokenizer, texts, first_epoch) for name, texts in groups.items()}
    export(model, tokenizer, card(losses, model.num_parameters(), threads, len(train), run), out)
    typer.echo(json.dumps({"steps": run.steps, "minutes": run.seconds / 60, "held_out": losses}, indent=1))


if __name__ == "__main__":
    try:
        typer.run(main)
    except FedloomError as error:
        sys.exit(str(error))
