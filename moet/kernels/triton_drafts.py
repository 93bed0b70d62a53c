# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, attr-defined, misc"
"""A draft block's rows in one launch, and its likeliest tokens in two."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moet.kernels.drafts import Parts
from moet.kernels.triton_common import kernel
from moet.kernels.triton_greedy import PART, best_of_part

SEQS_EACH = 32


@kernel(do_not_specialize=["num_seqs", "proposed_width", "page_size"])
def settle(
    sent,
    out,
    sampler_slots,
    wanted,
    given,
    proposed,
    rows,
    last,
    num_seqs,
    proposed_width,
    page_size,
    NUM_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
):
    seq = tl.program_id(0).to(tl.int64)
    num_tokens = num_seqs * NUM_ROWS
    line = out + (1 + seq) * (NUM_ROWS + 2)
    row = tl.arange(0, ROWS)
    inside = row < NUM_ROWS
    at = seq * NUM_ROWS + row
    held = tl.load(line + NUM_ROWS)
    start = tl.load(sent + 2 * num_tokens + seq * NUM_ROWS)
    slot = tl.load(sent + 4 * num_tokens + seq * NUM_ROWS)
    want = tl.load(wanted + seq)
    end = start + held
    drafts = (want >= 0) & (held > 0)
    position = tl.load(sent + num_tokens + at, mask=inside, other=-1)
    own = tl.load(sent + at, mask=inside, other=0)
    token = tl.load(line + row, mask=inside, other=0)
    there = (row < held) & drafts
    token = tl.where((position + 1) % page_size == 0, own, token)
    tl.store(rows + at, tl.where(there, token, 0), mask=inside)
    tl.store(rows + num_tokens + at, tl.where(there, position, -1), mask=inside)
    tl.store(rows + 2 * num_tokens + at, tl.where(there, start, 0), mask=inside)
    tl.store(rows + 3 * num_tokens + at, tl.where(there, end, 0), mask=inside)
    tl.store(rows + 4 * num_tokens + at, tl.where(there, slot, 0), mask=inside)
    tl.store(last + seq, seq * NUM_ROWS + tl.maximum(held - 1, 0))
    tl.store(given + seq, end)
    tl.store(given + num_seqs + seq, slot)
    tl.store(given + 2 * num_seqs + seq, tl.load(sampler_slots + seq))
    limit = tl.where(drafts & (end % page_size != 0), want, 0)
    tl.store(given + 3 * num_seqs + seq, limit)
    tl.store(proposed + seq * proposed_width, held * 0)


@kernel(do_not_specialize=["num_seqs", "width", "number"])
def chain(given, proposed, rows, num_seqs, width, number, EACH: tl.constexpr):
    seq = tl.program_id(0) * EACH + tl.arange(0, EACH)
    inside = seq < num_seqs
    end = tl.load(given + seq, mask=inside, other=0)
    slot = tl.load(given + num_seqs + seq, mask=inside, other=0)
    limit = tl.load(given + 3 * num_seqs + seq, mask=inside, other=0)
    count = tl.load(proposed + seq * width, mask=inside, other=0)
    token = tl.load(proposed + seq * width + 1 + number, mask=inside, other=0)
    goes_on = (count == number + 1) & (limit > number + 1)
    place = end + number
    tl.store(rows + seq, token, mask=inside)
    tl.store(rows + num_seqs + seq, tl.where(goes_on, place, -1), mask=inside)
    tl.store(rows + 2 * num_seqs + seq, tl.where(goes_on, place, 0), mask=inside)
    tl.store(rows + 3 * num_seqs + seq, tl.where(goes_on, place + 1, 0), mask=inside)
    tl.store(rows + 4 * num_seqs + seq, tl.where(goes_on, slot, 0), mask=inside)


@kernel(do_not_specialize=["width", "number", "num_parts"])
def take_best(best, place, limits, proposed, width, number, num_parts, PARTS: tl.constexpr):
    seq = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    inside = part < num_parts
    value = tl.load(best + seq * num_parts + part, mask=inside, other=float("-inf"))
    index = tl.load(place + seq * num_parts + part, mask=inside, other=2147483647)
    top = tl.max(value, 0)
    token = tl.min(tl.where(value == top, index, 2147483647), 0).to(tl.int64)
    count = tl.load(proposed + seq * width)
    limit = tl.load(limits + seq)
    holds = (limit > number) & (count == number) & (top < float("inf"))
    tl.store(proposed + seq * width + 1 + number, token)
    tl.store(proposed + seq * width, count + holds.to(tl.int64))


def settled_rows(
    sent: Tensor,
    out: Tensor,
    sampler_slots: Tensor,
    wanted: Tensor,
    given: Tensor,
    proposed: Tensor,
    *,
    page_size: int,
) -> tuple[Parts, Tensor]:
    num_seqs, num_rows = len(wanted), out.shape[1] - 2
    rows = sent.new_empty(5, num_seqs * num_rows)
    last = sent.new_empty(num_seqs)
    settle[(num_seqs,)](
        sent,
        out,
        sampler_slots,
        wanted,
        given,
        proposed,
        rows,
        last,
        num_seqs,
        proposed.shape[1],
        page_size,
        NUM_ROWS=num_rows,
        ROWS=triton.next_power_of_2(num_rows),
        num_warps=1,
    )
    a, b, c, d, e = rows.unbind(0)
    return (a, b, c, d, e), last


def chained_rows(given: Tensor, proposed: Tensor, *, number: int) -> Parts:
    num_seqs = len(proposed)
    rows = given.new_empty(5, num_seqs)
    grid = (triton.cdiv(num_seqs, SEQS_EACH),)
    chain[grid](
        given, proposed, rows, num_seqs, proposed.shape[1], number, EACH=SEQS_EACH, num_warps=1
    )
    a, b, c, d, e = rows.unbind(0)
    return a, b, c, d, e


def take_likeliest(
    logits: Tensor, limits: Tensor, proposed: Tensor, *, number: int, num_token_ids: int
) -> None:
    num_seqs, num_parts = len(logits), triton.cdiv(num_token_ids, PART)
    best = torch.empty((num_seqs, num_parts), dtype=torch.float32, device=logits.device)
    place = torch.empty(best.shape, dtype=torch.int32, device=logits.device)
    best_of_part[(num_seqs, num_parts)](
        logits, best, place, logits.stride(0), num_token_ids, num_parts, PART=PART, num_warps=4
    )
    take_best[(num_seqs,)](
        best,
        place,
        limits,
        proposed,
        proposed.shape[1],
        number,
        num_parts,
        PARTS=triton.next_power_of_2(num_parts),
        num_warps=1,
    )
