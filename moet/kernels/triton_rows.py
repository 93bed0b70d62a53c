# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, attr-defined, misc"
"""Row kernels: norm, rotation and the write of fp8 KV rows. One program a row (or a row's heads),
so that a row never meets another."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moet.kernels.cache import Cache, Fp8Rows
from moet.kernels.triton_common import (
    CODED_ROWS,
    kernel,
    let_next,
    load_rotation,
    overlap,
    rotate_pairs,
    store_fp8_row,
    wait,
)
from moet.kernels.triton_index_queries import hadamard_matrix, index_query, prepare_heads

HEADS_EACH = 16  # of a program, of whose warps each has one
INDEX_HEADS_EACH = 16
QUERY_WARPS = 16


@kernel
def norm_row(x, weight, out, stride, eps, DIM: tl.constexpr, PAD: tl.constexpr, W: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, PAD)
    value = tl.load(x + row * stride + d, mask=d < DIM, other=0.0).to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / DIM + eps)
    if W:
        value = value * tl.load(weight + d, mask=d < DIM, other=0.0)
    tl.store(out + row * DIM + d, value.to(out.dtype.element_ty), mask=d < DIM)


@triton.jit
def unit_heads(
    q,
    cos_ptr,
    sin_ptr,
    out,
    row,
    first,
    stride,
    eps,
    HEADS: tl.constexpr,
    EACH: tl.constexpr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Norm and rotation: EACH heads of a row from `first` on. A warp has whole heads and waits for
    no other: half a head is what its lanes read at once, and a head's sum is that of its halves."""
    HALF: tl.constexpr = DIM // 2
    head = first + tl.arange(0, EACH)
    at = head[:, None] * DIM + tl.arange(0, HALF)[None, :]
    inside = (head < HEADS)[:, None]
    # Where the angles lie, once for each head: so each lane reads those of its own values.
    pair = tl.zeros([EACH, 1], tl.int32) + (tl.arange(0, HALF // 2) - (HALF - ROPE) // 2)[None, :]
    turns = inside & (pair >= 0)
    cos = tl.load(cos_ptr + row * (ROPE // 2) + pair, mask=turns, other=1.0)
    sin = tl.load(sin_ptr + row * (ROPE // 2) + pair, mask=turns, other=0.0)
    wait(OVERLAP)
    x = q + row * stride + at
    low = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(x + HALF, mask=inside, other=0.0).to(tl.float32)
    factor = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / DIM + eps)[:, None]
    to = out + row * HEADS * DIM + at
    tl.store(to, (low * factor).to(out.dtype.element_ty), mask=inside)
    high = rotate_pairs((high * factor).to(out.dtype.element_ty).to(tl.float32), cos, sin)
    tl.store(to + HALF, high.to(out.dtype.element_ty), mask=inside)


@kernel
def norm_rope(
    q,
    cos_ptr,
    sin_ptr,
    out,
    index_out,
    stride,
    eps,
    HEADS: tl.constexpr,
    EACH: tl.constexpr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    INDEX_HEADS: tl.constexpr,
    INDEX_EACH: tl.constexpr,
    INDEX_DIM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Row and part: EACH heads, or behind them INDEX_EACH heads of the index query. The
    matrix that mixes a query is made, and angles are read, while the product ahead still runs: it
    has waited for what made them before it let this kernel start."""
    let_next(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    PARTS: tl.constexpr = (HEADS + EACH - 1) // EACH
    if part < PARTS:
        unit_heads(
            q, cos_ptr, sin_ptr, out, row, part * EACH, stride, eps, HEADS, EACH, DIM, ROPE, OVERLAP
        )
    elif INDEX_HEADS > 0:
        cos, sin = load_rotation(cos_ptr, sin_ptr, row, INDEX_DIM, ROPE)
        sign = hadamard_matrix(INDEX_DIM)
        wait(OVERLAP)
        prepare_heads(
            q + HEADS * DIM,
            cos,
            sin,
            index_out,
            row,
            (part - PARTS) * INDEX_EACH,
            stride,
            sign,
            INDEX_HEADS,
            INDEX_EACH,
            INDEX_DIM,
        )


@kernel
def write_fp8(
    kv,
    weight,
    cos_ptr,
    sin_ptr,
    pages,
    slots,
    stride,
    PAGE_BYTES,
    eps,
    ENTRIES: tl.constexpr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot >= 0:
        d = tl.arange(0, DIM)
        x = tl.load(kv + row * stride + d).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, 0) / DIM + eps) * tl.load(weight + d)
        x = x.to(kv.dtype.element_ty).to(tl.float32)
        cos, sin = load_rotation(cos_ptr, sin_ptr, row, DIM, ROPE)
        x = rotate_pairs(tl.reshape(x, [1, DIM]), cos, sin)
        x = tl.reshape(x.to(kv.dtype.element_ty).to(tl.float32), [DIM])
        store_fp8_row(x, pages, slot, PAGE_BYTES, ENTRIES, DIM, ROPE, SCALE_BYTES)


@kernel(do_not_specialize=["SOURCE_ENTRIES"])
def copy_fp8(
    source,
    target,
    slots,
    SOURCE_ENTRIES,
    PAGE_BYTES,
    ENTRIES: tl.constexpr,
    DATA: tl.constexpr,
    DATA_PAD: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot >= 0:
        d = tl.arange(0, DATA_PAD)
        s = tl.arange(0, SCALE_BYTES)
        data = tl.load(source + row * DATA + d, mask=d < DATA)
        scales = tl.load(source + SOURCE_ENTRIES.to(tl.int64) * DATA + row * SCALE_BYTES + s)
        page = target + (slot // ENTRIES) * PAGE_BYTES
        place = slot % ENTRIES
        tl.store(page + place * DATA + d, data, mask=d < DATA)
        tl.store(page + ENTRIES * DATA + place * SCALE_BYTES + s, scales)


def rms_norm(x: Tensor, weight: Tensor | None, *, eps: float) -> Tensor:
    dim = x.shape[-1]
    flat = x if x.dim() == 2 else x.reshape(-1, dim)
    assert flat.stride(1) == 1
    out = torch.empty(flat.shape, dtype=x.dtype, device=x.device)
    if len(flat):
        pad = triton.next_power_of_2(dim)
        norm_row[(len(flat),)](
            flat,
            x if weight is None else weight,
            out,
            flat.stride(0),
            eps,
            DIM=dim,
            PAD=pad,
            W=weight is not None,
            num_warps=4,
        )
    return out.view(x.shape)


def norm_rope_heads(q: Tensor, cos: Tensor, sin: Tensor, *, num_heads: int, eps: float) -> Tensor:
    head_dim = q.shape[1] // num_heads
    return query_heads(q, cos, sin, num_heads=num_heads, head_dim=head_dim, index_heads=0, eps=eps)[
        0
    ]


def query_heads(
    q: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    num_heads: int,
    head_dim: int,
    index_heads: int,
    eps: float,
) -> tuple[Tensor, Tensor | None]:
    num_rows, width = q.shape
    index_dim = (width - num_heads * head_dim) // max(1, index_heads)
    out = torch.empty((num_rows, num_heads, head_dim), dtype=q.dtype, device=q.device)
    index = torch.empty((num_rows, index_heads, index_dim), dtype=q.dtype, device=q.device)
    # Many rows: the Hadamard product of the index query would take registers from all programs.
    apart = num_rows > CODED_ROWS and index_heads > 0
    together = 0 if apart else index_heads
    parts = triton.cdiv(num_heads, HEADS_EACH) + triton.cdiv(together, INDEX_HEADS_EACH)
    if num_rows:
        norm_rope[(num_rows, parts)](
            q,
            cos,
            sin,
            out,
            index,
            q.stride(0),
            eps,
            HEADS=num_heads,
            EACH=HEADS_EACH,
            DIM=head_dim,
            ROPE=2 * cos.shape[1],
            INDEX_HEADS=together,
            INDEX_EACH=INDEX_HEADS_EACH,
            INDEX_DIM=index_dim,
            num_warps=QUERY_WARPS,
            **overlap(q),
        )
    if apart:
        index_q = q[:, num_heads * head_dim :]
        index = index_query(index_q, cos, sin, num_heads=index_heads, quantised=True)
    return out, index if index_heads else None


def fp8_form(cache: Cache) -> Fp8Rows:
    assert isinstance(cache.form, Fp8Rows)  # by the predicate
    return cache.form


def write_kv(
    kv: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: Cache,
    slots: Tensor,
    *,
    eps: float,
) -> None:
    form = fp8_form(cache)
    if len(kv):
        write_fp8[(len(kv),)](
            kv,
            weight,
            cos,
            sin,
            cache.pages,
            slots,
            kv.stride(0),
            form.page_bytes,
            eps,
            ENTRIES=form.entries_per_page,
            DIM=form.width,
            ROPE=form.width - form.nope_dim,
            SCALE_BYTES=form.planes().bytes_per_entry[1],
            num_warps=1,
        )


def copy_entries(source: Cache, target: Cache, slots: Tensor) -> None:
    form = fp8_form(target)
    data, scales = form.planes().bytes_per_entry
    if len(slots):
        copy_fp8[(len(slots),)](
            source.pages,
            target.pages,
            slots,
            source.form.entries_per_page,
            form.page_bytes,
            ENTRIES=form.entries_per_page,
            DATA=data,
            DATA_PAD=triton.next_power_of_2(data),
            SCALE_BYTES=scales,
            num_warps=1,
        )
