# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, attr-defined, misc"
"""Drawing by weights on many processors: sums of parts of a row, in a fixed order, then one program
a row that finds the part and the token in it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moet.kernels.sampling import FACTORS, GOLDEN, Purpose, signed
from moet.kernels.triton_common import kernel
from moet.kernels.triton_greedy import PART, best_of_part

_GOLDEN = tl.constexpr(GOLDEN)
_FIRST, _SECOND = tl.constexpr(FACTORS[0]), tl.constexpr(FACTORS[1])
_ACCEPT = tl.constexpr(signed(int(Purpose.ACCEPT) * GOLDEN))
_RESIDUAL = tl.constexpr(signed(int(Purpose.RESIDUAL) * GOLDEN))
NOWHERE = tl.constexpr(2147483647)


@triton.jit
def mix64(x):
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _FIRST
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _SECOND
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def uniform_of(seed, position, PURPOSE: tl.constexpr):
    """counter_uniform; PURPOSE: times the golden number, 0 for a plain draw."""
    mixed = mix64(mix64(seed + _GOLDEN) ^ (position * _GOLDEN))
    if PURPOSE != 0:
        mixed = mix64(mixed ^ PURPOSE)
    return ((mixed >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * 1.1102230246251565e-16


@kernel(do_not_specialize=["num_parts"])
def weigh_part(
    scores,
    best,
    place,
    temperature,
    min_p,
    weights,
    token_ids,
    is_bad,
    stride,
    num,
    num_parts,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    each = tl.arange(0, PARTS)
    value = tl.load(best + row * num_parts + each, mask=each < num_parts, other=float("-inf"))
    top = tl.max(value, 0)
    if part == 0:
        index = tl.load(place + row * num_parts + each, mask=each < num_parts, other=NOWHERE)
        first = tl.min(tl.where(value == top, index, NOWHERE), 0)
        tl.store(token_ids + row, first.to(tl.int64))
        tl.store(is_bad + row, top == float("inf"))
    at = part * PART + tl.arange(0, PART)
    x = tl.load(scores + row * stride + at, mask=at < num, other=float("-inf"))
    scale = tl.load(temperature + row)
    scale = tl.where(scale > 0, scale, 1.0)
    weight = tl.exp((x - top) / scale)
    weight = tl.where(weight >= tl.load(min_p + row), weight, 0.0)  # the largest is 1
    tl.store(weights + row * num + at, weight, mask=at < num)


@triton.jit
def tile(weights, row, part, num, PART: tl.constexpr):
    at = part * PART + tl.arange(0, PART)
    return tl.load(weights + row * num + at, mask=at < num, other=0.0).to(tl.float64)


@triton.jit
def row_sum(sums, row, num_parts, PARTS: tl.constexpr):
    each = tl.arange(0, PARTS)
    value = tl.load(sums + row * num_parts + each, mask=each < num_parts, other=0.0)
    return tl.sum(value, 0)


@triton.jit
def part_before(sums, row, num_parts, uniform, PARTS: tl.constexpr):
    """The part in which a share of the row's sum is reached, and what is still missing there."""
    each = tl.arange(0, PARTS)
    value = tl.load(sums + row * num_parts + each, mask=each < num_parts, other=0.0)
    upto = tl.cumsum(value, 0)
    wanted = uniform * tl.max(upto, 0)
    part = tl.min(tl.where((upto > wanted) & (value > 0), each, num_parts - 1), 0)
    before = tl.max(tl.where(each < part, upto, 0.0), 0)
    return part, wanted - before


@triton.jit
def index_in(weight, missing, PART: tl.constexpr):
    """The first place of a part whose cumulated weight exceeds what is missing; the last one that
    has any, if rounding lets none."""
    each = tl.arange(0, PART)
    upto = tl.cumsum(weight, 0)
    found = tl.min(tl.where((upto > missing) & (weight > 0), each, NOWHERE), 0)
    last = tl.max(tl.where(weight > 0, each, 0), 0)
    return tl.minimum(found, last)


@kernel(do_not_specialize=["num_parts"])
def sum_part(weights, sums, num, num_parts, PART: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tl.store(sums + row * num_parts + part, tl.sum(tile(weights, row, part, num, PART), 0))


@triton.jit
def ranked_tile(weights, ids, top_k, row, part, num, PART: tl.constexpr):
    """Tokens of a part of the order, and their weights if they are among the first top_k."""
    at = part * PART + tl.arange(0, PART)
    token = tl.load(ids + row * num + at, mask=at < num, other=0)
    inside = (at < num) & (at < tl.load(top_k + row))
    return token, tl.load(weights + row * num + token, mask=inside, other=0.0)


@kernel(do_not_specialize=["num_parts"])
def sum_ranked(weights, ids, top_k, needed, sums, num, num_parts, PART: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(needed + row) != 0:
        _, weight = ranked_tile(weights, ids, top_k, row, part, num, PART)
        tl.store(sums + row * num_parts + part, tl.sum(weight.to(tl.float64), 0))


@kernel(do_not_specialize=["num_parts"])
def keep_ranked(
    weights,
    ids,
    top_k,
    top_p,
    min_p,
    needed,
    sums,
    out,
    num,
    num_parts,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * PART + tl.arange(0, PART)
    floor = tl.load(min_p + row) * tl.load(weights + row * num + tl.load(ids + row * num))
    if tl.load(needed + row) != 0:
        each = tl.arange(0, PARTS)
        value = tl.load(sums + row * num_parts + each, mask=each < num_parts, other=0.0)
        share = tl.load(top_p + row)
        token, weight = ranked_tile(weights, ids, top_k, row, part, num, PART)
        wide = weight.to(tl.float64)
        before = tl.sum(tl.where(each < part, value, 0.0), 0) + tl.cumsum(wide, 0) - wide
        limit = tl.where(share < 1.0, share * tl.sum(value, 0), float("inf"))
        kept = (before < limit) & (weight >= floor)
        tl.store(out + row * num + token, tl.where(kept, weight, 0.0), mask=at < num)
    else:
        weight = tl.load(weights + row * num + at, mask=at < num, other=0.0)
        tl.store(out + row * num + at, tl.where(weight >= floor, weight, 0.0), mask=at < num)


@kernel(do_not_specialize=["num_parts"])
def pick(
    weights,
    sums,
    seeds,
    positions,
    out,
    num,
    num_parts,
    PURPOSE: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    uniform = uniform_of(tl.load(seeds + row), tl.load(positions + row), PURPOSE)
    part, missing = part_before(sums, row, num_parts, uniform, PARTS)
    index = index_in(tile(weights, row, part, num, PART), missing, PART)
    tl.store(out + row, (part * PART + index).to(tl.int64))


@kernel(do_not_specialize=["num_parts"])
def sum_pair(weights, probs, places, there, sums, draft_sums, num, num_parts, PART: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tl.store(sums + row * num_parts + part, tl.sum(tile(weights, row, part, num, PART), 0))
    if tl.load(there + row) != 0:
        q = tile(probs, tl.load(places + row), part, num, PART)
        tl.store(draft_sums + row * num_parts + part, tl.sum(q, 0))


@triton.jit
def residual(weights, probs, places, there, row, part, p_sum, q_sum, num, PART: tl.constexpr):
    """What p has over q in a part of a row; p where there is no draft."""
    left = tile(weights, row, part, num, PART) / p_sum
    if tl.load(there + row) != 0:
        q = tile(probs, tl.load(places + row), part, num, PART) / q_sum
        left = tl.maximum(left - q, 0.0)
    return left


@kernel(do_not_specialize=["num_parts"])
def sum_residual(
    weights,
    probs,
    places,
    there,
    sums,
    draft_sums,
    left_sums,
    num,
    num_parts,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    p_sum = row_sum(sums, row, num_parts, PARTS)
    q_sum = row_sum(draft_sums, row, num_parts, PARTS)
    left = residual(weights, probs, places, there, row, part, p_sum, q_sum, num, PART)
    tl.store(left_sums + row * num_parts + part, tl.sum(left, 0))


@kernel(do_not_specialize=["num_parts"])
def pick_verified(
    weights,
    probs,
    places,
    drafts,
    there,
    sums,
    draft_sums,
    left_sums,
    seeds,
    positions,
    out,
    num,
    num_parts,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    seed, position = tl.load(seeds + row), tl.load(positions + row)
    has_draft = tl.load(there + row) != 0
    p_sum = row_sum(sums, row, num_parts, PARTS)
    q_sum = row_sum(draft_sums, row, num_parts, PARTS)
    uniform = tl.where(
        has_draft, uniform_of(seed, position, _RESIDUAL), uniform_of(seed, position, 0)
    )
    if row_sum(left_sums, row, num_parts, PARTS) > 0:
        part, missing = part_before(left_sums, row, num_parts, uniform, PARTS)
        left = residual(weights, probs, places, there, row, part, p_sum, q_sum, num, PART)
        token = part * PART + index_in(left, missing, PART)
    else:
        part, missing = part_before(sums, row, num_parts, uniform, PARTS)
        token = part * PART + index_in(tile(weights, row, part, num, PART), missing, PART)
    if has_draft:
        draft = tl.load(drafts + row)
        p = tl.load(weights + row * num + draft).to(tl.float64) / p_sum
        q = tl.load(probs + tl.load(places + row) * num + draft).to(tl.float64) / q_sum
        if uniform_of(seed, position, _ACCEPT) * q < p:
            token = draft.to(tl.int32)
    tl.store(out + row, token.to(tl.int64))


def weigh(scores: Tensor, temperature: Tensor, min_p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, num = scores.shape
    num_parts = triton.cdiv(num, PART)
    grid = num_rows, num_parts
    best = scores.new_empty(grid)
    place = torch.empty(grid, dtype=torch.int32, device=scores.device)
    stride = scores.stride(0)
    best_of_part[grid](scores, best, place, stride, num, num_parts, PART=PART, num_warps=4)
    weights = scores.new_empty(num_rows, num)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=scores.device)
    is_bad = torch.empty(num_rows, dtype=torch.bool, device=scores.device)
    weigh_part[grid](
        scores,
        best,
        place,
        temperature,
        min_p,
        weights,
        token_ids,
        is_bad,
        stride,
        num,
        num_parts,
        PART=PART,
        PARTS=triton.next_power_of_2(num_parts),
        num_warps=4,
    )
    return weights, token_ids, is_bad


def rank_weights(
    weights: Tensor, ids: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, needed: Tensor
) -> Tensor:
    num_rows, num = weights.shape
    num_parts = triton.cdiv(num, PART)
    grid = num_rows, num_parts
    sums = torch.empty(grid, dtype=torch.float64, device=weights.device)
    sum_ranked[grid](weights, ids, top_k, needed, sums, num, num_parts, PART=PART, num_warps=4)
    out = torch.empty_like(weights)
    keep_ranked[grid](
        weights,
        ids,
        top_k,
        top_p,
        min_p,
        needed,
        sums,
        out,
        num,
        num_parts,
        PART=PART,
        PARTS=triton.next_power_of_2(num_parts),
        num_warps=4,
    )
    return out


def draw_weights(
    weights: Tensor, seeds: Tensor, positions: Tensor, *, purpose: Purpose = Purpose.DRAW
) -> Tensor:
    num_rows, num = weights.shape
    num_parts = triton.cdiv(num, PART)
    grid = num_rows, num_parts
    sums = torch.empty(grid, dtype=torch.float64, device=weights.device)
    sum_part[grid](weights, sums, num, num_parts, PART=PART, num_warps=4)
    out = torch.empty(num_rows, dtype=torch.int64, device=weights.device)
    pick[(num_rows,)](
        weights,
        sums,
        seeds,
        positions,
        out,
        num,
        num_parts,
        PURPOSE=signed(int(purpose) * GOLDEN),
        PART=PART,
        PARTS=triton.next_power_of_2(num_parts),
        num_warps=4,
    )
    return out


def verify_weights(
    weights: Tensor,
    probs: Tensor,
    places: Tensor,
    drafts: Tensor,
    there: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    num_rows, num = weights.shape
    num_parts = triton.cdiv(num, PART)
    parts = triton.next_power_of_2(num_parts)
    grid = num_rows, num_parts
    # Rows without a draft have no sum of one, and divide by 1.
    sums, draft_sums, left_sums = torch.ones(
        (3, *grid), dtype=torch.float64, device=weights.device
    ).unbind(0)
    sum_pair[grid](
        weights, probs, places, there, sums, draft_sums, num, num_parts, PART=PART, num_warps=4
    )
    sum_residual[grid](
        weights,
        probs,
        places,
        there,
        sums,
        draft_sums,
        left_sums,
        num,
        num_parts,
        PART=PART,
        PARTS=parts,
        num_warps=4,
    )
    out = torch.empty(num_rows, dtype=torch.int64, device=weights.device)
    pick_verified[(num_rows,)](
        weights,
        probs,
        places,
        drafts,
        there,
        sums,
        draft_sums,
        left_sums,
        seeds,
        positions,
        out,
        num,
        num_parts,
        PART=PART,
        PARTS=parts,
        num_warps=4,
    )
    return out
