# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, attr-defined, misc"
"""Compressor kernel: per row of a step, the state it leaves and the entry it closes. A window is
pooled in blocks of tokens in ascending order, whatever part of it the step or the ring holds."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moet.kernels.cache import Cache, Fp8Rows, Mxfp4Rows
from moet.kernels.rows import Rows
from moet.kernels.triton_common import (
    e2m1_codes,
    exponent_byte,
    hadamard_sign,
    kernel,
    load_rotation,
    power_of_two,
    rotate_pairs,
    store_fp8_row,
)


@triton.jit
def store_mxfp4_row(row, pages, slot, PAGE_BYTES, ENTRIES: tl.constexpr, DIM: tl.constexpr):
    """Encode one row ([DIM] fp32) in the layout of cache.Mxfp4Rows at a slot."""
    page = pages + (slot // ENTRIES) * PAGE_BYTES
    place = slot % ENTRIES
    blocks = tl.reshape(row, [DIM // 32, 32])
    amax = tl.maximum(tl.max(tl.abs(blocks), 1), 6.0 * 2.0**-126)
    byte = exponent_byte(amax, 2, 0x400000)
    codes = e2m1_codes(blocks * power_of_two(254 - byte)[:, None])
    low, high = tl.split(tl.reshape(codes, [DIM // 2, 2]))
    tl.store(page + place * (DIM // 2) + tl.arange(0, DIM // 2), (low | (high << 4)).to(tl.uint8))
    scales = page + ENTRIES * (DIM // 2) + place * (DIM // 32)
    tl.store(scales + tl.arange(0, DIM // 32), byte.to(tl.uint8))


@triton.jit
def keep_state(
    projected, ape, state, positions, seq_slots, row, stride, RATIO, RING, CHANNELS: tl.constexpr
):
    """Store a row's values and biased scores in its place of the ring."""
    p = tl.load(positions + row)
    c = tl.arange(0, CHANNELS)
    place = state + (tl.load(seq_slots + row) * RING + p % RING) * (2 * CHANNELS)
    tl.store(place + c, tl.load(projected + row * stride + c))
    scores = tl.load(projected + row * stride + CHANNELS + c)
    tl.store(place + CHANNELS + c, scores + tl.load(ape + (p % RATIO) * CHANNELS + c))


@kernel
def keep_last_rows(
    projected,
    ape,
    state,
    positions,
    ends,
    seq_slots,
    stride,
    RATIO: tl.constexpr,
    RING: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Behind a chunk: the state of rows that no later row of the chunk overwrites."""
    row = tl.program_id(0).to(tl.int64)
    p = tl.load(positions + row)
    if (p >= 0) & (p >= tl.load(ends + row) - RING):
        keep_state(projected, ape, state, positions, seq_slots, row, stride, RATIO, RING, CHANNELS)


@triton.jit
def hadamard(x, DIM: tl.constexpr):
    """Walsh-Hadamard transform of [DIM] fp32 values, not scaled: over the high bits of the place,
    then over the low ones."""
    LOW: tl.constexpr = 16 if DIM > 16 else DIM
    HIGH: tl.constexpr = DIM // LOW
    i, j = tl.arange(0, HIGH), tl.arange(0, LOW)
    x = tl.reshape(x, [HIGH, LOW])
    sign = hadamard_sign(i[:, None], i[None, :])
    x = tl.sum(sign[:, :, None] * x[None, :, :], 1)
    sign = hadamard_sign(j[:, None], j[None, :])
    x = tl.sum(x[:, :, None] * sign[None, :, :], 1)
    return tl.reshape(x, [DIM])


@triton.jit
def close_window(
    projected,
    ape,
    weight,
    cos_ptr,
    sin_ptr,
    state,
    entries,
    row,
    p,
    start,
    seq_slot,
    table,
    stride,
    PAGE_BYTES,
    eps,
    RATIO: tl.constexpr,
    LENGTH: tl.constexpr,
    TOKENS: tl.constexpr,
    RING: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROPE: tl.constexpr,
    ENTRIES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    ROTATE: tl.constexpr,
    FP8: tl.constexpr,
    dtype: tl.constexpr,
):
    """Pool the window that a row closes and store its entry, in fp8 or else MXFP4."""
    ring = state + seq_slot * RING * (2 * CHANNELS)
    c = tl.arange(0, WIDTH)
    top = tl.full([WIDTH], float("-inf"), tl.float32)
    total = tl.zeros([WIDTH], tl.float32)
    pooled = tl.zeros([WIDTH], tl.float32)
    for first in range(0, LENGTH, TOKENS):
        j = first + tl.arange(0, TOKENS)
        token = p - LENGTH + 1 + j
        half = tl.where(j >= LENGTH - RATIO, CHANNELS - WIDTH, 0)
        col = half[:, None] + c[None, :]
        own = (token >= start)[:, None]
        old = ((token >= 0) & (token < start))[:, None]
        mine = projected + (row + token - p)[:, None] * stride + col
        kept = ring + (token % RING)[:, None] * (2 * CHANNELS) + col
        value = tl.where(
            own, tl.load(mine, mask=own, other=0.0), tl.load(kept, mask=old, other=0.0)
        )
        bias = tl.load(ape + (token % RATIO)[:, None] * CHANNELS + col, mask=own, other=0.0)
        score = tl.where(
            own,
            tl.load(mine + CHANNELS, mask=own, other=0.0) + bias,
            tl.load(kept + CHANNELS, mask=old, other=float("-inf")),
        )
        new_top = tl.maximum(top, tl.max(score, 0))
        # Before any token counts both are -inf, and their difference is no number.
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        factor = tl.exp(top - shift)
        share = tl.exp(score - shift[None, :])
        total = total * factor + tl.sum(share, 0)
        pooled = pooled * factor + tl.sum(share * value, 0)
        top = new_top
    x = (pooled / total).to(dtype).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps) * tl.load(weight + c)
    x = x.to(dtype).to(tl.float32)
    cos, sin = load_rotation(cos_ptr, sin_ptr, row, WIDTH, ROPE)
    x = rotate_pairs(tl.reshape(x, [1, WIDTH]), cos, sin).to(dtype).to(tl.float32)
    x = tl.reshape(x, [WIDTH])
    if ROTATE:
        x = (hadamard(x, WIDTH) * (WIDTH**-0.5)).to(dtype).to(tl.float32)
    entry = p // RATIO
    slot = tl.load(table + entry // ENTRIES) * ENTRIES + entry % ENTRIES
    if FP8:
        store_fp8_row(x, entries, slot, PAGE_BYTES, ENTRIES, WIDTH, ROPE, SCALE_BYTES)
    else:
        store_mxfp4_row(x, entries, slot, PAGE_BYTES, ENTRIES, WIDTH)


@kernel
def close_windows(
    projected,
    ape,
    weight,
    cos_ptr,
    sin_ptr,
    state,
    entries,
    positions,
    starts,
    seq_slots,
    page_rows,
    page_table,
    stride,
    table_stride,
    PAGE_BYTES,
    eps,
    RATIO: tl.constexpr,
    LENGTH: tl.constexpr,
    TOKENS: tl.constexpr,
    RING: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROPE: tl.constexpr,
    ENTRIES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    KEEP: tl.constexpr,
    ROTATE: tl.constexpr,
    FP8: tl.constexpr,
    BF16: tl.constexpr,
):
    """One row: its state if KEEP, and if it closes a window the entry."""
    row = tl.program_id(0).to(tl.int64)
    p = tl.load(positions + row)
    if p >= 0:
        if KEEP:
            keep_state(
                projected, ape, state, positions, seq_slots, row, stride, RATIO, RING, CHANNELS
            )
        if (p + 1) % RATIO == 0:
            close_window(
                projected,
                ape,
                weight,
                cos_ptr,
                sin_ptr,
                state,
                entries,
                row,
                p,
                tl.load(starts + row),
                tl.load(seq_slots + row),
                page_table + tl.load(page_rows + row) * table_stride,
                stride,
                PAGE_BYTES,
                eps,
                RATIO,
                LENGTH,
                TOKENS,
                RING,
                WIDTH,
                CHANNELS,
                ROPE,
                ENTRIES,
                SCALE_BYTES,
                ROTATE,
                FP8,
                tl.bfloat16 if BF16 else tl.float32,
            )


NUM_WARPS = 4  # most programs of a chunk close no window: they must be many on a chip


def tokens_at_once(length: int) -> int:
    """As many as leave a program registers for the sums. A row's bits depend on it."""
    return min(length, 4)


def keep_last(projected: Tensor, ape: Tensor, state: Cache, rows: Rows) -> None:
    """Behind a chunk: the state that later steps need."""
    ratio, channels = ape.shape
    keep_last_rows[(len(projected),)](
        projected,
        ape,
        state.pages.view(torch.float32),
        rows.positions,
        rows.ends,
        rows.seq_slots,
        projected.stride(0),
        RATIO=ratio,
        RING=state.form.entries_per_page,
        CHANNELS=channels,
        num_warps=4,
    )


def compress(
    projected: Tensor,
    ape: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    state: Cache,
    entries: Cache,
    rows: Rows,
    *,
    overlapped: bool,
    rotate: bool,
    eps: float,
    dtype: torch.dtype,
) -> None:
    num_rows = len(projected)
    if num_rows == 0:
        return
    ratio, channels = ape.shape
    length = 2 * ratio if overlapped else ratio
    ring = state.pages.view(torch.float32)
    form = entries.form
    assert isinstance(form, Fp8Rows | Mxfp4Rows)  # by the predicate
    close_windows[(num_rows,)](
        projected,
        ape,
        weight,
        cos,
        sin,
        ring,
        entries.pages,
        rows.positions,
        rows.starts,
        rows.seq_slots,
        rows.page_rows,
        rows.page_table,
        projected.stride(0),
        rows.page_table.stride(0),
        form.page_bytes,
        eps,
        RATIO=ratio,
        LENGTH=length,
        TOKENS=tokens_at_once(length),
        RING=state.form.entries_per_page,
        WIDTH=form.width,
        CHANNELS=channels,
        ROPE=2 * cos.shape[1],
        ENTRIES=form.entries_per_page,
        SCALE_BYTES=form.planes().bytes_per_entry[1],
        KEEP=rows.short,
        ROTATE=rotate,
        FP8=isinstance(form, Fp8Rows),
        BF16=dtype == torch.bfloat16,
        num_warps=NUM_WARPS,
    )
    if not rows.short:
        keep_last(projected, ape, state, rows)
