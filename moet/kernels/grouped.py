"""Groups of few rows through a matrix each, without lists in memory (`csrc/projections.cu`).

The bits are those of `stream_gemm.py` with lists. Knows a Launcher; not what is multiplied.
"""

from __future__ import annotations

import ctypes
from typing import ClassVar

from moet.kernels.stream_gemm import THREADS, Instance, Launcher, StreamArgs, complete, share_among

MAX_ROWS = 8
INSTANCE = Instance("fp8", MAX_ROWS, "bf16", False, 2, 2)
ENTRY_BYTES = 16


class GroupArgs(ctypes.Structure):
    """Field for field `struct GroupArgs` of the source."""

    _fields_: ClassVar = [
        ("stream", StreamArgs),
        ("rows", ctypes.c_int32),
        ("lists_at", ctypes.c_int32),
    ]


def run(launcher: Launcher, args: StreamArgs, num_rows: int) -> None:
    """Launch on args.num_slots groups of num_rows rows of e4m3: group g's row i is row
    i * num_slots + g of inputs and outputs."""
    assert 0 < num_rows <= MAX_ROWS
    groups, stages = args.num_slots, complete(args, "fp8")
    items = groups * args.tiles * args.slices
    resident = launcher.num_sms * INSTANCE.resident(stages, launcher.max_shared_bytes)
    grid = max(1, min(items, resident))
    share_among(args, grid, items)
    lists_at = -(-INSTANCE.shared_bytes(stages) // ENTRY_BYTES) * ENTRY_BYTES
    launcher.launch(
        "groups_n8",
        grid=grid,
        threads=THREADS,
        shared_bytes=lists_at + _list_bytes(groups, num_rows),
        args=GroupArgs(args, num_rows, lists_at),
    )


def fits(launcher: Launcher, num_groups: int, stages: int) -> bool:
    """Whether as many CTAs share an SM as with lists in memory, with slices of so many stages."""
    needed = INSTANCE.shared_bytes(stages) + ENTRY_BYTES + _list_bytes(num_groups, MAX_ROWS)
    held = (launcher.max_shared_bytes + 1024) // (needed + 1024)
    return 0 < INSTANCE.resident(stages, launcher.max_shared_bytes) <= held


def _list_bytes(groups: int, num_rows: int) -> int:
    return groups * (ENTRY_BYTES + 4 * num_rows) + 4
