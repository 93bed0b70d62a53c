# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, attr-defined, misc"
"""A step's angles and slots in one launch, a program for some rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moet.kernels.rows import Rows
from moet.kernels.triton_common import begin, kernel, overlap

ROWS = 4  # of a program


@kernel(do_not_specialize=["num_rows"])
def place_rows(
    positions,
    page_rows,
    page_table,
    frequencies,
    cos,
    sin,
    slots,
    num_rows,
    table_stride,
    PAGE: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = row < num_rows
    position = tl.load(positions + row, mask=there, other=-1)
    pair = tl.arange(0, PAIRS)
    angle = position.to(tl.float32)[:, None] * tl.load(frequencies + pair)[None, :]
    at = row[:, None] * PAIRS + pair[None, :]
    tl.store(cos + at, tl.cos(angle), mask=there[:, None])
    tl.store(sin + at, tl.sin(angle), mask=there[:, None])
    real = there & (position >= 0)
    own = page_table + tl.load(page_rows + row, mask=real, other=0) * table_stride
    page = tl.load(own + position // PAGE, mask=real, other=0)
    tl.store(slots + row, tl.where(real, page * PAGE + position % PAGE, -1), mask=there)


def latent_places(rows: Rows, frequencies: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, pairs, where = len(rows.positions), len(frequencies), rows.positions.device
    cos = torch.empty((num_rows, pairs), dtype=torch.float32, device=where)
    sin, slots = torch.empty_like(cos), torch.empty_like(rows.positions)
    if num_rows:
        place_rows[(triton.cdiv(num_rows, ROWS),)](
            rows.positions,
            rows.page_rows,
            rows.page_table,
            frequencies,
            cos,
            sin,
            slots,
            num_rows,
            rows.page_table.stride(0),
            PAGE=rows.page_size,
            PAIRS=pairs,
            ROWS=ROWS,
            num_warps=1,
            **overlap(rows.positions),
        )
    return cos, sin, slots
