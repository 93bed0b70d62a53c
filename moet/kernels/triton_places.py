# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, attr-defined, misc"
"""A step's angles and slots in one launch, a program for some rows. Angles are fp32 products, and
their cosines exact for large ones, too."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moet.kernels.rows import Rows
from moet.kernels.triton_common import begin, kernel, overlap
from moet.kernels.window_places import CosSin

ROWS = 4  # of a program


@triton.jit
def store_angles(frequencies, cos, sin, row, there, position, PAIRS: tl.constexpr):
    """Of some rows' positions."""
    pair = tl.arange(0, PAIRS)
    angle = position.to(tl.float32)[:, None] * tl.load(frequencies + pair)[None, :]
    at = row[:, None] * PAIRS + pair[None, :]
    tl.store(cos + at, tl.cos(angle), mask=there[:, None])
    tl.store(sin + at, tl.sin(angle), mask=there[:, None])


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
    store_angles(frequencies, cos, sin, row, there, position, PAIRS)
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


@kernel(do_not_specialize=["num_rows"])
def place_windows(
    positions,
    ends,
    seq_slots,
    main,
    compress,
    cos,
    sin,
    slots,
    num_rows,
    RATIO: tl.constexpr,
    SECOND_RATIO: tl.constexpr,
    RING: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Rows and which of the angles; the first ones' programs find slots, too."""
    begin(OVERLAP)
    which = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = row < num_rows
    position = tl.load(positions + row, mask=there, other=-1)
    cos += which.to(tl.int64) * num_rows * PAIRS
    sin += which.to(tl.int64) * num_rows * PAIRS
    if which == 0:
        store_angles(main, cos, sin, row, there, position, PAIRS)
        end = tl.load(ends + row, mask=there, other=0)
        slot = tl.load(seq_slots + row, mask=there, other=0) * RING + position % RING
        stays = (position >= 0) & (position >= end - RING)
        tl.store(slots + row, tl.where(stays, slot, -1), mask=there)
    else:
        if which == 2:
            position = position // RATIO * RATIO
        if which == 3:
            position = position // SECOND_RATIO * SECOND_RATIO
        store_angles(compress, cos, sin, row, there, position, PAIRS)


def window_places(
    rows: Rows, main: Tensor, compress: Tensor, *, ratios: tuple[int, ...], num_entries: int
) -> tuple[list[CosSin], Tensor]:
    num_rows, pairs = len(rows.positions), len(main)
    shape = 2 + len(ratios), num_rows, pairs
    cos = torch.empty(shape, dtype=torch.float32, device=rows.positions.device)
    sin, slots = torch.empty_like(cos), torch.empty_like(rows.positions)
    first, second = (*ratios, 1, 1)[:2]
    if num_rows:
        place_windows[(triton.cdiv(num_rows, ROWS), shape[0])](
            rows.positions,
            rows.ends,
            rows.seq_slots,
            main,
            compress,
            cos,
            sin,
            slots,
            num_rows,
            RATIO=first,
            SECOND_RATIO=second,
            RING=num_entries,
            PAIRS=pairs,
            ROWS=ROWS,
            num_warps=1,
            **overlap(rows.positions),
        )
    return list(zip(cos, sin, strict=True)), slots
