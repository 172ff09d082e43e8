from __future__ import annotations

from decimal import Decimal

import pytest
from rouge_score.rouge_scorer import RougeScorer

from fedloom.data import tasks
from fedloom.data.sources import Example, conversation
from fedloom.data.tasks import METRICS, TASKS, final_number, get_task, load_task, rouge_mean, score, score_each
from fedloom.errors import ConfigError, DataError

GSM8K = {"question": "2 pens at $9 each?", "answer": "It is 2 * 9 = $<<2*9=18>>18.\n#### 18"}
TWEET = {"text": "hm ", "label": 2}
ARC = {"question": "Why?", "choices": {"text": ["x", "y", "z"], "label": ["1", "2", "3"]}, "answerKey": "3"}
MMLU = {"subject": "abstract_algebra", "question": " Q", "choices": ["k", "l", "m", "n"], "answer": 1}
EDIT = {"task": "gec", "source": "He go . ", "targets": ["He goes . ", "He went ."]}


@pytest.mark.parametrize(
    ("task", "row", "ends", "response", "references"),
    [
        ("gsm8k", GSM8K, "\n\nProblem:\n2 pens at $9 each?", "It is 2 * 9 = $18.\n#### 18", ()),
        ("tweet_eval_sentiment", TWEET, "\n\nMessage:\nhm", "positive", ()),
        ("arc_challenge", ARC, "\n\nQuestion:\nWhy?\nA. x\nB. y\nC. z", "C", ()),
        ("mmlu", MMLU, "\n\nQuestion:\nQ\nA. k\nB. l\nC. m\nD. n", "B", ()),
        ("text_edit", EDIT, "fluently.\nHe go .", "He goes .", ("He goes .", "He went .")),
        ("coedit", {"src": "Fix grammar: He go", "tgt": "He goes"}, "Fix grammar: He go", "He goes", ()),
        ("ag_news", {"text": "t", "label": 3}, "\n\nNews:\nt", "science", ()),
    ],
)  # fmt: skip
def test_rows_become_prompts_and_targets(task, row, ends, response, references):
    parts = TASKS[task].example(row)
    assert parts.prompt.endswith(ends)
    assert (parts.response, parts.references) == (response, references)


def test_text_edit_asks_for_what_is_wanted():
    gec, simple = (TASKS["text_edit"].example({**EDIT, "task": t}).prompt for t in ("gec", "simplification"))
    assert "mistakes" in gec
    assert "simpler" in simple


@pytest.mark.parametrize(
    ("task", "row", "says"),
    [
        ("gsm8k", {"question": "q", "answer": None}, "field 'answer' is null"),
        ("gsm8k", {"answer": "q"}, "field 'question' is missing"),
        ("tweet_eval_sentiment", {"text": "t", "label": 3}, "field 'label' is 3. Use 0 to 2"),
        ("tweet_eval_sentiment", {"text": "t", "label": -1}, "field 'label' is -1"),
        ("arc_challenge", {**ARC, "answerKey": "A"}, "field 'answerKey' is 'A'"),
        ("mmlu", {**MMLU, "answer": 4}, "field 'answer' is 4"),
        ("mmlu", {**MMLU, "choices": ["k", "l", None, "n"]}, r"field 'choices\[2\]' must be text"),
        ("text_edit", {**EDIT, "task": "gek"}, "field 'task' is 'gek'. Did you mean 'gec'"),
        ("text_edit", {**EDIT, "targets": []}, "field 'targets' must be a list"),
    ],
)
def test_d2_bad_field_of_a_task_row_is_named(write_jsonl, tmp_path, task, row, says):
    write_jsonl(f"{task}/train.jsonl", row)
    with pytest.raises(DataError, match=rf"train\.jsonl, row 1: .*{says}"):
        load_task(task, "train", tmp_path)


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


def test_paper_budgets():
    budgets = {name: task.max_new_tokens for name, task in TASKS.items()}
    assert budgets == {
        "gsm8k": 192, "tweet_eval_sentiment": 4, "arc_challenge": 4, "text_edit": 64, "coedit": 64,
        "ag_news": 4, "mmlu": 4,
    }  # fmt: skip


def test_unknown_task_and_split_name_the_nearest(write_jsonl, tmp_path):
    with pytest.raises(ConfigError, match="Did you mean 'gsm8k'"):
        get_task("gsm8")
    write_jsonl("gsm8k/train.jsonl", GSM8K)
    with pytest.raises(DataError, match=r"no split 'trian'\. Did you mean 'train'"):
        load_task("gsm8k", "trian", tmp_path)
    with pytest.raises(DataError, match=r"no \.jsonl file for task 'mmlu'"):
        load_task("mmlu", "test", tmp_path)
    with pytest.raises(DataError, match="not on the hub"):
        load_task("text_edit", "train")


def test_hub_rows_carry_their_source(monkeypatch):
    asked = []
    monkeypatch.setattr(tasks, "load_hub", lambda *names: asked.append(names) or [GSM8K])
    (example,) = load_task("gsm8k", "test")
    assert asked == [("openai/gsm8k", "main", "test")]
    assert (example.source, example.split, example.row, example.task) == ("openai/gsm8k", "test", 0, "gsm8k")


@pytest.mark.parametrize("name", [name for name in TASKS if name != "coedit"])
def test_every_real_row_reads_and_scores_itself(data_root, name):
    for split in tasks.task_splits(name, data_root):
        examples = load_task(name, split, data_root)
        assert [e.row for e in examples] == list(range(len(examples)))
        assert {(e.split, e.task) for e in examples} == {(split, name)}
        assert all(score_each(TASKS[name], e.response, e) == 1 for e in examples[:300])
