"""Accuracy, macro precision and recall by hand and by scikit-learn, and answers read as the metrics read them."""

from __future__ import annotations

import pytest
from sklearn.metrics import classification_report, confusion_matrix

from fedloom.data.metrics import score_each
from fedloom.data.sources import Example, conversation
from fedloom.data.tasks import TASKS
from fedloom.evaluation.classification import classify, label_metrics


def test_three_classes_and_an_answer_that_is_none_by_hand() -> None:
    """a: 2 of 3 right, said 3 times of which 2 right; b: 1 of 2, said 1 time; c: 0 of 1, never said."""
    true = ["a", "a", "a", "b", "b", "c"]
    said = ["a", "a", None, "b", "zebra", "a"]
    found = label_metrics(true, said)
    assert found["labels"] == ["a", "b", "c"]
    assert found["accuracy"] == 3 / 6
    assert found["precision"] == pytest.approx((2 / 3 + 1 + 0) / 3)
    assert found["recall"] == pytest.approx((2 / 3 + 1 / 2 + 0) / 3)
    assert found["confusion"] == [[2, 0, 0, 1], [0, 1, 0, 1], [1, 0, 0, 0]]


def test_against_scikit_learn_where_every_answer_is_a_class() -> None:
    true = list("abacbbcaabcc")
    said = list("abbcbacaaacb")
    found = label_metrics(true, said)
    report = classification_report(true, said, output_dict=True)
    assert isinstance(report, dict)
    assert found["accuracy"] == pytest.approx(report["accuracy"])
    assert found["precision"] == pytest.approx(report["macro avg"]["precision"])
    assert found["recall"] == pytest.approx(report["macro avg"]["recall"])
    assert [line[:-1] for line in found["confusion"]] == confusion_matrix(true, said).tolist()


def test_answers_are_read_as_the_metric_reads_them() -> None:
    """The accuracy is the mean score, whatever stands around the label."""
    answers = {
        "ag_news": ["Sports.", " **world** news", "it is business", "", "Sci/Tech", "science"],
        "mmlu": ["(B)", "The answer is C.", "b", "A or B", "", "D"],
        "gsm8k": ["#### 3"],
    }
    true = {
        "ag_news": ["sports", "world", "business", "science", "science", "science"],
        "mmlu": ["B", "C", "B", "A", "A", "C"],
        "gsm8k": ["#### 3"],
    }
    examples = {name: [Example(conversation("?", label), name) for label in labels] for name, labels in true.items()}
    found = classify(answers, examples)
    assert sorted(found) == ["ag_news", "mmlu"]  # a number is no label
    for name, result in found.items():
        scores = [score_each(TASKS[name], a, e) for a, e in zip(answers[name], examples[name], strict=True)]
        assert result["accuracy"] == sum(scores) / len(scores)
    assert found["ag_news"]["labels"] == ["business", "science", "sports", "world"]
    assert found["ag_news"]["confusion"] == [[0, 0, 0, 0, 1], [0, 1, 0, 0, 2], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0]]
    assert found["mmlu"]["accuracy"] == 3 / 6


def test_nothing_to_classify() -> None:
    mine = [Example(conversation("?", "yes"))]
    assert classify({"ag_news": [], "mine": ["yes"]}, {"ag_news": [], "mine": mine}) == {}
