"""Rounding of activations, KV rows and index keys to few bits with power-of-two block scales.
Knows the arithmetic only; where the bytes go is the affair of cache.py."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from moet.kernels.nvfp4 import (
    E2M1_MAX,
    E4M3_MAX,
    decode_e2m1,
    encode_e2m1,
    pack_nibbles,
    unpack_nibbles,
)
from moet.kernels.registry import op

MXFP4_BLOCK = 32
FP8_AMAX_FLOOR = 1e-4
FP4_AMAX_FLOOR = E2M1_MAX * 2.0**-126


def e8m0_round_up(x: Tensor) -> Tensor:
    """Exponent byte of the smallest power of two that is not below x.

    x: fp32, positive, normal. Returns uint8 of the same shape, 2^(byte - 127).
    """
    mantissa, exponent = torch.frexp(x)  # x = mantissa * 2^exponent, mantissa in [0.5, 1)
    return (exponent - (mantissa == 0.5).int() + 127).to(torch.uint8)


def e8m0_value(scale: Tensor) -> Tensor:
    """2^(byte - 127) as fp32, built from bits. scale: uint8, 1..254."""
    return (scale.to(torch.int32) << 23).view(torch.float32)


def _blocks(x: Tensor, block: int) -> Tensor:
    """[..., K] -> [..., ceil(K / block), block], the last block filled up with zeros."""
    return torch.unflatten(F.pad(x, (0, -x.shape[-1] % block)), -1, (-1, block))


def fp8_encode(x: Tensor, *, block: int) -> tuple[Tensor, Tensor]:
    """Round to e4m3 with a scale per block of the last dimension.

    x: [..., K] fp32, K a multiple of block. scale = 2^ceil(log2(max(amax, 1e-4) / 448)); values
    round to nearest even. Returns ([..., K] float8_e4m3fn, [..., K / block] uint8 exponents).
    """
    blocks = torch.unflatten(x, -1, (-1, block))
    scale = e8m0_round_up(blocks.abs().amax(-1).clamp(min=FP8_AMAX_FLOOR) / E4M3_MAX)
    scaled = blocks / e8m0_value(scale).unsqueeze(-1)
    codes = scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.flatten(-2), scale


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
    blocks = _blocks(x.float(), block)
    codes, scale = fp8_encode(blocks.flatten(-2), block=block)
    return fp8_decode(codes, scale, block=block)[..., : x.shape[-1]].to(x.dtype)


def mxfp4_encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round to e2m1 with a scale per 32 values of the last dimension.

    x: [..., K] fp32, K a multiple of 32. scale = 2^ceil(log2(amax / 6)); ties go to the even code.
    Returns ([..., K / 2] uint8, low nibble first; [..., K / 32] uint8 exponents).
    """
    blocks = torch.unflatten(x, -1, (-1, MXFP4_BLOCK))
    scale = e8m0_round_up(blocks.abs().amax(-1).clamp(min=FP4_AMAX_FLOOR) / E2M1_MAX)
    scaled = (blocks / e8m0_value(scale).unsqueeze(-1)).flatten(-2)
    return pack_nibbles(encode_e2m1(scaled)), scale


def mxfp4_decode(packed: Tensor, scale: Tensor) -> Tensor:
    """Inverse of mxfp4_encode, exact. Returns [..., K] fp32."""
    blocks = torch.unflatten(decode_e2m1(unpack_nibbles(packed)), -1, (-1, MXFP4_BLOCK))
    return (blocks * e8m0_value(scale).unsqueeze(-1)).flatten(-2)


@op(tolerance=0.0)
def fp4_qdq(x: Tensor) -> Tensor:
    """x as MXFP4 (e2m1, a power-of-two scale per 32 values) would give it back.

    x: [..., K] fp32 or bf16, K a multiple of 32. Returns the same shape and dtype.
    """
    return mxfp4_decode(*mxfp4_encode(x.float())).to(x.dtype)


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
