"""Normalisation of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from moet.kernels.registry import GPU_ARCHS, op


@op(tolerance=2**-8)
def rms_norm(x: Tensor, weight: Tensor | None, *, eps: float) -> Tensor:
    """Scale each row to unit root mean square, then by weight.

    x: [..., dim] fp32 or bf16, contiguous; any leading dimension may be 0. weight: [dim] fp32, or
    None for no weight. Returns the shape and dtype of x; computes in fp32 and rounds once.
    Source: arXiv:1910.07467.
    """
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight).to(x.dtype)


@op(tolerance=2**-8)
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float) -> Tensor:
    """Bring each row to zero mean and unit variance, then scale by weight and add bias.

    x: [..., dim] fp32 or bf16, contiguous; any leading dimension may be 0. weight, bias: [dim]
    fp32. Returns the shape and dtype of x; computes in fp32 and rounds once.
    Source: arXiv:1607.06450.
    """
    y = x.float()
    y = y - y.mean(-1, keepdim=True)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y * weight + bias).to(x.dtype)


def _on_gpu(*, arch: str) -> bool:
    return arch in GPU_ARCHS


rms_norm.impl_in("moet.kernels.triton_rows", "triton", supports=_on_gpu)
