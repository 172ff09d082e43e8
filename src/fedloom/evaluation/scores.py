"""Task scores by greedy generation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from fedloom.data.metrics import METRICS, score_each
from fedloom.data.sources import Example
from fedloom.data.tasks import TASKS
from fedloom.data.tokenize import stop_tokens
from fedloom.evaluation.generate import greedy
from fedloom.evaluation.losses import gates_for, macro
from fedloom.runtime.client import Rows, Workbench

#: For a test file whose name is not a known task.
DEFAULT_NEW_TOKENS = 64


def new_tokens(task: str) -> int:
    """Return the most tokens of an answer to a task's test rows."""
    return TASKS[task].max_new_tokens if task in TASKS else DEFAULT_NEW_TOKENS


#: What each metric counts, in words.
COUNTED = {
    "number": "the right final number",
    "letter": "the right letter",
    "word": "the right first word",
    "exact": "exact match up to case and white space",
    "rouge": "the mean of ROUGE-1, ROUGE-2 and ROUGE-Lsum",
}


def scoring(tasks: Iterable[str]) -> str:
    """Say what each task's score counts, and in how many tokens of an answer."""
    metrics = {task: TASKS[task].metric if task in TASKS else "exact" for task in tasks}
    said = (f"{task}: {COUNTED[metric]}, in at most {new_tokens(task)} tokens" for task, metric in metrics.items())
    return f"Score of {'; '.join(said)}."


def score_tasks(
    bench: Workbench,
    tasks: Mapping[str, Rows],
    examples: Mapping[str, Sequence[Example]],
    mode: str,
    advance: Callable[[int], None] | None = None,
) -> tuple[dict[str, float | None], dict[str, list[float]]]:
    """Generate answers and score them; see ``answer_tasks`` and ``score_answers``."""
    return score_answers(answer_tasks(bench, tasks, mode, advance), examples)


def answer_tasks(
    bench: Workbench, tasks: Mapping[str, Rows], mode: str, advance: Callable[[int], None] | None = None
) -> dict[str, list[str]]:
    """Return task → generated text of each row.

    Args:
        tasks: task → encoded rows.
        mode: routing, see ``adapters.router.route``.
    """
    tokenizer = bench.backbone.tokenizer
    stop = stop_tokens(tokenizer)
    texts: dict[str, list[str]] = {}
    for name, rows in tasks.items():
        prompts = [e.ids[: e.prompt_length] for e in rows.encoded]
        answers = greedy(bench, prompts, gates_for(bench, rows, mode), new_tokens(name), stop, advance=advance)
        texts[name] = tokenizer.batch_decode(answers, skip_special_tokens=True)
    return texts


def score_answers(
    answers: Mapping[str, Sequence[str]], examples: Mapping[str, Sequence[Example]]
) -> tuple[dict[str, float | None], dict[str, list[float]]]:
    """Score texts; those of a test set that is no known task by exact match (up to case and white space).

    Args:
        answers: task → generated texts.
        examples: task → the examples behind them, same order.

    Returns:
        task → mean score with ``macro``, the plain mean over tasks; and task → score of each example.
    """
    means: dict[str, float | None] = {}
    each: dict[str, list[float]] = {}
    for name, texts in answers.items():
        task = TASKS.get(name)
        each[name] = [
            score_each(task, text, example)
            if task
            else METRICS["exact"](text, example.references or (example.response,))
            for text, example in zip(texts, examples[name], strict=True)
        ]
        means[name] = sum(each[name]) / len(each[name]) if each[name] else None
    return means | {"macro": macro(list(means.values()))}, each
