"""8-bit blocks: every bound worked out by hand or in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as np_st

from fedloom.errors import AdapterError
from fedloom.numerics.quantize import from_int8, to_int8


def test_two_blocks_by_hand() -> None:
    """Block 1: largest 254, so scale 2; 3/2 = 1.5 rounds to even, 2. Block 2 (short): largest 0.127, scale 0.001."""
    multiples, scales = to_int8(torch.tensor([254.0, 3.0, -127.0, 0.9, 0.127, -0.0004]), block=4)
    assert multiples.tolist() == [127, 2, -64, 0, 127, 0]  # -127/2 = -63.5 rounds to even, -64
    assert scales.tolist() == pytest.approx([2.0, 0.001])
    assert from_int8(multiples, scales, block=4).tolist() == pytest.approx([254.0, 4.0, -128.0, 0.0, 0.127, 0.0])


SHAPES = np_st.array_shapes(max_dims=3, max_side=7, min_side=0)


@given(
    np_st.arrays(
        "float32",
        np_st.array_shapes(max_dims=3, max_side=7, min_side=0),
        elements=st.floats(-(2**100), 2**100, width=32),
    ),
    st.integers(1, 9),
)
def test_the_error_is_at_most_half_a_scale(values: Any, block: int) -> None:
    """The oracle takes each block's largest magnitude in float64; a scale is a float32, so of relative error 2⁻²⁴."""
    multiples, scales = to_int8(torch.from_numpy(values), block)
    found = from_int8(multiples, scales, block)
    assert found.shape == values.shape
    flat, received = values.astype(np.float64).ravel(), found.double().numpy().ravel()
    for start in range(0, len(flat), block):
        part = flat[start : start + block]
        bound = np.abs(part).max() / 127 / 2 * (1 + 1e-4) + 2.0**-142  # 127 times the smallest subnormal, 2⁻¹⁴⁹
        assert np.abs(part - received[start : start + block]).max() <= bound


def test_zeros_stay_zero_and_what_is_not_finite_is_seen() -> None:
    assert from_int8(*to_int8(torch.zeros(300))).count_nonzero() == 0
    assert from_int8(*to_int8(torch.empty(0, 4))).shape == (0, 4)
    values = torch.ones(600)
    values[0], values[300] = float("nan"), float("inf")
    found = from_int8(*to_int8(values))
    assert found[:512].isnan().all()
    assert torch.equal(found[512:], torch.ones(88))


def test_multiples_without_their_scales_are_refused() -> None:
    multiples, scales = to_int8(torch.randn(300))
    for wrong in ((multiples, scales[:1]), (multiples.float(), scales), (multiples, scales.double())):
        with pytest.raises(AdapterError, match="2 float32 scales"):
            from_int8(*wrong)
