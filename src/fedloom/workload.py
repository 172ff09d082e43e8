"""The rows of a run: read or drawn, encoded, and pooled for a method without federation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from fedloom.backbones.context import check_length, check_room
from fedloom.backbones.load import Backbone
from fedloom.config import Config
from fedloom.data.partition import build_benchmark
from fedloom.data.sources import Example, read_examples
from fedloom.data.synthetic import build_synthetic
from fedloom.data.tasks import read_task_file
from fedloom.data.tokenize import EncodingReport, encode
from fedloom.errors import ConfigError, DataError
from fedloom.evaluation.scores import new_tokens
from fedloom.methods.base import Method
from fedloom.runtime.client import Rows, Workbench
from fedloom.runtime.events import Observer
from fedloom.runtime.loop import cohort_size
from fedloom.runtime.memory import check_client_name
from fedloom.types import Plain, Training

#: Name of the one client of a method without federation.
POOLED = "pooled"


@dataclass
class Data:
    """Encoded rows by client and by test task, with the examples behind them and where they came from."""

    clients: dict[str, Rows]
    labels: dict[str, list[str]]  # client → task of each row; audit only
    sizes: dict[str, int]  # client → usable rows, also where they are trained pooled
    mixes: dict[str, dict[str, float]]  # client → kind → share of its rows; empty without labels; audit only
    kinds: dict[str, tuple[str, list[int]]]  # kind (a task, or under label skew a label of it) → task, its test rows
    test: dict[str, Rows]
    test_examples: dict[str, list[Example]]
    manifest: dict[str, Plain]


@dataclass(frozen=True)
class Run:
    """What stays the same from the first round to the report."""

    config: Config
    method: Method
    bench: Workbench
    data: Data


class Found(NamedTuple):
    """Rows as they stand in files or were drawn, by client and by test task, and where they came from."""

    clients: Mapping[str, Sequence[Example]]
    test: Mapping[str, Sequence[Example]]
    record: dict[str, Plain]


def read_data(config: Config) -> Found:
    """Read or draw all rows. It needs no backbone, so that their faults are said before one is loaded.

    Raises:
        DataError: a file or a row is wrong.
        ConfigError: a client's name cannot be one.
    """
    data = config.data
    if data.benchmark is not None or data.synthetic is not None:
        if data.benchmark is not None:
            drawn = build_benchmark(seed=config.seed, **data.benchmark.model_dump())
        else:
            assert data.synthetic is not None
            drawn = build_synthetic(seed=config.seed, **data.synthetic.model_dump())
        clients, record = drawn.clients, drawn.manifest
        test = drawn.test if config.evaluation.split == "test" else drawn.validation
    else:
        left_out: dict[str, Plain] = {}
        clients = {}
        for name, path in data.clients.items():
            clients[name], counts = read_examples(path, strict=data.strict)
            left_out[name] = dict(counts)
        test = read_tests(data.test, data.strict)
        record = {"clients": data.clients, "test": data.test, "rows": left_out}
    for name in clients:
        check_client_name(name)
    return Found(clients, test, record)


def check_replies(config: Config, clients: int) -> None:
    """Refuse a least number of replies that no round of so many clients can have.

    With privacy a round may ask fewer, and the least is then what it asks (``answers.judge``).

    Raises:
        ConfigError: a round asks fewer clients than ``federation.min_replies``.
    """
    federation = config.federation
    asked = cohort_size(clients, federation.participation)
    if federation.rounds and config.privacy is None and federation.min_replies > asked:
        raise ConfigError(
            f"federation.min_replies is {federation.min_replies}, but a round asks {asked} of {clients} clients: set "
            f"it to {asked} or less."
        )


def load_data(config: Config, found: Found, backbone: Backbone, observer: Observer, *, pooled: bool = False) -> Data:
    """Encode all rows; say what was left out.

    Args:
        found: what ``read_data`` returned.
        pooled: train all rows as those of one client, in client order.

    Raises:
        DataError: a row gives nothing to learn, under ``data.strict``, or none does.
        ConfigError: the backbone has too few positions, or the rows cannot tell what ``evaluation.personalised`` asks.
    """
    data = config.data
    check_length(backbone, data.max_length, observer.say)
    rows, train = {}, {}
    for name, examples in found.clients.items():
        rows[name], train[name], _ = encode_rows(name, examples, backbone, data.max_length, observer, data.strict)
        if not len(rows[name]):
            observer.say(f"{name} holds no usable example: it takes no part and has weight 0.")
    tests = encode_tests(found.test, backbone, data.max_length, observer, config.evaluation.limit, data.strict)
    train, measured = dict(sorted(train.items())), dict(sorted(tests.examples.items()))
    by_label = data.benchmark is not None and data.benchmark.skew == "label"
    mixes = {name: _mix([kind_of(example, by_label) for example in found]) for name, found in train.items()}
    result = Data(
        clients=dict(sorted(rows.items())),
        labels={name: [example.task for example in found] for name, found in train.items()},
        sizes={name: len(found) for name, found in train.items() if found},
        mixes={name: mix for name, mix in mixes.items() if mix},
        kinds=_kinds(measured, by_label),
        test=dict(sorted(tests.rows.items())),
        test_examples=measured,
        manifest=found.record | {"test_rows_too_long": tests.too_long},
    )
    if not any(map(len, result.clients.values())):
        raise DataError("no client holds a usable example, so there is nothing to train on.")
    mixed = {kind for mix in result.mixes.values() for kind in mix}
    if config.evaluation.personalised and not mixed & result.kinds.keys():
        raise ConfigError(
            "evaluation.personalised weighs test rows of each task as a client's own rows are mixed, but no client's "
            "rows name a task that has test rows, as those of a benchmark do: leave it out."
        )
    check_answers(config, backbone, result.test)
    return pool(result) if pooled else result


def server_data(config: Config, backbone: Backbone, counts: Mapping[str, dict[str, int]], observer: Observer) -> Data:
    """Return the test rows of a federation's server; of clients' rows it has the counts that sites told, ``counts``.

    Raises:
        DataError: a file or a row is wrong.
        ConfigError: the backbone has too few positions.
    """
    data = config.data
    check_length(backbone, data.max_length, observer.say, "max_length")
    found = read_tests(dict(sorted(data.test.items())), data.strict)
    tests = encode_tests(found, backbone, data.max_length, observer, config.evaluation.limit, data.strict)
    check_answers(config, backbone, tests.rows)
    record = {"clients": data.clients, "test": data.test, "rows": counts, "test_rows_too_long": tests.too_long}
    return Data({}, {}, {}, {}, _kinds(tests.examples, by_label=False), tests.rows, tests.examples, record)


def read_tests(files: Mapping[str, str | Path], strict: bool = False) -> dict[str, list[Example]]:
    """Read test rows; files are task → file."""
    return {task: read_task_file(task, path, strict=strict) for task, path in files.items()}


class Tests(NamedTuple):
    """Test rows by task, the examples behind them, and how many prompts were too long to leave room for an answer."""

    rows: dict[str, Rows]
    examples: dict[str, list[Example]]
    too_long: dict[str, int]


def encode_tests(
    found: Mapping[str, Sequence[Example]],
    backbone: Backbone,
    max_length: int,
    observer: Observer,
    limit: int | None = None,
    strict: bool = False,
) -> Tests:
    """Encode the first ``limit`` test rows of each task; say what was left out, and count what was too long."""
    encoded = {
        task: encode_rows(task, examples[:limit], backbone, max_length, observer, strict)
        for task, examples in found.items()
    }
    return Tests(
        rows={task: rows for task, (rows, _, _) in encoded.items()},
        examples={task: behind for task, (_, behind, _) in encoded.items()},
        too_long={task: report.no_label_left for task, (_, _, report) in encoded.items()},
    )


def encode_rows(
    name: str, examples: Sequence[Example], backbone: Backbone, max_length: int, observer: Observer, strict: bool
) -> tuple[Rows, list[Example], EncodingReport]:
    """Encode the rows of a client or a task, and say what was left out; return them with the examples behind them."""
    kept, report = encode(examples, backbone.tokenizer, max_length=max_length, strict=strict)
    if report.kept < len(examples) or report.truncated:
        observer.say(f"{name}: {report.summary()}.")
    return Rows(kept), [examples[e.index] for e in kept], report


def check_answers(config: Config, backbone: Backbone, test: Mapping[str, Rows]) -> None:
    """Refuse, before any training, test rows whose answers could not be generated after it."""
    wanted = config.evaluation
    if not (wanted.generate or wanted.generate_before or wanted.every_score or wanted.personalised_scores):
        return
    for task, rows in test.items():
        longest = max((encoded.prompt_length for encoded in rows.encoded), default=0)
        advice = (
            f"So the test rows of {task!r} cannot be scored: set the maximum length to less than the difference, which "
            "leaves long prompts out, or evaluation.generate to false."
        )
        check_room(backbone, longest, new_tokens(task), advice)


def pool(data: Data) -> Data:
    """Return the same rows as one client's."""
    rows = [encoded for client in data.clients.values() for encoded in client.encoded]
    labels = [label for found in data.labels.values() for label in found]
    return replace(data, clients={POOLED: Rows(rows)}, labels={POOLED: labels})


def kind_of(example: Example, by_label: bool) -> str:
    """Return what a client's mixture counts: the task or, where clients differ in labels, task and label."""
    return f"{example.task}={example.response.strip()}" if by_label and example.task else example.task


def _kinds(tests: Mapping[str, Sequence[Example]], by_label: bool) -> dict[str, tuple[str, list[int]]]:
    """Return ``Data.kinds`` of the test rows of each task."""
    kinds: dict[str, tuple[str, list[int]]] = {}
    for task, found in tests.items():
        for row, example in enumerate(found):
            kinds.setdefault(kind_of(example, by_label) if by_label else task, (task, []))[1].append(row)
    return kinds


def _mix(labels: list[str]) -> dict[str, float]:
    return {task: n / len(labels) for task, n in sorted(Counter(labels).items())} if all(labels) else {}


def cut_epochs(training: Training, sizes: Mapping[str, int]) -> str:
    """Say whose passes over their rows ``training.steps`` cuts short, if anybody's; sizes are client → usable rows."""
    needs = {name: training.passes_of(size) for name, size in sizes.items()}
    if not (short := {name: steps for name, steps in needs.items() if steps > training.steps}):
        return ""
    name = max(short, key=lambda each: short[each])
    return (
        f"training.steps {training.steps} cuts the epochs of {len(short)} of {len(sizes)} clients short; {name} would "
        f"need {short[name]}."
    )
