"""From a run's log to the numbers of its record."""

import pytest

from fedloom.bench.record import conflict, curve, difference, whole_configuration
from fedloom.bench.suite import Cell
from fedloom.config import parse_config


def unit(clients, conflicting, cosine, length):
    return {"clients": clients, "conflicting": conflicting, "cosine": cosine, "removed": 0.0, "length": length}


def test_curves_hold_what_was_measured():
    rounds = [
        {"round": 0, "evaluation": {"loss": {"macro": 2.0}, "score": {"macro": 0.1}}},
        {"round": 1},
        {"round": 2, "evaluation": {"loss": {"macro": 1.0}, "score_model": {"ag_news": 0.5, "macro": 0.5}}},
        {"round": 3, "evaluation": {}},
    ]
    assert curve(rounds, "loss") == [[0, 2.0], [2, 1.0]]
    assert curve(rounds, "score_model") == [[2, 0.5]]  # the bare backbone's score is no point of it


def test_conflicts_count_pairs_of_client_and_expert():
    """Of 4 clients 1 opposes, of 2 none: 1 of 6 pairs; cosines (4·0.2 + 2·0.5) / 6; lengths 1.5 and 1."""
    rounds = [
        {"round": 0},
        {"round": 1, "method": {"conflict": {"a": unit(4, 0.25, 0.2, 1.5), "b": unit(2, 0.0, 0.5, 1.0)}}},
        {"round": 2, "method": {"conflict": {"a": unit(2, 0.5, 0.0, 0.0)}}},
        {"round": 3, "method": {}},
    ]
    found = conflict(rounds)
    assert found[0] == [1, pytest.approx(1 / 6), pytest.approx(0.3), pytest.approx(1.25)]
    assert found[1] == [2, 0.5, 0.0, None]  # no direction in common: no factor
    assert len(found) == 2


def fedit(folder, rows="1", **training):
    """Return a cell with a file of its own rows."""
    (folder / "ann.jsonl").write_text(rows)
    files = {"ann": str(folder / "ann.jsonl")}
    plain = {"method": {"name": "fedit"}, "data": {"clients": files, "test": files}, "training": training}
    return Cell("fedit_s42", "fedit", "FedIT", parse_config(plain))


def record_of(cell):
    return {"config_hash": cell.config_hash, "config": whole_configuration(cell.config)}


def test_a_record_holds_defaults_and_what_files_hold_but_no_path(tmp_path):
    found = whole_configuration(fedit(tmp_path, rows="abc").config)
    assert found["training"]["clip"] == 1.0
    assert found["adapter"]["rank"] == 32  # four experts of rank 8, in one
    # FIPS 180-2, appendix B.1: SHA-256 of "abc"
    assert found["data"]["test"]["ann"] == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert str(tmp_path) not in str(found)
    plain = {"method": {"name": "fedweave"}, "data": {"benchmark": {"tasks": ["a"], "root": str(tmp_path)}}}
    found = whole_configuration(parse_config(plain))
    assert found["method"]["warmup_steps"] == 10
    assert "root" not in found["data"]["benchmark"]


def test_a_finished_cell_is_the_suites_only_with_the_same_rows_and_defaults(tmp_path):
    cell = fedit(tmp_path)
    record = record_of(cell)
    assert difference(record, cell) == ""
    assert difference({"config_hash": cell.config_hash}, cell) == ""  # an older version's: not known
    assert "is from another configuration" in difference({"config_hash": "0" * 64}, cell)

    other = fedit(tmp_path, lr=0.5)
    assert difference(record, other).endswith("than the suite has now: training.lr was 0.0001, is 0.5")

    record["config"]["training"]["clip"] = 5.0  # as if the default had been another
    record["config"]["evaluation"]["limit"] = 7
    record["config"]["training"]["gone"] = 1  # and a key was dropped since
    del record["config"]["training"]["weight_decay"]  # and one came
    said = "than the suite has now: evaluation.limit was 7, is None; training.clip was 5.0, is 1.0"
    assert difference(record, cell).endswith(said)

    cell = fedit(tmp_path)
    record = record_of(cell)
    fedit(tmp_path, rows="2")
    assert "data.clients.ann was 6b86b273" in difference(record, cell)  # SHA-256 of "1"
    (tmp_path / "ann.jsonl").unlink()
    assert difference(record, cell) == ""  # tables can be drawn without the rows
