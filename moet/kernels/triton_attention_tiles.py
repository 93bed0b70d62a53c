# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, attr-defined, misc, assignment, var-annotated"
# ruff: noqa: RUF005  (tuples of blocks grow by addition: the compiler knows no unpacking)
"""What attention does with one tile of a row's keys, and with all of them in turn: device functions
of the kernels in triton_attention.py, some of which those of latent attention share."""

from __future__ import annotations

import triton
import triton.language as tl

from moet.kernels.triton_common import (
    e4m3_codes,
    e4m3_exponent,
    mma_place,
    power_of_two,
    rotate_pairs,
)


@triton.jit
def find_rows(
    where,
    tile,
    WINDOW: tl.constexpr,
    RING: tl.constexpr,
    ENTRIES: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
    DATA: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
):
    """Where the rows of a tile are: bytes from `window` to their data and scales, [KEYS] int64, and
    which of them exist."""
    (window, chunk, entries, selected, CHUNK_ENTRIES, PAGE_BYTES, table, ring) = where[:8]
    (row, p, start, visible) = where[8:]
    WINDOW_TILES: tl.constexpr = (WINDOW + KEYS - 1) // KEYS
    key = tile * KEYS + tl.arange(0, KEYS)
    oldest = tl.maximum(p - WINDOW + 1, 0)
    if tile < WINDOW_TILES:
        token = oldest + key
        valid = token <= p
        place = token % RING
        data_at = ring + place * DATA
        scales_at = ring + RING * DATA + place * SCALE_BYTES
        if HAS_CHUNK:
            chunk_at = chunk.to(tl.int64) - window.to(tl.int64)
            own = row + token - p
            fresh = token >= start
            data_at = tl.where(fresh, chunk_at + own * DATA, data_at)
            own_scales = chunk_at + CHUNK_ENTRIES.to(tl.int64) * DATA + own * SCALE_BYTES
            scales_at = tl.where(fresh, own_scales, scales_at)
    else:
        entry = (key - WINDOW_TILES * KEYS).to(tl.int64)
        valid = entry < visible
        if TOP_K > 0:
            chosen = tl.load(selected + row * TOP_K + entry, mask=valid, other=0)
            entry = chosen.to(tl.int64)
        page = tl.load(table + entry // ENTRIES, mask=valid, other=0)
        place = entry % ENTRIES
        page_at = entries.to(tl.int64) - window.to(tl.int64) + page * PAGE_BYTES
        data_at = page_at + place * DATA
        scales_at = page_at + ENTRIES * DATA + place * SCALE_BYTES
    return data_at, scales_at, valid


@triton.jit
def load_rows(pages, data_at, scales_at, valid, DIM: tl.constexpr):
    """Rows of cache.Fp8Rows as bf16, exact, in blocks of 64 columns, the last one rotated. Returns
    a tuple of [keys, 64]; zero where not valid."""
    NOPE_BLOCKS: tl.constexpr = DIM // 64 - 1
    data = (pages + tl.multiple_of(data_at, 16))[:, None]
    scales = (pages + tl.multiple_of(scales_at, 8)).to(tl.pointer_type(tl.int64))[:, None]
    real = valid[:, None]
    d = tl.arange(0, 64)[None, :]
    codes = ()
    for b in tl.static_range(NOPE_BLOCKS):
        codes = codes + (tl.load(data + (b * 64 + d), mask=real, other=0),)
    rotated = (data + NOPE_BLOCKS * 64).to(tl.pointer_type(tl.bfloat16)) + d
    turned = tl.load(rotated, mask=real, other=0.0)
    bytes_ = tl.load(scales, mask=real, other=0)
    blocks = ()
    for b in tl.static_range(NOPE_BLOCKS):
        factor = (((bytes_ >> (8 * b)) & 0xFF).to(tl.int32) << 23).to(tl.float32, bitcast=True)
        value = codes[b].to(tl.float8e4nv, bitcast=True).to(tl.float32)
        blocks = blocks + ((value * factor).to(tl.bfloat16),)
    return blocks + (turned,)


@triton.jit
def scaled_sum(a, x, b, y):
    """a * x + b * y, all of one shape. Rounds twice in a fixed way, which the compiler may not
    choose, so that kernels that share this share its bits."""
    return tl.fma(b, y, a * x)


@triton.jit
def shares(top, total, part_top, part_total):
    """Join two sums that are relative to different maxima. Returns the maximum and the sum of
    weights of both, and the factors of the old and the new values."""
    new_top = tl.maximum(top, part_top)
    old, new = tl.exp2(top - new_top), tl.exp2(part_top - new_top)
    return new_top, scaled_sum(old, total, new, part_total), old, new


@triton.jit
def final_factor(top, total, sink):
    """What the sums are multiplied with: one over the sum of weights with the sink's."""
    shift = tl.maximum(top, sink)
    factor = tl.exp2(top - shift)
    return factor / tl.fma(total, factor, tl.exp2(sink - shift))


@triton.jit
def attend_tile(q, blocks, valid, scale, BLOCKS: tl.constexpr):
    """Weights of a tile's keys, [HB, KEYS] bf16; their maximum logit and sum, [HB]."""
    logits = tl.dot(q[0], tl.trans(blocks[0]))
    for b in tl.static_range(1, BLOCKS):
        logits = tl.dot(q[b], tl.trans(blocks[b]), logits)
    logits = tl.where(valid[None, :], logits * scale, float("-inf"))
    top = tl.max(logits, 1)
    weight = tl.exp2(logits - top[:, None])
    return weight.to(tl.bfloat16), top, tl.sum(weight, 1)


@triton.jit
def sight(
    positions, row, WINDOW_TILES, RATIO: tl.constexpr, TOP_K: tl.constexpr, KEYS: tl.constexpr
):
    """A row's position, the entries it sees, and the tiles that these and its window take."""
    p = tl.load(positions + row)
    visible = (p + 1) // RATIO if RATIO > 0 else 0
    if TOP_K > 0:
        visible = tl.minimum(visible, TOP_K)
    return p, visible, tl.where(p >= 0, WINDOW_TILES + tl.cdiv(visible, KEYS), 0)


@triton.jit
def load_query(q_ptr, at, real, BLOCKS: tl.constexpr):
    q = ()
    for b in tl.static_range(BLOCKS):
        q = q + (tl.load(q_ptr + at + b * 64, mask=real, other=0.0).to(tl.bfloat16),)
    return q


@triton.jit
def attend_all(
    q_ptr,
    at,
    real,
    where,
    last,
    scale,
    WINDOW: tl.constexpr,
    RING: tl.constexpr,
    ENTRIES: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
    HB: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
    DATA: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
):
    """A row's tiles in turn. Returns their maximum logit and sum of weights, [HB], and the sums of
    their values, [HB, 64] of each block."""
    BLOCKS: tl.constexpr = DIM // 64
    WINDOW_TILES: tl.constexpr = (WINDOW + KEYS - 1) // KEYS
    q = load_query(q_ptr, at, real, BLOCKS)
    acc = ()
    for _ in tl.static_range(BLOCKS):
        acc = acc + (tl.zeros([HB, 64], tl.float32),)
    top = tl.full([HB], float("-inf"), tl.float32)
    total = tl.zeros([HB], tl.float32)
    for tile in range(last):
        if (tile >= WINDOW_TILES) | (tile * KEYS <= where[9]):
            data_at, scales_at, valid = find_rows(
                where, tile, WINDOW, RING, ENTRIES, TOP_K, HAS_CHUNK, KEYS, DATA, SCALE_BYTES
            )
            blocks = load_rows(where[0], data_at, scales_at, valid, DIM)
            weight, part_top, part_total = attend_tile(q, blocks, valid, scale, BLOCKS)
            top, total, old, new = shares(top, total, part_top, part_total)
            old = tl.broadcast_to(old[:, None], [HB, 64])
            new = tl.broadcast_to(new[:, None], [HB, 64])
            joined = ()
            for b in tl.static_range(BLOCKS):
                part = tl.dot(weight, blocks[b])
                joined = joined + (scaled_sum(old, acc[b], new, part),)
            acc = joined
    return top, total, acc


@triton.jit
def store_values(
    acc,
    factor,
    cos,
    sin,
    out,
    scales,
    head,
    at,
    inside,
    DIM: tl.constexpr,
    QUANT: tl.constexpr,
):
    """A row's heads from their sums: rotated back, and in e4m3 with scales if QUANT."""
    BLOCKS: tl.constexpr = DIM // 64
    done = ()
    for b in tl.static_range(BLOCKS):
        value = (acc[b] * factor).to(tl.bfloat16).to(tl.float32)
        if b == BLOCKS - 1:
            value = rotate_pairs(value, cos, -sin).to(tl.bfloat16).to(tl.float32)
        done = done + (value,)
    if QUANT:
        for c in tl.static_range(DIM // 128):
            low, high = tl.abs(done[2 * c]), tl.abs(done[2 * c + 1])
            byte = e4m3_exponent(tl.maximum(tl.max(low, 1), tl.max(high, 1)))
            fit = power_of_two(254 - byte)[:, None]
            scale_at = head * (DIM // 128) + c
            tl.store(scales + scale_at, power_of_two(byte), mask=inside)
            d = mma_place(tl.arange(0, 64))[None, :]
            to = out + head[:, None] * DIM + c * 128 + d
            tl.store(to, e4m3_codes(done[2 * c] * fit).to(tl.uint8), mask=inside[:, None])
            tl.store(to + 64, e4m3_codes(done[2 * c + 1] * fit).to(tl.uint8), mask=inside[:, None])
    else:
        for b in tl.static_range(BLOCKS):
            value = done[b].to(out.dtype.element_ty)
            tl.store(out + at + b * 64, value, mask=inside[:, None])


@triton.jit
def attend_one(
    q_ptr,
    at,
    real,
    where,
    tile,
    scale,
    h,
    part_acc,
    part_sum,
    WINDOW: tl.constexpr,
    RING: tl.constexpr,
    ENTRIES: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    DATA: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
):
    """One tile of a row, of whose sums a program stores one of SPLIT parts."""
    BLOCKS: tl.constexpr = DIM // 64
    q = load_query(q_ptr, at, real, BLOCKS)
    data_at, scales_at, valid = find_rows(
        where, tile, WINDOW, RING, ENTRIES, TOP_K, HAS_CHUNK, KEYS, DATA, SCALE_BYTES
    )
    blocks = load_rows(where[0], data_at, scales_at, valid, DIM)
    weight, top, total = attend_tile(q, blocks, valid, scale, BLOCKS)
    part = (where[8] * tl.num_programs(1) + tile) * HEADS + h
    to = part_acc + part[:, None] * DIM + tl.arange(0, 64)[None, :]
    mine = tl.program_id(2) % SPLIT
    if mine == 0:
        tl.store(part_sum + part * 2, top, mask=h < HEADS)
        tl.store(part_sum + part * 2 + 1, total, mask=h < HEADS)
    for s in tl.static_range(SPLIT):
        if mine == s:
            for b in tl.static_range(s * BLOCKS // SPLIT, (s + 1) * BLOCKS // SPLIT):
                tl.store(to + b * 64, tl.dot(weight, blocks[b]), mask=real)


@triton.jit
def load_angles(cos_ptr, sin_ptr, row, ROPE: tl.constexpr):
    """cos and sin of a row's pairs, [1, ROPE / 2] each."""
    at = row * (ROPE // 2) + tl.arange(0, ROPE // 2)
    return tl.load(cos_ptr + at)[None, :], tl.load(sin_ptr + at)[None, :]
