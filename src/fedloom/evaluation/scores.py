"""Task scores by greedy generation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fedloom.data.metrics import METRICS, score_each
from fedloom.data.sources import Example
from fedloom.data.tasks import TASKS
from fedloom.data.tokenize import end_token_id
from fedloom.evaluation.generate import greedy
from fedloom.evaluation.losses import gates_for, macro
from fedloom.runtime.client import Rows, Workbench

#: For a test file whose name is not a known task.
DEFAULT_NEW_TOKENS = 64


def score_tasks(
    bench: Workbench,
    tasks: Mapping[str, Rows],
    examples: Mapping[str, Sequence[Example]],
    mode: str,
    advance: Callable[[int], None] | None = None,
) -> tuple[dict[str, float | None], dict[str, list[float]]]:
    """Generate answers and score them.

    A test set that is not a known task is scored by exact match (up to case and white space).

    Args:
        tasks: task → encoded rows.
        examples: task → the examples behind the rows, same order.
        mode: routing, see ``adapters.router.route``.

    Returns:
        task → mean score with ``macro``, the plain mean over tasks; and task → score of each example.
    """
    tokenizer = bench.backbone.tokenizer
    stop = [end_token_id(tokenizer)]
    means: dict[str, float | None] = {}
    each: dict[str, list[float]] = {}
    for name, rows in tasks.items():
        task = TASKS.get(name)
        prompts = [e.ids[: e.prompt_length] for e in rows.encoded]
        budget = task.max_new_tokens if task else DEFAULT_NEW_TOKENS
        answers = greedy(bench, prompts, gates_for(bench, rows, mode), budget, stop, advance=advance)
        texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
        each[name] = [
            score_each(task, text, example)
            if task
            else METRICS["exact"](text, example.references or (example.response,))
            for text, example in zip(texts, examples[name], strict=True)
        ]
        means[name] = sum(each[name]) / len(each[name]) if each[name] else None
    return means | {"macro": macro(list(means.values()))}, each
