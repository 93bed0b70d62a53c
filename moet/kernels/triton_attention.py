# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, attr-defined, misc"
"""Attention kernels over fp8 rows. One program takes one row's query, all heads at once, over the
window or over a fixed share of its entries; shares are joined in ascending order. Short steps give
each share a program, long ones take a row's shares in turn, with the same sums in one order."""

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


TILES = {"sm90a": Tiles(32, 32, 8), "sm120a": Tiles(32, 32, 8)}


@triton.jit
def load_rows(pages, data_at, scales_at, valid, DIM: tl.constexpr, ROPE: tl.constexpr):
    """Rows of cache.Fp8Rows as bf16, exact; zero where not valid.

    data_at, scales_at: [keys] int64, bytes from `pages` on to a row's data and to its scales.
    Returns [keys, DIM], zero from the rotated part on, and the rotated part [keys, ROPE].
    """
    NOPE: tl.constexpr = DIM - ROPE
    BLOCKS: tl.constexpr = DIM // 64
    KEYS: tl.constexpr = valid.shape[0]
    b = tl.arange(0, BLOCKS)
    d = b[:, None] * 64 + tl.arange(0, 64)[None, :]
    inside = valid[:, None] & (b < NOPE // 64)[None, :]
    data = pages + data_at
    code = tl.load(data[:, None, None] + d[None, :, :], mask=inside[:, :, None], other=0)
    value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    byte = tl.load((pages + scales_at)[:, None] + b[None, :], mask=inside, other=127)
    factor = (byte.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    value = (value * factor[:, :, None]).to(tl.bfloat16)
    rope = (data + NOPE).to(tl.pointer_type(tl.bfloat16))[:, None] + tl.arange(0, ROPE)[None, :]
    return tl.reshape(value, [KEYS, DIM]), tl.load(rope, mask=valid[:, None], other=0.0)


@triton.jit
def scaled_sum(a, x, b, y):
    """a * x + b * y, all of one shape. Rounds twice in a fixed way, which the compiler may not
    choose, so that kernels that share this share its bits."""
    return tl.fma(b, y, a * x)


@triton.jit
def add_part(top, acc, part_top, part_acc):
    """Join two sums that are relative to different maxima. acc: [H, N]; top: [H]."""
    new_top = tl.maximum(top, part_top)
    old = tl.broadcast_to(tl.exp2(top - new_top)[:, None], acc.shape)
    new = tl.broadcast_to(tl.exp2(part_top - new_top)[:, None], acc.shape)
    return scaled_sum(old, acc, new, part_acc)


@triton.jit
def add_total(top, total, part_top, part_total):
    """The same for the sums of weights, [H]. Returns the new maximum too."""
    new_top = tl.maximum(top, part_top)
    old, new = tl.exp2(top - new_top), tl.exp2(part_top - new_top)
    return new_top, scaled_sum(old, total, new, part_total)


@triton.jit
def finish(top, total, acc, sink, DTYPE: tl.constexpr):
    """Divide, with the sink in the sum. Rounds."""
    shift = tl.maximum(top, sink)
    factor = tl.exp2(top - shift)
    share = factor / tl.fma(total, factor, tl.exp2(sink - shift))
    return (acc * share[:, None]).to(DTYPE)


@triton.jit
def load_angles(cos_ptr, sin_ptr, row, ROPE: tl.constexpr):
    """cos and sin of a row's pairs, [1, ROPE / 2] each."""
    at = row * (ROPE // 2) + tl.arange(0, ROPE // 2)
    return tl.load(cos_ptr + at)[None, :], tl.load(sin_ptr + at)[None, :]


@triton.jit(do_not_specialize=["CHUNK_ENTRIES"])
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
    WHOLE: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
    HEADS: tl.constexpr,
    HB: tl.constexpr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Row, share, head block. Share 0 is the window, the others SPLIT entries each. WHOLE: all
    shares of a row in turn, and its output; otherwise one share, and its sums."""
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(2) * HB + tl.arange(0, HB)
    d = tl.arange(0, DIM)
    r = tl.arange(0, ROPE)
    at = (row * HEADS + h)[:, None] * DIM + d[None, :]
    turned_at = (row * HEADS + h)[:, None] * DIM + (DIM - ROPE + r)[None, :]
    real = (h < HEADS)[:, None]
    plain = real & (d < DIM - ROPE)[None, :]
    p = tl.load(positions + row)
    visible = (p + 1) // RATIO if RATIO > 0 else 0
    if TOP_K > 0:
        visible = tl.minimum(visible, TOP_K)
    # Keys of a row: the tokens of its window, then its entries.
    oldest = tl.maximum(p - WINDOW + 1, 0)
    num_tokens = p + 1 - oldest
    num_shares = 1 + tl.cdiv(visible, SPLIT)
    first_share = 0 if WHOLE else tl.program_id(1)
    last_share = num_shares if WHOLE else tl.minimum(first_share + 1, num_shares)
    if (p >= 0) & (first_share < last_share):
        q = tl.load(q_ptr + at, mask=plain, other=0.0).to(tl.bfloat16)
        q_turned = tl.load(q_ptr + turned_at, mask=real, other=0.0).to(tl.bfloat16)
        start = tl.load(starts + row)
        ring = tl.load(seq_slots + row) * RING_BYTES
        table = page_table + tl.load(page_rows + row) * table_stride
        DATA: tl.constexpr = DIM + ROPE
        SCALE_BYTES: tl.constexpr = ((DIM - ROPE) // 64 + 7) // 8 * 8
        all_top = tl.full([HB], float("-inf"), tl.float32)
        all_total = tl.zeros([HB], tl.float32)
        all_acc = tl.zeros([HB, DIM], tl.float32)
        all_turned = tl.zeros([HB, ROPE], tl.float32)
        for share in range(first_share, last_share):
            first = tl.where(share == 0, 0, num_tokens + (share - 1) * SPLIT)
            last = tl.where(share == 0, num_tokens, first + SPLIT)
            last = tl.minimum(last, num_tokens + visible)
            top = tl.full([HB], float("-inf"), tl.float32)
            total = tl.zeros([HB], tl.float32)
            acc = tl.zeros([HB, DIM], tl.float32)
            acc_turned = tl.zeros([HB, ROPE], tl.float32)
            for first_key in range(first, last, KEYS):
                key = first_key + tl.arange(0, KEYS)
                valid = key < last
                token = oldest + key
                place = token % RING
                data_at = ring + place * DATA
                scales_at = ring + RING * DATA + place * SCALE_BYTES
                if HAS_CHUNK:
                    base = chunk.to(tl.int64) - window.to(tl.int64)
                    own = row + token - p
                    fresh = token >= start
                    data_at = tl.where(fresh, base + own * DATA, data_at)
                    own_scales = base + CHUNK_ENTRIES * DATA + own * SCALE_BYTES
                    scales_at = tl.where(fresh, own_scales, scales_at)
                if RATIO > 0:
                    is_entry = key >= num_tokens
                    entry = key - num_tokens
                    if TOP_K > 0:
                        wanted = selected + row * TOP_K + entry
                        entry = tl.load(wanted, mask=valid & is_entry, other=0)
                    page = tl.load(table + entry // ENTRIES, mask=valid & is_entry, other=0)
                    base = entries.to(tl.int64) - window.to(tl.int64) + page * PAGE_BYTES
                    place = entry % ENTRIES
                    data_at = tl.where(is_entry, base + place * DATA, data_at)
                    entry_scales = base + ENTRIES * DATA + place * SCALE_BYTES
                    scales_at = tl.where(is_entry, entry_scales, scales_at)
                k, turned = load_rows(window, data_at, scales_at, valid, DIM, ROPE)
                logits = tl.dot(q_turned, tl.trans(turned), tl.dot(q, tl.trans(k))) * scale
                logits = tl.where(valid[None, :], logits, float("-inf"))
                new_top = tl.maximum(top, tl.max(logits, 1))
                factor = tl.exp2(top - new_top)
                weight = tl.exp2(logits - new_top[:, None])
                total = tl.fma(total, factor, tl.sum(weight, 1))
                weight = weight.to(tl.bfloat16)
                acc = tl.dot(weight, k, acc * factor[:, None])
                acc_turned = tl.dot(weight, turned, acc_turned * factor[:, None])
                top = new_top
            if WHOLE:
                all_acc = add_part(all_top, all_acc, top, acc)
                all_turned = add_part(all_top, all_turned, top, acc_turned)
                all_top, all_total = add_total(all_top, all_total, top, total)
            else:
                part = (row * tl.num_programs(1) + share) * HEADS + h
                parts = part_acc + part[:, None] * DIM
                tl.store(parts + d[None, :], acc, mask=plain)
                tl.store(parts + (DIM - ROPE + r)[None, :], acc_turned, mask=real)
                tl.store(part_sum + part * 2, top, mask=h < HEADS)
                tl.store(part_sum + part * 2 + 1, total, mask=h < HEADS)
        if WHOLE:
            dtype: tl.constexpr = out.dtype.element_ty
            sink = tl.load(sink_ptr + h, mask=h < HEADS, other=0.0) * 1.4426950408889634
            cos, sin = load_angles(cos_ptr, sin_ptr, row, ROPE)
            tl.store(out + at, finish(all_top, all_total, all_acc, sink, dtype), mask=plain)
            turned = finish(all_top, all_total, all_turned, sink, dtype).to(tl.float32)
            tl.store(out + turned_at, rotate_pairs(turned, cos, -sin).to(dtype), mask=real)


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
            acc = add_part(top, acc, part_top, tl.load(part_row, mask=real, other=0.0))
            top, total = add_total(top, total, part_top, part_total)
        sink = tl.load(sink_ptr + h, mask=h < HEADS, other=0.0) * 1.4426950408889634
        cos, sin = load_rotation(cos_ptr, sin_ptr, row, DIM, ROPE)
        o = finish(top, total, acc, sink, out.dtype.element_ty).to(tl.float32)
        o = rotate_pairs(o, cos, -sin).to(out.dtype.element_ty)
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
    split = 256 if selected is None else 128
    num_splits = 1 + triton.cdiv(most, split) if rows.short else 1
    heads = min(tiles.heads, max(16, triton.next_power_of_2(num_heads)))
    parts = num_rows * num_splits * num_heads if rows.short else 0
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
        WHOLE=not rows.short,
        HAS_CHUNK=chunk is not None,
        HB=heads,
        KEYS=tiles.keys,
        num_warps=tiles.num_warps,
        num_stages=1,
        **facts,
    )
    if rows.short:
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
