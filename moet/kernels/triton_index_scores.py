# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, attr-defined, misc"
"""Scores of the entries that rows see, each row's by itself: of steps by pages, of chunks by rows
that share a page."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moet.kernels.cache import Cache, Mxfp4Rows
from moet.kernels.cubin import device_arch
from moet.kernels.mla_cache import Fp8IndexKeys
from moet.kernels.triton_common import (
    CODED_ROWS,
    as_here,
    e2m1_values,
    kernel,
    let_next,
    overlap,
    power_of_two,
    wait,
)

PAGES_EACH = 2  # of a row of a step, that one program scores
STREAMED_ROWS = 8  # of a step whose programs read keys while the kernel ahead still runs
# Of a thread that scores pages: the kernel that follows finds room beside it.
REGISTERS = {"sm90a": 96, "sm120a": 128}
ROWS_EACH = 16  # of a chunk, that share a page's keys in one program


@triton.jit
def load_keys(base, DIM: tl.constexpr, ENTRIES: tl.constexpr, FP8: tl.constexpr):
    """The keys of a page: [ENTRIES, DIM] bf16, which holds them exactly."""
    e = tl.arange(0, ENTRIES)
    if FP8:
        code = tl.load(base + e[:, None] * DIM + tl.arange(0, DIM)[None, :])
        scale = tl.load((base + ENTRIES * DIM).to(tl.pointer_type(tl.float32)) + e)
        value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale[:, None]
        return value.to(tl.bfloat16)
    packed = tl.load(base + e[:, None] * (DIM // 2) + tl.arange(0, DIM // 2)[None, :])
    packed = packed.to(tl.int32)
    codes = tl.reshape(tl.join(packed & 15, packed >> 4), [ENTRIES, DIM // 32, 32])
    scale_at = e[:, None] * (DIM // 32) + tl.arange(0, DIM // 32)[None, :]
    byte = tl.load(base + ENTRIES * (DIM // 2) + scale_at).to(tl.int32)
    values = e2m1_values(codes) * power_of_two(byte)[:, :, None]
    return tl.reshape(values, [ENTRIES, DIM]).to(tl.bfloat16)


@triton.jit
def mxfp4_values(packed, byte, ENTRIES: tl.constexpr, DIM: tl.constexpr):
    """[ENTRIES, DIM] bf16 of pairs of e2m1 codes, [ENTRIES, DIM / 2] int32, and bytes of scales,
    [ENTRIES, DIM / 32] int32: as e2m1_values times power_of_two, with fewer instructions."""
    # Exponent and mantissa of a code are those of a bf16 that is 2^126 times smaller.
    pair = ((packed * 0x40040) & 0x01C001C0) | ((packed * 0x1001000) & -0x7FFF8000)
    codes = tl.join(pair << 16, pair & -0x10000).to(tl.float32, bitcast=True) * 2.0**126
    blocks = tl.reshape(codes, [ENTRIES, DIM // 32, 32])
    return tl.reshape(blocks * power_of_two(byte)[:, :, None], [ENTRIES, DIM]).to(tl.bfloat16)


@triton.jit
def ask_for_keys(page, place, DIM: tl.constexpr, ENTRIES: tl.constexpr, FP8: tl.constexpr):
    """What keys_of takes of entries at places of pages: codes, by pairs unless FP8, and scales."""
    if FP8:
        code = tl.load(page[:, None] + place[:, None] * DIM + tl.arange(0, DIM)[None, :])
        scale = tl.load((page + ENTRIES * DIM).to(tl.pointer_type(tl.float32)) + place)
    else:
        PAIRS: tl.constexpr = DIM // 2
        code = tl.load(page[:, None] + place[:, None] * PAIRS + tl.arange(0, PAIRS)[None, :])
        scales = page + ENTRIES * PAIRS + place * (DIM // 32)
        scale = tl.load(scales[:, None] + tl.arange(0, DIM // 32)[None, :])
    return code, scale


@triton.jit
def keys_of(code, scale, SPAN: tl.constexpr, DIM: tl.constexpr, FP8: tl.constexpr):
    """[SPAN, DIM] bf16, as load_keys has them."""
    if FP8:
        value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale[:, None]
        key = value.to(tl.bfloat16)
    else:
        key = mxfp4_values(code.to(tl.int32), scale.to(tl.int32), SPAN, DIM)
    return key


@kernel
def score_pages(
    q,
    gate,
    keys,
    scores,
    positions,
    page_rows,
    page_table,
    gate_stride,
    gate_scale,
    table_stride,
    width,
    PAGE_BYTES,
    RATIO: tl.constexpr,
    TOP_K,
    PAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    DIM: tl.constexpr,
    ENTRIES: tl.constexpr,
    FP8: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A row's scores for the entries of PAGES of its pages. Rows that see no more than TOP_K need
    none. Where pages are is read while the kernel that makes queries still runs, and if AHEAD what
    they hold, too; the rest is asked for together."""
    let_next(OVERLAP)
    # What is read ahead of the wait is older than the product of queries: positions and pages are
    # the step's, and keys are stored by attention_inputs or latent_inputs, in a chunk as in any
    # other step. All kernels of that product wait before they let the next one start.
    SPAN: tl.constexpr = PAGES * ENTRIES
    first = tl.program_id(0) * PAGES
    row = tl.program_id(1).to(tl.int64)
    page_row, position = tl.load(page_rows + row), tl.load(positions + row)
    visible = (position.to(tl.int32) + 1) // RATIO
    live = (visible > TOP_K) & (first * ENTRIES < visible)
    e, h, d = tl.arange(0, SPAN), tl.arange(0, HEADS_PAD), tl.arange(0, DIM)
    table, place = page_table + page_row * table_stride + first, e % ENTRIES
    base = tl.zeros([SPAN], tl.int64)
    for i in tl.static_range(PAGES):
        number = tl.load(table + i, mask=(first + i) * ENTRIES < visible, other=0)
        base = tl.where(e // ENTRIES == i, number * PAGE_BYTES, base)
    page = keys + base
    key = tl.zeros([SPAN, DIM], tl.bfloat16)
    if AHEAD:  # noqa: SIM102  (a constant)
        if live:
            code, scale = ask_for_keys(page, place, DIM, ENTRIES, FP8)
            key = keys_of(code, scale, SPAN, DIM, FP8)
    wait(OVERLAP)
    if live:
        at = (row * HEADS + h[None, :]) * DIM + d[:, None]
        weight = tl.load(gate + row * gate_stride + h, mask=h < HEADS, other=0.0)
        if AHEAD:
            query = tl.load(q + at, mask=(h < HEADS)[None, :], other=0.0)
        else:
            code, scale = ask_for_keys(page, place, DIM, ENTRIES, FP8)
            query = tl.load(q + at, mask=(h < HEADS)[None, :], other=0.0)
            code = as_here(code, OVERLAP)
            if not FP8:
                scale = as_here(scale, OVERLAP)
            query = as_here(query, OVERLAP)
            key = keys_of(code, scale, SPAN, DIM, FP8)
        if not FP8:  # whose gates have the dtype of its queries
            weight = weight.to(q.dtype.element_ty)
        wanted = tl.maximum(tl.dot(key, query.to(tl.bfloat16)), 0.0)
        score = tl.sum(wanted * (weight.to(tl.float32) * gate_scale)[None, :], 1)
        entry = first * ENTRIES + e
        tl.store(scores + row * width + entry, score, mask=entry < visible)


@kernel(do_not_specialize=["num_rows"])
def score_rows(
    q,
    gate,
    keys,
    scores,
    positions,
    page_rows,
    page_table,
    num_rows,
    gate_stride,
    gate_scale,
    table_stride,
    width,
    PAGE_BYTES,
    RATIO,
    TOP_K,
    EACH: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    DIM: tl.constexpr,
    ENTRIES: tl.constexpr,
    FP8: tl.constexpr,
):
    """As score_pages for EACH rows of a chunk and one page, whose queries come while the rows
    before multiply: whoever sees nothing of the page is computed, too, and not stored."""
    page_idx = tl.program_id(0)
    first = tl.program_id(1).to(tl.int64) * EACH
    e, h, d = tl.arange(0, ENTRIES), tl.arange(0, HEADS_PAD), tl.arange(0, DIM)
    entry = page_idx * ENTRIES + e
    places = first + tl.arange(0, EACH)
    position = tl.load(positions + places, mask=places < num_rows, other=0)
    most = tl.max((position + 1) // RATIO, 0)
    if (most > TOP_K) & (page_idx * ENTRIES < most):
        held = tl.full([], -1, tl.int64)
        key = tl.zeros([ENTRIES, DIM], tl.bfloat16)
        for i in tl.range(EACH, num_stages=2):
            row = tl.minimum(first + i, num_rows - 1)
            at = (row * HEADS + h)[:, None] * DIM + d[None, :]
            query = tl.load(q + at, mask=(h < HEADS)[:, None], other=0.0).to(tl.bfloat16)
            weight = tl.load(gate + row * gate_stride + h, mask=h < HEADS, other=0.0)
            visible = (tl.load(positions + row) + 1) // RATIO
            page = tl.load(page_table + tl.load(page_rows + row) * table_stride + page_idx)
            page = tl.maximum(page, 0)  # a row that sees nothing of it may have no such page
            if page != held:
                key = load_keys(keys + page * PAGE_BYTES, DIM, ENTRIES, FP8)
                held = page
            wanted = tl.maximum(tl.dot(key, tl.trans(query)), 0.0)
            if not FP8:  # as in score_pages
                weight = weight.to(q.dtype.element_ty)
            score = tl.sum(wanted * (weight.to(tl.float32) * gate_scale)[None, :], 1)
            visible = tl.where(visible > TOP_K, visible, 0)
            tl.store(scores + row * width + entry, score, mask=entry < visible)


def score_entries(
    q: Tensor,
    heads: tuple[Tensor, float],
    keys: Cache,
    where: tuple[Tensor, Tensor],
    page_table: Tensor,
    ratio: int,
    scores: Tensor,
    top_k: int,
) -> None:
    """scores: [n, width] fp32, written for the rows that see more than top_k."""
    num_rows, num_heads, dim = q.shape
    form = keys.form
    assert isinstance(form, Mxfp4Rows | Fp8IndexKeys)  # by the predicate
    positions, page_rows = where
    gate, gate_scale = heads
    what = q, gate, keys.pages, scores, positions, page_rows, page_table
    sizes = gate.stride(0), gate_scale, page_table.stride(0), scores.shape[1]
    limits = form.page_bytes, ratio, top_k
    facts = {
        "HEADS": num_heads,
        "HEADS_PAD": max(16, triton.next_power_of_2(num_heads)),
        "DIM": dim,
        "ENTRIES": form.entries_per_page,
        "FP8": isinstance(form, Fp8IndexKeys),
    }
    if num_rows > CODED_ROWS:
        grid = page_table.shape[1], triton.cdiv(num_rows, ROWS_EACH)
        score_rows[grid](*what, num_rows, *sizes, *limits, EACH=ROWS_EACH, num_warps=4, **facts)
    else:
        grid = triton.cdiv(page_table.shape[1], PAGES_EACH), num_rows
        facts |= {"PAGES": PAGES_EACH, "AHEAD": num_rows <= STREAMED_ROWS}
        most = REGISTERS[device_arch(q.device) if q.is_cuda else "sm90a"]
        facts |= {"num_warps": 4 * PAGES_EACH, "maxnreg": most}
        score_pages[grid](*what, *sizes, *limits, **facts, **overlap(q))
