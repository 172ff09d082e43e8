from __future__ import annotations

import pytest

from fedloom.data import sources, tasks
from fedloom.data.metrics import score_each
from fedloom.data.sources import conversation
from fedloom.data.tasks import TASKS, get_task, load_task, read_task_file
from fedloom.errors import ConfigError, DataError, nearest

GSM8K = {"question": "2 pens at $9 each?", "answer": "It is 2 * 9 = $<<2*9=18>>18.\n#### 18"}
TWEET = {"text": "hm ", "label": 2}
ARC = {"question": "Why?", "choices": {"text": ["x", "y", "z"], "label": ["1", "2", "3"]}, "answerKey": "3"}
CHOICES = ARC["choices"]
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
        ("arc_challenge", {**ARC, "choices": ["x", "y"]}, "field 'choices' must be an object of two lists, not list"),
        ("arc_challenge", {**ARC, "choices": [{"text": "x", "label": "1"}]}, "field 'choices' must be an object"),
        ("arc_challenge", {**ARC, "choices": "text label"}, "field 'choices' must be an object of two lists, not str"),
        ("arc_challenge", {**ARC, "choices": 3}, "field 'choices' must be an object of two lists, not int"),
        ("arc_challenge", {**ARC, "choices": {**CHOICES, "label": 5}}, "field 'choices.label' must be a list of texts"),
        ("arc_challenge", {**ARC, "choices": {**CHOICES, "text": 5}}, "field 'choices.text' must be a list of texts"),
        (
            "arc_challenge",
            {**ARC, "choices": {"text": ["x", "y"], "label": "AB"}, "answerKey": "AB"},
            "'choices.label'",
        ),
        (
            "arc_challenge",
            {**ARC, "choices": {**CHOICES, "label": [1, 2, 3]}},
            r"field 'choices.label\[0\]' must be text",
        ),
        ("arc_challenge", {**ARC, "choices": {**CHOICES, "label": ["3"]}}, "has 3 texts and 1 labels. Give each text"),
        ("mmlu", {**MMLU, "choices": 4}, "field 'choices' must be a list of texts, not int. Write"),
        ("mmlu", {**MMLU, "choices": "abcd"}, "field 'choices' must be a list of texts, not str"),
        ("mmlu", {**MMLU, "choices": {"k": 1, "l": 2}}, "field 'choices' must be a list of texts, not dict"),
        ("mmlu", {**MMLU, "answer": True}, "field 'answer' is True"),
        ("tweet_eval_sentiment", {"text": "t", "label": True}, "field 'label' is True"),
        ("text_edit", {**EDIT, "task": "gek"}, "field 'task' is 'gek'. Did you mean 'gec'"),
        ("text_edit", {**EDIT, "targets": []}, "field 'targets' must be a list"),
    ],
)
def test_d2_bad_field_of_a_task_row_is_named(write_jsonl, tmp_path, task, row, says):
    write_jsonl(f"{task}/train.jsonl", row)
    with pytest.raises(DataError, match=rf"train\.jsonl, row 1: .*{says}"):
        load_task(task, "train", tmp_path)


def test_the_nearest_words_are_told_whatever_the_known_ones_are():
    assert nearest("text", [{"label": 1}, "texts", 3]) == " Did you mean 'texts'?"
    assert nearest(["x"], {1: "a", "b": 2}) == " Known: 1, b."


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


def test_a_file_of_a_task_has_its_fields_or_the_users_own(write_jsonl, monkeypatch):
    reads = []
    read_rows = tasks.read_rows
    monkeypatch.setattr(tasks, "read_rows", lambda path: reads.append(path) or read_rows(path))
    monkeypatch.setattr(sources, "read_rows", None)  # a file is read once
    (example,) = read_task_file("tweet_eval_sentiment", write_jsonl("a.jsonl", TWEET))
    assert (example.response, example.task, example.source) == ("positive", "tweet_eval_sentiment", "a.jsonl")
    row = {"prompt": "p", "response": "r"}
    for name in ("tweet_eval_sentiment", "mine"):
        (example,) = read_task_file(name, write_jsonl("b.jsonl", row, {"prompt": "p", "response": ""}))
        assert (example.messages, example.task) == (conversation("p", "r"), name)
    with pytest.raises(DataError, match=r"b\.jsonl, row 2: field 'response' is empty"):
        read_task_file("mine", write_jsonl("b.jsonl", row, {"prompt": "p", "response": ""}), strict=True)
    with pytest.raises(DataError, match=r"c\.jsonl: the file holds no rows"):
        read_task_file("gsm8k", write_jsonl("c.jsonl"))
    assert len(reads) == 5


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
