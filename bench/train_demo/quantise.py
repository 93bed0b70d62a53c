"""Weights rounded to the number formats of the official checkpoints, for quantisation-aware steps.

The trainer keeps fp32 masters and runs the graph on rounded copies, so the gradient passes straight
through the rounding and the graph itself never changes. Works on any device."""

from __future__ import annotations

import torch
from torch import Tensor

_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BORDERS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def _e2m1(x: Tensor) -> Tensor:
    """The nearest e2m1 value."""
    borders = torch.tensor(_BORDERS, device=x.device)
    levels = torch.tensor(_LEVELS, device=x.device)
    return torch.copysign(levels[torch.bucketize(x.abs(), borders)], x)


def mxfp4(weight: Tensor) -> Tensor:
    """e2m1 with a power of two per 32 inputs. weight: [..., K] fp32, K a multiple of 32."""
    blocks = weight.unflatten(-1, (-1, 32))
    amax = blocks.abs().amax(-1, keepdim=True)
    scale = torch.exp2(torch.log2(amax / 6 + 1e-30).round())
    return (_e2m1(blocks / scale) * scale).flatten(-2)


def nvfp4(weight: Tensor) -> Tensor:
    """e2m1 with an e4m3 scale per 16 inputs and one fp32 scale per matrix. weight: [..., N, K]."""
    per_matrix = weight.abs().amax((-2, -1), keepdim=True) / (6 * 448)
    blocks = weight.unflatten(-1, (-1, 16))
    outer = per_matrix.unsqueeze(-1)
    scale = blocks.abs().amax(-1, keepdim=True) / 6 / outer
    scale = scale.clamp(2.0**-9, 448).to(torch.float8_e4m3fn).float() * outer
    return (_e2m1(blocks / scale) * scale).flatten(-2)


def fp8_block(weight: Tensor) -> Tensor:
    """e4m3 with a power of two per 128 x 128 weights. weight: [N, K], multiples of 128."""
    rows, cols = weight.shape
    blocks = weight.view(rows // 128, 128, cols // 128, 128)
    amax = blocks.abs().amax((1, 3), keepdim=True).clamp(min=1e-12)
    scale = torch.exp2(torch.log2(amax / 448).ceil())
    return ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).view(rows, cols)
