"""NVFP4: e2m1 values with one e4m3 scale per 16 neighbours and one fp32 scale over all.

Reference encode and decode, exact and vectorised, shared by KV rows and expert weights. Knows
nothing of where the bytes are kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moet.kernels.registry import op

BLOCK = 16  # values per e4m3 scale
E2M1_MAX = 6.0
E4M3_MAX = 448.0
MIN_BLOCK_SCALE = 2.0**-9  # smallest e4m3 above zero: a block of zeros keeps a usable scale

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_VALUES = (*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES))  # by code
# A magnitude belongs to the code that counts the borders below it. A border itself goes to the
# neighbour with an even code (round to nearest even), so every other border is inclusive.
_BORDERS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True))
_LAST_BORDER = 5.0


def encode_e2m1(x: Tensor) -> Tensor:
    """Round to the nearest e2m1 code, ties to even, saturating at 6; the sign of zero is kept.

    x: any shape, float, finite. Returns uint8 codes 0..15 of the same shape; bit 3 is the sign.
    """
    magnitude = x.abs()
    code = (magnitude > _LAST_BORDER).to(torch.uint8)
    for border, inclusive in _BORDERS:
        code += (magnitude >= border) if inclusive else (magnitude > border)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def decode_e2m1(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """codes: uint8 0..15, any shape. Returns their values in dtype, exact in every float type."""
    return torch.tensor(E2M1_VALUES, dtype=dtype, device=codes.device)[codes.long()]


def pack_nibbles(codes: Tensor) -> Tensor:
    """codes: uint8 [..., K] 0..15, K even. Returns uint8 [..., K/2], even index in the low half."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Invert pack_nibbles: uint8 [..., K/2] to codes [..., K]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


@op(tolerance=0.0)
def nvfp4_quantize(x: Tensor, *, global_scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Round each 16 neighbours to e2m1 under a shared e4m3 scale.

    x: [..., K] float, K a multiple of 16. Block scale = e4m3(max(amax / 6 / global_scale, 2^-9)),
    at most 448; codes are e2m1(x / (scale * global_scale)), nearest even, saturating.
    Returns packed codes uint8 [..., K/2] and e4m3 bytes uint8 [..., K/16].
    """
    blocks = torch.unflatten(x.float(), -1, (-1, BLOCK))
    wanted = blocks.abs().amax(-1) / E2M1_MAX / global_scale
    scales = wanted.clamp(MIN_BLOCK_SCALE, E4M3_MAX).to(torch.float8_e4m3fn)
    codes = encode_e2m1(blocks / (scales.float() * global_scale).unsqueeze(-1))
    return pack_nibbles(codes.flatten(-2)), scales.view(torch.uint8)


@op(tolerance=0.0)
def nvfp4_dequantize(
    packed: Tensor,
    scales: Tensor,
    *,
    global_scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Give back e2m1 * scale * global_scale.

    packed: uint8 [..., K/2]; scales: e4m3 bytes, uint8 [..., K/16]. Returns [..., K] in dtype. The
    product of code and block scale is exact in fp32; the global scale rounds once (not in float64).
    """
    values = torch.unflatten(decode_e2m1(unpack_nibbles(packed), dtype), -1, (-1, BLOCK))
    block_scale = scales.contiguous().view(torch.float8_e4m3fn).to(dtype).unsqueeze(-1)
    return torch.flatten(values * block_scale * global_scale, -2)
