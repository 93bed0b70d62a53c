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
from moet.kernels.nvfp4 import E2M1_MAX, E4M3_MAX, nvfp4_dequantize, nvfp4_quantize
from moet.kernels.nvfp4_rows import Nvfp4Rows
from moet.models.expert_map import Fp4Format
from moet.models.formats import (
    FP4_BLOCK,
    decode_e8m0,
    dequantize_fp8_block,
    dequantize_mxfp4,
    e8m0_bytes,
    pack_nibbles,
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
    """One matrix as read.

    form, fp4: its 4-bit form, codes and scale bytes; global_scale belongs to NVFP4 alone.
    values: float64, what the checkpoint says; None where MXFP4 says exactly that.
    exact: whether the 4-bit form loses nothing.
    """

    form: Fp4Format
    fp4: Quantised
    values: Tensor | None
    exact: bool
    global_scale: float = 1.0


def row_formats(
    hidden_size: int, moe_intermediate_size: int, fp4: Fp4Format = "mxfp4"
) -> Mapping[Tier, ExpertRows]:
    """The row layout of each tier."""
    shape = (hidden_size, moe_intermediate_size)
    return {"w2": W2Rows(*shape), "fp4": (Nvfp4Rows if fp4 == "nvfp4" else Mxfp4Rows)(*shape)}


def encode_expert(
    load: Load,
    names: tuple[str, str, str],
    formats: Mapping[Tier, ExpertRows],
    rule: ScaleRule,
    *,
    fp4: Fp4Format = "mxfp4",
    fp8_scale: str = "scale",
) -> EncodedExpert:
    """Read gate, up and down, quantise them and pack the rows of all `formats`.

    fp4, fp8_scale: as in ExpertMap. Raises CheckpointError naming the tensor that has a NaN scale,
    an encoding nobody knows, or errors beyond the bounds.
    """
    matrices: list[_Matrix] = []
    w2: list[Quantised] = []
    reports = {}
    for name in names:
        try:
            matrix = _read(load, name, fp4, fp8_scale)
            quantised = _quantize(matrix, rule)
            quantised.report.check(name, quantised.codes.numel())
        except CheckpointError as error:
            raise CheckpointError(f"{name}: {str(error).removeprefix(f'{name}: ')}") from error
        matrices.append(matrix)
        w2.append((quantised.codes, quantised.scale))
        reports[name] = MatrixReport(quantised.report, _fp4_error(matrix))
    rows, bases = {}, {}
    for tier, form in formats.items():
        gate, up, down = w2 if tier == "w2" else [matrix.fp4 for matrix in matrices]
        if isinstance(form, Nvfp4Rows):
            factors = torch.tensor([matrix.global_scale for matrix in matrices])
            rows[tier] = form.pack_scaled(gate, up, down, factors)
        else:
            for name, codes in zip(names, (gate, up, down), strict=True):
                check_row_range(name, form, *codes)
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


def _read(load: Load, name: str, fp4: Fp4Format, fp8_scale: str) -> _Matrix:
    weight = load(f"{name}.weight")
    if weight.dtype == torch.int8:
        scale = e8m0_bytes(load(f"{name}.scale"))
        return _Matrix("mxfp4", (unpack_nibbles(weight), scale), None, exact=True)
    if weight.dtype == torch.uint8:
        return _read_nvfp4(load, name, weight)
    if weight.dtype == torch.float8_e4m3fn:
        values = dequantize_fp8_block(weight, load(f"{name}.{fp8_scale}"), torch.float64)
    elif weight.dtype == torch.bfloat16:
        values = weight.double()
    else:
        raise CheckpointError(
            f"experts of dtype {weight.dtype} are unknown; int8 (MXFP4), uint8 (NVFP4), e4m3 or "
            "bf16 needed"
        )
    if not bool(values.isfinite().all()):
        raise CheckpointError("the weight or its scale holds NaN or infinity")
    if fp4 == "nvfp4":
        return _make_nvfp4(values)
    packed, scale = quantize_mxfp4(values)
    return _Matrix("mxfp4", (unpack_nibbles(packed), scale), values, exact=False)


def _read_nvfp4(load: Load, name: str, packed: Tensor) -> _Matrix:
    """Codes, block scales and the global scale as shipped; input_scale is not used."""
    scales = load(f"{name}.weight_scale").view(torch.uint8)
    global_scale = load(f"{name}.weight_scale_2").item()
    values = nvfp4_dequantize(packed, scales, global_scale=global_scale, dtype=torch.float64)
    if not bool(values.isfinite().all()):
        raise CheckpointError("a block scale or the global scale holds NaN or infinity")
    codes = unpack_nibbles(packed)
    return _Matrix("nvfp4", (codes, scales), values, exact=True, global_scale=global_scale)


def _make_nvfp4(values: Tensor) -> _Matrix:
    """Of a matrix that a checkpoint with NVFP4 experts left wide: its draft layer."""
    peak = values.abs().max().item()
    global_scale = torch.tensor(peak / (E2M1_MAX * E4M3_MAX) or 1.0).item()  # fp32
    packed, scales = nvfp4_quantize(values, global_scale=global_scale)
    codes = unpack_nibbles(packed)
    return _Matrix("nvfp4", (codes, scales), values, exact=False, global_scale=global_scale)


def _quantize(matrix: _Matrix, rule: ScaleRule) -> W2Matrix:
    codes, scale = matrix.fp4
    if matrix.values is None:
        return quantize_w2(pack_nibbles(codes), scale, rule)
    return quantize_w2_values(matrix.values, rule, scale if matrix.form == "mxfp4" else None)


def _fp4_error(matrix: _Matrix) -> float:
    if matrix.exact or matrix.values is None:
        return 0.0
    codes, scales = matrix.fp4
    if matrix.form == "mxfp4":
        stored = dequantize_mxfp4(pack_nibbles(codes), scales, torch.float64)
    else:
        packed = pack_nibbles(codes).view(torch.uint8)
        factor = matrix.global_scale
        stored = nvfp4_dequantize(packed, scales, global_scale=factor, dtype=torch.float64)
    energy = matrix.values.square().sum().item()
    return sqrt((stored - matrix.values).square().sum().item() / energy) if energy else 0.0
