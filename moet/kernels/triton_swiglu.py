# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, attr-defined, misc"
"""What an MLP does between its products, in one launch: each value on its own, so that no row meets
another."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moet.kernels.triton_common import begin, kernel, overlap

COLUMNS = 1024  # of a program


@kernel
def gate_values(
    gate_up,
    out,
    stride,
    limit,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    BOUND: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Row and block of columns."""
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = d < WIDTH
    at = gate_up + row * stride + d
    a = tl.load(at, mask=real, other=0.0).to(tl.float32)
    b = tl.load(at + WIDTH, mask=real, other=0.0).to(tl.float32)
    if BOUND:
        a = tl.minimum(a, limit)
        b = tl.minimum(tl.maximum(b, -limit), limit)
    value = tl.div_rn(a, 1.0 + tl.exp(-a)) * b
    tl.store(out + row * WIDTH + d, value.to(out.dtype.element_ty), mask=real)


def swiglu_halves(gate_up: Tensor, *, limit: float | None) -> Tensor:
    num_rows, both = gate_up.shape
    width = both // 2
    out = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        gate_values[(num_rows, triton.cdiv(width, COLUMNS))](
            gate_up,
            out,
            gate_up.stride(0),
            0.0 if limit is None else limit,
            WIDTH=width,
            COLUMNS=COLUMNS,
            BOUND=limit is not None,
            num_warps=4,
            **overlap(gate_up),
        )
    return out
