"""Numbers as tensors. torch wraps a Python number anew in every call, which takes longer than the
arithmetic of a decode step on the CPU."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


@functools.cache
def scalar(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor without dimensions, made once: for operands on any device, never to be written."""
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=dtype, device="cpu")
