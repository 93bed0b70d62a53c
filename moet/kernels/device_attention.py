"""Attention of 64 heads over fp8 rows, bit for bit what triton_attention.py makes of them: of a
chunk's rows by csrc/chunk_attention.cu, and which rows have another kernel. Knows tensors and a
Launcher."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from moet.kernels import row_attention
from moet.kernels.attention import Sink, WindowKeys
from moet.kernels.quant import Activations
from moet.kernels.stream_gemm import Launcher
from moet.kernels.window_arguments import WIDTH, window_arguments

THREADS = 384
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
    assert keys.chunk is not None
    assert keys.selected is None or keys.selected.shape[1] <= MAX_CHOSEN
    args = AttendArgs(
        **window_arguments(q, sink, keys, cos, sin, scale=scale),
        chunk=keys.chunk.pages.data_ptr(),
        starts=keys.rows.starts.data_ptr(),
        out=out.data_ptr(),
        chunk_entries=keys.chunk.form.entries_per_page,
        per_page=1 if keys.entries is None else keys.entries.form.entries_per_page,
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
