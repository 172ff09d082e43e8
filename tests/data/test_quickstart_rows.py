from __future__ import annotations

from collections import Counter
from importlib import resources

import pytest

from fedloom.data.metrics import score_each
from fedloom.data.tasks import TASKS, load_task

ROOT = resources.files("fedloom") / "assets" / "quickstart"
SIZES = {"gsm8k": (90, 30), "arc_challenge": (90, 30), "tweet_eval_sentiment": (76, 24), "text_edit": (76, 24)}


@pytest.mark.parametrize("task", SIZES)
def test_rows_read_as_the_task_and_no_test_prompt_is_trained_on(task):
    train, test = (load_task(task, split, ROOT) for split in ("train", "test"))
    assert (len(train), len(test)) == SIZES[task]
    assert len({e.prompt for e in train + test}) == sum(SIZES[task])
    assert all(score_each(TASKS[task], e.response, e) == 1 for e in train + test)


def test_public_rows_are_unchanged_and_unseen_by_the_small_backbone(data_root):
    seen = {e.prompt for e in load_task("gsm8k", "train", data_root)[:4973]}
    for task in ("gsm8k", "arc_challenge"):
        originals = {(e.prompt, e.response) for e in load_task(task, "train", data_root)}
        rows = [e for split in ("train", "test") for e in load_task(task, split, ROOT)]
        assert {(e.prompt, e.response) for e in rows} <= originals
        assert not seen & {e.prompt for e in rows}


def test_test_rows_are_balanced_where_it_matters():
    assert Counter(e.response for e in load_task("tweet_eval_sentiment", "test", ROOT)) == {
        "negative": 8, "neutral": 8, "positive": 8,
    }  # fmt: skip


def test_licences_name_every_folder():
    text = (ROOT / "LICENSES.md").read_text(encoding="utf-8")
    assert all(f"`{task}`" in text for task in SIZES)
    assert "CC BY-SA 4.0" in text
    assert "MIT" in text
