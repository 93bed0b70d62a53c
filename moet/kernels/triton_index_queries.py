# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, attr-defined, misc"
"""Index queries as MXFP4 values, by rows or, in chunks, by several of one program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moet.kernels.triton_common import (
    CODED_ROWS,
    e2m1_codes,
    e2m1_values,
    exponent_byte,
    hadamard_sign,
    kernel,
    load_rotation,
    power_of_two,
    rotate_pairs,
)

QUERIES_EACH = 16  # rows of a chunk, that one program prepares


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
