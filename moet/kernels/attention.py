"""Attention of one sequence over the rows of its window and its compressed entries. Keys are the
values. Knows nothing of pages: it is handed decoded rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moet.kernels.gemm import matmul
from moet.kernels.registry import op


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
