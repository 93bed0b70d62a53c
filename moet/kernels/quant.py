"""Rounding of activations, KV rows and index keys to few bits with power-of-two block scales.
Knows the arithmetic only; where the bytes go is the affair of cache.py."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from moet.kernels.layout import from_mma_order
from moet.kernels.nvfp4 import (
    E2M1_MAX,
    E4M3_MAX,
    decode_e2m1,
    encode_e2m1,
    pack_nibbles,
    unpack_nibbles,
)
from moet.kernels.registry import op
from moet.kernels.scalars import scalar

if TYPE_CHECKING:
    from moet.kernels.prefill_gemm import Tiles

MXFP4_BLOCK = 32
FP8_BLOCK = 128  # inputs that share an activation scale
_MANTISSA_BITS = 23  # of fp32
_EXPONENT_UNIT = 1 << _MANTISSA_BITS
_EXPONENT_MASK = 0xFF << _MANTISSA_BITS
FP8_AMAX_FLOOR = 1e-4
FP4_AMAX_FLOOR = E2M1_MAX * 2.0**-126


@dataclass(frozen=True, slots=True)
class Activations:
    """The input of linear layers, perhaps rounded to e4m3 by the kernel that made it.

    values: [T, K] fp32 or bf16; None if only the codes were made. codes: [T, K] uint8, e4m3 in the
    order of layout.to_mma_order. scale: [T, ceil(K / 128)] fp32, powers of two, as fp8_encode's.
    tiles: both as the product of many rows takes them, in place of all others.
    """

    values: Tensor | None
    codes: Tensor | None = None
    scale: Tensor | None = None
    tiles: Tiles | None = None

    @property
    def num_rows(self) -> int:
        if self.tiles is not None:
            return self.tiles.num_rows
        known = self.values if self.codes is None else self.codes
        assert known is not None
        return known.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """Of the values; what is codes only stands for bf16."""
        return torch.bfloat16 if self.values is None else self.values.dtype

    def plain(self) -> Tensor:
        """The values; there must be some."""
        assert self.values is not None, "these activations were made as e4m3 only"
        return self.values

    def decoded(self) -> Tensor:
        """What codes and scales stand for; there must be some. [T, K] fp32, K % 32 == 0."""
        assert self.codes is not None, "these activations were not made as e4m3"
        assert self.scale is not None, "codes without scales"
        codes = from_mma_order(self.codes).view(torch.float8_e4m3fn).float()
        scale = self.scale.repeat_interleave(FP8_BLOCK, 1)
        return codes * scale[:, : codes.shape[1]]


def as_activations(x: Tensor | Activations) -> Activations:
    """The same as Activations."""
    return Activations(x) if isinstance(x, Tensor) else x


def plain_values(x: Tensor | Activations) -> Tensor:
    """The same as a tensor; it must not be e4m3 only."""
    return x if isinstance(x, Tensor) else x.plain()


def e4m3_values(x: Tensor | Activations) -> tuple[Tensor, torch.dtype]:
    """The input of a product of e4m3, and the dtype of that product's output.

    x: [..., K]. Returns x rounded per row and 128 inputs, the same shape, fp32, and the dtype of x;
    activations that are codes only were rounded already, and count as bf16.
    """
    if isinstance(x, Activations) and x.values is None:
        return x.decoded(), torch.bfloat16
    values = plain_values(x)
    return fp8_qdq(values.float(), block=FP8_BLOCK), values.dtype


def round_up_to_power_of_two(x: Tensor) -> Tensor:
    """The smallest power of two that is not below x. x: fp32, positive, normal. Exact, by bits."""
    bits = x.view(torch.int32) + scalar(_EXPONENT_UNIT - 1, torch.int32)
    return (bits & scalar(_EXPONENT_MASK, torch.int32)).view(torch.float32)


def e8m0_round_up(x: Tensor) -> Tensor:
    """Exponent byte of the smallest power of two that is not below x. Same shape, uint8."""
    return e8m0_encode(round_up_to_power_of_two(x))


def e8m0_encode(scale: Tensor) -> Tensor:
    """Exponent bytes of powers of two. scale: fp32, normal. Returns uint8, 2^(byte - 127)."""
    return (scale.view(torch.int32) >> _MANTISSA_BITS).to(torch.uint8)


def e8m0_value(scale: Tensor) -> Tensor:
    """2^(byte - 127) as fp32, built from bits. scale: uint8, 1..254."""
    return (scale.to(torch.int32) << _MANTISSA_BITS).view(torch.float32)


def _largest(blocks: Tensor) -> Tensor:
    """The largest magnitude of each block, [..., 1]."""
    largest: Tensor = torch.linalg.vector_norm(blocks, math.inf, -1, keepdim=True)
    return largest


def _fp8_blocks(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """[..., K] fp32 -> e4m3 [..., K / block, block] and fp32 scales [..., K / block, 1]."""
    blocks = torch.unflatten(x, -1, (-1, block))
    amax = _largest(blocks).clamp_(min=FP8_AMAX_FLOOR)
    scale = round_up_to_power_of_two(amax / scalar(E4M3_MAX))
    return (blocks / scale).to(torch.float8_e4m3fn), scale  # at most 448 but for rounding


def fp8_encode(x: Tensor, *, block: int) -> tuple[Tensor, Tensor]:
    """Round to e4m3 with a scale per block of the last dimension.

    x: [..., K] fp32, K a multiple of block. scale = 2^ceil(log2(max(amax, 1e-4) / 448)); values
    round to nearest even. Returns ([..., K] float8_e4m3fn, [..., K / block] uint8 exponents).
    """
    codes, scale = _fp8_blocks(x, block)
    return codes.flatten(-2), e8m0_encode(scale.squeeze(-1))


def fp8_decode(codes: Tensor, scale: Tensor, *, block: int) -> Tensor:
    """Inverse of fp8_encode, exact. Returns [..., K] fp32."""
    blocks = torch.unflatten(codes.float(), -1, (-1, block))
    return (blocks * e8m0_value(scale).unsqueeze(-1)).flatten(-2)


@op(tolerance=0.0)
def fp8_qdq(x: Tensor, *, block: int) -> Tensor:
    """x as e4m3 with power-of-two scales would give it back; the last block may be short.

    x: [..., K] fp32 or bf16. Returns the same shape and dtype (bf16 holds every result exactly).
    Source: the fp8 recipe of the checkpoints, scale_fmt ue8m0.
    """
    width = x.shape[-1]
    values = x.float()
    if width % block:
        values = F.pad(values, (0, -width % block))
    codes, scale = _fp8_blocks(values, block)
    rounded = (codes.float() * scale).flatten(-2)
    if width % block:
        rounded = rounded[..., :width]
    return rounded if x.dtype == torch.float32 else rounded.to(x.dtype)


def _mxfp4_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., K] fp32 -> e2m1 codes [..., K / 32, 32] uint8 and fp32 scales [..., K / 32, 1]."""
    blocks = torch.unflatten(x, -1, (-1, MXFP4_BLOCK))
    amax = _largest(blocks).clamp_(min=FP4_AMAX_FLOOR)
    scale = round_up_to_power_of_two(amax / scalar(E2M1_MAX))
    return encode_e2m1(blocks / scale), scale


def mxfp4_encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round to e2m1 with a scale per 32 values of the last dimension.

    x: [..., K] fp32, K a multiple of 32. scale = 2^ceil(log2(amax / 6)); ties go to the even code.
    Returns ([..., K / 2] uint8, low nibble first; [..., K / 32] uint8 exponents).
    """
    codes, scale = _mxfp4_blocks(x)
    return pack_nibbles(codes.flatten(-2)), e8m0_encode(scale.squeeze(-1))


def mxfp4_decode(packed: Tensor, scale: Tensor) -> Tensor:
    """Inverse of mxfp4_encode, exact. Returns [..., K] fp32."""
    blocks = torch.unflatten(decode_e2m1(unpack_nibbles(packed)), -1, (-1, MXFP4_BLOCK))
    return (blocks * e8m0_value(scale).unsqueeze(-1)).flatten(-2)


@op(tolerance=0.0)
def fp4_qdq(x: Tensor) -> Tensor:
    """x as MXFP4 (e2m1, a power-of-two scale per 32 values) would give it back.

    x: [..., K] fp32 or bf16, K a multiple of 32. Returns the same shape and dtype.
    """
    codes, scale = _mxfp4_blocks(x.float())
    return (decode_e2m1(codes) * scale).flatten(-2).to(x.dtype)


@op(tolerance=2**-8)
def hadamard(x: Tensor) -> Tensor:
    """Walsh-Hadamard transform of the last dimension, natural order, times K^-0.5.

    x: [..., K] fp32 or bf16, K a power of two. Returns the same shape and dtype. Orthogonal: with
    both sides of a dot product transformed the product is unchanged, and FP4 rounding errors are
    spread evenly.
    """
    width = x.shape[-1]
    assert width & (width - 1) == 0, width
    y = x.float()
    half = 1
    while half < width:
        a, b = torch.unflatten(y, -1, (-1, 2, half)).unbind(-2)
        y = torch.stack([a + b, a - b], -2).flatten(-3)
        half *= 2
    return (y * (1 / math.sqrt(width))).to(x.dtype)
