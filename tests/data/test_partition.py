from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.data import partition
from fedloom.data.partition import build_benchmark, client_names, dirichlet, dirichlet_counts
from fedloom.data.tasks import load_task
from fedloom.errors import ConfigError, DataError

PAPER = ("text_edit", "gsm8k", "tweet_eval_sentiment", "arc_challenge")


@pytest.fixture
def small_root(write_jsonl, tmp_path):
    """60 + 20 tweets and 50 problems; every text is its own."""
    write_jsonl("tweet_eval_sentiment/train.jsonl", *({"text": f"tweet {i}", "label": i % 3} for i in range(60)))
    write_jsonl("tweet_eval_sentiment/test.jsonl", *({"text": f"other {i}", "label": i % 3} for i in range(20)))
    write_jsonl("gsm8k/train.jsonl", *({"question": f"problem {i}", "answer": f"#### {i}"} for i in range(50)))
    return tmp_path


def small(root, tasks=("gsm8k", "tweet_eval_sentiment"), **changes):
    settings = {"seed": 42, "clients": 4, "alpha": 0.3, "train": 30, "val": 5, "test": 10, **changes}
    return build_benchmark(tasks, root=root, **settings)


def keys(examples):
    return [(e.task, e.split, e.row) for e in examples]


def all_parts(bench):
    return [*bench.clients.values(), *bench.validation.values(), *bench.test.values()]


# --- Dirichlet counts -------------------------------------------------------------------------------------------------


@given(
    totals=st.lists(st.integers(0, 3000), min_size=1, max_size=6),
    clients=st.integers(1, 150),
    alpha=st.floats(1e-9, 1e9),
    seed=st.integers(0, 2**32),
)
def test_counts_sum_to_the_totals_and_repeat_with_the_seed(totals, clients, alpha, seed):
    counts = dirichlet_counts(totals, clients, alpha, np.random.default_rng(seed))
    assert counts.shape == (len(totals), clients)
    assert counts.min() >= 0
    assert counts.sum(axis=1).tolist() == totals
    assert np.array_equal(counts, dirichlet_counts(totals, clients, alpha, np.random.default_rng(seed)))


@pytest.mark.parametrize(
    ("p", "total", "expected"),
    [
        ([0.5, 0.3, 0.2], 7, [4, 2, 1]),  # quotas 3.5, 2.1, 1.4: one left, the largest remainder is the first
        ([0.25] * 4, 2, [1, 1, 0, 0]),  # ties go to the lowest client
        ([0.0, 1.0], 5, [0, 5]),
        ([0.6, 0.4], 0, [0, 0]),
    ],
)
def test_largest_remainder_golden(monkeypatch, p, total, expected):
    monkeypatch.setattr(partition, "dirichlet", lambda *_: np.array(p))
    assert dirichlet_counts([total], len(p), 1.0, np.random.default_rng(0)).tolist() == [expected]


@pytest.mark.parametrize("alpha", [0.05, 0.3, 1.0, 10.0])
def test_dirichlet_has_the_moments_of_the_distribution(alpha):
    size, draws = 5, 20_000
    rng = np.random.default_rng(1)
    p = np.stack([dirichlet(alpha, size, rng) for _ in range(draws)])
    variance = (1 / size) * (1 - 1 / size) / (size * alpha + 1)
    assert p.mean(axis=0) == pytest.approx(np.full(size, 1 / size), abs=5 * (variance / draws) ** 0.5)
    assert p.var(axis=0) == pytest.approx(np.full(size, variance), rel=0.06)
    # numpy's own sampler, largest share: a statistic that the two moments do not fix
    theirs = np.random.default_rng(2).dirichlet(np.full(size, alpha), draws).max(axis=1)
    assert p.max(axis=1).mean() == pytest.approx(theirs.mean(), abs=0.01)


@pytest.mark.parametrize("alpha", [1e-9, 1e-4])
def test_a11_tiny_alpha_gives_one_client_almost_all_and_never_nan(alpha):
    rng = np.random.default_rng(0)
    p = np.stack([dirichlet(alpha, 10, rng) for _ in range(1000)])
    assert np.isfinite(p).all()
    assert p.sum(axis=1) == pytest.approx(np.ones(1000))
    # E Σ p² = (alpha + 1) / (N · alpha + 1)
    assert (p**2).sum(axis=1).mean() == pytest.approx((alpha + 1) / (10 * alpha + 1), abs=2e-3)


def test_a11_a_class_with_fewer_rows_than_clients_runs_out_cleanly():
    counts = dirichlet_counts([3, 0, 1], 50, 0.1, np.random.default_rng(0))
    assert counts.sum(axis=1).tolist() == [3, 0, 1]


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_alpha_that_is_no_concentration_is_refused(alpha):
    with pytest.raises(ConfigError, match="alpha is"):
        dirichlet(alpha, 3, np.random.default_rng(0))


def test_client_names_sort_in_number_order():
    assert client_names(3) == ["client-00", "client-01", "client-02"]
    assert client_names(101)[-1] == "client-100"
    assert client_names(101) == sorted(client_names(101))


# --- the benchmark ----------------------------------------------------------------------------------------------------


def test_parts_are_disjoint_and_as_large_as_asked(small_root):
    bench = small(small_root)
    everything = [key for part in all_parts(bench) for key in keys(part)]
    assert len(everything) == len(set(everything)) == 2 * (30 + 5 + 10)
    assert {task: len(part) for task, part in bench.test.items()} == {"gsm8k": 10, "tweet_eval_sentiment": 10}
    assert {task: len(part) for task, part in bench.validation.items()} == {"gsm8k": 5, "tweet_eval_sentiment": 5}
    assert Counter(e.task for part in bench.clients.values() for e in part) == {"gsm8k": 30, "tweet_eval_sentiment": 30}
    assert {e.split for e in bench.test["tweet_eval_sentiment"]} == {"train", "test"}  # the splits are pooled


def test_a12_same_seed_same_benchmark_other_seed_other_samples(small_root):
    first, again, other = small(small_root), small(small_root), small(small_root, seed=43)
    assert first == again
    assert json.dumps(first.manifest) == json.dumps(again.manifest)
    assert keys(first.test["gsm8k"]) != keys(other.test["gsm8k"])
    assert all(keys(first.clients[name]) != keys(other.clients[name]) for name in first.clients)
    assert first.manifest["mix"] != other.manifest["mix"]


def test_a_task_does_not_depend_on_the_other_tasks_or_their_order(small_root):
    both, turned, alone = (
        small(small_root, tasks)
        for tasks in (("gsm8k", "tweet_eval_sentiment"), ("tweet_eval_sentiment", "gsm8k"), ("gsm8k",))
    )
    assert both == turned
    assert both.test["gsm8k"] == alone.test["gsm8k"]
    for name in both.clients:
        assert {k for k in keys(both.clients[name]) if k[0] == "gsm8k"} == set(keys(alone.clients[name]))


def test_test_rows_do_not_depend_on_alpha_clients_or_training_size(small_root):
    changed = small(small_root, alpha=5.0, clients=7, train=11)
    assert changed.test == small(small_root).test
    assert changed.validation == small(small_root).validation


def test_a3_clients_without_examples_remain(small_root):
    bench = small(small_root, clients=100, alpha=0.1)
    assert len(bench.clients) == 100
    empty = [name for name, examples in bench.clients.items() if not examples]
    assert empty
    assert bench.manifest["empty_clients"] == empty
    assert all(bench.manifest["mix"][name] == {} for name in empty)
    assert sum(map(len, bench.clients.values())) == 60


def test_manifest_is_json_and_traces_every_example(small_root):
    bench = small(small_root)
    manifest = json.loads(json.dumps(bench.manifest))
    assert manifest == bench.manifest
    rows = {
        (task, split, e.row): e
        for task, split in (("gsm8k", "train"), ("tweet_eval_sentiment", "train"), ("tweet_eval_sentiment", "test"))
        for e in load_task(task, split, small_root)
    }
    for part, recorded in ((bench.clients, "clients"), (bench.validation, "validation"), (bench.test, "test")):
        assert {name: [rows[tuple(key)] for key in listed] for name, listed in manifest[recorded].items()} == part
    assert manifest["pools"]["tweet_eval_sentiment"]["sources"] == {
        "test": {"source": "tweet_eval_sentiment/test.jsonl", "rows": 20},
        "train": {"source": "tweet_eval_sentiment/train.jsonl", "rows": 60},
    }
    counted = {name: dict(Counter(e.task for e in examples)) for name, examples in bench.clients.items()}
    assert manifest["mix"] == counted


def test_small_pool_keeps_test_and_validation_whole_and_says_so(small_root):
    bench = small(small_root, ("gsm8k",), train=2000)
    pool = bench.manifest["pools"]["gsm8k"]
    assert (pool["usable"], pool["test"], pool["validation"], pool["train"]) == (50, 10, 5, 35)
    assert pool["note"] == "the pool is too small: 35 training rows instead of 2000"


def test_a11_pool_without_a_training_row_is_a_clear_error(small_root):
    with pytest.raises(DataError, match="task 'gsm8k' has 50 usable rows, too few for 45 test and 5 validation rows"):
        small(small_root, ("gsm8k",), test=45)


def test_same_prompt_in_train_and_test_is_kept_once(small_root, write_jsonl):
    write_jsonl(
        "gsm8k/test.jsonl",
        {"question": "Problem  7", "answer": "#### 7"},  # as train row 7, but for case and white space
        {"question": "new", "answer": "#### 1"},
        {"question": "new", "answer": "#### 2"},
        {"question": "no answer", "answer": " "},
    )
    bench = small(small_root, ("gsm8k",), train=2000)
    pool = bench.manifest["pools"]["gsm8k"]
    assert pool["left_out"] == {"skipped": 0, "duplicates": 2, "empty_response": 1}
    assert pool["usable"] == 51
    prompts = [" ".join(e.prompt.lower().split()) for part in all_parts(bench) for e in part]
    assert len(prompts) == len(set(prompts)) == 51


def test_skipped_rows_and_their_copies_are_never_used(small_root, write_jsonl):
    write_jsonl("gsm8k/test.jsonl", {"question": "problem 3", "answer": "#### 3"})
    bench = small(small_root, ("gsm8k",), train=2000, skip={"gsm8k/train": 20})
    assert bench.manifest["pools"]["gsm8k"]["left_out"] == {"skipped": 20, "duplicates": 1, "empty_response": 0}
    used = {key[1:] for part in all_parts(bench) for key in keys(part)}
    assert used == {("train", row) for row in range(20, 50)}
    assert bench.manifest["skip"] == {"gsm8k/train": 20}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"skip": {"gsm8k/trian": 5}}, "skip: 'gsm8k/trian' is no split of task 'gsm8k'. Did you mean 'train'"),
        ({"skip": {"gsm8": 5}}, "unknown task 'gsm8'"),
        ({"skip": {"gsm8k/train": -1}}, "skip: 'gsm8k/train' is -1"),
        ({"tasks": ("gsm8k", "gsm8k")}, "each once"),
        ({"tasks": ()}, "at least one"),
        ({"tasks": ("gsm",)}, "unknown task 'gsm'. Did you mean 'gsm8k'"),
        ({"clients": 0}, "clients is 0"),
        ({"val": -1}, "val is -1"),
        ({"alpha": 0.0}, "alpha is 0"),
    ],
)
def test_wrong_settings_are_named(small_root, changes, says):
    with pytest.raises(ConfigError, match=says):
        small(small_root, **changes)


def test_paper_setting_on_real_rows(data_root):
    bench = build_benchmark(PAPER, root=data_root, seed=42, clients=20, alpha=0.3, skip={"gsm8k/train": 4973})
    assert {task: len(part) for task, part in bench.test.items()} == dict.fromkeys(sorted(PAPER), 400)
    assert {task: len(part) for task, part in bench.validation.items()} == dict.fromkeys(sorted(PAPER), 100)
    pools = bench.manifest["pools"]
    assert {task: pools[task]["train"] for task in PAPER if task != "arc_challenge"} == {
        "text_edit": 2000, "gsm8k": 2000, "tweet_eval_sentiment": 2000,
    }  # fmt: skip
    assert pools["arc_challenge"]["train"] == 1119 + 299 + 703 - 1 - 500  # one repeated question
    used = [e for part in all_parts(bench) for e in part]
    prompts = [" ".join(e.prompt.split()).casefold() for e in used]
    assert len(set(prompts)) == len(prompts) == 7620 + 2000
    assert min(e.row for e in used if (e.task, e.split) == ("gsm8k", "train")) >= 4973


def test_label_skew_draws_each_label_and_loses_no_row(tmp_path: Path) -> None:
    """Every label's training rows are spread by a draw of their own; the counts are those of ``dirichlet_counts``."""
    rows = [{"text": f"text {i} of kind {i % 4}", "label": i % 4} for i in range(240)]
    (tmp_path / "ag_news").mkdir()
    (tmp_path / "ag_news" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    drawn = build_benchmark(
        ["ag_news"], seed=3, clients=5, alpha=0.1, root=tmp_path, train=200, val=0, test=40, skew="label"
    )
    labels = {name: Counter(e.response.strip() for e in found) for name, found in drawn.clients.items()}
    total = sum(labels.values(), Counter())
    assert sum(total.values()) == 200
    assert set(total) == {"world", "sports", "business", "science"}
    held_out = Counter(e.response.strip() for e in drawn.test["ag_news"])
    assert total == Counter({label: 60 - held_out[label] for label in total})
    shares = [max(c.values()) / sum(c.values()) for c in labels.values() if sum(c.values()) >= 10]
    assert max(shares) > 0.6  # alpha 0.1: somebody holds mostly one label
    even = build_benchmark(
        ["ag_news"], seed=3, clients=5, alpha=1e6, root=tmp_path, train=200, val=0, test=40, skew="label"
    )
    for found in even.clients.values():
        assert all(9 <= n <= 11 for n in Counter(e.response for e in found).values())


def test_label_skew_refuses_what_are_no_labels(tmp_path: Path) -> None:
    (tmp_path / "gsm8k").mkdir()
    rows = [{"question": f"How many is {i}?", "answer": f"It is {i}.\n#### {i}"} for i in range(120)]
    (tmp_path / "gsm8k" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match="100 rows of 'gsm8k' have 100 different responses"):
        build_benchmark(["gsm8k"], seed=1, clients=2, alpha=1.0, root=tmp_path, train=100, val=0, test=20, skew="label")


@pytest.mark.parametrize("skew", ["task", "label"])
def test_a_floor_draws_again_until_every_client_has_it(small_root, skew: str) -> None:
    tasks, free = ("tweet_eval_sentiment",), {"alpha": 0.2, "skew": skew, "seed": 1}
    without = small(small_root, tasks, **free)
    smallest = min(len(rows) for rows in without.clients.values())
    same = small(small_root, tasks, **free, min_per_client=smallest)
    assert [keys(rows) for rows in same.clients.values()] == [keys(rows) for rows in without.clients.values()]
    assert smallest < 4
    floored = small(small_root, tasks, **free, min_per_client=4)
    assert min(len(rows) for rows in floored.clients.values()) >= 4
    assert sorted(keys(e for rows in floored.clients.values() for e in rows)) == sorted(
        keys(e for rows in without.clients.values() for e in rows)
    )
    assert keys(floored.test["tweet_eval_sentiment"]) == keys(without.test["tweet_eval_sentiment"])


def test_a_floor_out_of_reach_names_the_best_draw(small_root, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "MOST_DRAWS", 20)
    with pytest.raises(
        ConfigError, match=r"min_per_client is 8, but of 20 draws at alpha 0.3 the best left a client with"
    ):
        small(small_root, ("gsm8k",), min_per_client=8)  # 30 rows for 4 clients
