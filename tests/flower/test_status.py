"""``fedloom status``, the report and the numbers for Prometheus: while a run goes on, and after; simulated, too."""

from __future__ import annotations

import json
import math
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is an option of its own")

from fake_grid import Node, Restarts
from flwr.app import Message
from typer.testing import CliRunner

from fedloom.cli import app
from fedloom.errors import DataError
from fedloom.report.prometheus import exposition
from fedloom.report.status import SiteStatus, read_status
from fedloom.runtime.checkpoint import CheckpointFolder
from fedloom.runtime.flower_messages import pack


class Stopped(BaseException):
    """No error that anything may handle."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, backbone_folder: Path) -> Path:
    """A run of four sites: bob sends nonsense in round 1, cyd is silent in round 1; another node says it is ann."""
    restarts = Restarts(tmp_path_factory.mktemp("run"), backbone_folder)
    orders = {"bob": 0, "cyd": 0}

    def in_round_one(name: str, instead: Any) -> Any:
        def spoil(asked: Message, reply: Message) -> Message | None:
            orders[name] += asked.metadata.message_type == "train.order"
            first = orders[name] == 2 and asked.metadata.message_type == "train.order"  # after the probe
            return instead(asked) if first else reply

        return spoil

    by_name = {node.config.parent.name: node for node in restarts.nodes}
    by_name["bob"].spoil = in_round_one("bob", lambda asked: Message(pack({"kept": False}, b"no"), reply_to=asked))
    by_name["cyd"].spoil = in_round_one("cyd", lambda asked: None)
    impostor = Node(9, by_name["ann"].config)
    restarts.sections["federation"] = {"rounds": 3, "min_replies": 2}
    restarts.write(deadline=1e-6)  # the fake grid answers at once; what is lost is owed for two deadlines
    seen: list[str] = []

    def look(self: CheckpointFolder, checkpoint: Any) -> None:
        commit(self, checkpoint)
        if checkpoint.state.round == 3:
            out = restarts.home / "run"
            seen.append((out / "report.html").read_text())
            (restarts.home / "during.json").write_text(json.dumps(read_status(out).to_plain()))
            (restarts.home / "during.prom").write_text((out / "metrics.prom").read_text())

    commit = CheckpointFolder.commit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointFolder, "commit", look)
        restarts.serve([*restarts.nodes, impostor])
    assert "bob" in seen[0]
    assert "no round" not in seen[0].lower()
    return restarts.home


def test_status_says_what_the_files_say(home: Path) -> None:
    status = read_status(home / "run")
    records = [json.loads(line) for line in (home / "run" / "rounds.jsonl").read_text().splitlines()]
    assert (status.method, status.round, status.rounds_wanted, status.finished) == ("fedweave", 3, 3, True)
    assert list(status.sites) == ["ann", "bob", "cyd", "dan"]
    assert {name: site.rounds for name, site in status.sites.items()} == {"ann": 3, "bob": 2, "cyd": 2, "dan": 3}
    assert status.sites["bob"].quarantined == {1: "the payload has only 2 bytes"}
    assert status.sites["cyd"].absent == [1]
    for name, site in status.sites.items():
        assert site.bytes_up == sum(r["clients"].get(name, {}).get("bytes_up", 0) for r in records)
        assert site.examples == {"ann": 8, "bob": 5, "cyd": 2, "dan": 1}[name]
        assert abs((datetime.now(UTC) - datetime.fromisoformat(site.last_seen)).total_seconds()) < 3600
    assert status.refused == {"9": "another node that is online is 'ann' already"}
    assert status.waiting_for == []


def test_experts_name_who_trains_them_with_their_examples(home: Path) -> None:
    """Every example is in one bucket, and every bucket trains one expert."""
    experts = read_status(home / "run").experts
    assert len(experts) > 1
    for name, examples in {"ann": 8, "bob": 5, "cyd": 2, "dan": 1}.items():
        assert sum(clients.get(name, 0) for clients in experts.values()) == examples


def test_status_of_a_run_that_goes_on(home: Path) -> None:
    during = json.loads((home / "during.json").read_text())
    assert (during["round"], during["finished"]) == (3, False)
    assert "fedloom_finished 0\n" in (home / "during.prom").read_text()


LINE = re.compile(r'(fedloom_[a-z_]+)(\{(site|expert)="[^"\n]*"\})? (-?\d+(\.\d+)?([eE][+-]?\d+)?)')


def test_numbers_for_prometheus_have_its_form(home: Path) -> None:
    text = (home / "run" / "metrics.prom").read_text()
    assert text == exposition(read_status(home / "run"))
    declared: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            declared[name] = kind
        elif not line.startswith("# HELP "):
            found = LINE.fullmatch(line)
            assert found, line
            assert declared[found[1]] == ("counter" if found[1].endswith("_total") else "gauge")
    for line in ("fedloom_round 3", 'fedloom_site_quarantined_total{site="bob"} 1', "fedloom_finished 1"):
        assert line in text.splitlines()


def test_labels_are_escaped() -> None:
    status = read_status_of({'a"b\\c\n': SiteStatus(examples=2)})
    assert 'fedloom_site_examples{site="a\\"b\\\\c\\n"} 2\n' in exposition(status)


def read_status_of(sites: dict[str, SiteStatus]) -> Any:
    from fedloom.report.status import RunStatus

    return RunStatus("fedit", 1, None, False, None, [], sites, {}, {}, [])


def test_the_command_prints_it(home: Path, tmp_path: Path) -> None:
    said = CliRunner().invoke(app, ["status", str(home / "run")], env={"COLUMNS": "80"})
    assert said.exit_code == 0, said.output
    for words in (
        "fedweave · round 3 of 3 · finished",
        "bob, round 1, quarantined: the payload has only 2 bytes",
        "experts/0: ann (",
    ):
        assert words in said.output
    (bob,) = [line.split() for line in said.output.splitlines() if line.startswith("bob ")]
    assert bob[-8:-4] == ["5", "2", "0", "1"]  # examples, used, absent, quarantined


def test_what_privacy_has_cost_is_told_everywhere(backbone_folder: Path, tmp_path: Path) -> None:
    """D_α of Gaussian rounds adds up to that of one with σ / √T: two rounds at σ = 2√2 cost what one at σ = 2 does."""
    pytest.importorskip("opacus", reason="Opacus is an option of its own")
    restarts = Restarts(tmp_path, backbone_folder)
    restarts.sections |= {
        "method": {"name": "fedit"},
        "server": {"weights": "uniform"},
        "federation": {"rounds": 2, "min_replies": 2},
        "training": {"steps": 2, "batch_size": 2, "lr": 0.01},
        "privacy": {"clip": 0.05, "noise": 2 * math.sqrt(2)},
    }
    restarts.write()
    restarts.serve()
    spent = one_round_at(2.0)
    words = f"ε = {spent:.3g} at δ = 1e-05 is spent"
    said = CliRunner().invoke(app, ["status", str(tmp_path / "run")], env={"COLUMNS": "200"})
    assert f"{words}; in round 2 the noise was " in said.output
    page = (tmp_path / "run" / "report.html").read_text()
    assert words in page
    assert "the noise was" not in page  # its known length would tell that of the update
    (line,) = re.findall(
        r"^fedloom_privacy_epsilon (\S+)$", (tmp_path / "run" / "metrics.prom").read_text(), re.MULTILINE
    )
    assert float(line) == pytest.approx(spent, rel=1e-9)


def one_round_at(noise: float) -> float:
    from opacus.accountants import RDPAccountant

    from fedloom.runtime.private import ORDERS

    accountant = RDPAccountant()
    accountant.history = [(noise, 1.0, 1)]
    return float(accountant.get_epsilon(1e-5, alphas=ORDERS))


def test_times_are_told_in_words() -> None:
    site = SiteStatus(last_seen="2026-01-02T03:04:05+00:00")
    for now, words in (("03:04:06", "1 s ago"), ("03:05:50", "105 s ago"), ("03:06:05", "2 min ago")):
        assert site.last_seen_words(datetime.fromisoformat(f"2026-01-02T{now}+00:00")) == words
    assert site.last_seen_words(datetime.fromisoformat("2026-01-05T03:04:05+00:00")) == "3 d ago"
    assert SiteStatus().last_seen_words() == ""


def test_the_command_prints_json_and_refuses_other_folders(home: Path, tmp_path: Path) -> None:
    plain = CliRunner().invoke(app, ["status", str(home / "run"), "--json"])
    assert json.loads(plain.output)["sites"]["cyd"]["absent"] == [1]
    nothing = CliRunner().invoke(app, ["status", str(tmp_path)])
    assert nothing.exit_code == 1


def test_a_simulation_has_a_status_too(home: Path) -> None:
    out = home / "simulated"
    (home / "run" / "presence.json").rename(home / "presence.json")  # all that a server across sites adds
    try:
        status = read_status(home / "run")
    finally:
        (home / "presence.json").rename(home / "run" / "presence.json")
    assert status.sites["ann"].last_seen is None
    assert status.sites["ann"].last_round == 3
    with pytest.raises(DataError, match="cannot read"):
        read_status(out)
