import math

import torch
from torch import nn

from fedloom.numerics.init import lora_init

SHAPES = {"a.q_proj": (6, 4), "a.v_proj": (2, 4)}


def test_lora_init_is_kaiming_uniform_root_five_in_model_order_with_zero_b() -> None:
    ours = lora_init(SHAPES, 2, 2, torch.Generator().manual_seed(4))
    assert list(ours) == [f"experts/{m}/{path}.lora_{f}" for m in (0, 1) for path in SHAPES for f in "AB"]
    generator = torch.Generator().manual_seed(4)
    for name, tensor in ours.items():
        if name.endswith("lora_A"):
            expected = nn.init.kaiming_uniform_(torch.empty(2, 4), a=math.sqrt(5), generator=generator)
            torch.testing.assert_close(tensor, expected, rtol=1e-6, atol=0)
        else:
            assert tensor.shape == (SHAPES[name.split("/")[2].removesuffix(".lora_B")][0], 2)
            assert not tensor.any()
