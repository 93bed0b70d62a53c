# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, attr-defined, misc, assignment"
"""Sums over ranks for Triton kernels that read a rank's part, as csrc/peers.cuh makes them.

A program has a row. It pushes its own values into the other ranks' windows, two bf16 and the number
of the row's call in eight bytes, and takes theirs out of its own. Knows windows; no model.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moet.kernels.comm import RankPart

MAX_TRIES = tl.constexpr(1 << 30)
TRIES_PER_LIMIT = tl.constexpr(4096)  # looks before the host is asked whether to go on
HIGH = tl.constexpr(-65536)
FIRST_BIT = tl.constexpr(16)  # of the error word: rank 0 has not come


def arguments(part: RankPart | None) -> tuple[int, ...]:
    """For `sum_of_ranks`: windows, turns, error and limit by address, and the windows' capacity."""
    if part is None:
        return (0,) * 8
    links = part.links
    args = links.arguments()
    return (*args.windows, args.turns, args.error, args.limit_ns, args.capacity)


@triton.jit
def take(place, turn, there, error, limit, FROM: tl.constexpr):
    """What a rank has pushed, once it is all there. place: int64; there: which words there are."""
    words = place.to(tl.pointer_type(tl.int64))
    got = tl.load(words, mask=there, other=turn.to(tl.int64) << 32, volatile=True)
    late = tl.sum(((got >> 32).to(tl.int32) != turn).to(tl.int32), 0)
    tries = 0
    while (late > 0) & (tries < MAX_TRIES):
        got = tl.load(words, mask=there, other=turn.to(tl.int64) << 32, volatile=True)
        late = tl.sum(((got >> 32).to(tl.int32) != turn).to(tl.int32), 0)
        tries += 1
        if tries % TRIES_PER_LIMIT == 0:  # noqa: SIM102, for only then the host is asked
            if tl.load(limit.to(tl.pointer_type(tl.int64)), volatile=True) == 0:
                tries = MAX_TRIES
    if late > 0:
        tl.atomic_or(error.to(tl.pointer_type(tl.int32)), 1 << (FIRST_BIT + FROM))
    return got.to(tl.int32)


@triton.jit
def bf16_sum(a, b):
    """Of words of two bf16: fp32 sums of the low and of the high halves."""
    low = (a << 16).to(tl.float32, bitcast=True) + (b << 16).to(tl.float32, bitcast=True)
    high = (a & HIGH).to(tl.float32, bitcast=True) + (b & HIGH).to(tl.float32, bitcast=True)
    return low, high


@triton.jit
def sum_of_ranks(
    y,
    row,
    window_0,
    window_1,
    window_2,
    window_3,
    turns,
    error,
    limit,
    capacity,
    DIM: tl.constexpr,
    PAD: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
):
    """The ranks' rows `row` of y, added by tree in fp32 and rounded once to bf16. Returns [PAD]."""
    turn_place = turns.to(tl.pointer_type(tl.int32)) + row
    turn = tl.load(turn_place) + 1
    w = tl.arange(0, PAD // 2)
    there = w < DIM // 2
    own = tl.load((y + row * DIM).to(tl.pointer_type(tl.int32)) + w, mask=there, other=0)
    packet = (turn.to(tl.int64) << 32) | (own.to(tl.int64) & 0xFFFFFFFF)
    part = capacity.to(tl.int64) * 16  # bytes that a rank fills of a half
    place = (turn & 1).to(tl.int64) * RANKS * part + (row * (DIM // 2) + w) * 8
    for other in tl.static_range(RANKS):
        if other != RANK:
            if other == 0:
                window = window_0
            elif other == 1:
                window = window_1
            elif other == 2:
                window = window_2
            else:
                window = window_3
            to = (window + RANK * part + place).to(tl.pointer_type(tl.int64))
            tl.store(to, packet, mask=there)
    if RANK == 0:
        mine = window_0 + place
    elif RANK == 1:
        mine = window_1 + place
    elif RANK == 2:
        mine = window_2 + place
    else:
        mine = window_3 + place
    a, b = own, own
    if RANK != 0:
        a = take(mine, turn, there, error, limit, 0)
    if RANK != 1:
        b = take(mine + part, turn, there, error, limit, 1)
    low, high = bf16_sum(a, b)
    if RANKS == 4:
        c, d = own, own
        if RANK != 2:
            c = take(mine + 2 * part, turn, there, error, limit, 2)
        if RANK != 3:
            d = take(mine + 3 * part, turn, there, error, limit, 3)
        more_low, more_high = bf16_sum(c, d)
        low, high = low + more_low, high + more_high
    tl.store(turn_place, turn)
    return tl.interleave(low, high).to(tl.bfloat16).to(tl.float32)
