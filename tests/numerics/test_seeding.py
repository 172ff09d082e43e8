import hashlib

import numpy as np
import pytest
import torch

from fedloom.numerics.seeding import derive_seed, generator, numpy_generator


def test_seed_is_the_first_63_bits_of_sha256_of_the_json_list() -> None:
    digest = hashlib.sha256(b'[42, "fit", "c1", 3]').hexdigest()
    assert derive_seed(42, "fit", "c1", 3) == int(digest[:16], 16) // 2


def test_purposes_cannot_run_together() -> None:
    seeds = [
        derive_seed(1, "ab", "c"),
        derive_seed(1, "a", "bc"),
        derive_seed(1, "abc"),
        derive_seed(1, 2),
        derive_seed(1, "2"),
        derive_seed(12),
        derive_seed(1, 'a", "bc'),
        derive_seed(2, "abc"),
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= s < 2**63 for s in seeds)


def test_numpy_integers_are_integers_and_floats_are_refused() -> None:
    assert derive_seed(np.int64(3), "a", np.int32(4)) == derive_seed(3, "a", 4)
    with pytest.raises(TypeError):
        derive_seed(3, 1.5)  # type: ignore[arg-type]


def test_generators_repeat_themselves_and_differ_by_purpose() -> None:
    def draw(*purpose: str | int) -> list[float]:
        return torch.rand(4, generator=generator(7, *purpose)).tolist()

    assert draw("fit", 1) == draw("fit", 1)
    assert draw("fit", 1) != draw("fit", 2)
    assert numpy_generator(7, "x").random() == numpy_generator(7, "x").random()
    assert numpy_generator(7, "x").random() != numpy_generator(7, "y").random()
