import numpy as np
import pytest
import torch

from fedloom.errors import AdapterError
from fedloom.numerics.lowrank import delta, truncate


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


@pytest.mark.parametrize(("out", "width", "rank"), [(5, 3, 1), (5, 3, 2), (3, 6, 2), (4, 4, 3)])
def test_truncate_is_the_best_approximation(out: int, width: int, rank: int) -> None:
    """Against NumPy: same product, error √Σ σ² of what is left out (Eckart–Young), whatever the scaling."""
    dense = np.random.default_rng(out + width).normal(size=(out, width))
    U, S, Vt = np.linalg.svd(dense)
    for scaling in (0.5, 3.0):
        A, B = truncate(torch.from_numpy(dense), rank, scaling)
        assert (A.shape, B.shape) == ((rank, width), (out, rank))
        found = delta(A, B, scaling).numpy()
        np.testing.assert_allclose(found, (U[:, :rank] * S[:rank]) @ Vt[:rank], atol=1e-12)
        np.testing.assert_allclose(np.linalg.norm(dense - found), np.sqrt((S[rank:] ** 2).sum()), rtol=1e-10)


def test_truncate_gives_directions_by_falling_value_with_fixed_signs() -> None:
    """diag(3, −2) in a 2 × 3 layer, s = 2: A = (1 0 0; 0 1 0), B = (3/2 0; 0 −1)."""
    dense = torch.tensor([[3.0, 0.0, 0.0], [0.0, -2.0, 0.0]])
    A, B = truncate(dense, 2, 2.0)
    assert A.tolist() == [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    assert B.tolist() == [[1.5, 0.0], [0.0, -1.0]]
    assert A.dtype == B.dtype == torch.float32
    one_A, one_B = truncate(dense, 1, 2.0)
    assert (one_A.tolist(), one_B.tolist()) == (A[:1].tolist(), B[:, :1].tolist())
    for A, B in (truncate(-dense, 2, 2.0), truncate(dense.flip(0), 2, 2.0)):
        assert bool((A.gather(1, A.abs().argmax(1, keepdim=True)) > 0).all())
        assert B.shape == (2, 2)


def test_truncate_gives_back_a_pair_of_that_rank() -> None:
    source = torch.Generator().manual_seed(0)
    A, B = torch.randn(2, 7, generator=source).double(), torch.randn(5, 2, generator=source).double()
    torch.testing.assert_close(delta(*truncate(delta(A, B, 4.0), 2, 4.0), 4.0), delta(A, B, 4.0))


def test_truncate_fills_up_with_zeros_where_the_matrix_has_no_more() -> None:
    dense = torch.arange(6.0).view(2, 3) + 1
    A, B = truncate(dense, 5, 2.0)
    assert (A.shape, B.shape) == ((5, 3), (2, 5))
    assert not A[2:].any()
    assert not B[:, 2:].any()
    torch.testing.assert_close(delta(A, B, 2.0), dense)
    A, B = truncate(torch.zeros(2, 3), 2, 1.0)
    assert not delta(A, B, 1.0).any()
