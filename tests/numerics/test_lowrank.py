import numpy as np
import pytest
import torch

from fedloom.errors import AdapterError
from fedloom.numerics.lowrank import delta


def test_delta_on_a_non_square_layer() -> None:
    A = torch.tensor([[1.0, 2.0, 3.0]])  # rank 1, in 3
    B = torch.tensor([[10.0], [20.0]])  # out 2
    assert delta(A, B, 0.5).tolist() == [[5.0, 10.0, 15.0], [10.0, 20.0, 30.0]]


def test_delta_matches_numpy() -> None:
    rng = np.random.default_rng(0)
    A, B = rng.normal(size=(4, 7)), rng.normal(size=(5, 4))
    np.testing.assert_allclose(delta(torch.from_numpy(A), torch.from_numpy(B), 2.0), 2.0 * np.dot(B, A), rtol=1e-12)


@pytest.mark.parametrize(("a", "b"), [((4, 7), (4, 5)), ((4, 7), (5, 3)), ((1, 4, 7), (1, 5, 4))])
def test_factors_that_do_not_fit_are_refused(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    with pytest.raises(AdapterError, match="rank"):
        delta(torch.zeros(a), torch.zeros(b), 1.0)
