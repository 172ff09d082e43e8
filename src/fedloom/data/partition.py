"""The multi-task benchmark of FedWeave (arXiv 2607.26618, section 4.1): task budgets, and training rows over clients.

Every random draw has its own generator, derived from (seed, purpose, name), so that the rows of one task do not depend
on which other tasks are there, nor the test rows on the size of the training set.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.data.sources import Example
from fedloom.data.tasks import get_task, load_task, task_splits
from fedloom.errors import ConfigError, DataError, nearest

#: Responses of a task, beyond which they are no labels.
MOST_LABELS = 64

ALPHA_RANGE = (1e-9, 1e9)

#: Draws after which a floor under the clients' rows counts as out of reach.
MOST_DRAWS = 10_000


@dataclass(frozen=True)
class Benchmark:
    """Training rows by client, validation and test rows by task, and where every one of them came from.

    Attributes:
        clients: client → training examples, in a seeded order; a client may have none.
        validation: task → examples.
        test: task → examples.
        manifest: JSON-able record of sources, pools, budgets, the realised mix, and split and row of every example.
    """

    clients: dict[str, list[Example]]
    validation: dict[str, list[Example]]
    test: dict[str, list[Example]]
    manifest: dict[str, Any]


@dataclass(frozen=True)
class _Pool:
    examples: list[Example]
    record: dict[str, Any]


def build_benchmark(
    tasks: Sequence[str],
    *,
    seed: int,
    clients: int,
    alpha: float,
    root: str | Path | None = None,
    train: int = 2000,
    val: int = 100,
    test: int = 400,
    skip: Mapping[str, int] | None = None,
    skew: str = "task",
    min_per_client: int = 0,
) -> Benchmark:
    """Draw disjoint test, validation and training rows of each task and spread the training rows over clients.

    A task's splits are pooled, and rows with a prompt that stood earlier in the pool are left out, so that no test
    prompt can be a training prompt. Test rows are drawn first, then validation, then training rows; a pool too small
    for all gives test and validation in full and the rest to training. Training rows of each task go to clients by
    p ~ Dirichlet(alpha).

    Args:
        tasks: names of ``TASKS``.
        seed: the benchmark's seed.
        clients: how many clients.
        alpha: Dirichlet concentration; smaller means more unequal clients.
        root: folder of ``<task>/<split>.jsonl``; None reads the hub.
        train: training rows per task.
        val: validation rows per task.
        test: test rows per task.
        skip: ``{"task/split": n}`` leaves out the first n rows of a split (a backbone may have seen them in its own
            training), and any other row with the same prompt.
        skew: ``task``: one draw per task. ``label``: one draw per response of a task, for classification (FC-MoE,
            arXiv 2606.15625, after PFL-MoE): clients differ in the labels that they hold.
        min_per_client: draw the proportions again until every client has as many training rows.
    """
    _check(tasks, clients, {"train": train, "val": val, "test": test})
    skip = dict(skip or {})
    _check_skip(skip, tasks, root)
    names = client_names(clients)
    rows: dict[str, list[Example]] = {name: [] for name in names}
    validation_rows: dict[str, list[Example]] = {}
    test_rows: dict[str, list[Example]] = {}
    pools: dict[str, dict[str, Any]] = {}
    parts: dict[str, list[list[Example]]] = {}
    for task in sorted(tasks):
        pool = _pool(task, root, skip)
        order = _generator(seed, "pool", task).permutation(len(pool.examples))
        shuffled = [pool.examples[i] for i in order]
        if len(shuffled) < test + val + min(train, 1):
            raise DataError(
                f"task '{task}' has {len(shuffled)} usable rows, too few for {test} test and {val} validation rows and "
                "any training row. Ask for fewer, or give more data."
            )
        test_rows[task] = shuffled[:test]
        validation_rows[task] = shuffled[test : test + val]
        training = shuffled[test + val : test + val + train]
        pools[task] = {**pool.record, "test": test, "validation": val, "train": len(training)}
        if len(training) < train:
            pools[task]["note"] = f"the pool is too small: {len(training)} training rows instead of {train}"
        parts[task] = [training] if skew == "task" else list(by_response(training).values())
    sources = {task: _generator(seed, "clients", task) for task in parts}
    sizes = {task: [len(part) for part in found] for task, found in parts.items()}
    for task, split in _spread(sizes, clients, alpha, sources, min_per_client).items():
        for part, counts in zip(parts[task], split, strict=True):
            ends = np.cumsum(counts)
            for name, start, end in zip(names, ends - counts, ends, strict=True):
                rows[name] += part[start:end]
    for name in names:
        order = _generator(seed, "order", name).permutation(len(rows[name]))
        rows[name] = [rows[name][i] for i in order]
    manifest = {
        "format": 1,
        "seed": seed,
        "alpha": alpha,
        "budget": {"train": train, "validation": val, "test": test},
        "skip": skip,
        "skew": skew,
        "pools": pools,
        "mix": {name: dict(sorted(Counter(example.task for example in rows[name]).items())) for name in names},
        "empty_clients": [name for name in names if not rows[name]],
        # [task, split, row] of every example, in order
        "clients": {name: [[e.task, e.split, e.row] for e in rows[name]] for name in names},
        "validation": {task: [[e.task, e.split, e.row] for e in part] for task, part in validation_rows.items()},
        "test": {task: [[e.task, e.split, e.row] for e in part] for task, part in test_rows.items()},
    }
    return Benchmark(rows, validation_rows, test_rows, manifest)


def _spread(
    sizes: Mapping[str, Sequence[int]],
    clients: int,
    alpha: float,
    sources: Mapping[str, np.random.Generator],
    least: int,
) -> dict[str, NDArray[np.int64]]:
    """Return the counts of each task, (classes, clients), of the first draw that gives every client ``least`` rows.

    Raises:
        ConfigError: there is none among ``MOST_DRAWS``.
    """
    best = 0
    for _ in range(MOST_DRAWS if least else 1):
        drawn = {task: dirichlet_counts(sizes[task], clients, alpha, sources[task]) for task in sizes}
        smallest = int(np.vstack(list(drawn.values())).sum(axis=0).min())
        if smallest >= least:
            return drawn
        best = max(best, smallest)
    raise ConfigError(
        f"min_per_client is {least}, but of {MOST_DRAWS:,} draws at alpha {alpha:g} the best left a client with {best} "
        "rows. Ask for less, for fewer clients, or give more rows."
    )


def by_response(examples: Sequence[Example]) -> dict[str, list[Example]]:
    """Group examples by their response, sorted.

    Raises:
        DataError: there are so many that they are no labels.
    """
    groups: dict[str, list[Example]] = {}
    for example in examples:
        groups.setdefault(example.response.strip(), []).append(example)
    if len(groups) > MOST_LABELS:
        raise DataError(
            f"skew: label needs a classification task, but the {len(examples)} rows of "
            f"{examples[0].task!r} have {len(groups)} different responses."
        )
    return dict(sorted(groups.items()))


def client_names(clients: int) -> list[str]:
    """Return ``client-00``, ``client-01``, …, wide enough to sort in number order."""
    width = max(2, len(str(clients - 1)))
    return [f"client-{i:0{width}d}" for i in range(clients)]


def dirichlet_counts(
    total_per_class: Sequence[int], clients: int, alpha: float, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Split each class over clients in proportions drawn from Dirichlet(alpha · 1).

    Returns:
        (classes, clients) counts; row c sums to ``total_per_class[c]`` (largest remainder, ties to the lowest client).
    """
    counts = np.zeros((len(total_per_class), clients), dtype=np.int64)
    for c, total in enumerate(total_per_class):
        quota = dirichlet(alpha, clients, rng) * total
        counts[c] = np.floor(quota)
        left = total - int(counts[c].sum())
        counts[c, np.argsort(counts[c] - quota, kind="stable")[:left]] += 1
    return counts


def dirichlet(alpha: float, size: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw p ~ Dirichlet(alpha · 1), (size,), in logarithms, so that a tiny alpha gives one-hot and never 0/0.

    Gamma(alpha) draws underflow to zero for small alpha, at times all of them. With G ~ Gamma(alpha + 1) and
    E ~ Exponential(1), G · exp(−E / alpha) ~ Gamma(alpha) (Marsaglia and Tsang 2000), and its logarithm is safe.
    """
    low, high = ALPHA_RANGE
    if not low <= alpha <= high:
        raise ConfigError(f"alpha is {alpha}. Use a number from {low:g} to {high:g}; the paper uses 0.1, 0.3 and 0.5.")
    log_gamma = np.log(rng.standard_gamma(alpha + 1.0, size)) - rng.standard_exponential(size) / alpha
    weights = np.exp(log_gamma - log_gamma.max())
    return weights / weights.sum()


def _generator(seed: int, purpose: str, name: str) -> np.random.Generator:
    digest = hashlib.sha256(json.dumps(["benchmark", seed, purpose, name]).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest, "big"))


def _pool(task: str, root: str | Path | None, skip: Mapping[str, int]) -> _Pool:
    """Return the usable rows of all splits, each prompt once, and what was left out."""
    left_out: Counter[str] = Counter(skipped=0, duplicates=0, empty_response=0)
    kept: list[Example] = []
    seen: set[str] = set()
    splits = {split: load_task(task, split, root) for split in task_splits(task, root)}
    for split, examples in splits.items():
        first = examples[: skip.get(f"{task}/{split}", 0)]
        seen.update(_same_prompt(example) for example in first)
        left_out["skipped"] += len(first)
    for split, examples in splits.items():
        for example in examples[skip.get(f"{task}/{split}", 0) :]:
            prompt = _same_prompt(example)
            if not example.response.strip():
                left_out["empty_response"] += 1
            elif prompt in seen:
                left_out["duplicates"] += 1
            else:
                seen.add(prompt)
                kept.append(example)
    record = {
        "sources": {split: {"source": rows[0].source, "rows": len(rows)} for split, rows in splits.items() if rows},
        "left_out": dict(left_out),
        "usable": len(kept),
    }
    return _Pool(kept, record)


def _same_prompt(example: Example) -> str:
    # Prompts that differ in white space or case only are the same prompt.
    return " ".join(example.prompt.split()).casefold()


def _check(tasks: Sequence[str], clients: int, budget: Mapping[str, int]) -> None:
    if not tasks or len(set(tasks)) != len(tasks):
        raise ConfigError(f"tasks are {list(tasks)}. Name at least one, and each once.")
    for task in tasks:
        get_task(task)
    if clients < 1:
        raise ConfigError(f"clients is {clients}. Use 1 or more.")
    for name, rows in budget.items():
        if rows < 0:
            raise ConfigError(f"{name} is {rows}. Use 0 or more rows.")


def _check_skip(skip: Mapping[str, int], tasks: Sequence[str], root: str | Path | None) -> None:
    """Refuse a skip that names no split: rows to leave out would be used. Tasks that are not drawn may stay."""
    for key, rows in skip.items():
        task, _, split = key.partition("/")
        get_task(task)
        if task in tasks and split not in (splits := task_splits(task, root)):
            raise ConfigError(f"skip: '{key}' is no split of task '{task}'.{nearest(split, splits)}")
        if rows < 0:
            raise ConfigError(f"skip: '{key}' is {rows}. Use 0 or more rows.")
