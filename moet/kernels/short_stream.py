"""Products of few rows with a dense matrix by the short kernels (`csrc/short_stream.cuh`).

The bits are those of `stream_gemm.py`. Takes the arguments that a stream would get and says whether
there is a short kernel for them; knows a Launcher, not what is multiplied.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from moet.kernels.stream_gemm import (
    CHUNK_BYTES,
    THREADS,
    Launcher,
    StreamArgs,
    StreamLinear,
    inverse,
    num_stages,
)

MAX_ROWS = 8
MAX_CLUSTER = 8  # slices that the CTAs of a cluster sum
MAX_TILES = 8  # of a CTA of a pair
MAX_ROW_STAGES = 64  # a thread loads two blocks of rows, of which a stage has eight
CTAS_PER_SM = 2
FIXED_BYTES = 1 << 15  # what a CTA could stream while it ends


class ShortArgs(ctypes.Structure):
    """Field for field `struct ShortArgs` of the source."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("weights", "scales", "x", "x_scale", "out")),
        *((name, ctypes.c_void_p) for name in ("partial", "counters")),
        *((name, ctypes.c_int32) for name in ("rows", "ld_x", "ld_x_scale", "ld_out")),
        *((name, ctypes.c_int32) for name in ("x_group", "x_scale_group", "x_scale_step")),
        *((name, ctypes.c_int32) for name in ("chunks", "tiles", "slices", "stages")),
        *((name, ctypes.c_int32) for name in ("block_shift", "tiles_each", "longer_runs")),
        ("slice_stride", ctypes.c_int32),
        *((name, ctypes.c_uint32) for name in ("by_slices", "by_group_tiles")),
    ]


class ShortPair(ctypes.Structure):
    """Field for field `struct ShortPair` of the source."""

    _fields_: ClassVar = [
        ("quantised", ShortArgs),
        ("plain", ShortArgs),
        ("quantised_ctas", ctypes.c_int32),
    ]


def run_groups(launcher: Launcher, args: StreamArgs, groups: int) -> bool:
    """e4m3 rows: row i of group g, which is row i * groups + g of inputs and outputs, through the
    group's matrix. Whether there is a short kernel for it."""
    if args.slices > MAX_CLUSTER or not _fits(args, "fp8", groups):
        return False
    short = _short(args, "fp8", groups)
    _run(launcher, "short_fp8_bf16", short, short.tiles)
    return True


def multiply(
    launcher: Launcher, weight: StreamLinear, x: Tensor, scale: Tensor | None, *, error: Tensor
) -> Tensor | None:
    """x [T, K] through an fp8 matrix: e4m3 with scale, or bf16 that is rounded on its way in.

    Returns [T, N] bf16, or None if there is no short kernel for it.
    """
    slices = weight.slices(launcher)
    if not 0 < len(x) <= MAX_ROWS or slices > MAX_CLUSTER or (scale is None and slices == 1):
        return None
    out = torch.empty(len(x), weight.out_features, dtype=torch.bfloat16, device=x.device)
    args = weight.arguments(x, scale, out, slices=slices, error=error)
    if not _fits(args, "fp8"):
        return None
    short = _short(args, "fp8")
    runs = short.tiles if slices > 1 else min(short.tiles, _resident(launcher, short))
    _run(launcher, "short_fp8_quant_bf16" if scale is None else "short_fp8_bf16", short, runs)
    return out


def run_pair(launcher: Launcher, quantised: StreamArgs, plain: StreamArgs) -> bool:
    """e4m3 rows through an fp8 matrix beside the same bf16 rows through a bf16 one, into fp32.
    Whether it was done."""
    if not (_fits(quantised, "fp8") and _fits(plain, "bf16")):
        return False
    if quantised.slices == 1 or plain.slices == 1:
        return False
    args = ShortPair(_short(quantised, "fp8"), _short(plain, "bf16"))
    runs = runs_of_tiles(
        min(_resident(launcher, args.quantised), _resident(launcher, args.plain)),
        (quantised.tiles, quantised.slices, _item_bytes(quantised, "fp8")),
        (plain.tiles, plain.slices, _item_bytes(plain, "bf16")),
    )
    if runs is None:
        return False
    args.quantised_ctas = _divide(args.quantised, runs[0])
    launcher.launch(
        "short_pair",
        grid=args.quantised_ctas + _divide(args.plain, runs[1]),
        threads=THREADS,
        shared_bytes=max(_shared_bytes(args.quantised), _shared_bytes(args.plain)),
        args=args,
    )
    return True


@lru_cache
def runs_of_tiles(
    resident: int, first: tuple[int, int, int], second: tuple[int, int, int]
) -> tuple[int, int] | None:
    """Into how many runs the tiles of two products are divided so that all CTAs are resident and
    the longest is shortest. Of a product: tiles, slices, and bytes of a tile in a slice."""
    found = []
    for one in range(-(-first[0] // MAX_TILES), first[0] + 1):
        for other in range(-(-second[0] // MAX_TILES), second[0] + 1):
            pairs = ((one, first), (other, second))
            ctas = sum(runs * slices for runs, (_, slices, _) in pairs)
            longest = max(
                -(-tiles // runs) * (size + FIXED_BYTES) for runs, (tiles, _, size) in pairs
            )
            if ctas <= resident:
                found.append((longest, -ctas, one, other))
    return min(found)[2:] if found else None


def _fits(args: StreamArgs, codec: str, groups: int = 1) -> bool:
    stages = num_stages(codec, args.chunks, 1, args.slices)
    columns = 128 if codec == "fp8" else 64
    whole = args.columns == 64 * args.tiles and args.k == columns * args.chunks
    halves = stages >= 2 and stages & (stages - 1) == 0 and args.chunks == 2 * stages * args.slices
    rows = args.num_rows // groups
    few = 0 < rows <= MAX_ROWS and rows * stages <= MAX_ROW_STAGES
    return whole and halves and few


def _short(args: StreamArgs, codec: str, groups: int = 1) -> ShortArgs:
    """What a stream is told, as a short kernel takes it."""
    stages = num_stages(codec, args.chunks, 1, args.slices)
    assert groups == 1 or args.ld_out == args.columns, "outputs of groups lie side by side"
    return ShortArgs(
        weights=args.weights,
        scales=args.bases,
        x=args.x,
        x_scale=args.x_scale,
        out=args.out,
        partial=args.partial,
        counters=args.counters,
        rows=args.num_rows // groups,
        ld_x=args.ld_x * groups,
        ld_x_scale=args.ld_x_scale * groups,
        ld_out=args.ld_out * groups,
        x_group=args.ld_x,
        x_scale_group=args.ld_x_scale,
        x_scale_step=args.x_group_stride,
        chunks=args.chunks,
        tiles=args.tiles * groups,
        slices=args.slices,
        stages=stages,
        block_shift=(8 * stages).bit_length() - 1,
        slice_stride=args.num_rows * args.ld_out,
        by_slices=inverse(args.slices),
        by_group_tiles=inverse(args.tiles),
    )


def _run(launcher: Launcher, name: str, args: ShortArgs, runs: int) -> None:
    """A cluster sums the slices of a run; where there is one, it is the sum."""
    launcher.launch(
        f"{name}_whole" if args.slices == 1 else name,
        grid=_divide(args, runs),
        threads=THREADS,
        shared_bytes=_shared_bytes(args),
        args=args,
        cluster=args.slices,
    )


def _resident(launcher: Launcher, args: ShortArgs) -> int:
    """CTAs that all SMs hold at once."""
    by_memory = (launcher.max_shared_bytes + 1024) // (_shared_bytes(args) + 1024)
    return min(CTAS_PER_SM, by_memory) * launcher.num_sms


def _divide(args: ShortArgs, runs: int) -> int:
    """Divide the tiles into runs. Returns how many CTAs that takes."""
    args.tiles_each, args.longer_runs = divmod(args.tiles, runs)
    return runs * int(args.slices)


def _item_bytes(args: StreamArgs, codec: str) -> int:
    return int(4 * args.chunks * CHUNK_BYTES[codec] // args.slices)


def _shared_bytes(args: ShortArgs) -> int:
    """The ring with its scales, the rows and theirs, halves of two tiles, and who was last."""
    rows = int(args.stages) * 2 * (1024 + 32)
    return 2 * THREADS * (128 + 8) + rows + 2 * 2048 + 4 * MAX_TILES
