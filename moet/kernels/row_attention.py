"""Attention of a step of few rows by csrc/row_attention.cu: 64 heads over fp8 rows, bit for bit
what triton_attention.py makes of them. Knows tensors and a Launcher."""

from __future__ import annotations

import ctypes
from typing import ClassVar

import torch
from torch import Tensor

from moet.kernels.attention import WindowKeys
from moet.kernels.quant import Activations
from moet.kernels.stream_gemm import Launcher
from moet.kernels.window_arguments import HEADS, WIDTH, window_arguments

KEYS = 64  # of a tile
THREADS, JOIN_THREADS = 256, 128
MOST_TILES = 160  # of all rows; steps with more attend by Triton
FILLING_TILES = 64  # up to so many, a tile's values are divided among programs
PARTS = 4  # of a tile's values
ROW_TILES = 32  # of a row, which join at once
MOST_PAGES = 4096  # of a row, which wait in shared memory
HALF = HEADS // 2  # heads of a program
FIXED_BYTES = 2 * KEYS * WIDTH + HALF * (2 * WIDTH + 2 * KEYS + 4 * (KEYS + 4))  # keys, the rest

POINTERS = (
    "q sink window entries selected cos sin positions seq_slots page_rows page_table part_acc "
    "part_sum codes scales"
)
NUMBERS = "rows tiles window_tiles parts reach ring ratio page_bits top_k blocks pages"


class RowsArgs(ctypes.Structure):
    """Field for field `struct RowsArgs` of the source."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in POINTERS.split()),
        *((name, ctypes.c_int64) for name in ("table_stride", "ring_bytes", "page_bytes")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in NUMBERS.split()),
    ]


def tiles_of(keys: WindowKeys) -> tuple[int, int]:
    """Most tiles that a row's window comes in, and its entries."""
    most = 0
    if keys.entries is not None:
        seen = keys.rows.max_entries(keys.ratio)
        most = seen if keys.selected is None else min(keys.selected.shape[1], seen)
    return -(-keys.sliding_window // KEYS), -(-most // KEYS)


def fits(keys: WindowKeys) -> bool:
    """Whether the kernels take these rows, which are in their rings already."""
    tiles = sum(tiles_of(keys))
    few = 0 < len(keys.rows.positions) * tiles <= MOST_TILES
    small = tiles <= ROW_TILES and keys.rows.page_table.shape[1] <= MOST_PAGES
    places = 1 if keys.entries is None else keys.entries.form.entries_per_page
    return few and small and keys.chunk is None and places.bit_count() == 1


def attend(
    launcher: Launcher,
    q: Tensor,
    sink: Tensor,
    keys: WindowKeys,
    cos: Tensor,
    sin: Tensor,
    *,
    scale: float,
    num_groups: int,
) -> Activations:
    """`window_attention_q` of rows that fit. q: [T, 64, 512] bf16."""
    num_rows, device = len(q), q.device
    entries, selected = keys.entries, keys.selected
    window_tiles, entry_tiles = tiles_of(keys)
    tiles = window_tiles + entry_tiles
    parts = PARTS if num_rows * tiles <= FILLING_TILES else 1
    sums = num_rows * tiles * HEADS
    part_acc = torch.empty(sums * WIDTH, dtype=torch.float32, device=device)
    part_sum = torch.empty(sums * 2, dtype=torch.float32, device=device)
    shape = num_rows * num_groups, HEADS * WIDTH // num_groups
    codes = torch.empty(shape, dtype=torch.uint8, device=device)
    scales = torch.empty((shape[0], shape[1] // 128), dtype=torch.float32, device=device)
    num_pages = keys.rows.page_table.shape[1]
    args = RowsArgs(
        **window_arguments(q, sink, keys, cos, sin, scale=scale),
        part_acc=part_acc.data_ptr(),
        part_sum=part_sum.data_ptr(),
        codes=codes.data_ptr(),
        scales=scales.data_ptr(),
        tiles=tiles,
        window_tiles=window_tiles,
        parts=parts,
        page_bits=0 if entries is None else entries.form.entries_per_page.bit_length() - 1,
        blocks=WIDTH // 64 // parts,
        pages=num_pages,
    )
    launcher.launch(
        "attend_rows",
        grid=(tiles * 2 * parts, num_rows),
        threads=THREADS,
        shared_bytes=FIXED_BYTES + (0 if selected is None else 4 * num_pages),
        args=args,
    )
    launcher.launch(
        "join_rows",
        grid=num_rows * HEADS,
        threads=JOIN_THREADS,
        shared_bytes=8 * (-(-tiles // 2) * 2) + 4 * tiles * WIDTH,
        args=args,
    )
    return Activations(None, codes, scales)
