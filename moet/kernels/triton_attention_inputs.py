# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, attr-defined, misc"
"""One launch for what stands between attention's first projections and its queries: a program per
row and part, so that no row and no part meets another."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moet.kernels.attention_inputs import CompressorSite
from moet.kernels.cache import Cache, Fp8Rows, Mxfp4Rows
from moet.kernels.quant import Activations
from moet.kernels.rows import Rows
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
    store_fp8_row,
)
from moet.kernels.triton_compressor import (
    NUM_WARPS,
    close_window,
    keep_last,
    keep_state,
    tokens_at_once,
)
from moet.kernels.triton_rows import fp8_form


@triton.jit
def norm_latent(
    x,
    weight,
    values,
    codes,
    scales,
    row,
    stride,
    eps,
    DIM: tl.constexpr,
    PAD: tl.constexpr,
    QUANT: tl.constexpr,
):
    """RMS norm of a row; its e4m3 codes and scales too if QUANT."""
    d = tl.arange(0, PAD)
    value = tl.load(x + row * stride + d, mask=d < DIM, other=0.0).to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / DIM + eps)
    value = value * tl.load(weight + d, mask=d < DIM, other=0.0)
    value = value.to(values.dtype.element_ty)
    tl.store(values + row * DIM + d, value, mask=d < DIM)
    if QUANT:
        blocks = tl.reshape(value.to(tl.float32), [PAD // 128, 128])
        byte = e4m3_exponent(tl.max(tl.abs(blocks), 1))
        b = tl.arange(0, PAD // 128)
        tl.store(scales + row * (DIM // 128) + b, power_of_two(byte), mask=b < DIM // 128)
        code = e4m3_codes(blocks * power_of_two(254 - byte)[:, None]).to(tl.uint8)
        to = b[:, None] * 128 + mma_place(tl.arange(0, 128))[None, :]
        tl.store(codes + row * DIM + to, code, mask=to < DIM)


@triton.jit
def write_row(
    kv,
    weight,
    cos_ptr,
    sin_ptr,
    pages,
    slot,
    row,
    stride,
    PAGE_BYTES,
    eps,
    ENTRIES,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
):
    """Norm, rotation and fp8 of a row's KV."""
    d = tl.arange(0, DIM)
    x = tl.load(kv + row * stride + d).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / DIM + eps) * tl.load(weight + d)
    x = x.to(kv.dtype.element_ty).to(tl.float32)
    cos, sin = load_rotation(cos_ptr, sin_ptr, row, DIM, ROPE)
    x = rotate_pairs(tl.reshape(x, [1, DIM]), cos, sin)
    x = tl.reshape(x.to(kv.dtype.element_ty).to(tl.float32), [DIM])
    store_fp8_row(x, pages, slot, PAGE_BYTES, ENTRIES, DIM, ROPE, SCALE_BYTES)


@triton.jit
def compress_row(
    projected,
    ape,
    weight,
    state,
    entries,
    spot,
    angles,
    stride,
    PAGE_BYTES,
    eps,
    dtype: tl.constexpr,
    KEEP: tl.constexpr,
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
):
    """One compressor's state of a row if KEEP, and the entry that the row closes, if any."""
    row, p, start, seq_slot, table, positions, seq_slots, closes = spot
    if KEEP:
        keep_state(projected, ape, state, positions, seq_slots, row, stride, RATIO, RING, CHANNELS)
    if closes:
        close_window(
            projected,
            ape,
            weight,
            angles[0],
            angles[1],
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
            dtype,
        )


@kernel(do_not_specialize=["WINDOW_ENTRIES"])
def prepare(
    qr_kv,
    q_weight,
    kv_weight,
    cos_ptr,
    sin_ptr,
    values,
    codes,
    scales,
    window,
    places,
    stride,
    WINDOW_BYTES,
    WINDOW_ENTRIES,
    positions,
    starts,
    seq_slots,
    page_rows,
    page_table,
    table_stride,
    projected,
    projected_stride,
    start_cos,
    start_sin,
    eps,
    ape,
    weight,
    state,
    entries,
    PAGE_BYTES,
    second_ape,
    second_weight,
    second_state,
    second_entries,
    SECOND_BYTES,
    RANK: tl.constexpr,
    RANK_PAD: tl.constexpr,
    QUANT: tl.constexpr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    WINDOW_SCALES: tl.constexpr,
    SITES: tl.constexpr,
    KEEP: tl.constexpr,
    RATIO: tl.constexpr,
    LENGTH: tl.constexpr,
    TOKENS: tl.constexpr,
    RING: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    ENTRIES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    ROTATE: tl.constexpr,
    FP8: tl.constexpr,
    COLUMN: tl.constexpr,
    SECOND_WIDTH: tl.constexpr,
    SECOND_CHANNELS: tl.constexpr,
    SECOND_ENTRIES: tl.constexpr,
    SECOND_SCALES: tl.constexpr,
    SECOND_ROTATE: tl.constexpr,
    SECOND_FP8: tl.constexpr,
    SECOND_COLUMN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Row and part: the first compressor (its programs take longest), the second, the KV row, the
    latent."""
    begin(OVERLAP)
    row = tl.program_id(1).to(tl.int64)
    part = tl.program_id(0)
    p = tl.load(positions + row)
    if part == SITES + 1:
        norm_latent(qr_kv, q_weight, values, codes, scales, row, stride, eps, RANK, RANK_PAD, QUANT)
    elif part == SITES:
        slot = tl.load(places + row)
        if slot >= 0:
            write_row(
                qr_kv + RANK,
                kv_weight,
                cos_ptr,
                sin_ptr,
                window,
                slot,
                row,
                stride,
                WINDOW_BYTES,
                eps,
                WINDOW_ENTRIES,
                DIM,
                ROPE,
                WINDOW_SCALES,
            )
    elif p >= 0:
        closes = (p + 1) % RATIO == 0
        seq_slot = tl.load(seq_slots + row)
        start = tl.load(starts + row)
        table = page_table + tl.load(page_rows + row) * table_stride
        dtype: tl.constexpr = values.dtype.element_ty
        spot = (row, p, start, seq_slot, table, positions, seq_slots, closes)
        angles = (start_cos, start_sin)
        if SITES > 0:  # noqa: SIM102  (decided when the kernel is compiled)
            if part == 0:
                compress_row(
                    projected + COLUMN,
                    ape,
                    weight,
                    state,
                    entries,
                    spot,
                    angles,
                    projected_stride,
                    PAGE_BYTES,
                    eps,
                    dtype,
                    KEEP,
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
                )
        if SITES > 1:  # noqa: SIM102
            if part == 1:
                compress_row(
                    projected + SECOND_COLUMN,
                    second_ape,
                    second_weight,
                    second_state,
                    second_entries,
                    spot,
                    angles,
                    projected_stride,
                    SECOND_BYTES,
                    eps,
                    dtype,
                    KEEP,
                    RATIO,
                    LENGTH,
                    TOKENS,
                    RING,
                    SECOND_WIDTH,
                    SECOND_CHANNELS,
                    ROPE,
                    SECOND_ENTRIES,
                    SECOND_SCALES,
                    SECOND_ROTATE,
                    SECOND_FP8,
                )


def _entry_facts(site: CompressorSite, prefix: str, bytes_name: str) -> dict[str, object]:
    form = site.entries.form
    assert isinstance(form, Fp8Rows | Mxfp4Rows)  # by the predicate
    lower = prefix.lower()
    scale_bytes = form.planes().bytes_per_entry[1]
    return {
        f"{lower}ape": site.ape,
        f"{lower}weight": site.norm_weight,
        f"{lower}state": site.state.pages.view(torch.float32),
        f"{lower}entries": site.entries.pages,
        bytes_name: form.page_bytes,
        f"{prefix}WIDTH": form.width,
        f"{prefix}CHANNELS": site.ape.shape[1],
        f"{prefix}ENTRIES": form.entries_per_page,
        "SECOND_SCALES" if prefix else "SCALE_BYTES": scale_bytes,
        f"{prefix}ROTATE": site.rotate,
        f"{prefix}FP8": isinstance(form, Fp8Rows),
        f"{prefix}COLUMN": site.columns[0],
    }


def _site_facts(
    sites: tuple[CompressorSite, ...], window: Cache, weight: Tensor, cos: Tensor, sin: Tensor
) -> dict[str, object]:
    """What the kernel is told of the compressors; of absent ones something of the right types."""
    ratio = sites[0].ape.shape[0] if sites else 1
    length = ratio * 2 if sites and sites[0].overlapped else ratio
    common: dict[str, object] = {
        "SITES": len(sites),
        "RATIO": ratio,
        "LENGTH": length,
        "TOKENS": tokens_at_once(length),
        "RING": sites[0].state.form.entries_per_page if sites else 1,
        "start_cos": sites[0].cos if sites else cos,
        "start_sin": sites[0].sin if sites else sin,
    }
    for i, (prefix, bytes_name) in enumerate((("", "PAGE_BYTES"), ("SECOND_", "SECOND_BYTES"))):
        if i < len(sites):
            common |= _entry_facts(sites[i], prefix, bytes_name)
        else:
            common |= _absent(prefix, bytes_name, weight, window.pages)
    return common


def _absent(prefix: str, bytes_name: str, weight: Tensor, pages: Tensor) -> dict[str, object]:
    lower = prefix.lower()
    numbers = ("WIDTH", "CHANNELS", "ENTRIES", "ROTATE", "FP8", "COLUMN")
    return {
        **{f"{lower}{name}": weight for name in ("ape", "weight", "state")},
        f"{lower}entries": pages,
        bytes_name: 16,
        **{f"{prefix}{name}": 0 for name in numbers},
        "SECOND_SCALES" if prefix else "SCALE_BYTES": 0,
    }


def attention_inputs(
    qr_kv: Tensor,
    projected: Tensor | None,
    q_norm_weight: Tensor,
    kv_norm_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    window: Cache,
    places: Tensor,
    compressors: tuple[CompressorSite, ...],
    rows: Rows,
    *,
    eps: float,
) -> Activations:
    num_rows, rank = len(qr_kv), len(q_norm_weight)
    form = fp8_form(window)
    quant = num_rows <= CODED_ROWS
    values = torch.empty((num_rows, rank), dtype=qr_kv.dtype, device=qr_kv.device)
    codes = torch.empty((num_rows if quant else 0, rank), dtype=torch.uint8, device=qr_kv.device)
    scales = torch.empty((len(codes), rank // 128), dtype=torch.float32, device=qr_kv.device)
    found = Activations(values, codes, scales) if quant else Activations(values)
    if num_rows == 0:
        return found
    projections = kv_norm_weight.unsqueeze(0) if projected is None else projected
    prepare[(2 + len(compressors), num_rows)](
        qr_kv,
        q_norm_weight,
        kv_norm_weight,
        cos,
        sin,
        values,
        codes,
        scales,
        window.pages,
        places,
        qr_kv.stride(0),
        form.page_bytes,
        form.entries_per_page,
        rows.positions,
        rows.starts,
        rows.seq_slots,
        rows.page_rows,
        rows.page_table,
        rows.page_table.stride(0),
        projections,
        projections.stride(0),
        eps=eps,
        RANK=rank,
        RANK_PAD=triton.next_power_of_2(rank),
        QUANT=quant,
        DIM=form.width,
        ROPE=2 * cos.shape[1],
        WINDOW_SCALES=form.planes().bytes_per_entry[1],
        KEEP=rows.short,
        num_warps=NUM_WARPS,
        **overlap(qr_kv),
        **_site_facts(compressors, window, kv_norm_weight, cos, sin),
    )
    if not rows.short:
        for site in compressors:
            assert projected is not None
            first, last = site.columns
            keep_last(projected[:, first:last], site.ape, site.state, rows)
    return found
