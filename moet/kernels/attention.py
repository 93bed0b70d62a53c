"""Attention over window rows and compressed entries; keys are the values. `sparse_attention` is
handed one sequence's decoded rows, `window_attention` finds the rows of a whole step itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from moet.kernels.cache import Cache, EntryFormat, Fp8Rows, fp8_rows_fit
from moet.kernels.gemm import matmul
from moet.kernels.quant import Activations
from moet.kernels.registry import GPU_ARCHS, op
from moet.kernels.rope import rope
from moet.kernels.rows import Rows

if TYPE_CHECKING:
    from moet.kernels.device_attention import PlacedSink

Sink: TypeAlias = "Tensor | PlacedSink"  # [H] fp32; placed on a GPU that has a kernel for chunks


def attend(q: Tensor, rows: Tensor, sink: Tensor, scale: float) -> Tensor:
    """One query. q: [H, dim], rows: [n, dim], sink: [H], fp32. Returns [H, dim] fp32.

    The sink is one more logit per head, unscaled, with a value of zero.
    """
    logits = matmul(q * scale, rows)
    top = torch.maximum(logits.amax(1), sink).unsqueeze(1)
    weights = torch.exp(logits - top)
    total = weights.sum(1, keepdim=True) + torch.exp(sink.unsqueeze(1) - top)
    return matmul(weights, rows.t()) / total


@op(tolerance=2**-7)
def sparse_attention(
    q: Tensor,
    window: Tensor,
    window_spans: Sequence[tuple[int, int]],
    compressed: Tensor,
    selected: Sequence[Tensor | int],
    sink: Tensor,
    *,
    scale: float,
) -> Tensor:
    """Queries of one sequence, each over exactly its visible rows in absolute order.

    q: [t, H, dim] fp32 or bf16. window: [w, dim] fp32; query i sees rows
    window_spans[i][0]:window_spans[i][1] of it. compressed: [n, dim] fp32; query i sees the rows
    selected[i], ascending indices or the number of leading rows. sink: [H] fp32.
    Returns [t, H, dim] in the dtype of q. Each query is reduced alone, so its result does not
    depend on which others are in the chunk.
    """
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    for i, query in enumerate(q.float().unbind(0)):
        first, last = window_spans[i]
        chosen = selected[i]
        entries = compressed[:chosen] if isinstance(chosen, int) else compressed[chosen]
        out[i] = attend(query, torch.cat([window[first:last], entries]), sink, scale)
    return out.to(q.dtype)


@dataclass(frozen=True, slots=True)
class WindowKeys:
    """What the rows of a step see: the last sliding_window tokens, then compressed entries.

    window: the ring of tokens' rows. chunk: None if the step's own are in the ring already
    (rows.short); otherwise one page with a place per row of the step, and the ring ends before it.
    entries: one per `ratio` tokens, or None for window-only layers. selected: [T, k] int32,
    ascending entry numbers filled up with -1; None: all visible.
    """

    rows: Rows
    window: Cache
    chunk: Cache | None
    entries: Cache | None
    selected: Tensor | None
    sliding_window: int
    ratio: int


@op(tolerance=2**-7)
def window_attention(
    q: Tensor, sink: Tensor, keys: WindowKeys, cos: Tensor, sin: Tensor, *, scale: float
) -> Tensor:
    """Each row's query over its keys, rotated back.

    q: [T, H, dim] fp32 or bf16. sink: [H] fp32. cos, sin: [T, rope_dim / 2] fp32, of the inverse
    rotation. Returns [T, H, dim] in the dtype of q, rounded before and after the rotation.
    """
    rows, reach = keys.rows, keys.sliding_window
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for first, last in rows.sequences():
        start = int(rows.positions[first])
        oldest, recent = _window_rows(first, last, start, keys)
        spans = [
            (max(p - reach + 1, 0) - oldest, p + 1 - oldest)
            for p in range(start, start + last - first)
        ]
        compressed = recent[:0]
        chosen: list[Tensor | int] = [0] * (last - first)
        if keys.entries is not None:
            compressed, chosen = _entries(first, last, keys.entries, keys)
        out[first:last] = sparse_attention(
            q[first:last], recent, spans, compressed, chosen, sink, scale=scale
        )
    return rope(out, cos, sin, inverse=True)


@op(tolerance=2**-4)  # one step of e4m3
def window_attention_q(
    q: Tensor,
    sink: Sink,
    keys: WindowKeys,
    cos: Tensor,
    sin: Tensor,
    *,
    scale: float,
    num_groups: int,
) -> Activations:
    """window_attention as the input of a grouped projection.

    Returns [T * num_groups, H * dim / num_groups], row token * num_groups + group; on a GPU steps
    of few rows have codes and no values.
    """
    assert isinstance(sink, Tensor)
    out = window_attention.reference(q, sink, keys, cos, sin, scale=scale)
    return Activations(out.view(len(q) * num_groups, -1))


def _window_rows(first: int, last: int, start: int, keys: WindowKeys) -> tuple[int, Tensor]:
    """The first position that one sequence's window reaches, and the rows from there on."""
    rows, chunk = keys.rows, keys.chunk
    oldest = max(start - keys.sliding_window + 1, 0)
    ring = keys.window.form.entries_per_page
    end = start if chunk is not None else start + last - first
    tokens = torch.arange(oldest, end, device=rows.positions.device)
    past = keys.window.read(rows.seq_slots[first] * ring + tokens % ring)
    if chunk is None:
        return oldest, past
    own = chunk.read(torch.arange(first, last, device=past.device))
    return oldest, torch.cat([past, own])


def _entries(
    first: int, last: int, entries: Cache, keys: WindowKeys
) -> tuple[Tensor, list[Tensor | int]]:
    """Entries of one sequence and which of them each of its rows attends to."""
    rows, selected, ratio = keys.rows, keys.selected, keys.ratio
    page_row = rows.page_rows[first]
    visible = rows.visible(ratio)[first:last].tolist()
    if selected is not None and last - first == 1:  # read no more than is used
        places = selected[first][selected[first] >= 0].long()
        return entries.read(rows.entry_slots(page_row, places, ratio)), [len(places)]
    every = torch.arange(visible[-1], device=rows.positions.device)
    compressed = entries.read(rows.entry_slots(page_row, every, ratio))
    if selected is None:
        return compressed, list(visible)
    return compressed, [row[row >= 0].long() for row in selected[first:last]]


def _rows_fit(*, arch: str, form: EntryFormat, num_heads: int) -> bool:
    return arch in GPU_ARCHS and fp8_rows_fit(form)


window_attention.impl_in("moet.kernels.triton_attention", "triton_fp8", supports=_rows_fit)


def chunks_fit(*, arch: str, form: EntryFormat, num_heads: int) -> bool:
    """Whether chunks have a kernel of their own: of 64 heads over released rows, on sm_90a."""
    released = isinstance(form, Fp8Rows) and (form.width, form.nope_dim) == (512, 448)
    return arch == "sm90a" and released and num_heads == 64


def _placed_fits(*, arch: str, form: EntryFormat, num_heads: int, placed: bool = False) -> bool:
    """placed: the sink is a PlacedSink."""
    return placed and chunks_fit(arch=arch, form=form, num_heads=num_heads)


def _groups_fit(*, arch: str, form: EntryFormat, num_heads: int, placed: bool = False) -> bool:
    fits = _rows_fit(arch=arch, form=form, num_heads=num_heads)
    return not placed and fits and form.width % 128 == 0


window_attention_q.impl_in("moet.kernels.device_attention", "cuda_chunks", supports=_placed_fits)
window_attention_q.impl_in("moet.kernels.triton_attention", "triton_fp8", supports=_groups_fit)
