"""Checkpoint number formats: decode and encode, exact and vectorised. Knows no tensor names.

e8m0 scales are exponents, not numbers: they are only ever reinterpreted as bytes here, because a
numeric copy would turn 2^-7 into 0. Sources: OCP Microscaling 1.0, OCP 8-bit floating point."""

from __future__ import annotations

import torch
from torch import Tensor

from moet.errors import CheckpointError
from moet.kernels import nvfp4
from moet.kernels.nvfp4 import E4M3_MAX, decode_e2m1

E8M0_BIAS = 127
E8M0_NAN = 255
FP8_BLOCK = 128  # an fp8 scale covers 128 x 128 weights
FP4_BLOCK = 32  # an MXFP4 scale covers 32 consecutive inputs of a row

_E8M0_VALUES = (*(2.0 ** (byte - E8M0_BIAS) for byte in range(E8M0_NAN)), float("nan"))
_E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def e8m0_bytes(scale: Tensor) -> Tensor:
    """The bytes of an e8m0 tensor, same shape, uint8, without conversion.

    scale: float8_e8m0fnu, or uint8 that already holds them. Anything else is a CheckpointError.
    """
    if scale.dtype == torch.float8_e8m0fnu:
        return scale.view(torch.uint8)
    if scale.dtype == torch.uint8:
        return scale
    raise CheckpointError(f"an e8m0 scale has dtype {scale.dtype}; expected float8_e8m0fnu bytes")


def decode_e8m0(scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """2^(byte - 127), exact; byte 255 is NaN, byte 0 is 2^-127 (subnormal in fp32)."""
    raw = e8m0_bytes(scale)
    values = torch.tensor(_E8M0_VALUES, dtype=torch.float64, device=raw.device)
    return values.to(dtype)[raw.to(torch.int64)]


def scale_values(scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The factors that a scale tensor stands for, by its dtype: e8m0 bytes, or float32 as is."""
    if scale.dtype == torch.float32:
        return scale.to(dtype)
    return decode_e8m0(scale, dtype)


def decode_e4m3(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of e4m3 codes (float8_e4m3fn, or uint8 bytes); bytes 0x7f and 0xff are NaN."""
    return codes.view(torch.float8_e4m3fn).to(dtype)


def encode_e4m3(x: Tensor) -> Tensor:
    """Round to e4m3, ties to even, saturating at 448 (infinities too); NaN stays NaN."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).float().to(torch.float8_e4m3fn)


def encode_e2m1(x: Tensor) -> Tensor:
    """As nvfp4.encode_e2m1, but NaN, which has no code, is refused."""
    if bool(x.isnan().any()):
        raise CheckpointError("NaN cannot be stored as e2m1")
    return nvfp4.encode_e2m1(x)


def pack_nibbles(nibbles: Tensor) -> Tensor:
    """[..., K] codes 0..15 -> [..., K/2] int8; the even index is the low nibble. K is even."""
    return nvfp4.pack_nibbles(nibbles.to(torch.uint8)).view(torch.int8)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """[..., K/2] int8 or uint8 -> [..., K] uint8 codes 0..15, the low nibble first."""
    return nvfp4.unpack_nibbles(packed.view(torch.uint8))


def dequantize_mxfp4(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """packed [N, K/2] int8, scale [N, K/32] e8m0 -> [N, K]; exact unless fp32 underflows."""
    values = torch.unflatten(decode_e2m1(unpack_nibbles(packed), dtype), -1, (-1, FP4_BLOCK))
    return (values * decode_e8m0(scale, dtype).unsqueeze(-1)).flatten(-2)


def quantize_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[N, K] -> packed [N, K/2] int8 and scale [N, K/32] uint8, with K a multiple of 32.

    Works in float64: exponent round(log2(amax / 6)) per 32 inputs (-127 for a block of zeros),
    nearest magnitude with ties to the lower one, sign bit kept. Amax may saturate by up to sqrt(2).
    """
    blocks = torch.unflatten(weight.double(), -1, (-1, FP4_BLOCK))
    amax = blocks.abs().amax(-1)
    exponent = torch.log2(amax / 6 + 1e-30).round().clamp(-E8M0_BIAS, E8M0_BIAS)
    exponent = exponent.masked_fill(amax == 0, -E8M0_BIAS).to(torch.int32)
    byte = (exponent + E8M0_BIAS).to(torch.uint8)
    unit = blocks / decode_e8m0(byte, torch.float64).unsqueeze(-1)
    midpoints = torch.tensor(_E2M1_MIDPOINTS, dtype=torch.float64)
    code = torch.bucketize(unit.abs(), midpoints).to(torch.uint8)  # a tie stays below
    code += blocks.signbit().to(torch.uint8) * 8
    return pack_nibbles(code.flatten(-2)), byte


def expand_fp8_scale(scale: Tensor, rows: int, cols: int) -> Tensor:
    """A [ceil(rows/128), ceil(cols/128)] grid of factors, one per weight: [rows, cols]."""
    grid = (-(-rows // FP8_BLOCK), -(-cols // FP8_BLOCK))
    if tuple(scale.shape) != grid:
        raise CheckpointError(
            f"an fp8 weight of {rows} x {cols} needs a scale of {grid}, not {tuple(scale.shape)}"
        )
    wide = scale.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
    return wide[:rows, :cols]


def dequantize_fp8_block(
    weight: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """weight [N, K] e4m3, scale grid e8m0 or float32 -> [N, K]; edges need not divide by 128."""
    rows, cols = weight.shape
    return decode_e4m3(weight, dtype) * expand_fp8_scale(scale_values(scale, dtype), rows, cols)


def quantize_fp8_block(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[N, K] fp32 or narrower -> e4m3 [N, K] and e8m0 bytes of the ceil-divided 128 x 128 grid.

    The scale is the least power of two that keeps the block within 448; a block of zeros gets 1.
    """
    rows, cols = weight.shape
    pad = (0, -cols % FP8_BLOCK, 0, -rows % FP8_BLOCK)
    padded = torch.nn.functional.pad(weight.double().abs(), pad)
    grid = (padded.shape[0] // FP8_BLOCK, padded.shape[1] // FP8_BLOCK)
    amax = padded.reshape(grid[0], FP8_BLOCK, grid[1], FP8_BLOCK).amax((1, 3))
    mantissa, exponent = torch.frexp(amax / E4M3_MAX)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).masked_fill(amax == 0, 0)
    byte = (exponent + E8M0_BIAS).clamp(0, E8M0_NAN - 1).to(torch.uint8)
    wide = expand_fp8_scale(decode_e8m0(byte, torch.float64), rows, cols)
    return encode_e4m3(weight.double() / wide), byte
