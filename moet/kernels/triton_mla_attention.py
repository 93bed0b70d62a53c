# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, attr-defined, misc, assignment, var-annotated"
# ruff: noqa: RUF005  (tuples of blocks grow by addition: the compiler knows no unpacking)
"""Latent attention over chosen positions. A row's positions come in tiles of 64; every tile is
summed by itself and tiles are joined in ascending order, so a row's bits are the same whether each
tile has a program or one program takes them in turn."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moet.kernels import join_latents as join_latents_kernel
from moet.kernels.cache import Cache
from moet.kernels.cubin import device_arch
from moet.kernels.mla_cache import Fp8LatentRows, Nvfp4LatentRows
from moet.kernels.rows import Rows
from moet.kernels.stream_gemm import Launcher
from moet.kernels.triton_attention import LOG2E, MAX_PARTS, TILES_AHEAD
from moet.kernels.triton_attention_tiles import attend_tile, scaled_sum, shares
from moet.kernels.triton_common import all_here, begin, e2m1_values, kernel, overlap

# Of one program: the rows of its matrix instructions. NVFP4 rows take more memory as they unfold.
HEADS_EACH = {"sm90a": 64, "sm120a": 16}
HEADS_APART = {"sm90a": 64, "sm120a": 16}  # where every tile has a program
HEADS_JOINED = 1  # of one program that joins tiles
KEYS = 64  # of a tile
WARPS = 8  # of a program that attends


@triton.jit
def find_latents(
    selected,
    table,
    row,
    tile,
    visible,
    PAGE_BYTES,
    TOP_K: tl.constexpr,
    ENTRIES: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Bytes ahead of the rows of a tile, [KEYS] int64, and which of them exist."""
    key = tile * KEYS + tl.arange(0, KEYS)
    valid = key < visible
    position = tl.load(selected + row * TOP_K + key, mask=valid, other=0).to(tl.int64)
    return place_latents(position, table, valid, PAGE_BYTES, ENTRIES, ROW_BYTES)


@triton.jit
def place_latents(
    position, table, valid, PAGE_BYTES, ENTRIES: tl.constexpr, ROW_BYTES: tl.constexpr
):
    """As find_latents, of positions, [KEYS] int64, which mean nothing where not valid."""
    page = tl.load(table + position // ENTRIES, mask=valid, other=0)
    return page * PAGE_BYTES + position % ENTRIES * ROW_BYTES, valid


@triton.jit
def load_latents(pages, at, valid, LATENT: tl.constexpr, ROPE: tl.constexpr, NVFP4: tl.constexpr):
    """Rows as bf16, exact: a tuple of [keys, 64] of the latent, then [keys, ROPE] of the rope key;
    zero where not valid."""
    KEYS: tl.constexpr = at.shape[0]
    BLOCKS: tl.constexpr = LATENT // 64
    data = (pages + tl.multiple_of(at, 16))[:, None]
    real = valid[:, None]
    blocks = ()
    if NVFP4:
        d = tl.arange(0, 32)[None, :]
        j = tl.arange(0, 4)[None, :]
        for b in tl.static_range(BLOCKS):
            packed = tl.load(data + (b * 32 + d), mask=real, other=0).to(tl.int32)
            codes = tl.reshape(tl.join(packed & 15, packed >> 4), [KEYS, 4, 16])
            scale = tl.load(data + (LATENT // 2 + ROPE + b) + BLOCKS * j, mask=real, other=0)
            factor = scale.to(tl.float8e4nv, bitcast=True).to(tl.float32)
            value = e2m1_values(codes) * factor[:, :, None]
            blocks = blocks + (tl.reshape(value, [KEYS, 64]).to(tl.bfloat16),)
        key = tl.load(data + LATENT // 2 + tl.arange(0, ROPE)[None, :], mask=real, other=0)
        turned = key.to(tl.float8e4nv, bitcast=True).to(tl.float32).to(tl.bfloat16)
    else:
        d = tl.arange(0, 64)[None, :]
        scales = (data + LATENT).to(tl.pointer_type(tl.float32))
        for b in tl.static_range(BLOCKS):
            code = tl.load(data + (b * 64 + d), mask=real, other=0)
            factor = tl.load(scales + b // 2, mask=real, other=0.0)
            value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32) * factor
            blocks = blocks + (value.to(tl.bfloat16),)
        rope = (data + LATENT + LATENT // 128 * 4).to(tl.pointer_type(tl.bfloat16))
        turned = tl.load(rope + tl.arange(0, ROPE)[None, :], mask=real, other=0.0)
    return blocks + (turned,)


@triton.jit
def e2m1_scaled(code, factor):
    """Value of e2m1 codes (int32) times factor, exact: exponent and mantissa bit as they stand in
    fp32 are 2^126 times too small."""
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 2.0**100 * (factor * 2.0**26)


@triton.jit
def load_latents_at_once(
    pages, at, valid, LATENT: tl.constexpr, ROPE: tl.constexpr, NVFP4: tl.constexpr
):
    """As load_latents, but everything is asked for before any of it is used."""
    KEYS: tl.constexpr = at.shape[0]
    BLOCKS: tl.constexpr = LATENT // 64
    data = (pages + tl.multiple_of(at, 16))[:, None]
    real = valid[:, None]
    codes = ()
    blocks = ()
    if NVFP4:
        d = tl.arange(0, 32)[None, :]
        for b in tl.static_range(BLOCKS):
            codes = codes + (tl.load(data + (b * 32 + d), mask=real, other=0),)
        WORD: tl.constexpr = tl.int64 if BLOCKS == 8 else tl.int32 if BLOCKS == 4 else tl.int16
        tl.static_assert(BLOCKS == 8 or BLOCKS == 4 or BLOCKS == 2)
        words = (data + (LATENT // 2 + ROPE)).to(tl.pointer_type(WORD))
        scale = tl.load(words + tl.arange(0, 4)[None, :], mask=real, other=0)
        key = tl.load(data + LATENT // 2 + tl.arange(0, ROPE)[None, :], mask=real, other=0)
        tl.debug_barrier()  # or the compiler would ask for one after the other
        for b in tl.static_range(BLOCKS):
            packed = codes[b].to(tl.int32)
            byte = ((scale >> (8 * b)) & 0xFF).to(tl.uint8)
            factor = byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
            pairs = tl.reshape(tl.join(packed & 15, packed >> 4), [KEYS, 4, 16])
            value = e2m1_scaled(pairs, factor[:, :, None])
            blocks = blocks + (tl.reshape(value, [KEYS, 64]).to(tl.bfloat16),)
        turned = key.to(tl.float8e4nv, bitcast=True).to(tl.float32).to(tl.bfloat16)
    else:
        d = tl.arange(0, 64)[None, :]
        scales = (data + LATENT).to(tl.pointer_type(tl.float32))
        factors = ()
        for b in tl.static_range(BLOCKS):
            codes = codes + (tl.load(data + (b * 64 + d), mask=real, other=0),)
        for b in tl.static_range(BLOCKS // 2):
            factors = factors + (tl.load(scales + b, mask=real, other=0.0),)
        rope = (data + LATENT + LATENT // 128 * 4).to(tl.pointer_type(tl.bfloat16))
        turned = tl.load(rope + tl.arange(0, ROPE)[None, :], mask=real, other=0.0)
        tl.debug_barrier()
        for b in tl.static_range(BLOCKS):
            value = codes[b].to(tl.float8e4nv, bitcast=True).to(tl.float32) * factors[b // 2]
            blocks = blocks + (value.to(tl.bfloat16),)
    return blocks + (turned,)


@triton.jit
def load_query(q_ptr, row, h, HEADS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr):
    """Blocks of 64 columns of the heads h, then the rotated ones."""
    real = (h < HEADS)[:, None]
    at = q_ptr + (row * HEADS + h)[:, None] * (LATENT + ROPE)
    q = ()
    for b in tl.static_range(LATENT // 64):
        q = q + (tl.load(at + b * 64 + tl.arange(0, 64)[None, :], mask=real, other=0.0),)
    return q + (tl.load(at + LATENT + tl.arange(0, ROPE)[None, :], mask=real, other=0.0),)


@triton.jit
def visible_of(positions, row, TOP_K: tl.constexpr):
    """How many positions a row attends to; fill rows to none."""
    return tl.minimum(tl.load(positions + row) + 1, TOP_K).to(tl.int32)


@kernel
def attend_latents(
    q_ptr,
    pages,
    selected,
    positions,
    page_rows,
    page_table,
    out,
    part_acc,
    part_sum,
    table_stride,
    PAGE_BYTES,
    num_tiles,
    scale,
    TOP_K: tl.constexpr,
    ENTRIES: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    WHOLE: tl.constexpr,
    NVFP4: tl.constexpr,
    HEADS: tl.constexpr,
    HB: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    KEYS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Row, tile, head block. WHOLE: all tiles of a row in turn, and its output; otherwise one tile,
    and its sums; its queries go into shared memory when all that is read has been asked for."""
    begin(OVERLAP)
    BLOCKS: tl.constexpr = LATENT // 64
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(2) * HB + tl.arange(0, HB)
    real = (h < HEADS)[:, None]
    d = tl.arange(0, 64)[None, :]
    visible = visible_of(positions, row, TOP_K)
    table = page_table + tl.load(page_rows + row) * table_stride
    if WHOLE:
        q = load_query(q_ptr, row, h, HEADS, LATENT, ROPE)
        acc = ()
        for _ in tl.static_range(BLOCKS):
            acc = acc + (tl.zeros([HB, 64], tl.float32),)
        top = tl.full([HB], float("-inf"), tl.float32)
        total = tl.zeros([HB], tl.float32)
        for tile in range(tl.cdiv(visible, KEYS)):
            at, valid = find_latents(
                selected, table, row, tile, visible, PAGE_BYTES, TOP_K, ENTRIES, ROW_BYTES, KEYS
            )
            blocks = load_latents(pages, at, valid, LATENT, ROPE, NVFP4)
            weight, part_top, part_total = attend_tile(q, blocks, valid, scale, BLOCKS + 1)
            top, total, old, new = shares(top, total, part_top, part_total)
            old = tl.broadcast_to(old[:, None], [HB, 64])
            new = tl.broadcast_to(new[:, None], [HB, 64])
            joined = ()
            for b in tl.static_range(BLOCKS):
                part = tl.dot(weight, blocks[b])
                joined = joined + (scaled_sum(old, acc[b], new, part),)
            acc = joined
        factor = one_over(total)[:, None]
        to = out + (row * HEADS + h)[:, None] * LATENT + d
        for b in tl.static_range(BLOCKS):
            tl.store(to + b * 64, (acc[b] * factor).to(out.dtype.element_ty), mask=real)
    else:
        tile = tl.program_id(1)
        key = tile * KEYS + tl.arange(0, KEYS)  # asked for before it is known how many there are
        position = tl.load(selected + row * TOP_K + key, mask=key < TOP_K, other=-1)
        if tile * KEYS < visible:
            q = load_query(q_ptr, row, h, HEADS, LATENT, ROPE)
            valid = (key < visible) & (position >= 0)
            at, valid = place_latents(
                position.to(tl.int64), table, valid, PAGE_BYTES, ENTRIES, ROW_BYTES
            )
            blocks = load_latents_at_once(pages, at, valid, LATENT, ROPE, NVFP4)
            q = all_here(q, BLOCKS + 1, OVERLAP)
            weight, top, total = attend_tile(q, blocks, valid, scale, BLOCKS + 1)
            part = (row * num_tiles + tile) * HEADS + h
            tl.store(part_sum + part * 2, top, mask=h < HEADS)
            tl.store(part_sum + part * 2 + 1, total, mask=h < HEADS)
            to = part_acc + part[:, None] * LATENT + d
            for b in tl.static_range(BLOCKS):
                tl.store(to + b * 64, tl.dot(weight, blocks[b]), mask=real)


@triton.jit
def one_over(total):
    """1 / total, and 0 for rows that attend to nothing."""
    return tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0)


@kernel
def join_latents(
    positions,
    out,
    part_acc,
    part_sum,
    num_tiles,
    TOP_K: tl.constexpr,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    KEYS: tl.constexpr,
    EACH: tl.constexpr,
    AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Row and EACH heads: the tiles that have keys, in ascending order, AHEAD of them read at
    once."""
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * EACH + tl.arange(0, EACH)
    d = tl.arange(0, LATENT)
    real = h < HEADS
    last = tl.cdiv(visible_of(positions, row, TOP_K), KEYS)
    top = tl.full([EACH], float("-inf"), tl.float32)
    total = tl.zeros([EACH], tl.float32)
    acc = tl.zeros([EACH, LATENT], tl.float32)
    for first in range(0, last, AHEAD):
        tops = ()
        totals = ()
        parts = ()
        for i in tl.static_range(AHEAD):
            tile = tl.zeros([EACH], tl.int32) + (first + i)
            # A tile without keys adds nothing, exactly: its maximum is -inf.
            used = real & (tile < last)
            part = (row * num_tiles + tile) * HEADS + h
            tops = tops + (tl.load(part_sum + part * 2, mask=used, other=float("-inf")),)
            totals = totals + (tl.load(part_sum + part * 2 + 1, mask=used, other=0.0),)
            at = part_acc + part[:, None] * LATENT + d[None, :]
            parts = parts + (tl.load(at, mask=used[:, None], other=0.0),)
        for i in tl.static_range(AHEAD):
            top, total, old, new = shares(top, total, tops[i], totals[i])
            old = tl.broadcast_to(old[:, None], [EACH, LATENT])
            new = tl.broadcast_to(new[:, None], [EACH, LATENT])
            acc = scaled_sum(old, acc, new, parts[i])
    value = (acc * one_over(total)[:, None]).to(out.dtype.element_ty)
    tl.store(out + (row * HEADS + h)[:, None] * LATENT + d[None, :], value, mask=real[:, None])


def latent_attention(
    query: Tensor,
    latents: Cache,
    selected: Tensor,
    rows: Rows,
    *,
    scale: float,
    latent_dim: int,
    launcher: Launcher | None = None,
) -> Tensor:
    return attend_selected(
        query,
        latents,
        selected,
        rows,
        scale=scale,
        latent_dim=latent_dim,
        least_heads=16,
        launcher=launcher,
    )


def attend_selected(
    query: Tensor,
    latents: Cache,
    selected: Tensor,
    rows: Rows,
    *,
    scale: float,
    latent_dim: int,
    least_heads: int,
    launcher: Launcher | None = None,
) -> Tensor:
    """`latent_attention`. least_heads: of a program, real or not; the bits of fewer than 64 are
    others. launcher: of the kernel that joins tiles, where its shapes are."""
    num_rows, num_heads, _ = query.shape
    out = torch.empty((num_rows, num_heads, latent_dim), dtype=query.dtype, device=query.device)
    if num_rows == 0:
        return out
    form = latents.form
    assert isinstance(form, Fp8LatentRows | Nvfp4LatentRows)  # by the predicate
    top_k = selected.shape[1]
    num_tiles = triton.cdiv(min(top_k, rows.max_entries(1)), KEYS)
    whole = num_rows * num_tiles > MAX_PARTS
    arch = device_arch(query.device) if query.is_cuda else "sm90a"
    most_heads = (HEADS_EACH if whole else HEADS_APART)[arch]
    heads = min(most_heads, max(least_heads, triton.next_power_of_2(num_heads)))
    parts = 0 if whole else num_rows * num_tiles * num_heads
    part_acc = torch.empty(parts * latent_dim, dtype=torch.float32, device=query.device)
    part_sum = torch.empty(parts * 2, dtype=torch.float32, device=query.device)
    attend_latents[(num_rows, 1 if whole else num_tiles, triton.cdiv(num_heads, heads))](
        query,
        latents.pages,
        selected,
        rows.positions,
        rows.page_rows,
        rows.page_table,
        out,
        part_acc,
        part_sum,
        rows.page_table.stride(0),
        form.page_bytes,
        num_tiles,
        scale * LOG2E,
        TOP_K=top_k,
        ENTRIES=form.entries_per_page,
        ROW_BYTES=form.row_bytes,
        WHOLE=whole,
        NVFP4=isinstance(form, Nvfp4LatentRows),
        HEADS=num_heads,
        HB=heads,
        LATENT=latent_dim,
        ROPE=form.rope_dim,
        KEYS=KEYS,
        num_warps=WARPS,
        num_stages=1,
        **overlap(query),
    )
    if not whole and launcher is not None and join_latents_kernel.fits(out, num_tiles):
        join_latents_kernel.run(launcher, rows.positions, part_acc, part_sum, num_tiles, top_k, out)
    elif not whole:
        each = min(HEADS_JOINED, triton.next_power_of_2(num_heads))
        join_latents[(num_rows, triton.cdiv(num_heads, each))](
            rows.positions,
            out,
            part_acc,
            part_sum,
            num_tiles,
            TOP_K=top_k,
            HEADS=num_heads,
            LATENT=latent_dim,
            KEYS=KEYS,
            EACH=each,
            AHEAD=TILES_AHEAD,
            num_warps=4,
            **overlap(query),
        )
    return out
