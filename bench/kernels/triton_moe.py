"""The field's fused MoE product, written here in Triton from its published description: rows sorted
by expert and padded to blocks, fp8 block-128 weights, a program per block of rows and columns."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _grouped_fp8(  # type: ignore[no-untyped-def]
    x, x_scale, weight, weight_scale, out, places, block_expert, pairs, divisor, n, k,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    program, row_blocks = tl.program_id(0), tl.num_programs(0) // tl.cdiv(n, COLUMNS)
    column_blocks = tl.cdiv(n, COLUMNS)
    first = program // (GROUP * column_blocks) * GROUP
    width = min(row_blocks - first, GROUP)
    inside = program % (GROUP * column_blocks)
    row_block, column_block = first + inside % width, inside // width
    expert = tl.load(block_expert + row_block).to(tl.int64)
    if expert < 0:
        return
    place = tl.load(places + row_block * ROWS + tl.arange(0, ROWS))
    valid = place < pairs
    row = tl.where(valid, place, 0) // divisor
    column = column_block * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, DEPTH)
    x_at = x + row[:, None] * k + inner[None, :]
    weight_at = weight + expert * n * k + column[None, :].to(tl.int64) * k + inner[:, None]
    chunks = k // DEPTH
    scale_row = expert * (n // 128) * chunks + column_block * COLUMNS // 128 * chunks
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for chunk in range(chunks):
        a = tl.load(x_at + chunk * DEPTH)
        b = tl.load(weight_at + chunk * DEPTH)
        scale = tl.load(x_scale + row * chunks + chunk) * tl.load(weight_scale + scale_row + chunk)
        total += tl.dot(a, b) * scale[:, None]
    to = out + tl.where(valid, place, 0)[:, None].to(tl.int64) * n + column[None, :]
    tl.store(to, total.to(tl.bfloat16), mask=valid[:, None])


def align(ids: Tensor, experts: int, rows: int) -> tuple[Tensor, Tensor]:
    """ids [T, top_k] -> places padded to blocks of `rows` (the number of pairs where empty), and
    the expert of each block, -1 past the last."""
    flat = ids.flatten()
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=experts)
    blocks = (counts + rows - 1) // rows
    total = int(blocks.sum())
    places = torch.full((total * rows,), flat.numel(), dtype=torch.int64, device=ids.device)
    starts, block_starts = counts.cumsum(0) - counts, blocks.cumsum(0) - blocks
    expert = flat[order]
    offset = torch.arange(flat.numel(), device=ids.device) - starts[expert]
    places[block_starts[expert] * rows + offset] = order
    owners = torch.repeat_interleave(torch.arange(experts, device=ids.device), blocks)
    return places, owners


def grouped(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    aligned: tuple[Tensor, Tensor],
    *,
    pairs: int,
    divisor: int,
    rows: int,
    **options: Any,
) -> Tensor:
    """x [T, K] and weight [E, N, K] e4m3 with fp32 scales per 128; returns [pairs, N] bf16."""
    n, k = weight.shape[1:]
    out = torch.empty(pairs, n, dtype=torch.bfloat16, device=x.device)
    places, owners = aligned
    grid = (owners.numel() * triton.cdiv(n, 128),)
    _grouped_fp8[grid](
        x, x_scale, weight, weight_scale, out, places, owners, pairs, divisor, n, k,
        ROWS=rows, COLUMNS=128, DEPTH=128, **options,
    )  # fmt: skip
    return out
