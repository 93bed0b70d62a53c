"""Rotary position embedding on interleaved pairs of the last dimensions of a vector."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moet.kernels.norm import rms_norm
from moet.kernels.registry import GPU_ARCHS, op


@dataclass(frozen=True, slots=True)
class Yarn:
    """Frequency scaling for long windows. Magnitudes stay 1: there is no mscale in these models."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float


def rope_frequencies(dim: int, theta: float, yarn: Yarn | None = None) -> Tensor:
    """Angle per position of each pair: theta^(-2i/dim), long wavelengths slowed down by yarn.

    Returns [dim / 2] fp32, computed in fp64 and rounded once. Source: arXiv:2309.00071, section
    3.2 (interpolation by parts).
    """
    frequencies = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if yarn is not None:
        low = max(math.floor(_turning_pair(yarn.beta_fast, dim, theta, yarn)), 0)
        high = min(math.ceil(_turning_pair(yarn.beta_slow, dim, theta, yarn)), dim - 1)
        pairs = torch.arange(dim // 2, dtype=torch.float64)
        slow = ((pairs - low) / max(high - low, 1e-3)).clamp(0, 1)
        frequencies = frequencies * (1 - slow) + frequencies / yarn.factor * slow
    return frequencies.float()


def _turning_pair(num_turns: float, dim: int, theta: float, yarn: Yarn) -> float:
    """The (fractional) pair that makes num_turns full turns over the original window."""
    wavelength = yarn.original_max_position_embeddings / (2 * math.pi * num_turns)
    return dim * math.log(wavelength) / (2 * math.log(theta))


def rope_cos_sin(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of every position and pair.

    positions: [n] int64, below 2^24. frequencies: [dim / 2] fp32. Returns two [n, dim / 2] fp32
    tensors. The angle is an fp32 product; tables in fewer bits are useless at large positions.
    """
    angles = positions.float().unsqueeze(-1) * frequencies
    return angles.cos(), angles.sin()


@op(tolerance=2**-8)
def rope(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate the last 2 * cos.shape[1] values of each vector, pair (2i, 2i + 1) by angle i.

    x: [n, ..., dim] fp32 or bf16. cos, sin: [n, rope_dim / 2] fp32, one row per row of x.
    inverse rotates back. Returns the shape and dtype of x; computes in fp32 and rounds once.
    """
    turn = torch.complex(cos, -sin if inverse else sin)
    turn = turn.view((turn.shape[0],) + (1,) * (x.dim() - 2) + (turn.shape[1],))
    nope = x.shape[-1] - 2 * turn.shape[-1]
    pairs = torch.view_as_complex(torch.unflatten(x[..., nope:].float(), -1, (-1, 2)))
    rotated = torch.view_as_real(pairs * turn).flatten(-2)
    return torch.cat([x[..., :nope], rotated.to(x.dtype)], -1)


@op(tolerance=2**-7)
def norm_rope_heads(q: Tensor, cos: Tensor, sin: Tensor, *, num_heads: int, eps: float) -> Tensor:
    """Bring each head to unit root mean square and rotate its end by the row's position.

    q: [T, num_heads * head_dim] fp32 or bf16, rows may be strided. cos, sin: [T, rope_dim / 2]
    fp32. Returns [T, num_heads, head_dim]; norm and rotation each round to the dtype of q.
    """
    heads = torch.unflatten(q, 1, (num_heads, -1))
    return rope(rms_norm(heads, None, eps=eps), cos, sin)


def _pairs_fit(*, arch: str, head_dim: int, rope_dim: int) -> bool:
    power_of_two = head_dim & (head_dim - 1) == 0
    in_one_half = rope_dim % 2 == 0 and 2 * rope_dim <= head_dim
    return arch in GPU_ARCHS and power_of_two and in_one_half


norm_rope_heads.impl_in("moet.kernels.triton_rows", "triton", supports=_pairs_fit)
