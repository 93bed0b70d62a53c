"""What the CUDA kernels of V4's attention are told of queries and keys: 64 heads over fp8 rows of
512 values. Knows no kernel."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moet.kernels.attention import WindowKeys
from moet.kernels.stream_gemm import pointer

HEADS, WIDTH, ROPE = 64, 512, 64
LOG2E = 1.4426950408889634


def window_arguments(
    q: Tensor, sink: Tensor, keys: WindowKeys, cos: Tensor, sin: Tensor, *, scale: float
) -> dict[str, Any]:
    """The fields by these names of the kernels' arguments. q: [T, 64, 512] bf16, contiguous."""
    rows, window, entries, selected = keys.rows, keys.window, keys.entries, keys.selected
    assert q.shape[1:] == (HEADS, WIDTH)
    assert q.is_contiguous()
    assert selected is None or selected.is_contiguous()
    return {
        "q": q.data_ptr(),
        "sink": sink.data_ptr(),
        "window": window.pages.data_ptr(),
        "entries": None if entries is None else entries.pages.data_ptr(),
        "selected": pointer(selected),
        "cos": cos.data_ptr(),
        "sin": sin.data_ptr(),
        "positions": rows.positions.data_ptr(),
        "seq_slots": rows.seq_slots.data_ptr(),
        "page_rows": rows.page_rows.data_ptr(),
        "page_table": rows.page_table.data_ptr(),
        "table_stride": rows.page_table.stride(0),
        "ring_bytes": window.form.page_bytes,
        "page_bytes": 0 if entries is None else entries.form.page_bytes,
        "scale": scale * LOG2E,
        "rows": len(q),
        "reach": keys.sliding_window,
        "ring": window.form.entries_per_page,
        "ratio": max(1, keys.ratio),
        "top_k": 0 if selected is None else selected.shape[1],
    }
