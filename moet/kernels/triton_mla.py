# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, attr-defined, misc, assignment"

"""Row kernels around latent attention: residual and norm, what is stored of a token, what its heads
ask for, and the product with a matrix per head. A program has a row, or a tile of outputs whose
weights meet each row by itself, so that no row meets another."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moet.kernels.cache import Cache, EntryFormat
from moet.kernels.mla_attention import BLOCK, INDEX_NORM_EPS, HeadMatrices, IndexKeys
from moet.kernels.mla_cache import Fp8IndexKeys, Fp8LatentRows, Nvfp4LatentRows
from moet.kernels.quant import Activations
from moet.kernels.triton_common import (
    CODED_ROWS,
    begin,
    e2m1_codes,
    e4m3_codes,
    e4m3_exponent,
    exponent_byte,
    kernel,
    load_rotation,
    overlap,
    power_of_two,
    rotate_pairs,
)

OUTPUTS = BLOCK  # of a head's matrix that a program makes: the rows of matrix instructions
INPUTS = BLOCK  # of one of its steps
NEAR = False  # whether few rows' programs ask for weights before their inputs are there
MOST_AT_ONCE = 512  # inputs whose weights few rows' programs ask for at once
FEW_ROWS, MANY_ROWS = 16, 64  # columns of matrix instructions
HEADS_EACH = 16  # that a program turns


@triton.jit
def grouped_columns(GROUPS: tl.constexpr):
    """Columns by group of 128 and word of 4, [GROUPS, 32, 4]: a warp has a group, a thread a word,
    so that what a group shares takes no memory."""
    d = tl.arange(0, GROUPS)[:, None, None] * 128 + tl.arange(0, 32)[None, :, None] * 4
    return d + tl.arange(0, 4)[None, None, :]


@triton.jit
def norm_groups(
    x,
    weight,
    values,
    codes,
    scales,
    row,
    eps,
    DIM: tl.constexpr,
    GROUPS: tl.constexpr,
    QUANT: tl.constexpr,
):
    """RMS norm of a row, and its e4m3 codes and scales if QUANT. x, weight: fp32, by
    grouped_columns, 0 beyond DIM."""
    d = grouped_columns(GROUPS)
    square = tl.sum(tl.sum(tl.sum(x * x, 2), 1), 0)
    x = x * tl.rsqrt(square / DIM + eps) * weight
    x = x.to(values.dtype.element_ty)
    tl.store(values + row * DIM + d, x, mask=d < DIM)
    if QUANT:
        x = x.to(tl.float32)
        g = tl.arange(0, GROUPS)
        byte = e4m3_exponent(tl.max(tl.max(tl.abs(x), 2), 1))
        tl.store(scales + row * (DIM // 128) + g, power_of_two(byte), mask=g < DIM // 128)
        code = e4m3_codes(x * power_of_two(254 - byte)[:, None, None])
        word = tl.sum(code << (tl.arange(0, 4) * 8)[None, None, :], 2)
        w = tl.arange(0, 32)
        place = (w & 24) | ((w & 1) << 2) | ((w & 7) >> 1)  # mma_place, in words
        to = (codes + row * DIM).to(tl.pointer_type(tl.int32))
        real = (g < DIM // 128)[:, None] & (w >= 0)[None, :]
        tl.store(to + g[:, None] * 32 + place[None, :], word, mask=real)


@triton.jit
def store_fp8_latent(x, data, LATENT: tl.constexpr):
    """x: [LATENT] fp32, as mla_cache.Fp8LatentRows has it."""
    TILES: tl.constexpr = LATENT // 128
    tiles = tl.reshape(x, [TILES, 128])
    amax = tl.maximum(tl.max(tl.abs(tiles), 1), 1e-30)
    byte = tl.maximum(exponent_byte(amax, 8, 0x600000), 114)  # 2^-13 is the first above 1e-4
    codes = e4m3_codes(tiles * power_of_two(254 - byte)[:, None]).to(tl.uint8)
    t = tl.arange(0, TILES)
    tl.store(data + t[:, None] * 128 + tl.arange(0, 128)[None, :], codes)
    tl.store((data + LATENT).to(tl.pointer_type(tl.float32)) + t, power_of_two(byte))


@triton.jit
def store_nvfp4_latent(x, data, LATENT: tl.constexpr, ROPE: tl.constexpr):
    """x: [LATENT] fp32, as mla_cache.Nvfp4LatentRows has it; the rope key is stored apart."""
    BLOCKS: tl.constexpr = LATENT // 16
    blocks = tl.reshape(x, [BLOCKS, 16])
    wanted = tl.div_rn(tl.max(tl.abs(blocks), 1), tl.full([BLOCKS], 6.0, tl.float32))
    wanted = tl.minimum(tl.maximum(wanted, 2.0**-9), 448.0)
    scale_code = e4m3_codes(wanted).to(tl.uint8)
    scale = scale_code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    codes = e2m1_codes(tl.div_rn(blocks, tl.broadcast_to(scale[:, None], [BLOCKS, 16])))
    low, high = tl.split(tl.reshape(codes, [BLOCKS, 8, 2]))
    s = tl.arange(0, BLOCKS)
    at = s[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(data + at, (low | (high << 4)).to(tl.uint8))
    tl.store(data + LATENT // 2 + ROPE + (BLOCKS // 4) * (s % 4) + s // 4, scale_code)


@triton.jit
def store_latent_row(
    x,
    key,
    weight,
    cos,
    sin,
    kv,
    data,
    eps,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    NVFP4: tl.constexpr,
):
    """Norm of the latent x, rotation of the key behind it, and both as bytes of a row. kv: a
    pointer to what their dtype was."""
    x = x * tl.rsqrt(tl.sum(x * x, 0) / LATENT + eps) * weight
    x = x.to(kv.dtype.element_ty).to(tl.float32)
    r = tl.arange(0, ROPE)
    key = tl.reshape(rotate_pairs(tl.reshape(key, [1, ROPE]), cos, sin), [ROPE])
    key = key.to(kv.dtype.element_ty)
    if NVFP4:
        store_nvfp4_latent(x, data, LATENT, ROPE)
        key = tl.minimum(tl.maximum(key.to(tl.float32), -448.0), 448.0)
        tl.store(data + LATENT // 2 + r, e4m3_codes(key).to(tl.uint8))
    else:
        store_fp8_latent(x, data, LATENT)
        at = data + LATENT + LATENT // 128 * 4
        tl.store(at.to(tl.pointer_type(tl.bfloat16)) + r, key.to(tl.bfloat16))


@triton.jit
def first_rotation(cos_ptr, sin_ptr, row, DIM: tl.constexpr, ROPE: tl.constexpr):
    """cos and sin of all pairs of a vector whose first ROPE values turn, each [1, DIM / 2]."""
    pair = tl.arange(0, DIM // 2)
    at = row * (ROPE // 2) + pair
    cos = tl.load(cos_ptr + at, mask=pair < ROPE // 2, other=1.0)
    sin = tl.load(sin_ptr + at, mask=pair < ROPE // 2, other=0.0)
    return cos[None, :], sin[None, :]


@triton.jit
def store_index_key(
    x,
    weight,
    bias,
    cos,
    sin,
    page,
    place,
    eps,
    like,
    ENTRIES: tl.constexpr,
    DIM: tl.constexpr,
):
    """Norm, rotation and e4m3 of a row's index key. like: a pointer to what its dtype is."""
    d = tl.arange(0, DIM)
    x = x.to(like.dtype.element_ty).to(tl.float32)
    x = x - tl.sum(x, 0) / DIM
    x = x * tl.rsqrt(tl.sum(x * x, 0) / DIM + eps)
    x = (x * weight + bias).to(like.dtype.element_ty).to(tl.float32)
    x = rotate_pairs(tl.reshape(x, [1, DIM]), cos, sin)
    x = tl.reshape(x.to(like.dtype.element_ty).to(tl.float32), [DIM])
    byte = e4m3_exponent(tl.max(tl.abs(x), 0))
    tl.store(page + place * DIM + d, e4m3_codes(x * power_of_two(254 - byte)).to(tl.uint8))
    scales = (page + ENTRIES * DIM).to(tl.pointer_type(tl.float32))
    tl.store(scales + place, power_of_two(byte))


@kernel
def store_inputs(
    q_kv,
    projected,
    q_weight,
    kv_weight,
    key_weight,
    key_bias,
    cos_ptr,
    sin_ptr,
    latents,
    keys,
    slots,
    values,
    codes,
    scales,
    stride,
    projected_stride,
    LATENT_PAGE,
    KEY_PAGE,
    eps,
    index_eps,
    RANK: tl.constexpr,
    RANK_GROUPS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    ENTRIES: tl.constexpr,
    INDEX_DIM: tl.constexpr,
    NVFP4: tl.constexpr,
    QUANT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Row and part: the query latent, the stored row, the index key if there is one. Each asks for
    all that it reads at once, as the barriers see to."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if part == 0:
        q_at = grouped_columns(RANK_GROUPS)
        q_scale = tl.load(q_weight + q_at, mask=q_at < RANK, other=0.0)
        begin(OVERLAP)
        q = tl.load(q_kv + row * stride + q_at, mask=q_at < RANK, other=0.0).to(tl.float32)
        norm_groups(q, q_scale, values, codes, scales, row, eps, RANK, RANK_GROUPS, QUANT)
    elif part == 1:
        kv_at = tl.arange(0, LATENT)
        kv_scale = tl.load(kv_weight + kv_at)
        begin(OVERLAP)
        slot = tl.load(slots + row)
        kv = q_kv + row * stride + RANK
        latent = tl.load(kv + kv_at).to(tl.float32)
        turned = tl.load(kv + LATENT + tl.arange(0, ROPE)).to(tl.float32)
        cos, sin = load_rotation(cos_ptr, sin_ptr, row, ROPE, ROPE)
        tl.debug_barrier()
        if slot >= 0:
            at = slot // ENTRIES * LATENT_PAGE + slot % ENTRIES * ROW_BYTES
            data = latents + tl.multiple_of(at, 16)
            store_latent_row(latent, turned, kv_scale, cos, sin, kv, data, eps, LATENT, ROPE, NVFP4)
    elif INDEX_DIM > 0:
        key_at = tl.arange(0, INDEX_DIM)
        key_scale, key_shift = tl.load(key_weight + key_at), tl.load(key_bias + key_at)
        begin(OVERLAP)
        place = tl.load(slots + row)
        key = tl.load(projected + row * projected_stride + key_at)
        key_cos, key_sin = first_rotation(cos_ptr, sin_ptr, row, INDEX_DIM, ROPE)
        tl.debug_barrier()
        if place >= 0:
            store_index_key(
                key,
                key_scale,
                key_shift,
                key_cos,
                key_sin,
                keys + place // ENTRIES * KEY_PAGE,
                place % ENTRIES,
                index_eps,
                q_kv,
                ENTRIES,
                INDEX_DIM,
            )


@triton.jit
def turn_heads(
    q,
    cos_ptr,
    sin_ptr,
    query,
    index,
    row,
    part,
    stride,
    HEADS: tl.constexpr,
    EACH: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    LATENT: tl.constexpr,
    INDEX_HEADS: tl.constexpr,
    INDEX_DIM: tl.constexpr,
):
    """A part of a row: the rotated ends of EACH heads, or behind them of EACH index heads, rounded
    to e4m3."""
    PARTS: tl.constexpr = (HEADS + EACH - 1) // EACH
    if part < PARTS:
        h = part * EACH + tl.arange(0, EACH)
        r = tl.arange(0, ROPE)
        real = (h < HEADS)[:, None]
        at = q + row * stride + h[:, None] * (NOPE + ROPE) + NOPE + r[None, :]
        x = tl.load(at, mask=real, other=0.0).to(tl.float32)
        cos, sin = load_rotation(cos_ptr, sin_ptr, row, ROPE, ROPE)
        x = rotate_pairs(x, cos, sin).to(query.dtype.element_ty)
        to = query + (row * HEADS + h)[:, None] * (LATENT + ROPE) + LATENT + r[None, :]
        tl.store(to, x, mask=real)
    elif INDEX_HEADS > 0:
        h = (part - PARTS) * EACH + tl.arange(0, EACH)
        real = (h < INDEX_HEADS)[:, None]
        place = h[:, None] * INDEX_DIM + tl.arange(0, INDEX_DIM)[None, :]
        own = q + row * stride + HEADS * (NOPE + ROPE)
        wide = tl.load(own + place, mask=real, other=0.0).to(tl.float32)
        own_cos, own_sin = first_rotation(cos_ptr, sin_ptr, row, INDEX_DIM, ROPE)
        wide = rotate_pairs(wide, own_cos, own_sin)
        wide = wide.to(q.dtype.element_ty).to(tl.float32)
        byte = e4m3_exponent(tl.max(tl.abs(wide), 1))
        code = e4m3_codes(wide * power_of_two(254 - byte)[:, None]).to(tl.uint8)
        value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32) * power_of_two(byte)[:, None]
        value = value.to(index.dtype.element_ty)  # exact
        tl.store(index + row * INDEX_HEADS * INDEX_DIM + place, value, mask=real)


@triton.jit
def bring_near(weight, first, COUNT: tl.constexpr, LINES: tl.constexpr):
    """Ask for COUNT values from weight + first on, before what multiplies them is there. LINES: a
    power of two, at least as many as they fill of 128 bytes."""
    EACH: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth
    line = tl.minimum(tl.arange(0, LINES), COUNT // EACH - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [(weight + first + line * EACH).to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def tile_of(
    x,
    weight,
    scales,
    head,
    n,
    t,
    num_rows,
    x_row,
    x_head,
    N: tl.constexpr,
    K: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Outputs n of a head for rows t, fp32. The weights are the left operand, so that a row has the
    same bits however many rows there are. scales: one for 64 outputs and inputs, of e4m3."""
    FP8: tl.constexpr = weight.dtype.element_ty == tl.uint8
    OUTPUTS: tl.constexpr = n.shape[0]
    ROWS: tl.constexpr = t.shape[0]
    k = tl.arange(0, INPUTS)
    real, there = (n < N)[:, None], (t < num_rows)[None, :]
    w_at = weight + (head * N + n)[:, None] * K + k[None, :]
    x_at = x + head * x_head + t.to(tl.int64)[None, :] * x_row + k[:, None]
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for first in range(0, K, INPUTS):
        w = tl.load(w_at + first, mask=real, other=0.0)
        value = tl.load(x_at + first, mask=there, other=0.0)
        if FP8:
            at = (head * (N // 64) + n // 64) * (K // 64) + first // 64
            factor = tl.load(scales + at)[:, None]
            w = w.to(tl.float8e4nv, bitcast=True).to(tl.float32).to(tl.bfloat16)
            acc += tl.dot(w, value) * factor
        else:
            acc = tl.dot(w, value, acc)
    return acc


@kernel(do_not_specialize=["num_rows"])
def multiply_heads(
    x,
    weight,
    scales,
    values,
    codes,
    out_scales,
    num_rows,
    x_row,
    x_head,
    HEADS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    QUANT: tl.constexpr,
    LINES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """OUTPUTS of a head for a tile of rows, as values, or as e4m3 with a scale if QUANT, which
    takes 128 outputs. LINES: as bring_near has it, or 0."""
    BLOCKS: tl.constexpr = (N + OUTPUTS - 1) // OUTPUTS
    head = (tl.program_id(0) // BLOCKS).to(tl.int64)
    block = tl.program_id(0) % BLOCKS
    if LINES > 0:
        bring_near(weight, (head * N + block * OUTPUTS) * K, OUTPUTS * K, LINES)
    begin(OVERLAP)
    n = block * OUTPUTS + tl.arange(0, OUTPUTS)
    t = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    acc = tile_of(x, weight, scales, head, n, t, num_rows, x_row, x_head, N, K, INPUTS)
    acc = acc.to(tl.bfloat16)
    there = (t < num_rows)[None, :]
    row = t.to(tl.int64)[None, :]
    if QUANT:
        value = acc.to(tl.float32)
        byte = e4m3_exponent(tl.max(tl.abs(value), 0))
        to = out_scales + (row * HEADS + head) * BLOCKS + block
        tl.store(to, power_of_two(byte)[None, :], mask=there)
        code = e4m3_codes(value * power_of_two(254 - byte)[None, :])
        code = tl.reshape(code, [OUTPUTS // 4, 4, ROWS]) << (tl.arange(0, 4) * 8)[None, :, None]
        w = tl.arange(0, OUTPUTS // 4)
        place = (w & 24) | ((w & 1) << 2) | ((w & 7) >> 1)  # mma_place, in words
        words = codes.to(tl.pointer_type(tl.int32)) + (row * HEADS + head) * (N // 4)
        at = words + block * (OUTPUTS // 4) + place[:, None]
        tl.store(at, tl.sum(code, 1), mask=there)
    else:
        to = values + (row * HEADS + head) * N + n[:, None]
        tl.store(to, acc.to(values.dtype.element_ty), mask=(n < N)[:, None] & there)


@kernel(do_not_specialize=["num_rows"])
def make_queries(
    q,
    weight,
    scales,
    cos_ptr,
    sin_ptr,
    query,
    index,
    num_rows,
    stride,
    HEADS: tl.constexpr,
    EACH: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    LATENT: tl.constexpr,
    INDEX_HEADS: tl.constexpr,
    INDEX_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    LINES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Tile of rows and part: a head's outputs, or behind all of them what turns of one row. LINES:
    as bring_near has it, or 0."""
    PLACES: tl.constexpr = HEADS * ((LATENT + OUTPUTS - 1) // OUTPUTS)
    place, tile = tl.program_id(0), tl.program_id(1)
    if LINES > 0:  # noqa: SIM102
        if place < PLACES:
            bring_near(weight, place.to(tl.int64) * OUTPUTS * NOPE, OUTPUTS * NOPE, LINES)
    begin(OVERLAP)
    if place < PLACES:
        BLOCKS: tl.constexpr = PLACES // HEADS
        head = (place // BLOCKS).to(tl.int64)
        n = place % BLOCKS * OUTPUTS + tl.arange(0, OUTPUTS)
        t = tile * ROWS + tl.arange(0, ROWS)
        acc = tile_of(
            q, weight, scales, head, n, t, num_rows, stride, NOPE + ROPE, LATENT, NOPE, INPUTS
        )
        to = query + (t.to(tl.int64)[None, :] * HEADS + head) * (LATENT + ROPE) + n[:, None]
        real = (n < LATENT)[:, None] & (t < num_rows)[None, :]
        tl.store(to, acc.to(query.dtype.element_ty), mask=real)
    else:
        row = (tile * ROWS + (place - PLACES) % ROWS).to(tl.int64)
        if row < num_rows:
            turn_heads(
                q,
                cos_ptr,
                sin_ptr,
                query,
                index,
                row,
                (place - PLACES) // ROWS,
                stride,
                HEADS,
                EACH,
                NOPE,
                ROPE,
                LATENT,
                INDEX_HEADS,
                INDEX_DIM,
            )


def _groups(dim: int) -> int:
    """Groups of 128 columns, as many as a block has: a power of two."""
    return int(triton.next_power_of_2(triton.cdiv(dim, 128)))


def _coded(values: Tensor, quant: bool) -> Activations:
    """Values with room for their codes, if there are to be any."""
    if not quant:
        return Activations(values)
    num_rows, dim = values.shape
    codes = torch.empty((num_rows, dim), dtype=torch.uint8, device=values.device)
    scale = torch.empty((num_rows, dim // 128), dtype=torch.float32, device=values.device)
    return Activations(values, codes, scale)


def latent_inputs(
    q_kv: Tensor,
    projected: Tensor | None,
    q_norm_weight: Tensor,
    kv_norm_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    latents: Cache,
    index: IndexKeys | None,
    slots: Tensor,
    *,
    eps: float,
) -> Activations:
    num_rows, rank = len(q_kv), len(q_norm_weight)
    form = latents.form
    assert isinstance(form, Fp8LatentRows | Nvfp4LatentRows)  # by the predicate
    values = torch.empty((num_rows, rank), dtype=q_kv.dtype, device=q_kv.device)
    made = _coded(values, num_rows <= CODED_ROWS)
    if num_rows == 0:
        return made
    keys = None if index is None else index.cache.form
    store_inputs[(num_rows, 2 if index is None else 3)](
        q_kv,
        q_kv if projected is None else projected,
        q_norm_weight,
        kv_norm_weight,
        q_norm_weight if index is None else index.norm_weight,
        q_norm_weight if index is None else index.norm_bias,
        cos,
        sin,
        latents.pages,
        latents.pages if index is None else index.cache.pages,
        slots,
        values,
        values if made.codes is None else made.codes,
        q_norm_weight if made.scale is None else made.scale,
        q_kv.stride(0),
        0 if projected is None else projected.stride(0),
        form.page_bytes,
        0 if keys is None else keys.page_bytes,
        eps,
        INDEX_NORM_EPS,
        RANK=rank,
        RANK_GROUPS=_groups(rank),
        LATENT=form.latent_dim,
        ROPE=form.rope_dim,
        ROW_BYTES=form.row_bytes,
        ENTRIES=form.entries_per_page,
        INDEX_DIM=0 if keys is None else keys.width,
        NVFP4=isinstance(form, Nvfp4LatentRows),
        QUANT=made.codes is not None,
        num_warps=4,
        **overlap(q_kv),
    )
    return made


def latent_queries(
    q: Tensor,
    w_uk: HeadMatrices,
    cos: Tensor,
    sin: Tensor,
    *,
    index_heads: int,
    index_dim: int,
    index_form: EntryFormat | None,
) -> tuple[Tensor, Tensor | None]:
    assert index_form is None or isinstance(index_form, Fp8IndexKeys)  # by the predicate
    num_rows, (num_heads, latent, nope), rope = len(q), w_uk.values.shape, 2 * cos.shape[1]
    query = torch.empty((num_rows, num_heads, latent + rope), dtype=q.dtype, device=q.device)
    index = torch.empty((num_rows, index_heads, index_dim), dtype=q.dtype, device=q.device)
    if num_rows:
        rows = _tile_rows(num_rows)
        places = num_heads * triton.cdiv(latent, OUTPUTS)
        parts = triton.cdiv(num_heads, HEADS_EACH) + triton.cdiv(index_heads, HEADS_EACH)
        make_queries[(places + rows * parts, triton.cdiv(num_rows, rows))](
            q,
            *_operands(w_uk),
            cos,
            sin,
            query,
            index,
            num_rows,
            q.stride(0),
            HEADS=num_heads,
            EACH=HEADS_EACH,
            NOPE=nope,
            ROPE=rope,
            LATENT=latent,
            INDEX_HEADS=index_heads,
            INDEX_DIM=index_dim,
            ROWS=rows,
            OUTPUTS=OUTPUTS,
            INPUTS=min(INPUTS, nope),
            LINES=_lines(w_uk, OUTPUTS, rows) if q.is_cuda else 0,
            num_warps=4,
            num_stages=4,
            **overlap(q),
        )
    return query, index if index_heads else None


def _tile_rows(num_rows: int) -> int:
    return FEW_ROWS if num_rows <= FEW_ROWS else MANY_ROWS


def _lines(weight: HeadMatrices, outputs: int, rows: int) -> int:
    """For bring_near, of a program of few rows; 0 where a head's outputs are no whole programs."""
    _, n, k = weight.values.shape
    if rows != FEW_ROWS or n % outputs or not NEAR:
        return 0
    num_bytes = outputs * k * weight.values.element_size()
    return int(triton.next_power_of_2(triton.cdiv(num_bytes, 128)))


def _operands(weight: HeadMatrices) -> tuple[Tensor, Tensor]:
    """Values and scales as kernels take them; the scales of bf16 values are not read."""
    if weight.scales is None:
        return weight.values, weight.values
    return weight.values.view(torch.uint8), weight.scales


def head_products(x: Tensor, weight: HeadMatrices, *, quantised: bool) -> Activations:
    num_rows, (num_heads, n, k) = len(x), weight.values.shape
    quant = quantised and num_rows <= CODED_ROWS and n % 128 == 0
    width = num_heads * n
    shape = 0 if quant else num_rows, width
    values = torch.empty(shape, dtype=x.dtype, device=x.device)
    codes = torch.empty((num_rows if quant else 0, width), dtype=torch.uint8, device=x.device)
    scale = torch.empty((len(codes), width // 128), dtype=torch.float32, device=x.device)
    if num_rows:
        rows, outputs = _tile_rows(num_rows), 2 * OUTPUTS if quant else OUTPUTS
        multiply_heads[(num_heads * triton.cdiv(n, outputs), triton.cdiv(num_rows, rows))](
            x,
            *_operands(weight),
            values,
            codes,
            scale,
            num_rows,
            x.stride(0),
            x.stride(1),
            HEADS=num_heads,
            N=n,
            K=k,
            ROWS=rows,
            OUTPUTS=outputs,
            INPUTS=min(INPUTS, k),
            QUANT=quant,
            LINES=_lines(weight, outputs, rows) if x.is_cuda else 0,
            num_warps=4,
            num_stages=1 + k // INPUTS if rows == FEW_ROWS and k <= MOST_AT_ONCE else 4,
            **overlap(x),
        )
    return Activations(None, codes, scale) if quant else Activations(values)
