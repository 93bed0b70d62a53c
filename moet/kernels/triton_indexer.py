# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, attr-defined, misc"
"""Index kernels: queries as MXFP4 values, scores of visible entries, and the exact choice of the
best. A row's scores and choice never depend on other rows: each is scored by itself, and a
selection goes by bits of the score, block by block, then over the blocks' best."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moet.kernels import device_choice
from moet.kernels.cache import Cache, Mxfp4Rows
from moet.kernels.cubin import device_arch
from moet.kernels.mla_cache import Fp8IndexKeys
from moet.kernels.rows import Rows
from moet.kernels.stream_gemm import Launcher
from moet.kernels.triton_common import (
    CODED_ROWS,
    as_here,
    begin,
    e2m1_codes,
    e2m1_values,
    exponent_byte,
    hadamard_sign,
    kernel,
    let_next,
    load_rotation,
    overlap,
    power_of_two,
    rotate_pairs,
    wait,
)

CHUNK = 8192  # scores that one program chooses from
CANDIDATES = 16384  # chosen in chunks, that one program chooses from
PAGES_EACH = 2  # of a row of a step, that one program scores
STREAMED_ROWS = 8  # of a step whose programs read keys while the kernel ahead still runs
# Of a thread that scores pages: the kernel that follows finds room beside it.
REGISTERS = {"sm90a": 96, "sm120a": 128}
ROWS_EACH = 16  # of a chunk, that share a page's keys in one program
QUERIES_EACH = 16  # rows of a chunk, that one program prepares
SCORE_BYTES = 256 << 20  # most that the scores of one launch take; rows beyond it wait


@triton.jit
def hadamard_matrix(DIM: tl.constexpr):
    i = tl.arange(0, DIM)
    return hadamard_sign(i[:, None], i[None, :]).to(tl.bfloat16)


@triton.jit
def prepare_heads(
    q,
    cos,
    sin,
    out,
    row,
    first,
    stride,
    sign,
    HEADS: tl.constexpr,
    EACH: tl.constexpr,
    DIM: tl.constexpr,
):
    """Rotation, Hadamard, MXFP4 and back: EACH heads of a row from `first` on."""
    head = first + tl.arange(0, EACH)
    i = tl.arange(0, DIM)
    at = head[:, None] * DIM + i[None, :]
    inside = (head < HEADS)[:, None]
    x = tl.load(q + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    x = rotate_pairs(x, cos, sin).to(tl.bfloat16)
    x = (tl.dot(x, sign) * (DIM**-0.5)).to(tl.bfloat16).to(tl.float32)
    blocks = tl.reshape(x, [EACH, DIM // 32, 32])
    amax = tl.maximum(tl.max(tl.abs(blocks), 2), 6.0 * 2.0**-126)
    byte = exponent_byte(amax, 2, 0x400000)
    codes = e2m1_codes(blocks * power_of_two(254 - byte)[:, :, None])
    x = tl.reshape(e2m1_values(codes) * power_of_two(byte)[:, :, None], [EACH, DIM])
    tl.store(out + row * HEADS * DIM + at, x.to(out.dtype.element_ty), mask=inside)


@kernel(do_not_specialize=["num_rows", "rows_each"])
def prepare_query(
    q,
    cos_ptr,
    sin_ptr,
    out,
    num_rows,
    rows_each,
    stride,
    HEADS: tl.constexpr,
    EACH: tl.constexpr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
):
    """EACH heads of rows_each rows, for which the Hadamard matrix is made once."""
    first = tl.program_id(0).to(tl.int64) * rows_each
    head = tl.program_id(1) * EACH
    sign = hadamard_matrix(DIM)
    for i in range(tl.minimum(num_rows - first, rows_each)):
        row = first + i
        cos, sin = load_rotation(cos_ptr, sin_ptr, row, DIM, ROPE)
        prepare_heads(q, cos, sin, out, row, head, stride, sign, HEADS, EACH, DIM)


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


@triton.jit
def choose(score, valid, K: tl.constexpr):
    """Which of the valid scores are among the K highest; of equal ones the first. Returns bool."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # -0 counts as 0
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # ordered as the scores are
    key = tl.where(valid, key, -2147483648)
    positive = tl.sum((key >= 0).to(tl.int32), 0)
    border = tl.where(positive >= K, 0, -2147483648).to(tl.int32)
    # Bit by bit, until exactly K keys are not below the border, whichever value that is.
    num, bit = tl.where(positive >= K, positive, -1), 30
    while (bit >= 0) & (num != K):
        raised = border + (1 << bit)
        found = tl.sum((key >= raised).to(tl.int32), 0)
        border, num = tl.where(found >= K, raised, border), tl.where(found >= K, found, num)
        bit -= 1
    above = valid & (key > border)
    tie = valid & (key == border)
    room = K - tl.sum(above.to(tl.int32), 0)
    return above | (tie & (tl.cumsum(tie.to(tl.int32), 0) <= room))


@kernel
def choose_in_chunk(
    scores,
    out,
    out_scores,
    positions,
    width,
    RATIO,
    out_stride,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    LAST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The best K of a chunk of a row's scores, ascending by entry. LAST: there is one chunk only,
    and rows that see at most K entries get all of them."""
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    visible = (tl.load(positions + row) + 1) // RATIO
    i = tl.arange(0, CHUNK)
    entry = chunk * CHUNK + i
    at = row * out_stride + chunk * K
    if visible > K:
        if chunk * CHUNK < visible:
            valid = entry < visible
            score = tl.load(scores + row * width + entry, mask=valid, other=float("-inf"))
            chosen = choose(score, valid, K)
            place = tl.cumsum(chosen.to(tl.int32), 0) - 1
            tl.store(out + at + place, entry, mask=chosen)
            if not LAST:
                tl.store(out_scores + at + place, score, mask=chosen)
    elif LAST:
        k = tl.arange(0, K)
        tl.store(out + at + k, tl.where(k < visible, k, -1))


@kernel
def choose_of_chunks(
    candidates,
    scores,
    out,
    out_scores,
    positions,
    SPAN,
    RATIO,
    in_stride,
    out_stride,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    NUM: tl.constexpr,
    LAST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The best K of what PARTS chunks of SPAN entries each gave. LAST: there is one such group, and
    rows that see at most K entries get all of them."""
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    visible = (tl.load(positions + row) + 1) // RATIO
    k = tl.arange(0, K)
    at = row * out_stride + group * K
    if visible > K:
        i = tl.arange(0, NUM)
        chunk = group * PARTS + i // K
        held = tl.minimum(visible - chunk.to(tl.int64) * SPAN, K)
        valid = (i < PARTS * K) & ((i % K) < held)
        source = row * in_stride + group * PARTS * K + i
        score = tl.load(scores + source, mask=valid, other=float("-inf"))
        entry = tl.load(candidates + source, mask=valid, other=-1)
        chosen = choose(score, valid, K)
        place = tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(out + at + place, entry, mask=chosen)
        if not LAST:
            tl.store(out_scores + at + place, score, mask=chosen)
    elif LAST:
        tl.store(out + at + k, tl.where(k < visible, k, -1))


def index_query(q: Tensor, cos: Tensor, sin: Tensor, *, num_heads: int, quantised: bool) -> Tensor:
    assert quantised  # by the predicate
    num_rows, width = q.shape
    dim = width // num_heads
    out = torch.empty((num_rows, num_heads, dim), dtype=q.dtype, device=q.device)
    if num_rows:
        each = QUERIES_EACH if num_rows > CODED_ROWS else 1
        prepare_query[(triton.cdiv(num_rows, each), triton.cdiv(num_heads, 16))](
            q,
            cos,
            sin,
            out,
            num_rows,
            each,
            q.stride(0),
            HEADS=num_heads,
            EACH=16,
            DIM=dim,
            ROPE=2 * cos.shape[1],
            num_warps=4,
        )
    return out


def index_select(
    q: Tensor,
    gate: Tensor,
    keys: Cache,
    rows: Rows,
    *,
    ratio: int,
    top_k: int,
    gate_scale: float,
    launcher: Launcher | None = None,
) -> Tensor:
    out = torch.empty((len(q), top_k), dtype=torch.int32, device=q.device)
    width = rows.max_entries(ratio)
    each = max(1, SCORE_BYTES // (4 * width))
    for first in range(0, len(q), each):
        last = min(first + each, len(q))
        part = slice(first, last)
        where = rows.positions[part], rows.page_rows[part]
        heads = gate[part], gate_scale
        scores = torch.empty((last - first, width), dtype=torch.float32, device=q.device)
        if width > top_k:
            _score(q[part], heads, keys, where, rows.page_table, ratio, scores, top_k)
        if launcher is not None and _takes_clusters(scores, top_k):
            device_choice.run(launcher, scores, where[0], out[part], ratio=ratio)
        else:
            _choose(scores, where[0], ratio, out[part])
    return out


def _score(
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


def _takes_clusters(scores: Tensor, top_k: int) -> bool:
    """Whether a cluster of CTAs chooses for each row: of a step, from more than one chunk."""
    num_rows, width = scores.shape
    return num_rows <= CODED_ROWS and width > CHUNK and device_choice.fits(width, top_k)


def _choose(scores: Tensor, positions: Tensor, ratio: int, out: Tensor) -> None:
    """The best of each row's scores, in chunks if there are many."""
    (num_rows, width), top_k = scores.shape, out.shape[1]
    num_chunks = triton.cdiv(width, CHUNK)
    last = num_chunks == 1
    chunk = max(top_k, triton.next_power_of_2(width)) if last else CHUNK
    found, best = out, scores
    if not last:
        shape = num_rows, num_chunks * top_k
        found = torch.empty(shape, dtype=torch.int32, device=scores.device)
        best = torch.empty(shape, dtype=torch.float32, device=scores.device)
    choose_in_chunk[(num_rows, num_chunks)](
        scores,
        found,
        best,
        positions,
        width,
        ratio,
        found.stride(0),
        K=top_k,
        CHUNK=chunk,
        LAST=last,
        num_warps=4 if last and chunk <= 1024 else 8,
        **overlap(scores),
    )
    span = CHUNK
    while num_chunks > 1:
        found, best, num_chunks, span = _merge(found, best, positions, ratio, num_chunks, span, out)


def _merge(
    candidates: Tensor,
    best: Tensor,
    positions: Tensor,
    ratio: int,
    num_chunks: int,
    span: int,
    out: Tensor,
) -> tuple[Tensor, Tensor, int, int]:
    """The best of groups of chunks of `span` entries each. Returns what such a call takes of the
    groups: candidates (in `out`, of the only one), their scores, their number and their span."""
    num_rows, top_k = out.shape
    parts = min(num_chunks, max(2, CANDIDATES // top_k))
    num_groups = triton.cdiv(num_chunks, parts)
    last = num_groups == 1
    shape = num_rows, num_groups * top_k
    found = out if last else torch.empty(shape, dtype=torch.int32, device=out.device)
    found_best = best if last else torch.empty(shape, dtype=torch.float32, device=out.device)
    num = triton.next_power_of_2(parts * top_k)
    choose_of_chunks[(num_rows, num_groups)](
        candidates,
        best,
        found,
        found_best,
        positions,
        span,
        ratio,
        candidates.stride(0),
        found.stride(0),
        K=top_k,
        PARTS=parts,
        NUM=num,
        LAST=last,
        num_warps=8 if num <= 8192 else 16,
        **overlap(out),
    )
    return found, found_best, num_groups, span * parts
