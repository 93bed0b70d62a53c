# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, attr-defined, misc, assignment, var-annotated"
# ruff: noqa: RUF005  (tuples of blocks grow by addition: the compiler knows no unpacking)
"""What heads ask for in latent attention, and the product with a matrix per head. A program has a
tile of outputs whose weights meet each row by itself, so that no row meets another."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moet.kernels.cache import EntryFormat
from moet.kernels.mla_attention import BLOCK, HeadMatrices
from moet.kernels.mla_cache import Fp8IndexKeys
from moet.kernels.quant import Activations
from moet.kernels.triton_common import (
    CODED_ROWS,
    all_here,
    begin,
    e4m3_codes,
    e4m3_exponent,
    kernel,
    load_rotation,
    overlap,
    power_of_two,
    rotate_pairs,
)
from moet.kernels.triton_mla_inputs import first_rotation

OUTPUTS = BLOCK  # of a head's matrix that a program makes: the rows of matrix instructions
INPUTS = BLOCK  # of one of its steps
MOST_AT_ONCE = 64 << 10  # bytes of weights that a program of few rows asks for at once
FEW_ROWS, MANY_ROWS = 16, 64  # columns of matrix instructions
HEADS_EACH = 16  # that a program turns


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
def few_of(
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
    OVERLAP: tl.constexpr,
):
    """As tile_of, bit for bit, for few rows: all weights are asked for before the kernel ahead has
    made x, and all of x before any of it is used. Begins the kernel."""
    FP8: tl.constexpr = weight.dtype.element_ty == tl.uint8
    OUTPUTS: tl.constexpr = n.shape[0]
    ROWS: tl.constexpr = t.shape[0]
    real, there = (n < N)[:, None], (t < num_rows)[None, :]
    place = (head * N + n)[:, None] * K
    k = tl.arange(0, INPUTS)
    weights = ()
    factors = ()
    for b in tl.static_range(K // INPUTS):
        w_at = weight + (place + b * INPUTS) + k[None, :]
        weights = weights + (tl.load(w_at, mask=real, other=0),)
        if FP8:
            at = (head * (N // 64) + n // 64) * (K // 64) + b * INPUTS // 64
            factors = factors + (tl.load(scales + at),)
    tl.debug_barrier()  # or the compiler would ask for one after the other
    here = all_here(weights, K // INPUTS, OVERLAP)
    begin(OVERLAP)
    x_at = x + head * x_head + t.to(tl.int64)[None, :] * x_row + k[:, None]
    values = ()
    for b in tl.static_range(K // INPUTS):
        values = values + (tl.load(x_at + b * INPUTS, mask=there, other=0.0),)
    tl.debug_barrier()  # or the compiler would ask for one after the other
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for b in tl.static_range(K // INPUTS):
        if FP8:
            code = here[b].to(tl.float8e4nv, bitcast=True)
            acc += tl.dot(code.to(tl.float32).to(tl.bfloat16), values[b]) * factors[b][:, None]
        else:
            acc = tl.dot(here[b], values[b], acc)
    return acc


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
    FEW: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """OUTPUTS of a head for a tile of rows, as values, or as e4m3 with a scale if QUANT, which
    takes 128 outputs. FEW: as few_of has it."""
    BLOCKS: tl.constexpr = (N + OUTPUTS - 1) // OUTPUTS
    head = (tl.program_id(0) // BLOCKS).to(tl.int64)
    block = tl.program_id(0) % BLOCKS
    n = block * OUTPUTS + tl.arange(0, OUTPUTS)
    t = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    if FEW:
        acc = few_of(x, weight, scales, head, n, t, num_rows, x_row, x_head, N, K, INPUTS, OVERLAP)
    else:
        begin(OVERLAP)
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
    FEW: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Tile of rows and part: a head's outputs, or behind all of them what turns of one row. FEW: as
    few_of has it."""
    if not FEW:
        begin(OVERLAP)
    PLACES: tl.constexpr = HEADS * ((LATENT + OUTPUTS - 1) // OUTPUTS)
    place, tile = tl.program_id(0), tl.program_id(1)
    if place < PLACES:
        BLOCKS: tl.constexpr = PLACES // HEADS
        head = (place // BLOCKS).to(tl.int64)
        n = place % BLOCKS * OUTPUTS + tl.arange(0, OUTPUTS)
        t = tile * ROWS + tl.arange(0, ROWS)
        if FEW:
            acc = few_of(
                *(q, weight, scales, head, n, t, num_rows, stride),
                *(NOPE + ROPE, LATENT, NOPE, INPUTS, OVERLAP),
            )
        else:
            acc = tile_of(
                q, weight, scales, head, n, t, num_rows, stride, NOPE + ROPE, LATENT, NOPE, INPUTS
            )
        to = query + (t.to(tl.int64)[None, :] * HEADS + head) * (LATENT + ROPE) + n[:, None]
        real = (n < LATENT)[:, None] & (t < num_rows)[None, :]
        tl.store(to, acc.to(query.dtype.element_ty), mask=real)
    else:
        if FEW:
            begin(OVERLAP)
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
            FEW=rows == FEW_ROWS,
            num_warps=4,
            num_stages=4,
            **overlap(q),
        )
    return query, index if index_heads else None


def _tile_rows(num_rows: int) -> int:
    return FEW_ROWS if num_rows <= FEW_ROWS else MANY_ROWS


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
        at_once = outputs * k * weight.values.element_size() <= MOST_AT_ONCE and rows == FEW_ROWS
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
            FEW=at_once,
            num_warps=8 if at_once else 4,
            num_stages=4,
            **overlap(x),
        )
    return Activations(None, codes, scale) if quant else Activations(values)
