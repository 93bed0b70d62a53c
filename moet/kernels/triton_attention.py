# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, attr-defined, misc"
"""Attention kernels over fp8 rows. One program takes one row's query, all heads at once, over the
window or over a fixed share of its entries; shares are joined in ascending order. Short steps split
a row over programs, long ones do not, so that neither depends on the number of rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moet.kernels.cache import Cache
from moet.kernels.cubin import device_arch
from moet.kernels.rows import Rows
from moet.kernels.triton_common import load_rotation, rotate_pairs
from moet.kernels.triton_rows import fp8_form

LOG2E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Tiles:
    """What fits an architecture's shared memory and registers."""

    heads: int  # of one program
    keys: int  # at a time
    num_warps: int


TILES = {"sm90a": Tiles(64, 64, 8), "sm120a": Tiles(32, 32, 8)}


@triton.jit
def load_rows(
    pages, page, place, valid, PAGE_BYTES, ENTRIES, DIM: tl.constexpr, ROPE: tl.constexpr
):
    """Rows of cache.Fp8Rows as bf16, exact: [keys, DIM]; zero where not valid."""
    NOPE: tl.constexpr = DIM - ROPE
    DATA: tl.constexpr = NOPE + 2 * ROPE
    SCALE_BYTES: tl.constexpr = (NOPE // 64 + 7) // 8 * 8
    BLOCKS: tl.constexpr = DIM // 64
    KEYS: tl.constexpr = valid.shape[0]
    base = pages + page * PAGE_BYTES
    b = tl.arange(0, BLOCKS)
    d = b[:, None] * 64 + tl.arange(0, 64)[None, :]
    data = (base + place * DATA)[:, None, None] + d[None, :, :]
    is_nope = (d < NOPE)[None, :, :]
    inside = valid[:, None, None]
    code = tl.load(data, mask=inside & is_nope, other=0)
    value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    scales = (base + ENTRIES * DATA + place * SCALE_BYTES)[:, None] + b[None, :]
    byte = tl.load(scales, mask=valid[:, None] & (b < NOPE // 64)[None, :], other=127)
    factor = (byte.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    value = (value * factor[:, :, None]).to(tl.bfloat16)
    rope = (base + place * DATA + NOPE).to(tl.pointer_type(tl.bfloat16))
    turned = tl.load(
        rope[:, None, None] + (d - NOPE)[None, :, :],
        mask=inside & (d >= NOPE)[None, :, :],
        other=0.0,
    )
    return tl.reshape(tl.where(is_nope, value, turned), [KEYS, DIM])


@triton.jit
def add_tile(q, k, valid, scale, top, total, acc):
    """Online softmax (in powers of two) over one tile of keys that are their own values."""
    logits = tl.dot(q, tl.trans(k)) * scale
    logits = tl.where(valid[None, :], logits, float("-inf"))
    new_top = tl.maximum(top, tl.max(logits, 1))
    factor = tl.exp2(top - new_top)
    share = tl.exp2(logits - new_top[:, None])
    total = total * factor + tl.sum(share, 1)
    acc = tl.dot(share.to(tl.bfloat16), k, acc * factor[:, None])
    return new_top, total, acc


@triton.jit
def finish(top, total, acc, sink, cos, sin, DTYPE: tl.constexpr):
    """Divide, the sink in the sum, and rotate back. Rounds before and after the rotation."""
    shift = tl.maximum(top, sink)
    factor = tl.exp2(top - shift)
    o = acc * (factor / (total * factor + tl.exp2(sink - shift)))[:, None]
    return rotate_pairs(o.to(DTYPE).to(tl.float32), cos, -sin).to(DTYPE)


@triton.jit
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
    SPLIT: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
    HEADS: tl.constexpr,
    HB: tl.constexpr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Row, share, head block. SPLIT: entries of a share (share 0 is the window); 0: all at once."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    h = tl.program_id(2) * HB + tl.arange(0, HB)
    d = tl.arange(0, DIM)
    at = (row * HEADS + h)[:, None] * DIM + d[None, :]
    real = (h < HEADS)[:, None]
    p = tl.load(positions + row)
    visible = (p + 1) // RATIO if RATIO > 0 else 0
    if TOP_K > 0:
        visible = tl.minimum(visible, TOP_K)
    first = 0
    last = visible
    if SPLIT > 0:
        first = (split - 1) * SPLIT
        last = tl.minimum(visible, split * SPLIT)
    if (p >= 0) & ((split == 0) | (first < last)):
        q = tl.load(q_ptr + at, mask=real, other=0.0).to(tl.bfloat16)
        top = tl.full([HB], float("-inf"), tl.float32)
        total = tl.zeros([HB], tl.float32)
        acc = tl.zeros([HB, DIM], tl.float32)
        i = tl.arange(0, KEYS)
        if split == 0:
            start = tl.load(starts + row)
            slot = tl.load(seq_slots + row)
            oldest = tl.maximum(p - WINDOW + 1, 0)
            old_end = p + 1
            if HAS_CHUNK:
                old_end = start
            for token0 in range(oldest, old_end, KEYS):
                token = token0 + i
                valid = token < old_end
                k = load_rows(window, slot, token % RING, valid, RING_BYTES, RING, DIM, ROPE)
                top, total, acc = add_tile(q, k, valid, scale, top, total, acc)
            if HAS_CHUNK:
                for token0 in range(tl.maximum(oldest, start), p + 1, KEYS):
                    token = token0 + i
                    valid = token <= p
                    k = load_rows(
                        chunk, row * 0, row + token - p, valid, 0, CHUNK_ENTRIES, DIM, ROPE
                    )
                    top, total, acc = add_tile(q, k, valid, scale, top, total, acc)
        if RATIO > 0:  # noqa: SIM102 - decided at compile time, the inner one is not
            if (SPLIT == 0) | (split > 0):
                table = page_table + tl.load(page_rows + row) * table_stride
                for entry0 in range(first, last, KEYS):
                    place = entry0 + i
                    valid = place < last
                    if TOP_K > 0:
                        place = tl.load(selected + row * TOP_K + place, mask=valid, other=0)
                    page = tl.load(table + place // ENTRIES, mask=valid, other=0)
                    k = load_rows(
                        entries, page, place % ENTRIES, valid, PAGE_BYTES, ENTRIES, DIM, ROPE
                    )
                    top, total, acc = add_tile(q, k, valid, scale, top, total, acc)
        if SPLIT > 0:
            part = row * tl.num_programs(1) + split
            tl.store(part_acc + (part * HEADS + h)[:, None] * DIM + d[None, :], acc, mask=real)
            tl.store(part_sum + (part * HEADS + h) * 2, top, mask=h < HEADS)
            tl.store(part_sum + (part * HEADS + h) * 2 + 1, total, mask=h < HEADS)
        else:
            sink = tl.load(sink_ptr + h, mask=h < HEADS, other=0.0) * 1.4426950408889634
            cos, sin = load_rotation(cos_ptr, sin_ptr, row, DIM, ROPE)
            tl.store(
                out + at, finish(top, total, acc, sink, cos, sin, out.dtype.element_ty), mask=real
            )


@triton.jit
def join(
    sink_ptr,
    cos_ptr,
    sin_ptr,
    positions,
    out,
    part_acc,
    part_sum,
    num_splits,
    RATIO: tl.constexpr,
    TOP_K: tl.constexpr,
    SPLIT: tl.constexpr,
    HEADS: tl.constexpr,
    HB: tl.constexpr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
):
    """Row and head block: the shares that have keys, in ascending order."""
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * HB + tl.arange(0, HB)
    d = tl.arange(0, DIM)
    real = (h < HEADS)[:, None]
    p = tl.load(positions + row)
    if p >= 0:
        visible = (p + 1) // RATIO if RATIO > 0 else 0
        if TOP_K > 0:
            visible = tl.minimum(visible, TOP_K)
        top = tl.full([HB], float("-inf"), tl.float32)
        total = tl.zeros([HB], tl.float32)
        acc = tl.zeros([HB, DIM], tl.float32)
        for split in range(1 + tl.cdiv(visible, SPLIT)):
            part = (row * num_splits + split) * HEADS + h
            part_top = tl.load(part_sum + part * 2, mask=h < HEADS, other=0.0)
            part_total = tl.load(part_sum + part * 2 + 1, mask=h < HEADS, other=0.0)
            part_row = part_acc + part[:, None] * DIM + d[None, :]
            new_top = tl.maximum(top, part_top)
            old, new = tl.exp2(top - new_top), tl.exp2(part_top - new_top)
            total = total * old + part_total * new
            acc = acc * old[:, None] + tl.load(part_row, mask=real, other=0.0) * new[:, None]
            top = new_top
        sink = tl.load(sink_ptr + h, mask=h < HEADS, other=0.0) * 1.4426950408889634
        cos, sin = load_rotation(cos_ptr, sin_ptr, row, DIM, ROPE)
        o = finish(top, total, acc, sink, cos, sin, out.dtype.element_ty)
        tl.store(out + (row * HEADS + h)[:, None] * DIM + d[None, :], o, mask=real)
    else:
        nothing = tl.zeros([HB, DIM], out.dtype.element_ty)
        tl.store(out + (row * HEADS + h)[:, None] * DIM + d[None, :], nothing, mask=real)


def window_attention(
    q: Tensor,
    sink: Tensor,
    window: Cache,
    chunk: Cache | None,
    entries: Cache | None,
    selected: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    rows: Rows,
    *,
    scale: float,
    sliding_window: int,
    ratio: int,
) -> Tensor:
    num_rows, num_heads, dim = q.shape
    tiles = TILES[device_arch(q.device)] if q.is_cuda else TILES["sm90a"]
    out = torch.empty_like(q)
    if num_rows == 0:
        return out
    top_k = 0 if selected is None else selected.shape[1]
    most = 0
    if entries is not None:
        most = rows.max_entries(ratio) if selected is None else min(top_k, rows.max_entries(ratio))
    split = 0 if not rows.short else 128 if selected is not None else 256
    num_splits = 1 + triton.cdiv(most, split) if split else 1
    heads = min(tiles.heads, max(16, triton.next_power_of_2(num_heads)))
    parts = num_rows * num_splits * num_heads if split else 0
    part_acc = torch.empty(parts * dim, dtype=torch.float32, device=q.device)
    part_sum = torch.empty(parts * 2, dtype=torch.float32, device=q.device)
    ring, paged = fp8_form(window), fp8_form(entries or window)
    facts = {
        "RATIO": ratio if entries is not None else 0,
        "TOP_K": top_k,
        "SPLIT": split,
        "HEADS": num_heads,
        "DIM": dim,
        "ROPE": 2 * cos.shape[1],
    }
    attend[(num_rows, num_splits, triton.cdiv(num_heads, heads))](
        q,
        sink,
        window.pages,
        (chunk or window).pages,
        (entries or window).pages,
        rows.positions if selected is None else selected,
        cos,
        sin,
        rows.positions,
        rows.starts,
        rows.seq_slots,
        rows.page_rows,
        rows.page_table,
        out,
        part_acc,
        part_sum,
        rows.page_table.stride(0),
        ring.page_bytes,
        (chunk or window).form.entries_per_page,
        paged.page_bytes,
        scale * LOG2E,
        WINDOW=sliding_window,
        RING=ring.entries_per_page,
        ENTRIES=paged.entries_per_page,
        HAS_CHUNK=chunk is not None,
        HB=heads,
        KEYS=tiles.keys,
        num_warps=tiles.num_warps,
        num_stages=1,
        **facts,
    )
    if split:
        join_heads = min(8, num_heads)
        join[(num_rows, triton.cdiv(num_heads, join_heads))](
            sink,
            cos,
            sin,
            rows.positions,
            out,
            part_acc,
            part_sum,
            num_splits,
            HB=triton.next_power_of_2(join_heads),
            num_warps=4,
            **facts,
        )
    return out
