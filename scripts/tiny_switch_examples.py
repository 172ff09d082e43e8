"""What the tiny Switch Transformer learns from: windows with hidden spans, and short tasks made from the rows."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tiny_training import Row, epoch_tokens
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fedloom.data.tasks import INSTRUCTIONS

SENTINELS = 16
WINDOW = 128  # tokens
WINDOWS, SUBJECTS, SECTIONS, TASKS = 4, 12, 16, 4  # of each so many a step
NOISE, SPAN = 0.4, 4  # share of a window that is hidden, mean length of a hidden span
SUBJECT_PROMPT, PROMPT = 64, 128  # longest prompt in tokens
LISTED = 280  # most characters of what a response is read from, so that it fits into the prompt
#: Which section of a newspaper subjects of mmlu are nearest to. Sports is none of them: there words of a text decide.
SECTION_OF = {
    "world": (
        "global_facts high_school_european_history high_school_geography high_school_government_and_politics "
        "high_school_us_history high_school_world_history international_law security_studies us_foreign_policy "
        "world_religions"
    ),
    "business": (
        "business_ethics econometrics high_school_macroeconomics high_school_microeconomics management marketing "
        "professional_accounting public_relations"
    ),
    "science": (
        "astronomy college_biology college_chemistry college_computer_science college_physics computer_security "
        "conceptual_physics electrical_engineering high_school_biology high_school_chemistry "
        "high_school_computer_science high_school_physics machine_learning virology"
    ),
}
SPORTS = re.compile(
    r"\b(sports?|basketball|soccer|football|baseball|tennis|hockey|golf|volleyball|swimm\w*|racing|runners?|marathon|teams?|"
    r"coach|players?|tournament|league|olympics?|championship|athletes?|medals?|touchdowns?)\b",
    re.IGNORECASE,
)
Pair = tuple[list[int], list[int]]  # what the encoder reads, what the decoder writes


@dataclass(frozen=True)
class Batch:
    """Padded examples: source ids (b, s), its mask (b, s), labels (b, t) with -100 where nothing is to be written."""

    ids: torch.Tensor
    mask: torch.Tensor
    labels: torch.Tensor


def extend(folder: Path) -> PreTrainedTokenizerFast:
    """Return the tokenizer in ``folder`` with sentinels for hidden spans."""
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(folder, local_files_only=True)  # type: ignore[assignment]
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<extra_id_{i}>" for i in range(SENTINELS)]})
    return tokenizer


def sentinel_ids(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Return the ids of the sentinels in their order."""
    return [tokenizer.get_vocab()[f"<extra_id_{i}>"] for i in range(SENTINELS)]


def cut(total: int, parts: int, rng: random.Random) -> list[int]:
    """Return ``parts`` random positive lengths that sum to ``total``."""
    marks = [0, *sorted(rng.sample(range(1, total), parts - 1)), total]
    return [b - a for a, b in itertools.pairwise(marks)]


def corrupt(window: list[int], sentinels: Sequence[int], end: int, rng: random.Random) -> Pair:
    """Hide random spans of ``window``, each behind a sentinel; the target lists sentinels and what they hide."""
    hidden = max(1, round(NOISE * len(window)))
    spans = min(len(sentinels), max(1, round(hidden / SPAN)))
    source: list[int] = []
    target: list[int] = []
    at = 0
    shown = cut(len(window) - hidden, spans, rng)
    for sentinel, keep, hide in zip(sentinels, shown, cut(hidden, spans, rng)):
        source += [*window[at : at + keep], sentinel]
        target += [sentinel, *window[at + keep : at + keep + hide]]
        at += keep + hide
    return source, [*target, end]


def windows(rows: list[Row], tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[Pair]:
    """Yield corrupted windows of the rows' documents without end."""
    sentinels = sentinel_ids(tokenizer)
    rng = random.Random(f"windows {seed}")
    for epoch in itertools.count():
        stream = epoch_tokens(rows, tokenizer, seed, epoch)
        for window in stream[: len(stream) // WINDOW * WINDOW].view(-1, WINDOW).tolist():
            yield corrupt(window, sentinels, tokenizer.eos_token_id, rng)


def name_subject(row: Row, rng: random.Random) -> tuple[str, str]:
    """Make the task of naming a row's subject from its question, its choices or both: (prompt, response)."""
    question = row["question"].strip()
    subject = row["subject"].replace("_", " ") if "choices" in row else "grade school mathematics"
    listed = "\n".join(row["choices"]) if "choices" in row else row["answer"]
    text = rng.choice((question, question, f"{question}\n{listed}", listed))
    return f"Name the subject of this text.\n\nText:\n{text}", subject


def section_of(row: Row) -> str | None:
    """Return the section of a newspaper that a row is nearest to, if any: its subject's, or sports by its words."""
    if "choices" not in row or row["subject"] == "miscellaneous":
        return "sports" if SPORTS.search(row["question"]) else None
    return next((section for section, subjects in SECTION_OF.items() if row["subject"] in subjects.split()), None)


def name_section(row: Row, section: str, rng: random.Random) -> tuple[str, str]:
    """Make the task of naming a row's section, as fedloom asks for the topic of news: (prompt, response)."""
    question = row["question"].strip()
    text = rng.choice((question, question, "\n".join([question, *row["choices"]]))) if "choices" in row else question
    return f"{INSTRUCTIONS['news']}\n\nNews:\n{text}", section


def ask(row: Row, other: Row, rng: random.Random) -> tuple[str, str, str]:
    """Make another task of a row: (task, prompt, response). ``other`` is another row of the same source."""
    question = row["question"].strip()
    choices = row.get("choices")
    right = choices[row["answer"]] if choices else row["answer"].split("\n####")[0]
    listed = "\n".join(f"{name}. {choice}" for name, choice in zip("ABCD", choices)) if choices else right
    task = rng.choices(("answer", "find", "start", "belongs"), (4 if choices else 1, 3 if choices else 0, 2, 3))[0]
    if len(listed) + (len(question) if task == "answer" and choices else 0) > LISTED and task in ("answer", "find"):
        task = "start"  # the prompt would lose what the answer is read from
    if task == "answer":
        if choices:
            return task, f"Choose the right answer.\n\nQuestion:\n{question}\n{listed}", "ABCD"[row["answer"]]
        result = row["answer"].split("####")[1].strip()
        return "result", f"What is the result of this calculation?\n\nText:\n{right}", result
    if task == "find" and choices:
        place = rng.randrange(4)
        if rng.random() < 0.5:
            return task, f"Which letter marks {choices[place]}?\n\n{listed}", "ABCD"[place]
        return task, f"What stands beside {'ABCD'[place]}?\n\n{listed}", choices[place]
    if task == "start":
        words = question.split()[:4]
        return task, f"Repeat the first {len(words)} words.\n\nText:\n{question}", " ".join(words)
    fits = rng.random() < 0.5
    stranger = other["choices"][other["answer"]] if choices else other["answer"].split("\n")[0]
    answer = right.split("\n")[0] if fits else stranger
    prompt = f"Does the answer belong to the question?\n\nAnswer:\n{answer}\n\nQuestion:\n{question}"
    return task, prompt, "yes" if fits else "no"


def by_source(rows: list[Row]) -> dict[bool, list[Row]]:
    """Return the rows of mmlu (True) and of gsm8k (False)."""
    return {kind: [row for row in rows if ("choices" in row) is kind] for kind in (True, False)}


def encode(prompt: str, response: str, tokenizer: PreTrainedTokenizerFast, longest: int = PROMPT) -> Pair:
    """Tokenise a task as fedloom does: plain headings, one BOS before the prompt, EOS after the response.

    A long prompt loses text before its last heading, never the heading.
    """
    tail = tokenizer("\n\n### Response:\n", add_special_tokens=False)["input_ids"]
    head = tokenizer(f"### Instruction:\n{prompt}")["input_ids"]
    written = tokenizer(response, add_special_tokens=False)["input_ids"][: PROMPT // 4]
    return [*head[: longest - len(tail)], *tail], [*written, tokenizer.eos_token_id]


def shuffled(rows: list[Row], every: int, rng: random.Random) -> Iterator[Row]:
    """Yield rows without end in a new order each time, of gsm8k only one in ``every``: it is all of one kind."""
    for epoch in itertools.count():
        order = [row for i, row in enumerate(rows) if "choices" in row or i % every == epoch % every]
        rng.shuffle(order)
        yield from order


def subject_pairs(rows: list[Row], tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[Pair]:
    """Yield tokenised subject tasks without end."""
    rng = random.Random(f"subjects {seed}")
    for row in shuffled(rows, 20, rng):
        yield encode(*name_subject(row, rng), tokenizer, SUBJECT_PROMPT)


def section_pairs(rows: list[Row], tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[Pair]:
    """Yield tokenised section tasks without end, of each section alike often."""
    rng = random.Random(f"sections {seed}")
    pools: dict[str, list[Row]] = {}
    for row in rows:
        if (section := section_of(row)) is not None:
            pools.setdefault(section, []).append(row)
    streams = {
        section: shuffled(pool, 1, random.Random(f"{section} {seed}")) for section, pool in sorted(pools.items())
    }
    while True:
        section = rng.choice(list(streams))
        yield encode(*name_section(next(streams[section]), section, rng), tokenizer)


def task_pairs(rows: list[Row], tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[Pair]:
    """Yield the other tokenised tasks without end."""
    rng = random.Random(f"tasks {seed}")
    kin = by_source(rows)
    for row in shuffled(rows, 3, rng):
        _, prompt, response = ask(row, rng.choice(kin["choices" in row]), rng)
        yield encode(prompt, response, tokenizer)


def collate(pairs: Iterable[Pair], pad: int) -> Batch:
    """Pad on the right to the longest source and the longest target."""
    sources, targets = zip(*pairs)
    long, wide = max(map(len, sources)), max(map(len, targets))
    ids = torch.tensor([[*s, *[pad] * (long - len(s))] for s in sources])
    mask = torch.tensor([[1] * len(s) + [0] * (long - len(s)) for s in sources])
    return Batch(ids, mask, torch.tensor([[*t, *[-100] * (wide - len(t))] for t in targets]))


def batches(rows: list[Row], tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[tuple[Batch, ...]]:
    """Yield (windows, subjects, sections, other tasks) without end."""
    streams = (
        (windows(rows, tokenizer, seed), WINDOWS),
        (subject_pairs(rows, tokenizer, seed), SUBJECTS),
        (section_pairs(rows, tokenizer, seed), SECTIONS),
        (task_pairs(rows, tokenizer, seed), TASKS),
    )
    while True:
        yield tuple(collate(itertools.islice(pairs, count), tokenizer.pad_token_id) for pairs, count in streams)


def held_out_pairs(rows: list[Row], tokenizer: PreTrainedTokenizerFast) -> list[tuple[str, Pair]]:
    """Return named examples of held-out rows, the same ones on each call: every window once, three tasks a row.

    Subjects are asked of mmlu only, from the question only.
    """
    rng = random.Random("held out")
    sentinels = sentinel_ids(tokenizer)
    stream = epoch_tokens(rows, tokenizer, 0, 0)
    cuts = stream[: len(stream) // WINDOW * WINDOW].view(-1, WINDOW).tolist()
    named: list[tuple[str, Pair]] = [("spans", corrupt(w, sentinels, tokenizer.eos_token_id, rng)) for w in cuts]
    kin = by_source(rows)
    for row in kin[True]:
        prompt, subject = f"Name the subject of this text.\n\nText:\n{row['question'].strip()}", row["subject"]
        named.append(("subject", encode(prompt, subject.replace("_", " "), tokenizer, SUBJECT_PROMPT)))
    for row in rows:
        if (section := section_of(row)) is not None:
            named.append(("section", encode(*name_section(row, section, rng), tokenizer)))
    for row in rows * 3:
        task, prompt, response = ask(row, rng.choice(kin["choices" in row]), rng)
        named.append((task, encode(prompt, response, tokenizer)))
    return named
