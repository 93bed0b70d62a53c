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
from moet.kernels.device_gemm import STREAM_ROWS
from moet.kernels.prefill_gemm import empty_tiles
from moet.kernels.quant import FP8_BLOCK, Activations
from moet.kernels.stream_gemm import Launcher, pointer
from moet.kernels.window_arguments import HEADS, WIDTH, window_arguments

THREADS = 384
MAX_CHOSEN = 512  # entries of a row, which wait in shared memory
TILE_ROWS = 128  # tokens of a tile of the output
WEIGHED_BYTES = 5 * 16 * 128  # what is known of a weighed tile
# Barriers; queries and two tiles of keys; what was chosen.
SHARED_BYTES = 1024 + 3 * 64 * 2 * WIDTH + 4 * MAX_CHOSEN + 2 * WEIGHED_BYTES

POINTERS = (
    "q sink window chunk entries selected cos sin positions starts seq_slots page_rows page_table "
    "codes scales"
)


class AttendArgs(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in POINTERS.split()),
        *((name, ctypes.c_int64) for name in ("table_stride", "ring_bytes", "page_bytes")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("rows", "chunk_entries", "reach", "ring", "ratio")),
        *((name, ctypes.c_int) for name in ("page_bits", "top_k", "group_heads")),
    ]


@dataclass(frozen=True, slots=True)
class PlacedSink:
    """A sink's logits, [64] fp32, and what launches the kernels that read them."""

    values: Tensor
    launcher: Launcher


def _output(num_rows: int, num_groups: int, tiled: bool, device: torch.device) -> Activations:
    """Room for what a chunk's attention makes."""
    width, row_groups = HEADS * WIDTH // num_groups, num_rows * num_groups
    if tiled:
        count = num_groups * -(-num_rows // TILE_ROWS)
        tiles = empty_tiles(count, row_groups, width, TILE_ROWS, device=device)
        return Activations(None, tiles=tiles)
    codes = torch.empty(row_groups, width, dtype=torch.uint8, device=device)
    scale = torch.empty(row_groups, width // FP8_BLOCK, dtype=torch.float32, device=device)
    return Activations(None, codes, scale)


def attend_chunk(
    launcher: Launcher,
    q: Tensor,
    sink: Tensor,
    keys: WindowKeys,
    cos: Tensor,
    sin: Tensor,
    *,
    scale: float,
    num_groups: int,
    tiled: bool,
) -> Activations:
    """`window_attention_q` where the step's own rows are in a chunk. q: [T, 64, 512] bf16.

    tiled: as tiles of a group's rows, in the order of `Device.group_work`; otherwise as codes.
    """
    num_rows, made = len(q), _output(len(q), num_groups, tiled, q.device)
    if num_rows == 0:
        return made
    assert keys.chunk is not None
    assert keys.selected is None or keys.selected.shape[1] <= MAX_CHOSEN
    places = 1 if keys.entries is None else keys.entries.form.entries_per_page
    assert places.bit_count() == 1
    args = AttendArgs(
        **window_arguments(q, sink, keys, cos, sin, scale=scale),
        chunk=keys.chunk.pages.data_ptr(),
        starts=keys.rows.starts.data_ptr(),
        codes=pointer(made.tiles.data if made.tiles else made.codes),
        scales=pointer(made.scale),
        chunk_entries=keys.chunk.form.entries_per_page,
        page_bits=places.bit_length() - 1,
        group_heads=HEADS // num_groups,
    )
    launcher.launch(
        "attend_chunk",
        grid=min(num_rows, launcher.num_sms),
        threads=THREADS,
        shared_bytes=SHARED_BYTES,
        args=args,
    )
    return made


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
    return attend_chunk(
        sink.launcher,
        q,
        sink.values,
        keys,
        cos,
        sin,
        scale=scale,
        num_groups=num_groups,
        tiled=len(q) > STREAM_ROWS,
    )
