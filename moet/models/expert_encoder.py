"""One routed expert of a checkpoint -> its rows in the tiers of a pack, with what that cost.

Source encodings are told apart by dtype. Knows the number formats and the row layouts; nothing of
files or of how many experts there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Literal

import torch
from torch import Tensor

from moet.errors import CheckpointError
from moet.kernels.layout import ExpertRows, Mxfp4Rows, Quantised, W2Rows
from moet.models.formats import (
    FP4_BLOCK,
    decode_e8m0,
    dequantize_fp8_block,
    dequantize_mxfp4,
    e8m0_bytes,
    quantize_mxfp4,
    unpack_nibbles,
)
from moet.models.w2 import QuantReport, ScaleRule, W2Matrix, quantize_w2, quantize_w2_values

Tier = Literal["w2", "fp4"]
TIERS: tuple[Tier, ...] = ("w2", "fp4")
# A kernel drops blocks below its row's range; they may hold this share of the row's maximum.
_MAX_DROPPED = 2.0**-20

Load = Callable[[str], Tensor]


@dataclass(frozen=True, slots=True)
class MatrixReport:
    """Errors of one expert matrix. fp4_rel_rms is 0 where the source already was FP4."""

    w2: QuantReport
    fp4_rel_rms: float


@dataclass(frozen=True, slots=True)
class EncodedExpert:
    """rows, bases: by tier, uint8 [row_bytes] and [num_sub_rows, rows]. reports: by matrix name."""

    rows: Mapping[Tier, Tensor]
    bases: Mapping[Tier, Tensor]
    reports: Mapping[str, MatrixReport]


@dataclass(frozen=True, slots=True)
class _Matrix:
    """packed, scale: its MXFP4 form, exact if `values`, float64, is None."""

    packed: Tensor
    scale: Tensor
    values: Tensor | None


def row_formats(hidden_size: int, moe_intermediate_size: int) -> Mapping[Tier, ExpertRows]:
    """The row layout of each tier."""
    shape = (hidden_size, moe_intermediate_size)
    return {"w2": W2Rows(*shape), "fp4": Mxfp4Rows(*shape)}


def encode_expert(
    load: Load,
    names: tuple[str, str, str],
    formats: Mapping[Tier, ExpertRows],
    rule: ScaleRule,
) -> EncodedExpert:
    """Read gate, up and down, quantise them and pack the rows of all `formats`.

    Raises CheckpointError naming the tensor that has a NaN scale, an encoding nobody knows, or
    errors beyond the bounds.
    """
    fp4: list[Quantised] = []
    w2: list[Quantised] = []
    reports = {}
    for name in names:
        try:
            matrix = _read(load, name)
            quantised = _quantize(matrix, rule)
            quantised.report.check(name, quantised.codes.numel())
        except CheckpointError as error:
            raise CheckpointError(f"{name}: {str(error).removeprefix(f'{name}: ')}") from error
        fp4.append((unpack_nibbles(matrix.packed), e8m0_bytes(matrix.scale)))
        w2.append((quantised.codes, quantised.scale))
        reports[name] = MatrixReport(quantised.report, _fp4_error(matrix))
    rows, bases = {}, {}
    codes: Mapping[Tier, list[Quantised]] = {"w2": w2, "fp4": fp4}
    for tier, form in formats.items():
        for name, matrix_codes in zip(names, codes[tier], strict=True):
            check_row_range(name, form, *matrix_codes)
        gate, up, down = codes[tier]
        rows[tier] = form.pack(gate, up, down)
        bases[tier] = form.row_base(rows[tier])
    return EncodedExpert(rows, bases, reports)


def check_row_range(name: str, form: ExpertRows, codes: Tensor, scale: Tensor) -> None:
    """Refuse a matrix in which a block that sm_90a would drop is not negligible in its row."""
    largest = scale.amax(-1, keepdim=True).to(torch.int16)
    dropped = scale.to(torch.int16) < largest - form.exponent_span
    if not bool(dropped.any()):
        return
    magnitudes = torch.tensor(form.levels, dtype=torch.float64).abs()[codes.to(torch.int64)]
    peak = torch.unflatten(magnitudes, -1, (-1, FP4_BLOCK)).amax(-1)
    peak *= decode_e8m0(scale, torch.float64)
    allowed = peak.amax(-1) * _MAX_DROPPED
    rows = ((peak * dropped).amax(-1) > allowed).nonzero()
    if len(rows):
        raise CheckpointError(
            f"{name}, row {rows[0].item()}: block exponents span more than {form.exponent_span} "
            f"octaves and small blocks carry more than 2^-20 of the row; {form.name} cannot hold it"
        )


def _read(load: Load, name: str) -> _Matrix:
    weight, scale = load(f"{name}.weight"), load(f"{name}.scale")
    if weight.dtype == torch.int8:
        return _Matrix(weight, scale, None)
    if weight.dtype == torch.float8_e4m3fn:
        values = dequantize_fp8_block(weight, scale, torch.float64)
        if not bool(values.isfinite().all()):
            raise CheckpointError("the weight or its scale holds NaN or infinity")
        return _Matrix(*quantize_mxfp4(values), values)
    raise CheckpointError(f"experts of dtype {weight.dtype} are unknown; int8 (FP4) or e4m3 needed")


def _quantize(matrix: _Matrix, rule: ScaleRule) -> W2Matrix:
    if matrix.values is None:
        return quantize_w2(matrix.packed, matrix.scale, rule)
    return quantize_w2_values(matrix.values, rule, matrix.scale)


def _fp4_error(matrix: _Matrix) -> float:
    if matrix.values is None:
        return 0.0
    error = dequantize_mxfp4(matrix.packed, matrix.scale, torch.float64) - matrix.values
    energy = matrix.values.square().sum().item()
    return sqrt(error.square().sum().item() / energy) if energy else 0.0
