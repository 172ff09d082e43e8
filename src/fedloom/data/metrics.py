"""How an answer is scored. A metric takes one prediction and its accepted answers and gives a score in [0, 1]."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

from fedloom.data.sources import Example
from fedloom.data.tasks import LETTERS, Task
from fedloom.errors import DataError

_NUMBER = re.compile(r"((?<![\w)])-)?(?:\$(-?))?((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)")


def final_number(text: str) -> Decimal | None:
    """Return the number after the first ``####``, or, without that mark, the last number of the text.

    Thousands commas, a dollar sign and a closing period are passed over. A minus counts unless it stands after a word,
    a number or a bracket (``5-3`` ends in 3). The first mark, as in the scorer of the GSM8K authors: a model that does
    not stop may go on to another problem.
    """
    text = text.replace("\u2212", "-")
    _, mark, after = text.partition("####")
    found = list(_NUMBER.finditer(after if mark else text))
    if not found:
        return None
    outer, inner, digits = found[0 if mark else -1].groups()
    value = Decimal(digits.replace(",", ""))
    return -value if outer or inner else value


def choice_letter(text: str) -> str | None:
    """Return the first capital A to E that stands alone as a word: ``(B)``, ``B.``, ``The answer is B`` give B."""
    found = re.search(rf"\b([{LETTERS}])\b", text)
    return found.group(1) if found else None


def first_word(text: str) -> str:
    """Return the first run of letters in lower case: ``" Positive."`` and ``"**positive**"`` give ``positive``."""
    found = re.search(r"[^\W\d_]+", text)
    return found.group().casefold() if found else ""


def number_match(prediction: str, references: Sequence[str]) -> float:
    """Return 1 if the final numbers are equal as numbers (18 = 18.0)."""
    number = final_number(prediction)
    return float(number is not None and any(number == final_number(r) for r in references))


def letter_match(prediction: str, references: Sequence[str]) -> float:
    """Return 1 if the chosen letter is right."""
    letter = choice_letter(prediction)
    return float(letter is not None and any(letter == choice_letter(r) for r in references))


def word_match(prediction: str, references: Sequence[str]) -> float:
    """Return 1 if the first word is right."""
    word = first_word(prediction)
    return float(bool(word) and any(word == first_word(r) for r in references))


def exact_match(prediction: str, references: Sequence[str]) -> float:
    """Return 1 if the texts are equal up to white space and case."""
    normal = [" ".join(text.split()).casefold() for text in (prediction, *references)]
    return float(normal[0] in normal[1:])


@functools.cache
def _rouge_scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer  # imported here: it pulls in nltk

    return RougeScorer(["rouge1", "rouge2", "rougeLsum"], use_stemmer=False)


def _sentences_on_lines(text: str) -> str:
    return re.sub(r"(?<=[.!?])\s+", "\n", text.strip())


def rouge_mean(prediction: str, references: Sequence[str]) -> float:
    """Return the mean of ROUGE-1, ROUGE-2 and ROUGE-Lsum F1, each against its best reference, without stemming.

    ROUGE-Lsum wants one sentence a line; texts are broken after ``.``, ``!`` or ``?`` before white space. The library's
    tokenizer knows a-z and 0-9 only, so other scripts score 0.
    """
    texts = [_sentences_on_lines(text) for text in references]
    scores = _rouge_scorer().score_multi(texts, _sentences_on_lines(prediction))
    return float(sum(score.fmeasure for score in scores.values()) / len(scores))


Metric = Callable[[str, Sequence[str]], float]

METRICS: dict[str, Metric] = {
    "number": number_match,
    "letter": letter_match,
    "word": word_match,
    "exact": exact_match,
    "rouge": rouge_mean,
}


def score(metric: Metric, predictions: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Return the mean of ``metric`` over predictions and the accepted answers of each, in [0, 1]."""
    if not predictions or len(predictions) != len(references):
        raise DataError(
            f"{len(predictions)} predictions for {len(references)} references. Give as many of each, and at least one."
        )
    return sum(map(metric, predictions, references)) / len(predictions)


def score_each(task: Task, prediction: str, example: Example) -> float:
    """Return the score of one prediction, in [0, 1]; the mean over examples is the task's score."""
    return METRICS[task.metric](prediction, example.references or (example.response,))
