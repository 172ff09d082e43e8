"""The configuration of a run: a file into strict models; an unknown key is an error."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fedloom.config_file import override_key, read_yaml
from fedloom.errors import ConfigError, nearest
from fedloom.methods import METHODS
from fedloom.methods.base import Method, Section
from fedloom.methods.protection import Privacy, SecureAggregation
from fedloom.methods.server import ServerStep
from fedloom.types import Training, Wire


class BackboneConfig(Section):
    """The frozen model. ``threads`` pins PyTorch's CPU threads, which fixes the last bits of a run."""

    name: str = "tiny"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    threads: int | None = Field(None, ge=1, le=1024)


class BenchmarkConfig(Section):
    """Rows of known tasks, drawn per seed and spread over clients by a Dirichlet over tasks, or over labels."""

    tasks: list[str] = Field(min_length=1)
    root: str | None = None
    clients: int = Field(20, ge=1)
    alpha: float = Field(0.3, gt=0)
    train: int = Field(2000, ge=1)
    val: int = Field(100, ge=0)
    test: int = Field(400, ge=1)
    skip: dict[str, int] = Field(default_factory=dict)
    skew: Literal["task", "label"] = "task"
    min_per_client: int = Field(0, ge=0)


class SyntheticConfig(Section):
    """Made-up patterns that contradict each other; see ``data.synthetic.build_synthetic`` for the dials."""

    patterns: int = Field(4, ge=1)
    keys: int = Field(10, ge=1)
    words: int = Field(16, ge=1)
    clients: int = Field(4, ge=1)
    train: int = Field(120, ge=1)
    val: int = Field(20, ge=0)
    test: int = Field(50, ge=1)
    mixing: float = Field(1.0, ge=0, le=1)
    separability: float = Field(1.0, ge=0, le=1)
    drift: float = Field(0.0, ge=0, le=1)


class DataConfig(Section):
    """``benchmark``, ``synthetic``, or the user's own files: ``clients`` (name → file) and ``test`` (task → file)."""

    benchmark: BenchmarkConfig | None = None
    synthetic: SyntheticConfig | None = None
    clients: dict[str, str] = Field(default_factory=dict)
    test: dict[str, str] = Field(default_factory=dict)
    max_length: int = Field(512, ge=8, le=1_000_000)
    strict: bool = False

    @field_validator("test")
    @classmethod
    def _free_names(cls, test: dict[str, str]) -> dict[str, str]:
        if "macro" in test:
            raise ValueError("'macro' names the mean over tasks; give the task another name")
        return test

    @model_validator(mode="after")
    def _one_source(self) -> DataConfig:
        if sum(map(bool, (self.benchmark, self.synthetic, self.clients))) != 1:
            raise ValueError("give either 'benchmark' or 'clients' (name: file.jsonl) or 'synthetic', one of the three")
        if self.test and not self.clients:
            source = "benchmark" if self.benchmark else "synthetic"
            raise ValueError(f"'{source}' draws its own test rows, so 'test' would not be read: leave 'test' out")
        return self


class AdapterConfig(Section):
    """``targets`` null: query and value projections of the architecture. ``rank`` null: the method's own.

    ``native``: train the experts of a mixture-of-experts backbone itself, ``full`` or by a ``lora`` on each.
    """

    targets: list[str] | None = None
    rank: int | None = Field(None, ge=1, le=4096)
    alpha: float = Field(16.0, gt=0, lt=1e9)
    dropout: float = Field(0.05, ge=0, lt=1)
    native: Literal["full", "lora"] | None = None


class FederationConfig(Section):
    """``wire`` compresses what clients send: ``bf16``, or ``int8`` with error feedback; see docs/privacy.md."""

    rounds: int = Field(20, ge=0, le=1_000_000)
    participation: float = Field(1.0, gt=0, le=1)
    min_replies: int = Field(1, ge=1)
    max_examples: int = Field(10_000_000, ge=1)
    norm_factor: float = Field(100.0, gt=1)
    max_reply_bytes: int = Field(2 << 30, ge=1)
    wire: Wire = "none"


class TrainingConfig(Section):
    """Local optimisation; defaults are FedWeave's. ``epochs`` (0: none) go before ``steps``, then the most."""

    steps: int = Field(10, ge=1, le=1_000_000)
    epochs: int = Field(0, ge=0, le=1000)
    batch_size: int = Field(8, ge=1, le=65536)
    lr: float = Field(1e-4, ge=0, le=10)
    router_lr: float = Field(5e-5, ge=0, le=10)
    weight_decay: float = Field(0.0, ge=0)
    clip: float = Field(1.0, ge=0)
    optimizer_state: Literal["reset", "keep"] = "reset"

    @model_validator(mode="after")
    def _most_steps(self) -> TrainingConfig:
        if self.epochs and "steps" not in self.model_fields_set:
            raise ValueError(
                "epochs needs steps, the most that a client takes in a round however many examples it says it has: "
                "updates are bounded by it, and sites have a limit of it. Set it above what the largest client needs"
            )
        return self

    def ordered(self, steps_factor: int = 1) -> Training:
        """Return what the server orders; ``steps_factor`` clients' steps in one place for a method that pools rows."""
        return Training(**{**self.model_dump(), "steps": self.steps * steps_factor})


class EvaluationConfig(Section):
    """``every`` rounds the loss is measured (0: only before and after); ``routing`` is compared after the last one.

    ``every_score``: whenever the loss is measured, also generate and score.
    ``split`` says which rows of a benchmark are measured: choose rates on ``validation``, report on ``test``.
    ``personalised``: also measure every client's own model on its own mixture, with so many rows per task or, under
    ``skew: label``, per label (0: not); ``personalised_scores`` generates there, too.
    """

    split: Literal["test", "validation"] = "test"
    every: int = Field(0, ge=0)
    every_score: bool = False
    routing: list[str] = Field(default_factory=lambda: ["top1", "soft"])
    generate: bool = True
    generate_before: bool = False
    personalised: int = Field(0, ge=0)
    personalised_scores: bool = False
    limit: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _known_routing(self) -> EvaluationConfig:
        for mode in self.routing:
            if not re.fullmatch(r"soft|top[1-9]\d{0,3}", mode):
                raise ValueError(f"routing {mode!r} is none of soft, top1, top2, …")
        if not self.routing:
            raise ValueError("routing needs at least one of soft, top1, top2, …")
        return self

    @model_validator(mode="after")
    def _scores_of_something(self) -> EvaluationConfig:
        if self.personalised_scores and not self.personalised:
            raise ValueError("personalised_scores scores the rows that personalised counts, and personalised is 0")
        return self


class MethodConfig(BaseModel):
    """``name`` and the method's own options beside it."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str = "fedweave"


class RunSections(Section):
    """What a simulation and a run between sites are both told."""

    seed: int = 42
    method: MethodConfig = MethodConfig()
    backbone: BackboneConfig = BackboneConfig()
    adapter: AdapterConfig = AdapterConfig()
    federation: FederationConfig = FederationConfig()
    training: TrainingConfig = TrainingConfig()
    server: ServerStep = ServerStep()
    evaluation: EvaluationConfig = EvaluationConfig()
    privacy: Privacy | None = None
    secagg: SecureAggregation | None = None


class Config(RunSections):
    data: DataConfig

    def build_method(self) -> Method:
        """Return the method with its options.

        Raises:
            ConfigError: sections contradict each other.
        """
        if self.evaluation.split != "test" and self.data.clients:
            raise ConfigError(
                "evaluation.split chooses between rows that a benchmark draws; with data.clients what is measured is "
                "data.test. Leave evaluation.split out, and name the rows to validate on under data.test."
            )
        kind = METHODS[self.method.name]
        method = kind(kind.Options(**(self.method.model_extra or {})))
        redrawn = self.server.aggregation == "product-svd"
        if self.training.optimizer_state == "keep" and (redrawn or not method.keeps_moments):
            who = "server.aggregation product-svd" if redrawn else method.title
            raise ConfigError(
                f"training.optimizer_state keep lets a client's optimiser go on where its last round ended; with "
                f"{who} a client does not train the same tensors, once, in each round. Use 'reset'."
            )
        if method.pooled and self.training.epochs and self.federation.participation < 1:
            raise ConfigError(
                f"training.epochs makes {method.title} go over everyone's rows each round; with "
                "federation.participation below 1 a federation goes over a part of them. Give training.steps alone, or "
                "set participation to 1."
            )
        if self.adapter.native == "lora" and method.whole:
            raise ConfigError(
                f"adapter.native is 'lora', but {method.title} needs the whole model trained: {method.whole}. Set it "
                "to 'full'."
            )
        method.check_rounds(self.federation.rounds)
        if self.privacy is not None:
            self.privacy.check(method, self.server)
        if self.secagg is not None:
            federation = self.federation
            self.secagg.check(method, self.server, federation.wire, self.privacy, federation.participation)
        self.server.check(method)  # last: what a method cannot do at all is said before what an option cannot
        return method


def config_of(given: Config | Mapping[str, Any] | str | Path) -> Config:
    """Return a configuration as it is, from its file, or from what such a file holds (paths are from this folder).

    Raises:
        ConfigError: see ``load_config``; or it is none of these.
    """
    if isinstance(given, Config):
        return given
    if isinstance(given, str | Path):
        return load_config(given)
    if isinstance(given, Mapping):
        return parse_config(dict(given), base=Path())
    raise ConfigError(f"a configuration is a path, a mapping or a Config, not of type {type(given).__name__}.")


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read and check a YAML file, with ``a.b=c`` overrides (values are YAML).

    Relative file names in ``data`` are relative to the configuration's folder.

    Raises:
        ConfigError: the file, a key or a value is wrong; unknown keys name the nearest known one.
    """
    path = Path(path)
    plain = read_yaml(path)
    for override in overrides:
        override_key(plain, override)
    return parse_config(plain, where=str(path), base=path.parent)


def parse_config(plain: dict[str, Any], where: str = "configuration", base: Path | None = None) -> Config:
    """Check a plain mapping; see ``load_config``."""
    try:
        config = Config.model_validate(plain)
    except ValidationError as error:
        raise explained(error, Config, (), where) from error
    if config.method.name not in METHODS:
        raise ConfigError(f"{where}: unknown method {config.method.name!r}.{nearest(config.method.name, METHODS)}")
    options = METHODS[config.method.name].Options
    try:
        options.model_validate(config.method.model_extra or {})
    except ValidationError as error:
        raise explained(error, options, ("method",), where) from error
    config.build_method()  # refuses server options that the method cannot take
    return config if base is None else _anchored(config, base)


def _anchored(config: Config, base: Path) -> Config:
    """Make the data's relative paths relative to the configuration's folder."""

    def place(path: str) -> str:
        try:
            return str((base / Path(path).expanduser()).resolve())
        except (RuntimeError, ValueError) as error:
            raise ConfigError(f"the path {path!r} cannot be used: {error}.") from error

    data = config.data
    update: dict[str, Any] = {
        "clients": {name: place(p) for name, p in data.clients.items()},
        "test": {name: place(p) for name, p in data.test.items()},
    }
    if data.benchmark is not None and data.benchmark.root is not None:
        update["benchmark"] = data.benchmark.model_copy(update={"root": place(data.benchmark.root)})
    return config.model_copy(update={"data": data.model_copy(update=update)})


def explained(error: ValidationError, model: type[BaseModel], sections: tuple[str, ...], where: str) -> ConfigError:
    """Say every fault that was found in ``model``, which stands at ``sections``, as a person would."""
    return ConfigError("\n".join(f"{where}: {_explain(e, model, sections)}" for e in error.errors()))


def _explain(error: Any, model: type[BaseModel], sections: tuple[str, ...]) -> str:
    place = [str(part) for part in error["loc"]]
    path = ".".join([*sections, *place]) or "the configuration"
    if error["type"] == "extra_forbidden":
        return f"unknown key {path!r}.{nearest(place[-1], _known_keys(model, place[:-1]))}"
    if error["type"] == "missing":
        return f"{path!r} is missing."
    if error["type"] == "string_type" and place[-1] == "[key]":
        return (
            f"a name in {'.'.join([*sections, *place[:-2]])!r} is {error['input']!r}, and not text: YAML reads no, "
            'yes, on, off, numbers and dates as something else. Put it in quotes, "…".'
        )
    if place and (advice := _as_section(error["type"], place[-1], error["input"], _known_keys(model, place))):
        return f"{path!r} is {error['input']!r}: {advice}."
    return f"{path!r} is {error['input']!r}: {error['msg'].removeprefix('Value error, ')}."


def _as_section(kind: str, last: str, given: Any, keys: Sequence[str]) -> str:
    """Return what to write in place of a value that should be a section or a mapping; empty for other faults."""
    value = given if isinstance(given, str) else "…"
    if kind == "model_type":
        inside = f"name: {value}" if "name" in keys else f"{keys[0]}: …"
        return f"write its keys as a section, {last}: {{{inside}}}"
    return f"write a name before each value, {last}: {{NAME: {value}}}" if kind == "dict_type" else ""


def _known_keys(model: Any, sections: Sequence[str]) -> list[str]:
    """Return the keys known in a section of ``model``; a key outside all sections may be a method's."""
    if model is Config and not sections:
        options = {f"method.{key}" for method in METHODS.values() for key in method.Options.model_fields}
        return [*Config.model_fields, *sorted(options)]
    for section in sections:
        annotation = model.model_fields[section].annotation if section in model.model_fields else None
        inner = next(
            (a for a in [annotation, *getattr(annotation, "__args__", ())] if hasattr(a, "model_fields")), None
        )
        if inner is None:
            return []
        model = inner
    return list(model.model_fields)
