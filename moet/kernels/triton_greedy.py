# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, attr-defined, misc"
"""The likeliest token of every row in two launches: parts of rows first, so that few rows fill the
chip, then one program a sequence, which also sees which drafts hold."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moet.kernels.triton_common import kernel

PART = 2048  # logits a program reads
TOKENS_EACH = 128


@kernel
def fill_newest(token_ids, slots, last_token, out, num_rows, EACH: tl.constexpr):
    at = tl.program_id(0) * EACH + tl.arange(0, EACH)
    there = at < num_rows
    token = tl.load(token_ids + at, mask=there, other=0)
    slot = tl.load(slots + at, mask=there, other=0)
    newest = tl.load(last_token + slot, mask=there, other=0)
    tl.store(out + at, tl.where(token < 0, newest, token), mask=there)


@kernel
def best_of_part(logits, best, place, stride, num_token_ids, num_parts, PART: tl.constexpr):
    """NaN and infinity count as infinity, at which the row is no numbers."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * PART + tl.arange(0, PART)
    x = tl.load(logits + row * stride + at, mask=at < num_token_ids, other=float("-inf"))
    x = tl.where(x == x, x, float("inf"))
    value, index = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best + row * num_parts + part, value)
    tl.store(place + row * num_parts + part, part * PART + index)


@kernel
def take_best(
    best,
    place,
    token_ids,
    counts,
    slots,
    last_token,
    fault,
    out,
    num_parts,
    no_slot,
    NUM_ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_FAULT: tl.constexpr,
):
    seq = tl.program_id(0).to(tl.int64)
    line = out + (1 + seq) * (NUM_ROWS + 2)
    part = tl.arange(0, PARTS)
    count = tl.load(counts + seq)
    slot = tl.load(slots + seq)
    num_held = count * 0
    before = count * 0
    newest = count * 0
    for depth in tl.static_range(NUM_ROWS):
        row = seq * NUM_ROWS + depth
        inside = part < num_parts
        value = tl.load(best + row * num_parts + part, mask=inside, other=float("-inf"))
        index = tl.load(place + row * num_parts + part, mask=inside, other=2147483647)
        top = tl.max(value, 0)
        token = tl.min(tl.where(value == top, index, 2147483647), 0).to(tl.int64)
        is_bad = top == float("inf")
        holds = count > depth
        if depth == 0:
            tl.store(line + NUM_ROWS + 1, is_bad.to(tl.int64))
        else:
            holds = holds & (num_held == depth) & (tl.load(token_ids + row) == before)
            holds = holds & (is_bad == 0)
        tl.store(line + depth, token)
        newest = tl.where(holds, token, newest)
        num_held += holds.to(tl.int64)
        before = token
    tl.store(line + NUM_ROWS, num_held)
    tl.store(last_token + tl.where(num_held > 0, slot, no_slot), newest)
    if HAS_FAULT:
        first = seq == 0
        tl.store(out, tl.load(fault, mask=first, other=0).to(tl.int64), mask=first)
        tl.store(fault, 0, mask=first)


def newest_tokens(token_ids: Tensor, slots: Tensor, last_token: Tensor) -> Tensor:
    out = torch.empty_like(token_ids)
    grid = (triton.cdiv(len(out), TOKENS_EACH),)
    fill_newest[grid](token_ids, slots, last_token, out, len(out), EACH=TOKENS_EACH, num_warps=4)
    return out


def take_greedy(
    logits: Tensor,
    token_ids: Tensor,
    counts: Tensor,
    slots: Tensor,
    last_token: Tensor,
    fault: Tensor | None,
    out: Tensor,
    *,
    num_token_ids: int,
) -> None:
    num_parts = triton.cdiv(num_token_ids, PART)
    best = torch.empty((len(logits), num_parts), dtype=torch.float32, device=logits.device)
    place = torch.empty(best.shape, dtype=torch.int32, device=logits.device)
    best_of_part[(len(logits), num_parts)](
        logits, best, place, logits.stride(0), num_token_ids, num_parts, PART=PART, num_warps=4
    )
    take_best[(len(counts),)](
        best,
        place,
        token_ids,
        counts,
        slots,
        last_token,
        out if fault is None else fault,
        out,
        num_parts,
        len(last_token) - 1,
        NUM_ROWS=out.shape[1] - 2,
        PARTS=triton.next_power_of_2(num_parts),
        HAS_FAULT=fault is not None,
        num_warps=1,
    )
