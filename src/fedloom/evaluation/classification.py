"""Accuracy, macro precision and macro recall of generated labels, for tasks whose answer is one of a few words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sklearn.metrics import precision_recall_fscore_support

from fedloom.data.metrics import choice_letter, first_word
from fedloom.data.sources import Example
from fedloom.data.tasks import TASKS
from fedloom.types import Plain

#: Metric of a task → how its answer is read; the metric itself reads it the same way.
READERS: dict[str, Callable[[str], str | None]] = {"letter": choice_letter, "word": first_word}


def classify(
    answers: Mapping[str, Sequence[str]], examples: Mapping[str, Sequence[Example]]
) -> dict[str, dict[str, Plain]]:
    """Return ``label_metrics`` of each task that is a classification and has rows.

    Args:
        answers: task → generated texts.
        examples: task → the examples behind them, same order.
    """
    found = {}
    for name, texts in answers.items():
        task = TASKS.get(name)
        if texts and task is not None and (read := READERS.get(task.metric)) is not None:
            found[name] = label_metrics([read(e.response) for e in examples[name]], [read(t) for t in texts])
    return found


def label_metrics(true: Sequence[str | None], said: Sequence[str | None]) -> dict[str, Plain]:
    """Compare what was said with what is true; a class is what is true of at least one row.

    An answer that is no class counts as wrong, and for no class: it lowers accuracy and recall, not precision.

    Returns:
        ``labels``, sorted; ``accuracy``; ``precision`` and ``recall``, plain means over classes, 0 for a class that was
        never said; ``confusion``: a row for each true class with counts of each class said, and last of anything else.
    """
    rows = [str(label) for label in true]
    labels = sorted(set(rows))
    columns = [label if label in labels else "" for label in said]
    precision, recall, _, _ = precision_recall_fscore_support(
        rows, columns, labels=labels, average="macro", zero_division=0
    )
    counts = {label: dict.fromkeys([*labels, ""], 0) for label in labels}
    for row, column in zip(rows, columns, strict=True):
        counts[row][column or ""] += 1
    return {
        "labels": labels,
        "accuracy": sum(counts[label][label] for label in labels) / len(rows),
        "precision": float(precision),
        "recall": float(recall),
        "confusion": [list(line.values()) for line in counts.values()],
    }
