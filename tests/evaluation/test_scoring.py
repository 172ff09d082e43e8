"""What a score counts is said where it stands: the words of a task are those of its metric and its length."""

from __future__ import annotations

from fedloom.data.metrics import METRICS
from fedloom.evaluation.scores import COUNTED, scoring


def test_every_metric_has_words_and_a_users_own_task_is_an_exact_match() -> None:
    assert COUNTED.keys() == METRICS.keys()
    assert scoring(["mine", "gsm8k"]) == (
        "Score of mine: exact match up to case and white space, in at most 64 tokens; gsm8k: the right final number, "
        "in at most 192 tokens."
    )
