"""What the scripts that train the shipped tiny models share: rows, options, learning rate, checkpoints, folder writing.

Data: gsm8k train rows 0..4972 and mmlu (validation, dev, test), all under the MIT licence. Later gsm8k train rows, and
the gsm8k test file, are kept for the federated benchmark and are never read here.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import transformers
import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from fedloom.errors import BackboneError, DataError, FedloomError

FLOOR, WARMUP, WEIGHT_DECAY, CLIP = 0.05, 100, 0.1, 1.0
GSM8K_ROWS, GSM8K_HELD_OUT = 4973, 4700  # rows 4700..4972 are held out, rows from 4973 on are never used
MMLU_HELD_OUT = 50  # one question in fifty
CHECKPOINT_EVERY = 200
Row = dict[str, Any]
Item = TypeVar("Item")

Data = Annotated[Path, typer.Option(help="Folder with gsm8k/ and mmlu/.")]
Out = Annotated[Path, typer.Option(help="Folder of the finished model.")]
Minutes = Annotated[float, typer.Option(help="Training time to aim at; ignored with --steps.")]
Steps = Annotated[int | None, typer.Option(help="Exact number of steps, for a repeatable run.")]
Threads = Annotated[int, typer.Option(help="CPU threads.")]
Seed = Annotated[int, typer.Option(help="Seed of weights, order and examples.")]
Work = Annotated[Path, typer.Option(help="Folder of the checkpoint.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint in --work.")]


def command(main: Callable[..., None]) -> None:
    """Run a script's ``main`` with the options given; what goes wrong is said in one line."""
    try:
        typer.run(main)
    except FedloomError as error:
        sys.exit(str(error))


def repeatable(threads: int) -> None:
    """Compute the same bits in every run, and let ``transformers`` say nothing."""
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def digest(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return what tells one tokenizer from another."""
    return hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()


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


def epoch_tokens(rows: list[Row], tokenizer: PreTrainedTokenizerFast, seed: int, epoch: int) -> torch.Tensor:
    """Return one epoch's documents, ``BOS text EOS`` end to end, in an order and wording of its own: (tokens,)."""
    rng = random.Random(f"{seed}:{epoch}")
    texts = [render(row, rng) for row in rows]
    rng.shuffle(texts)
    return torch.tensor([i for ids in tokenizer(texts)["input_ids"] for i in [*ids, tokenizer.eos_token_id]])


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up, then a cosine down to ``FLOOR`` of the peak."""
    warmup = min(WARMUP, steps // 10 + 1)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))))


def make_optimizer(model: PreTrainedModel, lr: float) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices only."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def train_step(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[Any, Item], torch.Tensor],
    batch: Item,
    lr: float,
) -> float:
    """Take one step on ``batch`` and return the loss."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    loss = loss_of(model, batch)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    return loss.item()


def steps_in(minutes: float, model: PreTrainedModel, loss_of: Callable[[Any, Item], torch.Tensor], batch: Item) -> int:
    """Measure on a copy how many steps fit into ``minutes``."""
    trial = copy.deepcopy(model)
    optimizer, seconds = make_optimizer(trial, 0.0), []
    for _ in range(8):
        start = time.perf_counter()
        train_step(trial, optimizer, loss_of, batch, 0.0)
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


def save_checkpoint(path: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer, run: Progressed) -> None:
    """Write weights, AdamW moments and progress into one file, whole or not at all."""
    tensors = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    for index, moments in optimizer.state_dict()["state"].items():
        tensors |= {f"adamw.{index}.{name}": value for name, value in moments.items()}
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata={"progress": json.dumps(vars(run))})
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.replace(path)


def load_checkpoint(path: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> Progressed:
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


def train(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    batches: Callable[[], Iterator[Item]],
    loss_of: Callable[[Any, Item], torch.Tensor],
    peak: float,
    work: Path,
    *,
    seed: int,
    tokenizer: str,
    steps: int | None,
    minutes: float,
    resume: bool,
) -> Progressed:
    """Train ``model``, from the start or from the checkpoint in ``work``, and return what was run.

    Args:
        model: trained in place.
        optimizer: of ``make_optimizer``.
        batches: begins the endless series of batches, the same one each time.
        loss_of: loss of the model on a batch.
        peak: highest learning rate.
        work: folder of the checkpoint.
        seed: of weights and batches.
        tokenizer: digest of the tokenizer; a checkpoint of another one is refused.
        steps: number of steps; None takes as many as fit into ``minutes``.
        minutes: training time to aim at.
        resume: go on from the checkpoint.
    """
    work.mkdir(parents=True, exist_ok=True)
    checkpoint = work / "checkpoint.safetensors"
    if resume:
        run = load_checkpoint(checkpoint, model, optimizer)
        if (run.seed, run.tokenizer, run.steps) != (seed, tokenizer, steps or run.steps):
            raise BackboneError(f"{checkpoint} is of a run with other data, --seed or --steps. Start without --resume.")
    else:
        run = Progressed(0, steps or steps_in(minutes, model, loss_of, next(batches())), seed, 0.0, tokenizer)
    model.train()
    columns = TextColumn("step {task.completed:.0f}/{task.total:.0f}"), BarColumn(), TimeRemainingColumn()
    with Progress(*columns, TextColumn("loss {task.fields[loss]:.3f}")) as bar:
        task, mean = bar.add_task("train", total=run.steps, completed=run.step, loss=math.nan), math.nan
        start, already = time.perf_counter(), run.seconds
        for step, batch in enumerate(itertools.islice(batches(), run.step, run.steps), run.step):
            loss = train_step(model, optimizer, loss_of, batch, learning_rate(step, run.steps, peak))
            mean = loss if math.isnan(mean) else 0.95 * mean + 0.05 * loss
            bar.update(task, advance=1, loss=mean)
            if (step + 1) % CHECKPOINT_EVERY == 0 or step + 1 == run.steps:
                run = Progressed(step + 1, run.steps, seed, already + time.perf_counter() - start, tokenizer)
                save_checkpoint(checkpoint, model, optimizer, run)
    return run


def cpu_name() -> str:
    """Return the processor's model name, without anything that names the machine."""
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def export(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    readme: str,
    out: Path,
    check: Callable[[Path], None],
) -> None:
    """Write the folder, after ``check`` found that a copy read back computes the same."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as name:
        folder = Path(name)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "README.md").write_text(readme, encoding="utf-8")
        check(folder)
        for file in sorted(folder.iterdir()):
            shutil.copyfile(file, out / f".{file.name}.partial")
            (out / f".{file.name}.partial").replace(out / file.name)
