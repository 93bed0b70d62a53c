"""Numbers as tensors."""

from __future__ import annotations

import torch

from moet.kernels.scalars import scalar


def test_a_number_is_made_once_and_outlives_a_forward_pass() -> None:
    with torch.inference_mode():
        made = scalar(0.3125)
    assert scalar(0.3125) is made
    assert not made.is_inference()
    assert (torch.ones(2, dtype=torch.bfloat16) * made).dtype == torch.bfloat16
    assert scalar(7, torch.int32).dtype == torch.int32
