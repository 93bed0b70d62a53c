# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, attr-defined, misc, assignment"

"""What is stored of a token for latent attention: its latent row and its index key, and beside them
the norm of what its queries come from. A program has a row and a part of that."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moet.kernels.cache import Cache
from moet.kernels.mla_attention import INDEX_NORM_EPS, IndexKeys
from moet.kernels.mla_cache import Fp8LatentRows, Nvfp4LatentRows
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
