"""Two-bit quantiser of routed experts: levels {-4, -1, +1, +4} times a power of two per 32 inputs.

The code of a weight keeps its sign; only two magnitudes remain. A signed bias destroys a model
where a larger symmetric error does not, so the bias of every tensor is measured and bounded.
Knows matrices, not files."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import sqrt
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moet.errors import CheckpointError
from moet.kernels.nvfp4 import E2M1_VALUES
from moet.models.formats import (
    E8M0_BIAS,
    E8M0_NAN,
    FP4_BLOCK,
    decode_e8m0,
    e8m0_bytes,
    pack_nibbles,
    quantize_mxfp4,
    unpack_nibbles,
)

ScaleRule = Literal["inherit", "mse"]

_LARGE, _SMALL = 4.0, 1.0
_THRESHOLD = 2.5  # magnitudes above it are large; a tie is small
_ONE_SIGNED = 0.95  # share of zeros with one sign above which their signs are made to alternate
# Exponents that "mse" tries, relative to the source's; of equals the first wins. Two above would
# put every e2m1 magnitude on one level, which 0 offers too; blocks of tiny values are rare.
_NEIGHBOURS = (0, -1, 1, -2)
_FIELD_BITS = 16  # one sum per neighbour, four of them in an int64
_FIELD_BIAS = 64  # keeps the signed sums of a byte's two weights positive
_MAX_BIAS, _MAX_REL_RMS = 0.01, 0.75
_MAX_WANDER = 4.0  # the mean of n symmetric errors is still off by some 0.4 / sqrt(n)


@dataclass(frozen=True, slots=True)
class QuantReport:
    """Errors of one tensor. bias: mean(q - w) / rms(w), signed. rel_rms: rms(q - w) / rms(w)."""

    bias: float
    rel_rms: float
    zeros: float  # share of weights that are exactly zero
    zeros_alternated: bool

    def check(self, name: str, num_weights: int) -> None:
        """Raise CheckpointError naming the tensor if its errors would harm the model."""
        max_bias = _MAX_BIAS + _MAX_WANDER / sqrt(num_weights)
        if abs(self.bias) > max_bias:
            raise CheckpointError(
                f"{name}: 2-bit weights have a signed bias of {self.bias:.4f} of their size, above "
                f"{max_bias:.4f}; this tensor is not symmetric enough for 2-bit experts"
            )
        if self.rel_rms > _MAX_REL_RMS:
            raise CheckpointError(
                f"{name}: 2-bit weights are off by {self.rel_rms:.3f} of their size, above "
                f"{_MAX_REL_RMS}; this tensor does not suit 2-bit experts"
            )


@dataclass(frozen=True, slots=True)
class W2Matrix:
    """codes: [N, K] uint8, 2 * sign + large. scale: [N, K/32] uint8, e8m0 of the small level."""

    codes: Tensor
    scale: Tensor
    report: QuantReport


def quantize_w2(packed: Tensor, scale: Tensor, rule: ScaleRule) -> W2Matrix:
    """Quantise an MXFP4 matrix: packed [N, K/2] int8, scale [N, K/32] e8m0.

    "inherit" keeps the source's exponents; "mse" takes the neighbouring exponent with the least
    squared error, and byte 0 for a block of zeros. In integers, hence exact; the same as
    quantize_w2_values of the decoded matrix. Raises CheckpointError for a NaN scale.
    """
    source = _checked_scale(scale)
    nibbles, zeros, alternated = _balanced(unpack_nibbles(packed))
    raw = pack_nibbles(nibbles).view(torch.uint8).numpy().reshape(*source.shape, FP4_BLOCK // 2)
    tables = _error_tables()
    squares = _fields(tables.squared[raw].sum(-1))
    choice = np.zeros(source.shape, np.int64)
    if rule == "mse":
        choice = np.where(_in_range(source.numpy()), squares, np.iinfo(np.int64).max).argmin(0)
    thresholds = torch.from_numpy(tables.first_large[choice]).unsqueeze(-1)
    codes = torch.unflatten(nibbles, -1, (-1, FP4_BLOCK))
    codes = (codes >> 3) * 2 + ((codes & 7) >= thresholds)
    scaled = source.to(torch.int16) + torch.tensor(_NEIGHBOURS, dtype=torch.int16)[choice]
    energy = tables.energy[raw].sum(-1)
    signed = _fields(tables.signed[raw].sum(-1)) - _FIELD_BIAS * (FP4_BLOCK // 2)
    error = np.take_along_axis(signed, choice[None], 0)[0]
    squared = np.take_along_axis(squares, choice[None], 0)[0]
    if rule == "mse":
        empty = energy == 0  # its levels, +-2^-127, are no error to speak of
        scaled[torch.from_numpy(empty)] = 0
        error[empty] = squared[empty] = 0
    unit = decode_e8m0(source, torch.float64).numpy()
    report = _report(
        float((error * unit).sum() / 4),
        float((squared * unit**2).sum() / 16),
        float((energy * unit**2).sum() / 4),
        zeros,
        alternated,
        nibbles.numel(),
    )
    return W2Matrix(codes.flatten(-2), scaled.to(torch.uint8), report)


def quantize_w2_values(
    weight: Tensor, rule: ScaleRule, source_scale: Tensor | None = None
) -> W2Matrix:
    """Quantise [N, K] numbers in float64, K a multiple of 32.

    source_scale: [N, K/32] e8m0 from which "inherit" and "mse" start; None takes the one that
    quantize_mxfp4 gives.
    """
    source = _checked_scale(quantize_mxfp4(weight)[1] if source_scale is None else source_scale)
    blocks = torch.unflatten(weight.double(), -1, (-1, FP4_BLOCK))
    negative, zeros, alternated = _balanced_signs(blocks.flatten(-2) == 0, weight.signbit())
    sign = 1.0 - 2.0 * negative.view(blocks.shape).double()
    best = torch.full(source.shape, torch.inf, dtype=torch.float64)
    scaled, large = source.clone(), torch.zeros(blocks.shape, dtype=torch.bool)
    for neighbour in _NEIGHBOURS if rule == "mse" else (0,):
        byte = source.to(torch.int16) + neighbour
        valid = (byte >= 0) & (byte < E8M0_NAN)
        unit = torch.pow(2.0, (byte - E8M0_BIAS).double()).unsqueeze(-1)
        is_large = blocks.abs() > _THRESHOLD * unit
        error = torch.where(is_large, _LARGE, _SMALL) * unit - blocks.abs()
        squared = error.square().sum(-1)
        better = valid & (squared < best)
        best = torch.where(better, squared, best)
        scaled = torch.where(better, byte.to(torch.uint8), scaled)
        large = torch.where(better.unsqueeze(-1), is_large, large)
    if rule == "mse":
        scaled[(blocks == 0).all(-1)] = 0
    unit = decode_e8m0(scaled, torch.float64).unsqueeze(-1)
    error = sign * torch.where(large, _LARGE, _SMALL) * unit - blocks
    report = _report(
        error.sum().item(),
        error.square().sum().item(),
        blocks.square().sum().item(),
        zeros,
        alternated,
        weight.numel(),
    )
    codes = negative.view(blocks.shape).to(torch.uint8) * 2 + large
    return W2Matrix(codes.flatten(-2), scaled, report)


@dataclass(frozen=True, slots=True)
class _ErrorTables:
    """Sums over the two weights of a packed byte, in units of 2^(scale - 127) / 4.

    squared, signed: [256] int64 with a field per neighbour; energy: [256], w^2 in quarters;
    first_large: [neighbours] uint8, the first magnitude code on the large level.
    """

    squared: NDArray[np.int64]
    signed: NDArray[np.int64]
    energy: NDArray[np.int64]
    first_large: NDArray[np.uint8]


@cache
def _error_tables() -> _ErrorTables:
    value = np.array(E2M1_VALUES)
    magnitude = np.abs(value)
    unit = np.exp2(np.array(_NEIGHBOURS))[:, None]
    level = np.where(magnitude > _THRESHOLD * unit, _LARGE, _SMALL) * unit
    error = np.rint(4 * (level - magnitude)).astype(np.int64)
    sign = np.where(np.arange(16) < 8, 1, -1)
    low, high = np.arange(256) & 15, np.arange(256) >> 4

    def packed(by_nibble: NDArray[np.int64], bias: int) -> NDArray[np.int64]:
        shifts = _FIELD_BITS * np.arange(len(_NEIGHBOURS))[:, None]
        return np.asarray(((by_nibble[:, low] + by_nibble[:, high] + bias) << shifts).sum(0))

    energy = np.rint(4 * magnitude**2).astype(np.int64)
    return _ErrorTables(
        packed(error**2, 0),
        packed(sign * error, _FIELD_BIAS),
        energy[low] + energy[high],
        (magnitude[:8] <= _THRESHOLD * unit).sum(1).astype(np.uint8),
    )


def _fields(sums: NDArray[np.int64]) -> NDArray[np.int64]:
    """Split packed sums [...] into [neighbours, ...]."""
    mask = (1 << _FIELD_BITS) - 1
    return np.stack([(sums >> (_FIELD_BITS * i)) & mask for i in range(len(_NEIGHBOURS))])


def _in_range(source: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Which neighbours of each exponent exist: [neighbours, ...]."""
    byte = source.astype(np.int64) + np.array(_NEIGHBOURS).reshape(-1, *[1] * source.ndim)
    return np.asarray((byte >= 0) & (byte < E8M0_NAN))


def _checked_scale(scale: Tensor) -> Tensor:
    raw = e8m0_bytes(scale)
    bad = (raw == E8M0_NAN).nonzero()
    if len(bad):
        row, block = bad[0].tolist()
        raise CheckpointError(f"the scale of row {row}, block {block} is NaN (byte 255)")
    return raw


def _balanced(nibbles: Tensor) -> tuple[Tensor, float, bool]:
    """Nibbles with balanced zeros, the share of zeros, and whether their signs were changed."""
    is_zero = (nibbles & 7) == 0
    negative, zeros, alternated = _balanced_signs(is_zero, nibbles >= 8)
    if alternated:
        nibbles = (nibbles & 7) | (negative.to(torch.uint8) << 3)
    return nibbles, zeros, alternated


def _balanced_signs(is_zero: Tensor, negative: Tensor) -> tuple[Tensor, float, bool]:
    """Zeros take a level too: if nearly all have one sign, let it alternate along a row."""
    count = int(torch.count_nonzero(is_zero))
    share = count / max(is_zero.numel(), 1)
    negatives = int(torch.count_nonzero(is_zero & negative))
    if max(negatives, count - negatives) <= _ONE_SIGNED * count:
        return negative, share, False
    odd = torch.arange(is_zero.shape[-1]) % 2 == 1
    return torch.where(is_zero, odd, negative), share, True


def _report(
    error: float, squared: float, energy: float, zeros: float, alternated: bool, count: int
) -> QuantReport:
    """energy: the sum of w^2. A tensor of zeros has no size to compare with and reports 0."""
    if energy == 0:
        return QuantReport(0.0, 0.0, zeros, alternated)
    rms = sqrt(energy / count)
    return QuantReport(error / count / rms, sqrt(squared / count) / rms, zeros, alternated)
