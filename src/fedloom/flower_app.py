"""The server of a federation across sites: a Flower ServerApp around the same rounds as a simulation."""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from fedloom.config import (
    Config,
    DataConfig,
    RunSections,
    Section,
    explained,
    parse_config,
)
from fedloom.config_file import read_yaml
from fedloom.data.tokenize import tokenizer_hash
from fedloom.errors import ConfigError, DataError
from fedloom.experiment import backbone_of, describe, finish, setup_of
from fedloom.files import write_json
from fedloom.locking import alone
from fedloom.measure import evaluate_round
from fedloom.methods.base import Method
from fedloom.report import write_report
from fedloom.report.prometheus import write_metrics
from fedloom.runtime.answers import federation_of
from fedloom.runtime.events import Observer, RoundLog
from fedloom.runtime.flower import FlowerTransport, Patience
from fedloom.runtime.flower_messages import require_flower
from fedloom.runtime.flower_pull import bound_pulls
from fedloom.runtime.leaving import leaving_of
from fedloom.runtime.loop import federate
from fedloom.runtime.site import Terms
from fedloom.types import Plain
from fedloom.workload import Run, server_data

#: Names the server's configuration. It is set where the SuperLink starts, so that nobody who may start a run, and no
#: site, names a file of the server.
SERVER_CONFIG = "FEDLOOM_SERVER"

#: Stands in the configuration of the run where a simulation has a client's file.
AT_THE_SITE = "(at the site)"


class SitesConfig(Section):
    """``expected`` sites are waited for before round 1; see ``runtime.flower.Patience`` for the seconds."""

    expected: int = Field(ge=1)
    wait: float = Field(600.0, ge=0)
    deadline: float = Field(3600.0, gt=0)


class SiteRunConfig(RunSections):
    """The server's configuration: a run's, with sites in place of data. ``test`` (task → file) is the server's own."""

    out: str
    sites: SitesConfig
    test: dict[str, str] = Field(default_factory=dict)
    max_length: int = Field(512, ge=8, le=1_000_000)

    def of(self, clients: list[str]) -> Config:
        """Return the configuration of a run with these clients, whose files are at their sites."""
        data = DataConfig(clients=dict.fromkeys(clients, AT_THE_SITE), test=self.test, max_length=self.max_length)
        shared = {name: getattr(self, name) for name in RunSections.model_fields}
        return Config(data=data, **shared)


def load_server(path: Path) -> SiteRunConfig:
    """Read the server's configuration; relative names are relative to its folder.

    Raises:
        ConfigError: the file, a key or a value is wrong, or the method cannot run across sites.
    """
    plain = read_yaml(path)
    try:
        config = SiteRunConfig.model_validate(plain)
    except ValidationError as error:
        raise explained(error, SiteRunConfig, (), str(path)) from error
    method = parse_config(config.of(["site"]).model_dump(), where=str(path)).build_method()
    if method.pooled:
        raise ConfigError(f"{path}: {method.title} pools all rows in one place, which sites are there to avoid.")
    if type(method).assembled is not Method.assembled:
        raise ConfigError(f"{path}: {method.title} is measured on what clients keep, which the server has not.")
    if config.evaluation.personalised:
        raise ConfigError(f"{path}: evaluation.personalised needs the clients' rows, which the server has not.")
    if config.federation.min_replies > config.sites.expected:
        raise ConfigError(
            f"{path}: federation.min_replies is {config.federation.min_replies}, but only {config.sites.expected} "
            "sites are expected."
        )
    place = {name: str((path.parent / Path(file).expanduser()).resolve()) for name, file in config.test.items()}
    return config.model_copy(update={"out": str((path.parent / config.out).resolve()), "test": place})


def server_app() -> Any:
    """Return the ``ServerApp``."""
    require_flower()
    from flwr.app import Context
    from flwr.serverapp import Grid, ServerApp

    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        if not (place := os.environ.get(SERVER_CONFIG)):
            raise ConfigError(f"the environment variable {SERVER_CONFIG} does not name the server's configuration")
        config = load_server(Path(place))
        bound_pulls(config.sites.deadline)
        serve(config, grid, LogObserver())

    return app


class LogObserver(Observer):
    """Says in Flower's log what happens, a line per round."""

    def __init__(self) -> None:
        self.log = logging.getLogger("flwr")

    def say(self, message: str) -> None:
        self.log.info("fedloom: %s", message)

    def round(self, record: dict[str, Plain]) -> None:
        shown = (
            "round",
            "train_loss",
            "seconds",
            "bytes_up",
            "bytes_down",
            "quarantined",
            "absent",
            "joined",
            "privacy",
        )
        self.log.info("fedloom: %s", json.dumps({key: record[key] for key in shown if key in record}))


def serve(site_config: SiteRunConfig, grid: Any, observer: Observer) -> dict[str, Plain]:
    """Run all rounds, from the newest checkpoint if there is one; write what ``experiment.run`` writes.

    Raises:
        FedloomError: see the message; started again, it goes on from the last round.
    """
    out = Path(site_config.out)
    with alone(out, f"is running this federation, {out}. Wait for it, or stop it (flwr stop)."):
        return _serve(site_config, grid, observer, out)


def _serve(site_config: SiteRunConfig, grid: Any, observer: Observer, out: Path) -> dict[str, Plain]:
    start = time.perf_counter()
    backbone = backbone_of(site_config.backbone)
    resumed = (out / "sites.json").is_file()
    known: dict[str, Any] = {"run": secrets.token_hex(8)}
    if resumed:
        known = json.loads((out / "sites.json").read_text("utf-8"))
    blank = site_config.of(["site"])
    leaving = leaving_of(blank, blank.build_method())
    transport = FlowerTransport(
        grid,
        Terms(
            run=known["run"],
            seed=site_config.seed,
            method=site_config.method.name,
            options=site_config.method.model_extra or {},
            backbone=backbone.hash,
            tokenizer=tokenizer_hash(backbone.tokenizer),
            wire=leaving.wire,
            feedback=leaving.feedback,
            privacy=site_config.privacy,
            uniform=leaving.uniform,
        ),
        Patience(
            expected=site_config.sites.expected,
            minimum=site_config.federation.min_replies,
            wait=site_config.sites.wait,
            deadline=site_config.sites.deadline,
        ),
        out / "checkpoints" / "spool",
        site_config.federation.max_reply_bytes,
        observer,
        presence=out / "presence.json",
        on_commit=lambda: show(out, observer),
    )
    recorded = known.get("clients")
    clients = recorded if isinstance(recorded, list) else transport.gather()
    config = site_config.of(clients)
    method = config.build_method()
    hellos = known.get("hello", {}) if resumed else {name: transport.cards[name].hello for name in clients}
    counts = {name: hello.get("rows", {}) for name, hello in hellos.items()}
    data = server_data(config, backbone, counts, observer)
    bench, setup = setup_of(config, method, backbone, clients)
    checkpoints = describe(out, config, backbone, data)
    if resumed:
        done = checkpoints.rounds()
        transport.gather([*clients, *(checkpoints.load(done[-1]).joined if done else ())])
    else:  # who takes part is settled once, so that a server that starts again draws the same cohorts
        write_json(out / "sites.json", known | {"clients": clients, "hello": hellos})
    this = Run(config, method, bench, data)
    state = federate(
        method,
        transport,
        setup,
        config.training.ordered(),
        federation_of(config),
        checkpoints,
        RoundLog(out / "rounds.jsonl"),
        observer,
        evaluate=lambda state, versions: evaluate_round(this, state, {}),
        newcomers=transport.newcomers,
    )
    metrics = finish(out, this, state, {}, observer, start=start, resumed=resumed)
    write_metrics(out)
    observer.say(f"Done: {out / 'report.html'}.")
    return metrics


def show(out: Path, observer: Observer) -> None:
    """Write what people and machines look at while a run goes on: ``report.html`` and ``metrics.prom``."""
    try:
        write_report(out, unfinished=True)
        write_metrics(out)
    except (DataError, OSError) as error:
        observer.say(f"The report is not up to date: {error}")
