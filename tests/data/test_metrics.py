from __future__ import annotations

from decimal import Decimal

import pytest
from rouge_score.rouge_scorer import RougeScorer

from fedloom.data.metrics import METRICS, final_number, rouge_mean, score, score_each
from fedloom.data.sources import Example, conversation
from fedloom.data.tasks import TASKS
from fedloom.errors import DataError


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("6 + 12 = 18\n#### 18", 18),
        ("#### 1,450,000", 1450000),
        ("#### $18.50.", "18.5"),
        ("#### -10", -10),
        ("#### -$3", -3),
        ("#### $-3", -3),
        ("#### \u22127", -7),
        ("####18.0", 18),
        ("#### 5\n\nNext problem: 7\n#### 9", 5),
        ("so she has 1,234 eggs.", 1234),
        ("16-3=13, and 13-5 is 8", 8),
        ("take 5-3", 3),
        ("it is -4", -4),
        ("0.5 litres", "0.5"),
        ("1, 2,3", 3),
        ("18", 18),
        ("#### none, though 5 was near", 5),
        ("5 apples ####", None),
        ("no number", None),
        ("", None),
    ],
)
def test_final_number(text, number):
    assert final_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("metric", "prediction", "reference", "expected"),
    [
        ("number", "I get $1,000.00.", "... #### 1000", 1),
        ("number", "#### 1001", "... #### 1000", 0),
        ("number", "", "#### 0", 0),
        ("letter", "B", "B", 1),
        ("letter", " (B) because", "B", 1),
        ("letter", "The answer is B.", "B", 1),
        ("letter", "Because", "B", 0),
        ("letter", "b", "B", 0),
        ("letter", "C or B", "B", 0),
        ("letter", "A\nB", "A", 1),
        ("word", " Positive.", "positive", 1),
        ("word", "**positive**", "positive", 1),
        ("word", "positively", "positive", 0),
        ("word", "not positive", "positive", 0),
        ("word", "", "positive", 0),
        ("exact", " A  b\n", "a B", 1),
        ("exact", "ab", "a b", 0),
    ],
)
def test_metric_golden(metric, prediction, reference, expected):
    assert METRICS[metric](prediction, [reference]) == expected


def test_rouge_by_hand():
    # ROUGE-1: 3 of 3 and 3 of 4; ROUGE-2: 2 of 2 and 2 of 3; longest common subsequence: 3 of 3 and 3 of 4.
    expected = (6 / 7 + 4 / 5 + 6 / 7) / 3
    assert rouge_mean("the cat sat", ["the cat sat down"]) == pytest.approx(expected, abs=1e-12)
    assert rouge_mean("The cat, sat", ["a dog", "the cat sat down"]) == pytest.approx(expected, abs=1e-12)
    assert rouge_mean("", ["the cat"]) == 0


def test_rouge_takes_the_best_reference_for_each_type_and_splits_sentences():
    prediction = "Tides rise. The moon pulls water! Why?"
    references = ["The moon pulls water. Tides rise.", "Water rises as the moon pulls."]
    lines = "Tides rise.\nThe moon pulls water!\nWhy?"
    reference_lines = ["The moon pulls water.\nTides rise.", "Water rises as the moon pulls."]
    scorer = RougeScorer(["rouge1", "rouge2", "rougeLsum"])
    expected = sum(
        max(scorer.score(reference, lines)[kind].fmeasure for reference in reference_lines)
        for kind in ("rouge1", "rouge2", "rougeLsum")
    )
    assert rouge_mean(prediction, references) == pytest.approx(expected / 3, abs=1e-12)
    # 6 words of 7 are shared; with one sentence a line, the order of the sentences does not matter to Lsum.
    assert scorer.score(reference_lines[0], lines)["rougeLsum"].fmeasure == pytest.approx(12 / 13)


def test_score_is_the_mean_of_each():
    task = TASKS["tweet_eval_sentiment"]
    examples = [Example(conversation("p", word)) for word in ("neutral", "positive", "neutral", "negative")]
    predictions = ["neutral", "positive.", "positive", "neutral"]
    assert [score_each(task, *pair) for pair in zip(predictions, examples)] == [1, 1, 0, 0]
    assert score(METRICS[task.metric], predictions, [(e.response,) for e in examples]) == 0.5


def test_score_each_uses_all_references():
    example = Example(conversation("p", "one two"), references=("one two", "three four"))
    assert score_each(TASKS["text_edit"], "three four", example) == 1


@pytest.mark.parametrize(("predictions", "references"), [([], []), (["a"], [])])
def test_a2_score_of_nothing_is_a_clear_error(predictions, references):
    with pytest.raises(DataError, match="at least one"):
        score(METRICS["word"], predictions, references)
