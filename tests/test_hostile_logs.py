"""A run's folder may come from others: damaged records end in words, and nothing of them reaches a terminal raw."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedloom.cli import app, harmless

ANN = {"examples": 3, "bytes_up": 10, "bytes_down": 20, "loss": 1.5}
GOOD: dict[str, Any] = {
    "round": 1,
    "clients": {"ann": ANN},
    "joined": {"bob": {"bytes_up": 1, "bytes_down": 2, "experts": [0]}},
    "weights": {"examples": 3, "experts/0": 2},
    "shares": {"experts/0": {"ann": 2}},
    "quarantined": {},
    "absent": ["cyd"],
    "privacy": {"epsilon": 1.5, "delta": 1e-5, "noise_to_signal": None},
}


def run_folder(out: Path, record: dict[str, Any]) -> Path:
    out.mkdir()
    (out / "config.yaml").write_text("method: {name: fedit}\nfederation: {rounds: 3}\n")
    (out / "rounds.jsonl").write_text(json.dumps({"round": 0}) + "\n" + json.dumps(record) + "\n")
    return out


def status(out: Path, *more: str) -> tuple[int, str]:
    """Return exit code and output; an exception other than an exit is raised here."""
    found = CliRunner().invoke(app, ["status", str(out), *more], catch_exceptions=False)
    return found.exit_code, " ".join(found.output.split())


def test_a_record_as_a_server_writes_it_is_read(tmp_path: Path) -> None:
    code, said = status(run_folder(tmp_path / "run", GOOD), "--json")
    assert code == 0
    assert json.loads(said)["sites"]["ann"] | {"rounds": 1, "bytes_up": 10} == json.loads(said)["sites"]["ann"]


@pytest.mark.parametrize(
    "change",
    [
        {"round": -1},
        {"round": True},
        {"clients": {"ann": {"examples": 1}}},
        {"clients": {"ann": ANN | {"examples": "x"}}},
        {"clients": {"ann": ANN | {"bytes_up": -1}}},
        {"clients": {"ann": ANN | {"bytes_down": 1.5}}},
        {"clients": {"ann": ANN | {"bytes_down": 10**400}}},
        {"clients": {"ann": None}},
        {"joined": {"bob": {"bytes_up": "x"}}},
        {"weights": {"experts/0": [1]}},
        {"shares": {"experts/0": [1]}},
        {"shares": {"experts/0": {"ann": {}}}},
        {"quarantined": None},
        {"quarantined": {"ann": 1}},
        {"absent": 5},
        {"absent": [["x"]]},
        {"privacy": 1},
        {"privacy": {"epsilon": "x", "delta": 1e-5}},
        {"privacy": {"epsilon": 1.0}},
    ],
)
def test_a_damaged_record_is_told_in_words(tmp_path: Path, change: dict[str, Any]) -> None:
    code, said = status(run_folder(tmp_path / "run", GOOD | change))
    assert code == 1
    assert "rounds.jsonl is damaged: line 2 is not the record of a round" in said


@pytest.mark.parametrize("lacks", ["clients", "quarantined"])
def test_a_record_that_lacks_a_section_is_told_in_words(tmp_path: Path, lacks: str) -> None:
    code, said = status(run_folder(tmp_path / "run", {key: value for key, value in GOOD.items() if key != lacks}))
    assert code == 1
    assert "line 2 is not the record of a round" in said


@pytest.mark.parametrize(
    "presence",
    [
        [],
        {"last_seen": []},
        {"last_seen": {"ann": "yesterday"}},
        {"last_seen": {"ann": "2026-07-26T10:00:00"}},
        {"last_seen": {"ann": 5}},
        {"examples": {"ann": "x"}},
        {"refused": {"1": 5}},
        {"waiting_for": 5},
        {"waiting_for": [5]},
    ],
)
def test_damaged_presence_is_told_in_words(tmp_path: Path, presence: Any) -> None:
    out = run_folder(tmp_path / "run", GOOD)
    (out / "presence.json").write_text(json.dumps(presence))
    code, said = status(out)
    assert code == 1
    assert "presence.json is damaged" in said


def test_presence_may_name_a_site_that_the_log_does_not(tmp_path: Path) -> None:
    out = run_folder(tmp_path / "run", GOOD)
    (out / "presence.json").write_text(json.dumps({"examples": {"eve": 7}}))
    assert json.loads(status(out, "--json")[1])["sites"]["eve"]["examples"] == 7


ODD = "\x1b\x7f\x9b\u202e\u2066\u2028\u2029\u200f\ue000"


def test_what_turns_breaks_or_steers_lines_is_escaped_and_scripts_are_left_alone() -> None:
    plain = "naïve\u00a0: 日本\u3000語 می\u200cخواهم 👩\u200d🚀\n\tend"
    assert harmless(plain).plain == plain
    assert harmless(ODD).plain == r"\x1b\x7f\x9b\u202e\u2066\u2028\u2029\u200f\ue000"


def test_json_for_a_terminal_holds_the_same_values_and_no_control_character(tmp_path: Path) -> None:
    odd = ODD + "\U000e0041 é"
    out = run_folder(tmp_path / "run", GOOD | {"quarantined": {"ann": odd}})
    found = CliRunner().invoke(app, ["status", str(out), "--json"], catch_exceptions=False)
    assert json.loads(found.output)["sites"]["ann"]["quarantined"] == {"1": odd}
    assert all(c.isprintable() or c == "\n" for c in found.output)
    assert " é" in found.output
