# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, attr-defined, misc"
"""The exact choice of the best entries that a row sees: by bits of the score, block by block, then
over the blocks' best. A row's choice never depends on other rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moet.kernels import device_choice
from moet.kernels.cache import Cache
from moet.kernels.rows import Rows
from moet.kernels.stream_gemm import Launcher
from moet.kernels.triton_common import CODED_ROWS, begin, kernel, overlap
from moet.kernels.triton_index_scores import score_entries

CHUNK = 8192  # scores that one program chooses from
CANDIDATES = 16384  # chosen in chunks, that one program chooses from
SCORE_BYTES = 256 << 20  # most that the scores of one launch take; rows beyond it wait


@triton.jit
def choose(score, valid, K: tl.constexpr):
    """Which of the valid scores are among the K highest; of equal ones the first. Returns bool."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # -0 counts as 0
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # ordered as the scores are
    key = tl.where(valid, key, -2147483648)
    positive = tl.sum((key >= 0).to(tl.int32), 0)
    border = tl.where(positive >= K, 0, -2147483648).to(tl.int32)
    # Bit by bit, until exactly K keys are not below the border, whichever value that is.
    num, bit = tl.where(positive >= K, positive, -1), 30
    while (bit >= 0) & (num != K):
        raised = border + (1 << bit)
        found = tl.sum((key >= raised).to(tl.int32), 0)
        border, num = tl.where(found >= K, raised, border), tl.where(found >= K, found, num)
        bit -= 1
    above = valid & (key > border)
    tie = valid & (key == border)
    room = K - tl.sum(above.to(tl.int32), 0)
    return above | (tie & (tl.cumsum(tie.to(tl.int32), 0) <= room))


@kernel
def choose_in_chunk(
    scores,
    out,
    out_scores,
    positions,
    width,
    RATIO,
    out_stride,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    LAST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The best K of a chunk of a row's scores, ascending by entry. LAST: there is one chunk only,
    and rows that see at most K entries get all of them."""
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    visible = (tl.load(positions + row) + 1) // RATIO
    i = tl.arange(0, CHUNK)
    entry = chunk * CHUNK + i
    at = row * out_stride + chunk * K
    if visible > K:
        if chunk * CHUNK < visible:
            valid = entry < visible
            score = tl.load(scores + row * width + entry, mask=valid, other=float("-inf"))
            chosen = choose(score, valid, K)
            place = tl.cumsum(chosen.to(tl.int32), 0) - 1
            tl.store(out + at + place, entry, mask=chosen)
            if not LAST:
                tl.store(out_scores + at + place, score, mask=chosen)
    elif LAST:
        k = tl.arange(0, K)
        tl.store(out + at + k, tl.where(k < visible, k, -1))


@kernel
def choose_of_chunks(
    candidates,
    scores,
    out,
    out_scores,
    positions,
    SPAN,
    RATIO,
    in_stride,
    out_stride,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    NUM: tl.constexpr,
    LAST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The best K of what PARTS chunks of SPAN entries each gave. LAST: there is one such group, and
    rows that see at most K entries get all of them."""
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    visible = (tl.load(positions + row) + 1) // RATIO
    k = tl.arange(0, K)
    at = row * out_stride + group * K
    if visible > K:
        i = tl.arange(0, NUM)
        chunk = group * PARTS + i // K
        held = tl.minimum(visible - chunk.to(tl.int64) * SPAN, K)
        valid = (i < PARTS * K) & ((i % K) < held)
        source = row * in_stride + group * PARTS * K + i
        score = tl.load(scores + source, mask=valid, other=float("-inf"))
        entry = tl.load(candidates + source, mask=valid, other=-1)
        chosen = choose(score, valid, K)
        place = tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(out + at + place, entry, mask=chosen)
        if not LAST:
            tl.store(out_scores + at + place, score, mask=chosen)
    elif LAST:
        tl.store(out + at + k, tl.where(k < visible, k, -1))


def index_select(
    q: Tensor,
    gate: Tensor,
    keys: Cache,
    rows: Rows,
    *,
    ratio: int,
    top_k: int,
    gate_scale: float,
    launcher: Launcher | None = None,
) -> Tensor:
    out = torch.empty((len(q), top_k), dtype=torch.int32, device=q.device)
    width = rows.max_entries(ratio)
    each = max(1, SCORE_BYTES // (4 * width))
    for first in range(0, len(q), each):
        last = min(first + each, len(q))
        part = slice(first, last)
        where = rows.positions[part], rows.page_rows[part]
        heads = gate[part], gate_scale
        scores = torch.empty((last - first, width), dtype=torch.float32, device=q.device)
        if width > top_k:
            score_entries(q[part], heads, keys, where, rows.page_table, ratio, scores, top_k)
        if launcher is not None and _takes_clusters(scores, top_k):
            device_choice.run(launcher, scores, where[0], out[part], ratio=ratio)
        else:
            _choose(scores, where[0], ratio, out[part])
    return out


def _takes_clusters(scores: Tensor, top_k: int) -> bool:
    """Whether a cluster of CTAs chooses for each row: of a step, from more than one chunk."""
    num_rows, width = scores.shape
    return num_rows <= CODED_ROWS and width > CHUNK and device_choice.fits(width, top_k)


def _choose(scores: Tensor, positions: Tensor, ratio: int, out: Tensor) -> None:
    """The best of each row's scores, in chunks if there are many."""
    (num_rows, width), top_k = scores.shape, out.shape[1]
    num_chunks = triton.cdiv(width, CHUNK)
    last = num_chunks == 1
    chunk = max(top_k, triton.next_power_of_2(width)) if last else CHUNK
    found, best = out, scores
    if not last:
        shape = num_rows, num_chunks * top_k
        found = torch.empty(shape, dtype=torch.int32, device=scores.device)
        best = torch.empty(shape, dtype=torch.float32, device=scores.device)
    choose_in_chunk[(num_rows, num_chunks)](
        scores,
        found,
        best,
        positions,
        width,
        ratio,
        found.stride(0),
        K=top_k,
        CHUNK=chunk,
        LAST=last,
        num_warps=4 if last and chunk <= 1024 else 8,
        **overlap(scores),
    )
    span = CHUNK
    while num_chunks > 1:
        found, best, num_chunks, span = _merge(found, best, positions, ratio, num_chunks, span, out)


def _merge(
    candidates: Tensor,
    best: Tensor,
    positions: Tensor,
    ratio: int,
    num_chunks: int,
    span: int,
    out: Tensor,
) -> tuple[Tensor, Tensor, int, int]:
    """The best of groups of chunks of `span` entries each. Returns what such a call takes of the
    groups: candidates (in `out`, of the only one), their scores, their number and their span."""
    num_rows, top_k = out.shape
    parts = min(num_chunks, max(2, CANDIDATES // top_k))
    num_groups = triton.cdiv(num_chunks, parts)
    last = num_groups == 1
    shape = num_rows, num_groups * top_k
    found = out if last else torch.empty(shape, dtype=torch.int32, device=out.device)
    found_best = best if last else torch.empty(shape, dtype=torch.float32, device=out.device)
    num = triton.next_power_of_2(parts * top_k)
    choose_of_chunks[(num_rows, num_groups)](
        candidates,
        best,
        found,
        found_best,
        positions,
        span,
        ratio,
        candidates.stride(0),
        found.stride(0),
        K=top_k,
        PARTS=parts,
        NUM=num,
        LAST=last,
        num_warps=8 if num <= 8192 else 16,
        **overlap(out),
    )
    return found, found_best, num_groups, span * parts
