import math

import numpy as np
import pytest
import torch

from fedloom.errors import AdapterError
from fedloom.numerics import tree


def test_add_undoes_subtract() -> None:
    a = {"x": torch.tensor([3.0, 5.0]), "y": torch.tensor([[1.0]])}
    b = {"y": torch.tensor([[4.0]]), "x": torch.tensor([1.0, 2.0])}
    difference = tree.subtract(a, b)
    assert difference["x"].tolist() == [2.0, 3.0]
    assert difference["y"].tolist() == [[-3.0]]
    assert all(torch.equal(tree.add(difference, b)[name], a[name]) for name in a)


def test_key_mismatch_names_the_keys_of_each_side() -> None:
    with pytest.raises(AdapterError, match=r"missing from the second: only_a; missing from the first: only_b"):
        tree.subtract(
            {"both": torch.ones(1), "only_a": torch.ones(1)}, {"both": torch.ones(1), "only_b": torch.ones(1)}
        )


def test_shapes_never_broadcast() -> None:
    with pytest.raises(AdapterError, match=r"'x' has two shapes: \(2, 1\) and \(1, 2\)"):
        tree.add({"x": torch.ones(2, 1)}, {"x": torch.ones(1, 2)})


def test_norm_is_of_the_whole_vector() -> None:
    # √(3² + 4² + 12²) = 13, while the sum of per-tensor norms is 17.
    assert tree.norm({"x": torch.tensor([3.0, 4.0]), "y": torch.tensor([12.0])}) == 13.0
    assert tree.norm({}) == 0.0


def test_norm_accumulates_in_float64() -> None:
    ones = torch.full((20_000_000,), 1.0 + 2**-20)
    assert tree.norm({"x": ones}) == pytest.approx(math.sqrt(20_000_000) * (1.0 + 2**-20), rel=1e-12)
    assert tree.norm({"x": torch.tensor([3e38, 0.0]), "y": torch.tensor([3e38])}) == pytest.approx(
        3e38 * 2**0.5, rel=1e-6
    )


def test_inner_products_and_norms_in_pieces_are_those_of_the_whole_vector() -> None:
    """Against numpy's float64, on tensors longer than a piece, transposed, empty and of half precision."""
    draw = torch.Generator().manual_seed(3)
    shapes = {"long": (3, tree.PIECE // 2 + 5), "empty": (0, 4), "one": ()}
    a = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    b = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    a["turned"], b["turned"] = a["long"].T, b["long"].T.contiguous()
    a["half"], b["half"] = a["long"].bfloat16(), b["long"].bfloat16()
    x, y = (np.concatenate([t.float().numpy().ravel() for t in side.values()]).astype(np.float64) for side in (a, b))
    inner, size = tree.dot_and_norm(a, b)
    assert inner == pytest.approx(float(x @ y), rel=1e-12)
    assert size == pytest.approx(float(np.linalg.norm(x)), rel=1e-14)
    assert tree.norm(a) == size
    assert tree.norm({"x": torch.tensor([float("inf"), 1.0])}) == float("inf")
