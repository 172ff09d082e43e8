"""A benchmark with a known answer: patterns inside clients that answer the same question differently.

A row shows some marker words and a key; the answer is the key's letter under the row's pattern, and any two patterns
answer every key differently. So updates of two patterns conflict by construction, while the words tell the patterns
apart. Three dials set the regime: how far clients mix patterns, how well words tell patterns apart, how far a client's
mixture moves from its first row to its last.

Every draw has its own generator, derived from (seed, purpose, name): the training rows of one client do not depend on
how many other clients there are, nor the test rows on the dials of the clients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedloom.data.partition import Benchmark, client_names
from fedloom.data.sources import Example, conversation
from fedloom.errors import ConfigError
from fedloom.numerics.seeding import numpy_generator

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

#: Each pattern's own marker words; one token each for the tiny backbone, as the keys and answers are. The first ones
#: are about equally far apart in its features; the last is far from all others.
OWN_WORDS = (
    ("bank", "loan", "mortgage", "income", "taxes", "credit"),
    ("train", "truck", "road", "miles", "trip", "driver"),
    ("football", "baseball", "team", "player", "games", "score"),
    ("blood", "heart", "muscle", "protein", "hair", "cells"),
    ("teacher", "students", "books", "pencils", "school", "grade"),
    ("butter", "sugar", "cheese", "flour", "juice", "soda"),
    ("horses", "cows", "ducks", "chickens", "farmer", "corn"),
    ("court", "judge", "jury", "lawyer", "statute", "attorney"),
)
COMMON_WORDS = ("table", "door", "wall", "floor", "room", "line", "side", "part", "page", "list", "form", "note")


def build_synthetic(
    *,
    seed: int,
    patterns: int = 4,
    keys: int = 10,
    words: int = 16,
    clients: int = 4,
    train: int = 120,
    val: int = 20,
    test: int = 50,
    mixing: float = 1.0,
    separability: float = 1.0,
    drift: float = 0.0,
) -> Benchmark:
    """Draw clients of contradictory patterns. ``Example.task`` names the pattern (for the audit, as in a benchmark).

    Args:
        seed: the benchmark's seed.
        patterns: number of rules K, at most the number of keys (each key then has K different answers).
        keys: letters that are asked for.
        words: marker words of a prompt.
        clients: how many clients; client i leans to pattern i mod K.
        train: training rows of each client.
        val: validation rows of each pattern.
        test: test rows of each pattern.
        mixing: 0: each client has one pattern; 1: every client has all patterns alike; linear between.
        separability: chance that a marker word is one of the pattern's own rather than a common one. At 0 nothing says
            which rule holds, and no model can beat 1 in K.
        drift: at the client's last row, this share of every pattern's share has passed to the next pattern (linearly
            from none at its first row). A client with all patterns alike has nothing to pass.

    Raises:
        ConfigError: an impossible number.
    """
    _check(patterns, keys, words, clients)
    rules = pattern_rules(seed, patterns, keys)
    names = [f"pattern-{p}" for p in range(patterns)]

    def rows(order: Sequence[int], split: str, name: str) -> list[Example]:
        rng = numpy_generator(seed, "synthetic", split, name)
        asked = {p: _cycle(order.count(p), keys, rng) for p in sorted(set(order))}
        examples = []
        for row, p in enumerate(order):
            key = asked[p].pop()
            messages = conversation(_prompt(p, key, words, separability, rng), LETTERS[rules[p, key]])
            examples.append(Example(messages, task=names[p], source="synthetic", split=split, row=row))
        return examples

    by_client = {
        name: rows(deal(pattern_shares(patterns, i, train, mixing=mixing, drift=drift)), "train", name)
        for i, name in enumerate(client_names(clients))
    }
    validation = {name: rows([p] * val, "validation", name) for p, name in enumerate(names)}
    tests = {name: rows([p] * test, "test", name) for p, name in enumerate(names)}
    mix = {name: dict(sorted(Counter(e.task for e in examples).items())) for name, examples in by_client.items()}
    manifest = {
        "format": 1,
        "seed": seed,
        "dials": {"mixing": mixing, "separability": separability, "drift": drift},
        "rules": {
            name: {LETTERS[key]: LETTERS[answer] for key, answer in enumerate(rules[p])} for p, name in enumerate(names)
        },
        "mix": mix,
        "empty_clients": [name for name, examples in by_client.items() if not examples],
    }
    return Benchmark(by_client, validation, tests, manifest)


def pattern_rules(seed: int, patterns: int, keys: int) -> NDArray[np.int64]:
    """Return the answer to each key under each pattern, (patterns, keys): rows of a Latin square in a random order.

    Each row is a permutation of the keys, and no column holds an answer twice.
    """
    rng = numpy_generator(seed, "synthetic", "rules")
    places, answers = rng.permutation(keys), rng.permutation(keys)
    shifts = rng.permutation(keys)[:patterns]
    square: NDArray[np.int64] = answers[(places[None, :] + shifts[:, None]) % keys]
    return square


def pattern_shares(patterns: int, client: int, rows: int, *, mixing: float, drift: float = 0.0) -> NDArray[np.float64]:
    """Return each pattern's share at each of a client's rows, (rows, patterns), by the dials of ``build_synthetic``."""
    start = np.full(patterns, mixing / patterns)
    start[client % patterns] += 1.0 - mixing
    moved = drift * np.linspace(0.0, 1.0, rows)[:, None]
    return (1.0 - moved) * start + moved * np.roll(start, 1)


def deal(shares: NDArray[np.float64]) -> list[int]:
    """Return one pattern a row, so that every beginning of the rows is as near its shares (rows, patterns) as can be.

    Each row goes to the pattern that is furthest behind the sum of its shares so far; ties to the lowest.
    """
    behind = np.zeros(shares.shape[1])
    order = []
    for share in shares:
        behind += share
        order.append(int(np.argmax(np.round(behind, 9))))  # rounded, so that equal shares do tie
        behind[order[-1]] -= 1.0
    return order


def _cycle(count: int, keys: int, rng: np.random.Generator) -> list[int]:
    """Return ``count`` keys, all equally often up to one, in a random order."""
    return [int(key) for _ in range(-(-count // keys)) for key in rng.permutation(keys)][:count]


def _prompt(pattern: int, key: int, words: int, separability: float, rng: np.random.Generator) -> str:
    own = rng.random(words) < separability
    markers = [str(rng.choice(OWN_WORDS[pattern] if is_own else COMMON_WORDS)) for is_own in own]
    return f"{' '.join(markers)}\nLetter: {LETTERS[key]}"


def _check(patterns: int, keys: int, words: int, clients: int) -> None:
    if not 1 <= patterns <= min(keys, len(OWN_WORDS)):
        raise ConfigError(
            f"patterns is {patterns} for {keys} keys. Use 1 to {len(OWN_WORDS)} patterns, and as many keys or more: "
            "every pattern answers a key differently."
        )
    if keys > len(LETTERS):
        raise ConfigError(f"keys is {keys}. Use at most {len(LETTERS)}: keys are letters.")
    if words < 1 or clients < 1:
        raise ConfigError(f"words is {words} and clients is {clients}. Use 1 or more of each.")
