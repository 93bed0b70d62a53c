"""Attention of a chunk's rows by csrc/chunk_attention.cu: 64 heads over fp8 rows, bit for bit what
triton_attention.py makes of them. Knows tensors and a Launcher."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from moet.kernels import row_attention
from moet.kernels.attention import Sink, WindowKeys
from moet.kernels.quant import Activations
from moet.kernels.stream_gemm import Launcher, pointer

HEADS, WIDTH, ROPE = 64, 512, 64
THREADS = 384
LOG2E = 1.4426950408889634
MAX_CHOSEN = 512  # entries of a row, which wait in shared memory
SHARED_BYTES = 1024 + 3 * 64 * 2 * WIDTH + 4 * MAX_CHOSEN  # barriers, queries, two tiles of keys

POINTERS = (
    "q sink window chunk entries selected cos sin positions starts seq_slots page_rows page_table "
    "out"
)


class AttendArgs(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in POINTERS.split()),
        *((name, ctypes.c_int64) for name in ("table_stride", "ring_bytes", "page_bytes")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("rows", "chunk_entries", "reach", "ring", "ratio")),
        *((name, ctypes.c_int) for name in ("per_page", "top_k")),
    ]


@dataclass(frozen=True, slots=True)
class PlacedSink:
    """A sink's logits, [64] fp32, and what launches the kernels that read them."""

    values: Tensor
    launcher: Launcher


def attend_chunk(
    launcher: Launcher,
    q: Tensor,
    sink: Tensor,
    keys: WindowKeys,
    cos: Tensor,
    sin: Tensor,
    *,
    scale: float,
) -> Tensor:
    """`window_attention` where the step's own rows are in a chunk. q: [T, 64, 512] bf16."""
    out = torch.empty_like(q)
    if len(q) == 0:
        return out
    rows, window, chunk = keys.rows, keys.window, keys.chunk
    entries, selected = keys.entries, keys.selected
    assert chunk is not None
    assert q.shape[1:] == (HEADS, WIDTH)
    assert q.is_contiguous()
    assert selected is None or (selected.is_contiguous() and selected.shape[1] <= MAX_CHOSEN)
    args = AttendArgs(
        q=q.data_ptr(),
        sink=sink.data_ptr(),
        window=window.pages.data_ptr(),
        chunk=chunk.pages.data_ptr(),
        entries=None if entries is None else entries.pages.data_ptr(),
        selected=pointer(selected),
        cos=cos.data_ptr(),
        sin=sin.data_ptr(),
        positions=rows.positions.data_ptr(),
        starts=rows.starts.data_ptr(),
        seq_slots=rows.seq_slots.data_ptr(),
        page_rows=rows.page_rows.data_ptr(),
        page_table=rows.page_table.data_ptr(),
        out=out.data_ptr(),
        table_stride=rows.page_table.stride(0),
        ring_bytes=window.form.page_bytes,
        page_bytes=0 if entries is None else entries.form.page_bytes,
        scale=scale * LOG2E,
        rows=len(q),
        chunk_entries=chunk.form.entries_per_page,
        reach=keys.sliding_window,
        ring=window.form.entries_per_page,
        ratio=max(1, keys.ratio),
        per_page=1 if entries is None else entries.form.entries_per_page,
        top_k=0 if selected is None else selected.shape[1],
    )
    launcher.launch(
        "attend_chunk",
        grid=min(len(q), launcher.num_sms),
        threads=THREADS,
        shared_bytes=SHARED_BYTES,
        args=args,
    )
    return out


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
    from moet.kernels import triton_attention  # which needs Triton; a CPU may have none

    assert isinstance(sink, PlacedSink)
    if row_attention.fits(keys):
        return row_attention.attend(
            sink.launcher, q, sink.values, keys, cos, sin, scale=scale, num_groups=num_groups
        )
    if keys.chunk is None:
        return triton_attention.window_attention_q(
            q, sink.values, keys, cos, sin, scale=scale, num_groups=num_groups
        )
    out = attend_chunk(sink.launcher, q, sink.values, keys, cos, sin, scale=scale)
    return Activations(out.view(len(q) * num_groups, -1))
