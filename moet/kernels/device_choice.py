"""The exact choice of a row's best scores by csrc/choose_entries.cu, a cluster of CTAs to a row:
what triton_indexer.py chooses in two launches or more. Knows tensors and a Launcher."""

from __future__ import annotations

import ctypes
from typing import ClassVar

from torch import Tensor

from moet.kernels.stream_gemm import Launcher

THREADS, DIGITS, VALUES = 512, 4, 256
SLICES = 8  # CTAs of a row
ROUND = 128  # scores that a slice is a multiple of
MOST_CHOSEN = 4095  # whose count the kernel packs
SHARED_BYTES = 2 * DIGITS * 4 * VALUES + 8 * (DIGITS + 2) + THREADS // 8  # counts, barriers, totals


class ChoiceArgs(ctypes.Structure):
    """Field for field `struct ChoiceArgs` of the source."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("scores", "positions", "out")),
        ("ratio_inverse", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("width", "top_k", "slices", "held")),
    ]


def fits(width: int, top_k: int) -> bool:
    """Whether the kernel takes rows of so many scores, of which so many are chosen."""
    return width % 4 == 0 and top_k <= MOST_CHOSEN and width <= 1 << 20


def run(launcher: Launcher, scores: Tensor, positions: Tensor, out: Tensor, *, ratio: int) -> None:
    """Write out, [rows, top_k] int32: each row's best entries, ascending, of equal ones the first;
    rows that see no more than top_k get all of them and -1. scores: [rows, width] fp32, contiguous,
    of the entries that a row sees, one per `ratio` tokens; they may be lost. positions: [rows]
    int64."""
    num_rows, width = scores.shape
    slice_bytes = 4 * ROUND * -(-width // (SLICES * ROUND))
    held = SHARED_BYTES + slice_bytes <= launcher.max_shared_bytes
    args = ChoiceArgs(
        scores.data_ptr(),
        positions.data_ptr(),
        out.data_ptr(),
        -(-(1 << 32) // ratio),
        width,
        out.shape[1],
        SLICES,
        held,
    )
    launcher.launch(
        "choose_entries",
        grid=num_rows * SLICES,
        threads=THREADS,
        shared_bytes=SHARED_BYTES + slice_bytes * held,
        args=args,
        cluster=SLICES,
    )
