"""The made-up benchmark: contradiction, shares, order, and what its dials do."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.neighbors import NearestCentroid

from fedloom.config import parse_config
from fedloom.data.partition import Benchmark
from fedloom.data.synthetic import build_synthetic, deal, pattern_shares
from fedloom.errors import ConfigError


def build(**dials: Any) -> Benchmark:
    return build_synthetic(**{"seed": 5, "patterns": 3, "keys": 6, "clients": 3, "train": 90, "test": 60, **dials})


def answers(drawn: Benchmark) -> dict[str, dict[str, set[str]]]:
    """Return key → pattern → the answers that rows of all splits give."""
    groups = [*drawn.clients.values(), *drawn.validation.values(), *drawn.test.values()]
    found: dict[str, dict[str, set[str]]] = {}
    for example in (e for group in groups for e in group):
        found.setdefault(example.prompt[-1], {}).setdefault(example.task, set()).add(example.response)
    return found


def test_each_key_has_one_answer_in_a_pattern_and_another_in_every_other_pattern() -> None:
    found = answers(build())
    assert sorted(found) == list("ABCDEF")
    for by_pattern in found.values():
        assert len(by_pattern) == 3
        assert all(len(given) == 1 for given in by_pattern.values())
        assert len(set.union(*by_pattern.values())) == 3
    for pattern in ("pattern-0", "pattern-1", "pattern-2"):  # a permutation of the keys
        assert sorted(next(iter(by_pattern[pattern])) for by_pattern in found.values()) == list("ABCDEF")


def test_the_manifest_states_the_rules_that_rows_follow() -> None:
    drawn = build()
    for key, by_pattern in answers(drawn).items():
        for pattern, given in by_pattern.items():
            assert given == {drawn.manifest["rules"][pattern][key]}


@pytest.mark.parametrize(
    ("mixing", "shares"), [(0.0, [90, 0, 0]), (1.0, [30, 30, 30]), (0.5, [60, 15, 15]), (0.25, [75, 8, 7])]
)
def test_mixing_moves_shares_from_one_pattern_to_all_alike(mixing: float, shares: list[int]) -> None:
    drawn = build(mixing=mixing)
    for index, examples in enumerate(drawn.clients.values()):
        counts = Counter(e.task for e in examples)
        assert [counts[f"pattern-{(index + k) % 3}"] for k in range(3)] == pytest.approx(shares, abs=1)


def test_drift_passes_the_share_of_a_pattern_to_the_next_one() -> None:
    still, moving = (build(mixing=0.0, drift=d, train=300).clients["client-00"] for d in (0.0, 1.0))
    assert {e.task for e in still} == {"pattern-0"}
    first, last = (Counter(e.task for e in part) for part in (moving[:100], moving[200:]))
    # The share falls linearly from 1 to 0: 5/6 in the first third of the rows, 1/6 in the last.
    assert first["pattern-0"] == pytest.approx(500 / 6, abs=2)
    assert last["pattern-0"] == pytest.approx(100 / 6, abs=2)
    assert first["pattern-1"] + first["pattern-0"] == 100
    assert Counter(e.task for e in moving)["pattern-0"] == pytest.approx(150, abs=1)


def test_every_beginning_of_the_rows_keeps_to_its_shares() -> None:
    shares = pattern_shares(4, 1, 57, mixing=0.4, drift=0.7)
    np.testing.assert_allclose(shares.sum(axis=1), 1.0)
    given = np.cumsum(np.eye(4)[deal(shares)], axis=0)
    assert np.abs(given - np.cumsum(shares, axis=0)).max() <= 1.0


def test_keys_are_asked_equally_often() -> None:
    counts = Counter((e.task, e.prompt[-1]) for e in build().clients["client-01"])
    assert len(counts) == 18
    assert set(counts.values()) == {5}


def test_the_same_seed_draws_the_same_rows_and_another_seed_others() -> None:
    assert build() == build()
    assert build(seed=6).test != build().test


def test_other_clients_and_dials_leave_a_clients_rows_and_the_tests_alone() -> None:
    few, many = build(clients=2), build(clients=5)
    assert few.clients["client-01"] == many.clients["client-01"]
    assert few.test == build(mixing=0.0, drift=1.0, train=10).test


def test_training_words_and_test_words_are_drawn_apart() -> None:
    drawn = build()
    seen = {e.prompt for examples in drawn.clients.values() for e in examples}
    assert not seen & {e.prompt for examples in drawn.test.values() for e in examples}


def nearest_centroid_accuracy(drawn: Benchmark) -> float:
    """Fit centroids of word counts on the clients' rows, and name the pattern of the test rows by them."""
    train = [e for examples in drawn.clients.values() for e in examples]
    test = [e for examples in drawn.test.values() for e in examples]
    words = CountVectorizer().fit([e.prompt for e in train])
    found = NearestCentroid().fit(words.transform([e.prompt for e in train]), [e.task for e in train])
    return float(np.mean(found.predict(words.transform([e.prompt for e in test])) == [e.task for e in test]))


def test_separability_is_how_well_words_tell_patterns_apart() -> None:
    dials = np.array([0.0, 0.1, 0.3, 1.0])
    purities = np.array([nearest_centroid_accuracy(build(separability=s, words=8, test=200)) for s in dials])
    assert purities[0] == pytest.approx(1 / 3, abs=0.08)  # chance
    assert (np.diff(purities) > 0.03).all()
    assert purities[3] == 1.0
    # No reader can do better than this: (1 − s)^8 of the rows hold none of their pattern's words and must be guessed.
    assert (purities <= 1 - (1 - dials) ** 8 * 2 / 3 + 0.05).all()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"patterns": 7}, "patterns is 7 for 6 keys"),
        ({"patterns": 9, "keys": 26}, "Use 1 to 8 patterns"),
        ({"keys": 27}, "keys is 27"),
        ({"words": 0}, "words is 0"),
    ],
)
def test_impossible_numbers_are_refused(wrong: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(**wrong)


def test_defaults_of_the_configuration_are_those_of_the_generator() -> None:
    section = parse_config({"data": {"synthetic": {}}}).data.synthetic
    assert section is not None
    assert build_synthetic(seed=1, **section.model_dump()) == build_synthetic(seed=1)


def test_a_configuration_names_one_source() -> None:
    with pytest.raises(ConfigError, match="one of the three"):
        parse_config({"data": {"synthetic": {}, "benchmark": {"tasks": ["gsm8k"]}}})
    with pytest.raises(ConfigError, match=r"data\.synthetic\.mixin'\. Did you mean 'mixing'"):
        parse_config({"data": {"synthetic": {"mixin": 1}}})


def test_rows_name_their_place() -> None:
    example = build().test["pattern-2"][7]
    assert (example.source, example.split, example.row, example.task) == ("synthetic", "test", 7, "pattern-2")
