# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, attr-defined, misc, assignment, var-annotated"
# ruff: noqa: RUF005  (tuples of blocks grow by addition: the compiler knows no unpacking)
"""Attention kernels over fp8 rows. A row's keys come in tiles of 64 with fixed borders: those of
its window, then its entries. Every tile is summed by itself and tiles are joined in ascending
order, so a row's bits are the same whether each tile has a program or one program takes them in
turn."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moet.kernels.attention import WindowKeys
from moet.kernels.cubin import device_arch
from moet.kernels.quant import Activations
from moet.kernels.triton_attention_tiles import (
    attend_all,
    attend_one,
    final_factor,
    load_angles,
    scaled_sum,
    shares,
    sight,
    store_values,
)
from moet.kernels.triton_common import (
    CODED_ROWS,
    begin,
    e4m3_codes,
    e4m3_exponent,
    kernel,
    load_rotation,
    mma_place,
    overlap,
    power_of_two,
    rotate_pairs,
)
from moet.kernels.triton_rows import fp8_form

LOG2E = 1.4426950408889634
KEYS = 64  # of a tile
HEADS_EACH = {"sm90a": 64, "sm120a": 32}  # of one program: the rows of its matrix instructions
HEADS_JOINED = 1  # of one program that joins tiles
SPLIT_TILES = 64  # up to so many tiles in all, a tile's sums are divided among programs
PROGRAMS_EACH = {16: 8, SPLIT_TILES: 4}  # of a tile, up to so many tiles
TILES_AHEAD = 8  # whose sums such a program reads at once
MAX_PARTS = 1024  # tiles whose sums wait in memory at a time; 128 KiB each at released sizes


@kernel(do_not_specialize=["CHUNK_ENTRIES"])
def attend(
    q_ptr,
    sink_ptr,
    window,
    chunk,
    entries,
    selected,
    cos_ptr,
    sin_ptr,
    positions,
    starts,
    seq_slots,
    page_rows,
    page_table,
    out,
    scales,
    part_acc,
    part_sum,
    table_stride,
    RING_BYTES,
    CHUNK_ENTRIES,
    PAGE_BYTES,
    scale,
    WINDOW: tl.constexpr,
    RING: tl.constexpr,
    RATIO: tl.constexpr,
    ENTRIES: tl.constexpr,
    TOP_K: tl.constexpr,
    WHOLE: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
    QUANT: tl.constexpr,
    HEADS: tl.constexpr,
    HB: tl.constexpr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Row, tile, head block. WHOLE: all tiles of a row in turn, and its output; otherwise one tile,
    and one of SPLIT parts of its sums."""
    begin(OVERLAP)
    WINDOW_TILES: tl.constexpr = (WINDOW + KEYS - 1) // KEYS
    DATA: tl.constexpr = DIM + ROPE
    SCALE_BYTES: tl.constexpr = ((DIM - ROPE) // 64 + 7) // 8 * 8
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(2) // SPLIT * HB + tl.arange(0, HB)
    at = (row * HEADS + h)[:, None] * DIM + tl.arange(0, 64)[None, :]
    inside = h < HEADS
    real = inside[:, None]
    p, visible, last = sight(positions, row, WINDOW_TILES, RATIO, TOP_K, KEYS)
    ring = tl.load(seq_slots + row) * RING_BYTES
    start = tl.load(starts + row)
    table = page_table + tl.load(page_rows + row) * table_stride
    memory = (window, chunk, entries, selected, CHUNK_ENTRIES, PAGE_BYTES, table, ring)
    where = memory + (row, p, start, visible)
    if WHOLE:
        top, total, acc = attend_all(
            q_ptr,
            at,
            real,
            where,
            last,
            scale,
            WINDOW,
            RING,
            ENTRIES,
            TOP_K,
            HAS_CHUNK,
            HB,
            DIM,
            KEYS,
            DATA,
            SCALE_BYTES,
        )
        sink = tl.load(sink_ptr + h, mask=inside, other=0.0) * 1.4426950408889634
        factor = final_factor(top, total, sink)[:, None]
        cos, sin = load_angles(cos_ptr, sin_ptr, row, ROPE)
        head = row * HEADS + h
        store_values(acc, factor, cos, sin, out, scales, head, at, inside, DIM, QUANT)
    else:
        tile = tl.program_id(1)
        if (tile < last) & ((tile >= WINDOW_TILES) | (tile * KEYS <= p)):
            attend_one(
                q_ptr,
                at,
                real,
                where,
                tile,
                scale,
                h,
                part_acc,
                part_sum,
                WINDOW,
                RING,
                ENTRIES,
                TOP_K,
                HAS_CHUNK,
                HEADS,
                DIM,
                KEYS,
                SPLIT,
                DATA,
                SCALE_BYTES,
            )


@kernel
def join(
    sink_ptr,
    cos_ptr,
    sin_ptr,
    positions,
    out,
    scales,
    part_acc,
    part_sum,
    num_tiles,
    WINDOW: tl.constexpr,
    RATIO: tl.constexpr,
    TOP_K: tl.constexpr,
    QUANT: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    KEYS: tl.constexpr,
    EACH: tl.constexpr,
    AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Row and EACH heads: the tiles that have keys, in ascending order, AHEAD of them read at
    once."""
    begin(OVERLAP)
    WINDOW_TILES: tl.constexpr = (WINDOW + KEYS - 1) // KEYS
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * EACH + tl.arange(0, EACH)
    d = tl.arange(0, DIM)
    real = h < HEADS
    p, _, last = sight(positions, row, WINDOW_TILES, RATIO, TOP_K, KEYS)
    top = tl.full([EACH], float("-inf"), tl.float32)
    total = tl.zeros([EACH], tl.float32)
    acc = tl.zeros([EACH, DIM], tl.float32)
    for first in range(0, last, AHEAD):
        tops = ()
        totals = ()
        parts = ()
        for i in tl.static_range(AHEAD):
            tile = tl.zeros([EACH], tl.int32) + (first + i)
            # A tile without keys adds nothing, exactly: its maximum is -inf.
            used = real & (tile < last) & ((tile >= WINDOW_TILES) | (tile * KEYS <= p))
            part = (row * num_tiles + tile) * HEADS + h
            tops = tops + (tl.load(part_sum + part * 2, mask=used, other=float("-inf")),)
            totals = totals + (tl.load(part_sum + part * 2 + 1, mask=used, other=0.0),)
            at = part_acc + part[:, None] * DIM + d[None, :]
            parts = parts + (tl.load(at, mask=used[:, None], other=0.0),)
        for i in tl.static_range(AHEAD):
            top, total, old, new = shares(top, total, tops[i], totals[i])
            old = tl.broadcast_to(old[:, None], [EACH, DIM])
            new = tl.broadcast_to(new[:, None], [EACH, DIM])
            acc = scaled_sum(old, acc, new, parts[i])
    sink = tl.load(sink_ptr + h, mask=real, other=0.0) * 1.4426950408889634
    value = (acc * final_factor(top, total, sink)[:, None]).to(tl.bfloat16).to(tl.float32)
    cos, sin = load_rotation(cos_ptr, sin_ptr, row, DIM, ROPE)
    value = rotate_pairs(value, cos, -sin).to(tl.bfloat16).to(tl.float32)
    head = (row * HEADS + h)[:, None]
    if QUANT:
        blocks = tl.reshape(value, [EACH, DIM // 128, 128])
        byte = e4m3_exponent(tl.max(tl.abs(blocks), 2))
        c = tl.arange(0, DIM // 128)[None, :]
        tl.store(scales + head * (DIM // 128) + c, power_of_two(byte), mask=real[:, None])
        codes = e4m3_codes(blocks * power_of_two(254 - byte)[:, :, None])
        codes = tl.reshape(codes, [EACH, DIM]).to(tl.uint8)
        tl.store(out + head * DIM + mma_place(d)[None, :], codes, mask=real[:, None])
    else:
        value = value.to(out.dtype.element_ty)
        tl.store(out + head * DIM + d[None, :], value, mask=real[:, None])


def _programs_each(num_tiles: int, dim: int) -> int:
    """How many programs divide a tile's sums, so that few tiles fill a chip."""
    fitting = (each for most, each in PROGRAMS_EACH.items() if num_tiles <= most)
    return min(next(fitting, 1), dim // 64)


def _tiles(keys: WindowKeys) -> int:
    """Most tiles that a row's keys come in."""
    most = 0
    if keys.entries is not None:
        seen = keys.rows.max_entries(keys.ratio)
        most = seen if keys.selected is None else min(keys.selected.shape[1], seen)
    return -(-keys.sliding_window // KEYS) + -(-most // KEYS)


def _heads_each(q: Tensor) -> int:
    """Heads that a program attends for."""
    most = HEADS_EACH[device_arch(q.device) if q.is_cuda else "sm90a"]
    padded: int = triton.next_power_of_2(q.shape[1])
    return min(most, max(16, padded))


def _launch(
    q: Tensor,
    sink: Tensor,
    keys: WindowKeys,
    cos: Tensor,
    sin: Tensor,
    scale: float,
    out: Tensor,
    scales: Tensor | None = None,
) -> None:
    """out: values as q, or codes if there are scales for them."""
    num_rows, num_heads, dim = q.shape
    if num_rows == 0:
        return
    rows, selected = keys.rows, keys.selected
    chunk, entries = keys.chunk or keys.window, keys.entries or keys.window
    num_tiles = _tiles(keys)
    whole = num_rows * num_tiles > MAX_PARTS
    heads = _heads_each(q)
    split = 1 if whole else _programs_each(num_rows * num_tiles, dim)
    parts = 0 if whole else num_rows * num_tiles * num_heads
    part_acc = torch.empty(parts * dim, dtype=torch.float32, device=q.device)
    part_sum = torch.empty(parts * 2, dtype=torch.float32, device=q.device)
    ring, paged = fp8_form(keys.window), fp8_form(entries)
    outputs = out, sink if scales is None else scales, part_acc, part_sum
    facts = {
        "WINDOW": keys.sliding_window,
        "RATIO": keys.ratio if keys.entries is not None else 0,
        "TOP_K": 0 if selected is None else selected.shape[1],
        "QUANT": scales is not None,
        "HEADS": num_heads,
        "DIM": dim,
        "ROPE": 2 * cos.shape[1],
        "KEYS": KEYS,
        **overlap(q),
    }
    attend[(num_rows, 1 if whole else num_tiles, triton.cdiv(num_heads, heads) * split)](
        q,
        sink,
        keys.window.pages,
        chunk.pages,
        entries.pages,
        rows.positions if selected is None else selected,
        cos,
        sin,
        rows.positions,
        rows.starts,
        rows.seq_slots,
        rows.page_rows,
        rows.page_table,
        *outputs,
        rows.page_table.stride(0),
        ring.page_bytes,
        chunk.form.entries_per_page,
        paged.page_bytes,
        scale * LOG2E,
        RING=ring.entries_per_page,
        ENTRIES=paged.entries_per_page,
        WHOLE=whole,
        HAS_CHUNK=keys.chunk is not None,
        HB=heads,
        SPLIT=split,
        num_warps=8,
        num_stages=1,
        **facts,
    )
    if not whole:
        each = min(HEADS_JOINED, triton.next_power_of_2(num_heads))
        grid = num_rows, triton.cdiv(num_heads, each)
        facts |= {"EACH": each, "AHEAD": TILES_AHEAD, "num_warps": 4}
        join[grid](sink, cos, sin, rows.positions, *outputs, num_tiles, **facts)


def window_attention(
    q: Tensor, sink: Tensor, keys: WindowKeys, cos: Tensor, sin: Tensor, *, scale: float
) -> Tensor:
    out = torch.empty_like(q)
    _launch(q, sink, keys, cos, sin, scale, out)
    return out


def window_attention_q(
    q: Tensor,
    sink: Tensor,
    keys: WindowKeys,
    cos: Tensor,
    sin: Tensor,
    *,
    scale: float,
    num_groups: int,
) -> Activations:
    num_rows, num_heads, dim = q.shape
    shape = num_rows * num_groups, num_heads * dim // num_groups
    if num_rows > CODED_ROWS:
        return Activations(window_attention(q, sink, keys, cos, sin, scale=scale).view(shape))
    codes = torch.empty(shape, dtype=torch.uint8, device=q.device)
    scales = torch.empty((shape[0], shape[1] // 128), dtype=torch.float32, device=q.device)
    _launch(q, sink, keys, cos, sin, scale, codes, scales)
    return Activations(None, codes, scales)
