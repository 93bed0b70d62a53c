"""Pooling of consecutive KV rows into one entry, by a softmax per channel over their scores; and
the whole way from projections to a stored entry, with the state that lies between steps."""

from __future__ import annotations

import torch
from torch import Tensor

from moet.kernels.cache import Cache, EntryFormat, Mxfp4Rows, PlainRows, fp8_rows_fit
from moet.kernels.norm import rms_norm
from moet.kernels.quant import hadamard
from moet.kernels.registry import GPU_ARCHS, op
from moet.kernels.rope import rope
from moet.kernels.rows import Rows


def _pool(values: Tensor, scores: Tensor) -> Tensor:
    """[n, rows, dim] twice, rows a power of two -> [n, dim]. A halving tree, so that the order of
    the sums is the same for any n."""
    weights = torch.exp(scores - scores.amax(1, keepdim=True))
    both = torch.stack([weights * values, weights])
    while both.shape[2] > 1:
        half = both.shape[2] // 2
        both = both[:, :, :half] + both[:, :, half:]
    return both[0, :, 0] / both[1, :, 0]


@op(tolerance=2**-16)
def pool_windows(values: Tensor, scores: Tensor) -> Tensor:
    """Pool each window of `ratio` tokens into one entry.

    values, scores: [n, ratio, dim] fp32, ratio a power of two; scores hold the position bias.
    Returns [n, dim] fp32: per channel, values weighted by the softmax of scores over the window.
    """
    return _pool(values, scores)


@op(tolerance=2**-16)
def pool_overlapped_windows(values: Tensor, scores: Tensor) -> Tensor:
    """Pool windows that reach back over the previous one.

    values, scores: [n, 2 * ratio, 2 * dim] fp32: the rows of the previous window, then those of
    the current one. The first dim channels of the previous rows and the last dim channels of the
    current rows take part. Absent previous rows carry score -inf and value 0.
    Returns [n, dim] fp32.
    """
    ratio, dim = values.shape[1] // 2, values.shape[2] // 2

    def halves(x: Tensor) -> Tensor:
        return torch.cat([x[:, :ratio, :dim], x[:, ratio:, dim:]], 1)

    return _pool(halves(values), halves(scores))


@op(tolerance=2**-3)  # one step of e4m3 or e2m1: a last-bit difference may round the other way
def compress(
    projected: Tensor,
    ape: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    state: Cache,
    entries: Cache,
    rows: Rows,
    *,
    overlapped: bool,
    rotate: bool,
    eps: float,
    dtype: torch.dtype,
) -> None:
    """Store the entry of every window that a row of the step closes, and the state for later ones.

    projected: [T, 2 * channels] fp32, values then scores without position bias; rows may be
    strided. ape: [ratio, channels], weight: [width] fp32. channels is twice the width if
    overlapped: an entry pools the first half of the channels of the previous window's tokens and
    the second half of its own. cos, sin: [T, rope_dim / 2] fp32 of the first token of each row's
    window. state: a ring of [2 * channels] fp32 rows, scores with their bias. The entry is normed,
    rotated and, if `rotate`, Hadamard-transformed; each of these rounds to dtype.
    """
    ratio = ape.shape[0]
    own = _biased(projected, ape, rows)
    slots = rows.closed_slots(ratio)
    closing = (slots >= 0).nonzero().squeeze(1)
    if len(closing):
        pool = pool_overlapped_windows if overlapped else pool_windows
        window = _windows(own, closing, state, rows, ratio * (2 if overlapped else 1))
        channels = ape.shape[1]
        pooled = pool(window[..., :channels], window[..., channels:])
        entry = rope(rms_norm(pooled.to(dtype), weight, eps=eps), cos[closing], sin[closing])
        if rotate:
            entry = hadamard(entry)
        entries.write(slots[closing], entry.float())
    state.write(rows.ring_slots(state.form.entries_per_page), own)


def _biased(projected: Tensor, ape: Tensor, rows: Rows) -> Tensor:
    """[T, 2 * channels]: the projections with the position bias on their scores."""
    ratio, channels = ape.shape
    values, scores = projected[:, :channels], projected[:, channels:]
    return torch.cat([values, scores + ape[rows.positions % ratio]], 1)


def _windows(own: Tensor, closing: Tensor, state: Cache, rows: Rows, length: int) -> Tensor:
    """[n, length, 2 * channels]: the tokens up to each closing row, from the step or the ring.

    Tokens before the first have the value 0 and the score -inf.
    """
    channels = own.shape[1] // 2
    ring = state.form.entries_per_page
    ends = rows.positions[closing].unsqueeze(1)
    tokens = ends + torch.arange(1 - length, 1, device=ends.device)  # [n, length]
    fresh = tokens >= rows.starts[closing].unsqueeze(1)
    step_rows = (closing.unsqueeze(1) + tokens - ends).clamp(min=0)
    slots = rows.seq_slots[closing].unsqueeze(1) * ring + tokens % ring
    kept = state.read(slots.flatten()).view(*slots.shape, -1)
    window = torch.where(fresh.unsqueeze(2), own[step_rows], kept)
    absent = (tokens < 0).unsqueeze(2)
    values = window[..., :channels].masked_fill(absent, 0.0)
    return torch.cat([values, window[..., channels:].masked_fill(absent, float("-inf"))], 2)


def encodings_fit(
    *, arch: str, state: EntryFormat, entries: EntryFormat, ratio: int, rotate: bool
) -> bool:
    """fp8 entries, or MXFP4 ones whose Hadamard matrix fits a program's registers."""
    width = entries.width
    mxfp4 = isinstance(entries, Mxfp4Rows) and width <= 128 and width & (width - 1) == 0
    raw = isinstance(state, PlainRows) and state.dtype == torch.float32
    fits = mxfp4 if rotate else mxfp4 or fp8_rows_fit(entries)
    return arch in GPU_ARCHS and raw and fits and ratio & (ratio - 1) == 0


compress.impl_in("moet.kernels.triton_compressor", "triton", supports=encodings_fit)
