"""The tasks: how a row becomes a prompt and a target."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fedloom.data.sources import (
    Example,
    as_text,
    conversation,
    examples_of,
    field,
    load_hub,
    located,
    read_rows,
    text_field,
)
from fedloom.errors import ConfigError, DataError, nearest

LETTERS = "ABCDE"

#: What a prompt says before its row. Written out in full sentences, as instruction data usually is: the benchmark of
#: FedWeave "contains distinct instruction patterns that can be recovered from the frozen representations", and with
#: one-line instructions SmolLM2-135M's features merged tasks (docs/benchmark.md has the figures).
INSTRUCTIONS = {
    "gsm8k": (
        "You are given a maths word problem. Work it out step by step, writing every calculation as a sentence with "
        "its numbers. After the last step, write a line with #### and then the final number, and nothing more."
    ),
    "sentiment": (
        "You are given a short message that somebody posted on social media. Decide whether the sentiment that its "
        "writer expresses is negative, neutral or positive, and answer with just that one word."
    ),
    "news": (
        "You are given the beginning of a news item. Decide whether its topic is world, sports, business or science, "
        "and answer with just that one word."
    ),
    "science": (
        "You are given a science question from a school examination together with several possible answers, each "
        "marked with a capital letter. Choose the one that is right, and answer with just its letter."
    ),
    "subject": (
        "You are given a question about {subject} together with several possible answers, each marked with a capital "
        "letter. Choose the one that is right, and answer with just its letter."
    ),
    "edit": (
        "You are given a sentence written by a learner or taken from an encyclopaedia. Edit the text as asked, so that "
        "the result reads well and keeps the meaning, and answer with just the edited text."
    ),
}


class Parts(NamedTuple):
    """What a row says: the prompt, the answer to learn, and (where there are several) all accepted answers."""

    prompt: str
    response: str
    references: tuple[str, ...] = ()


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        name: its key in ``TASKS`` and the name of its folder.
        description: one line for people.
        example: row → prompt, target, references.
        metric: key of ``metrics.METRICS``.
        max_new_tokens: greedy decoding budget (64/192/4/4: FedWeave, section 4.1).
        hub: (dataset, config, {our split: hub split}); None where no hub dataset has these fields.
    """

    name: str
    description: str
    example: Callable[[Mapping[str, Any]], Parts]
    metric: str
    max_new_tokens: int
    hub: tuple[str, str | None, dict[str, str]] | None


# --- rows → parts -----------------------------------------------------------------------------------------------------


def _gsm8k(row: Mapping[str, Any]) -> Parts:
    # The target is the whole worked answer with its "#### N". The calculator marks <<48/2=24>> are left out: they are
    # meant for a tool, and repeat what the text says.
    answer = re.sub(r"<<[^<>]*>>", "", text_field(row, "answer")).strip()
    return Parts(f"{INSTRUCTIONS['gsm8k']}\n\nProblem:\n{text_field(row, 'question').strip()}", answer)


SENTIMENTS = ("negative", "neutral", "positive")
TOPICS = ("world", "sports", "business", "science")  # one word each; AG News calls the last one Sci/Tech


def _label(row: Mapping[str, Any], words: Sequence[str]) -> str:
    label = field(row, "label")
    if type(label) is not int or not 0 <= label < len(words):  # JSON's true is an int to isinstance
        raise DataError(f"field 'label' is {label!r}. Use 0 to {len(words) - 1} ({', '.join(words)}).")
    return words[label]


def _sentiment(row: Mapping[str, Any]) -> Parts:
    return Parts(
        f"{INSTRUCTIONS['sentiment']}\n\nMessage:\n{text_field(row, 'text').strip()}",
        _label(row, SENTIMENTS),
    )


def _ag_news(row: Mapping[str, Any]) -> Parts:
    return Parts(
        f"{INSTRUCTIONS['news']}\n\nNews:\n{text_field(row, 'text').strip()}",
        _label(row, TOPICS),
    )


def _texts(value: Any, name: str) -> list[str]:
    """Return ``value`` if it is a list of texts; a text counts as none, or its letters would be its items."""
    if not isinstance(value, list):
        raise DataError(f'field \'{name}\' must be a list of texts, not {type(value).__name__}. Write ["…", "…"].')
    return [as_text(item, f"{name}[{i}]") for i, item in enumerate(value)]


def _choices(intro: str, question: str, choices: Sequence[str], answer: int) -> Parts:
    if not 2 <= len(choices) <= len(LETTERS):
        raise DataError(f"field 'choices' has {len(choices)} choices. Give 2 to {len(LETTERS)}.")
    lines = [f"{LETTERS[i]}. {choice.strip()}" for i, choice in enumerate(choices)]
    return Parts("\n".join([f"{intro}\n\nQuestion:\n{question.strip()}", *lines]), LETTERS[answer])


def _arc(row: Mapping[str, Any]) -> Parts:
    choices = field(row, "choices")
    if not isinstance(choices, Mapping):
        raise DataError(
            f"field 'choices' must be an object of two lists, not {type(choices).__name__}. "
            'Write {"text": ["…", "…"], "label": ["A", "B"]}.'
        )
    texts, labels = (_texts(field(choices, name), f"choices.{name}") for name in ("text", "label"))
    if len(texts) != len(labels):
        raise DataError(f"field 'choices' has {len(texts)} texts and {len(labels)} labels. Give each text its label.")
    key = text_field(row, "answerKey")
    if key not in labels:
        raise DataError(f"field 'answerKey' is {key!r}, but the choices are {labels!r}. Name one of them.")
    # Labels are A-E or 1-5: the position gives the letter either way.
    return _choices(INSTRUCTIONS["science"], text_field(row, "question"), texts, labels.index(key))


def _mmlu(row: Mapping[str, Any]) -> Parts:
    choices, answer = _texts(field(row, "choices"), "choices"), field(row, "answer")
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise DataError(f"field 'answer' is {answer!r}. Use the index of the right choice, from 0.")
    subject = text_field(row, "subject").replace("_", " ")
    return _choices(INSTRUCTIONS["subject"].format(subject=subject), text_field(row, "question"), choices, answer)


EDITS = {
    "gec": "Correct the mistakes in this sentence so that it reads fluently.",
    "simplification": "Rewrite this sentence in simpler words. Keep its meaning.",
}


def _text_edit(row: Mapping[str, Any]) -> Parts:
    edit = text_field(row, "task")
    if edit not in EDITS:
        raise DataError(f"field 'task' is {edit!r}.{nearest(edit, EDITS)}")
    targets = field(row, "targets")
    if not isinstance(targets, list) or not targets:
        raise DataError("field 'targets' must be a list with at least one text.")
    references = tuple(as_text(target, f"targets[{i}]").strip() for i, target in enumerate(targets))
    prompt = f"{INSTRUCTIONS['edit']}\n\n{EDITS[edit]}\n{text_field(row, 'source').strip()}"
    return Parts(prompt, references[0], references)


def _coedit(row: Mapping[str, Any]) -> Parts:
    # CoEdIT's source already begins with its instruction ("Fix grammar: …").
    return Parts(text_field(row, "src").strip(), text_field(row, "tgt").strip())


# --- the registry -----------------------------------------------------------------------------------------------------


def _same(*splits: str) -> dict[str, str]:
    return {split: split for split in splits}


TASKS: dict[str, Task] = {
    "gsm8k": Task(
        name="gsm8k",
        description="Grade-school word problems, worked in full; exact final number",
        example=_gsm8k,
        metric="number",
        max_new_tokens=192,
        hub=("openai/gsm8k", "main", _same("train", "test")),
    ),
    "tweet_eval_sentiment": Task(
        name="tweet_eval_sentiment",
        description="Sentiment of a short message: negative, neutral or positive; accuracy",
        example=_sentiment,
        metric="word",
        max_new_tokens=4,
        hub=("cardiffnlp/tweet_eval", "sentiment", _same("train", "validation", "test")),
    ),
    "arc_challenge": Task(
        name="arc_challenge",
        description="Hard science questions with 3 to 5 choices; exact letter",
        example=_arc,
        metric="letter",
        max_new_tokens=4,
        hub=("allenai/ai2_arc", "ARC-Challenge", _same("train", "validation", "test")),
    ),
    "text_edit": Task(
        name="text_edit",
        description="Correction (JFLEG) and simplification (ASSET) of sentences; mean ROUGE, best reference",
        example=_text_edit,
        metric="rouge",
        max_new_tokens=64,
        hub=None,
    ),
    "coedit": Task(
        name="coedit",
        description="Text editing by instruction (CoEdIT); mean ROUGE",
        example=_coedit,
        metric="rouge",
        max_new_tokens=64,
        hub=("grammarly/coedit", None, _same("train", "validation")),
    ),
    "ag_news": Task(
        name="ag_news",
        description="Topic of a news item: world, sports, business or science; accuracy",
        example=_ag_news,
        metric="word",
        max_new_tokens=4,
        hub=("fancyzhx/ag_news", None, _same("train", "test")),
    ),
    "mmlu": Task(
        name="mmlu",
        description="Questions from 57 subjects with 4 choices; exact letter",
        example=_mmlu,
        metric="letter",
        max_new_tokens=4,
        hub=("cais/mmlu", "all", _same("dev", "validation", "test")),
    ),
}


def get_task(name: str) -> Task:
    """Return a task by name; an unknown one is a ConfigError that names the nearest."""
    if name not in TASKS:
        raise ConfigError(f"unknown task {name!r}.{nearest(name, TASKS)}")
    return TASKS[name]


def task_splits(name: str, root: str | Path | None = None) -> list[str]:
    """Return the splits of a task, sorted: the files in ``root/<name>``, or what the hub dataset has."""
    task = get_task(name)
    if root is None:
        return sorted(_hub(task)[2])
    splits = sorted(path.stem for path in (Path(root) / name).glob("*.jsonl"))
    if not splits:
        raise DataError(f"{Path(root) / name}: no .jsonl file for task '{name}'. Check the data folder.")
    return splits


def load_task(name: str, split: str, root: str | Path | None = None) -> list[Example]:
    """Return all examples of a split, in row order, from ``root/<name>/<split>.jsonl`` or else from the hub."""
    task = get_task(name)
    splits = task_splits(name, root)
    if split not in splits:
        raise DataError(f"task '{name}' has no split '{split}'.{nearest(split, splits)}")
    if root is None:
        source, config, hub_splits = _hub(task)
        place, rows = source, list(enumerate(load_hub(source, config, hub_splits[split]), start=1))
    else:
        path = Path(root) / name / f"{split}.jsonl"
        source, place, rows = f"{name}/{split}.jsonl", str(path), list(read_rows(path))
    return _examples(task, rows, place, source, split)


def read_task_file(name: str, path: str | Path, *, strict: bool = False) -> list[Example]:
    """Return the examples of one file: of a known task with its own fields, or rows of prompt and response.

    Rows count as the user's own where the first of them holds ``prompt`` or ``messages``.
    """
    path = Path(path)
    rows = list(read_rows(path))
    own = name not in TASKS or not rows or rows[0][1].keys() & {"prompt", "messages"}
    if own:
        return examples_of(rows, path, task=name, strict=strict)[0]
    return _examples(TASKS[name], rows, str(path), path.name, "")


def _examples(
    task: Task, rows: Sequence[tuple[int, Mapping[str, Any]]], place: str, source: str, split: str
) -> list[Example]:
    examples = []
    for index, (number, row) in enumerate(rows):
        with located(place, number):
            prompt, response, references = task.example(row)
        examples.append(Example(conversation(prompt, response), task.name, references, source, split, index))
    return examples


def _hub(task: Task) -> tuple[str, str | None, dict[str, str]]:
    if task.hub is None:
        raise DataError(
            f"task '{task.name}' is not on the hub in these fields. Give a data folder with {task.name}/<split>.jsonl."
        )
    return task.hub
