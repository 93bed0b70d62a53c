"""Normalisation of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moet.kernels.comm import RankPart, added
from moet.kernels.mixture import Mixture
from moet.kernels.quant import Activations
from moet.kernels.registry import GPU_ARCHS, op
from moet.kernels.scalars import scalar

if TYPE_CHECKING:
    from moet.kernels.join_norm import NormWeight


@op(tolerance=2**-8)
def rms_norm(x: Tensor, weight: Tensor | None, *, eps: float) -> Tensor:
    """Scale each row to unit root mean square, then by weight.

    x: [..., dim] fp32 or bf16, contiguous; any leading dimension may be 0. weight: [dim] fp32, or
    None for no weight. Returns the shape and dtype of x; computes in fp32 and rounds once.
    Source: arXiv:1910.07467.
    """
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + scalar(eps))
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


@op(tolerance=2**-7)
def add_rms_norm(
    x: Tensor, y: Tensor | RankPart | Mixture | None, weight: Tensor | NormWeight, *, eps: float
) -> tuple[Tensor, Activations]:
    """A sublayer's output joins the residual stream, which is then normed for the next sublayer.

    x: [n, dim] fp32 or bf16; y: the same, maybe what ranks have parts of or a mixture that is not
    summed, or None if nothing joins. weight: [dim] fp32; for a GPU placed there. Returns
    x + y, rounded once, and its norm, both in the dtype of x; on a GPU steps of few rows have codes
    of the norm, too, if dim is a multiple of 128.
    """
    assert isinstance(weight, Tensor)
    total = x if y is None else x + added(y)
    return total, Activations(rms_norm.reference(total, weight, eps=eps))


def _on_gpu(*, arch: str) -> bool:
    return arch in GPU_ARCHS


def _placed(*, arch: str, dim: int) -> bool:
    return arch in GPU_ARCHS and dim % 128 == 0 and dim <= 8192


rms_norm.impl_in("moet.kernels.triton_rows", "triton", supports=_on_gpu)
add_rms_norm.impl_in("moet.kernels.join_norm", "cluster", supports=_placed)
