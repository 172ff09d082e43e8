"""From a run's log to the numbers of its record."""

import pytest

from fedloom.bench.record import conflict, curve


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
