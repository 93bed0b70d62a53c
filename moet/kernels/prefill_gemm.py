"""GEMMs for many rows on the streaming planes: dense, and grouped by expert.

The same argument block and the same bits as `stream_gemm.py`; only the tile differs. Knows tensors
and a Launcher.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from moet.errors import UnsupportedError
from moet.kernels.stream_experts import ExpertPool, SharedExpert, Work, codec_of, combine
from moet.kernels.stream_gemm import (
    CHUNKS_PER_STAGE,
    Launcher,
    Part,
    StreamArgs,
    StreamLinear,
    num_stages,
    pointer,
)

LARGE_SHARED_BYTES = 200_000  # from which on a CTA has room for 128 tokens
FEW_ROWS = 32  # of a narrow tile: two CTAs share an SM
FEW_FOR_EXPERTS = 24  # rows of an expert on average, up to which narrow tiles are faster
CHUNKS_AT_ONCE = 4  # that a CTA lays out
THREADS = 384
# Stages of tokens and places of weights, as `csrc/prefill_gemm.cu` lists them: large, small device.
DEPTHS: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "w2_swiglu": ((4, 6), (2, 3)),
    "w2_bf16": ((4, 5), (2, 2)),
    "mxfp4_swiglu": ((3, 4), (2, 2)),
    "mxfp4_bf16": ((3, 4), (2, 2)),
    "nvfp4_swiglu": ((3, 4), (2, 2)),
    "nvfp4_bf16": ((3, 4), (2, 2)),
    "fp8_swiglu": ((3, 3), (2, 0)),
    "fp8_bf16": ((3, 3), (3, 0)),
    "fp8_f32": ((3, 3), (3, 0)),
    "bf16_bf16": ((3, 3), (3, 0)),
    "bf16_f32": ((3, 3), (3, 0)),
    "w2_swiglu_few": ((4, 8), (0, 0)),
    "w2_bf16_few": ((4, 7), (0, 0)),
    "bf16_f32_few": ((3, 3), (0, 0)),
}
# Of a lane's weights in a chunk: bytes of codes.
CODE_BYTES = {"w2": 16, "mxfp4": 32, "nvfp4": 32, "fp8": 64, "bf16": 64}


class TileArgs(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("x", "tiles", "entries")),
        *((name, ctypes.c_void_p) for name in ("num_entries", "pairs")),
        *((name, ctypes.c_int32) for name in ("num_rows", "x_divisor", "k")),
        *((name, ctypes.c_int32) for name in ("ld_x", "chunks", "tokens")),
    ]


@dataclass(frozen=True, slots=True)
class Tiles:
    """Activations cut into tiles, as the kernel's copies take them.

    data: uint8 [tiles, chunks, rows * 132]: the fp32 scales of a chunk's rows, then their e4m3
    bytes; for bf16 [tiles, chunks, rows * 128], without scales. Rows past a tile's end may be
    anything. num_rows: of the activations.
    """

    data: Tensor
    k: int
    rows: int
    num_rows: int


def tile_rows(launcher: Launcher) -> int:
    """Token rows of a tile on this device: the most `rows` of its work lists."""
    return 128 if launcher.max_shared_bytes > LARGE_SHARED_BYTES else 64


def entry_rows(launcher: Launcher, codec: str) -> int:
    """Token rows of a work list's entry at most, for weights of a codec."""
    rows = tile_rows(launcher)
    return rows if codec != "nvfp4" else 96 if rows == 128 else 32


def plan_rows(expert_ids: Tensor, slot_of: Tensor, rows: int) -> Work:
    """A work list for any number of pairs, in torch operations: as few entries of at most `rows`
    as each expert's pairs allow, all but its last of the same size, a multiple of 8.

    expert_ids: [T, top_k] int64, every one in range; slot_of: [num_experts] int64. No host sync.
    """
    flat, experts = expert_ids.flatten(), slot_of.shape[0]
    pairs = torch.argsort(flat, stable=True)
    every = torch.arange(experts, device=flat.device)
    sorted_ids = flat[pairs]
    counts = torch.searchsorted(sorted_ids, every, right=True)
    counts = counts - torch.searchsorted(sorted_ids, every)  # no host sync, unlike bincount
    starts = counts.cumsum(0) - counts
    tiles = (counts + rows - 1) // rows
    sizes = (counts + 8 * tiles.clamp(min=1) - 1) // (8 * tiles.clamp(min=1)) * 8
    ends = tiles.cumsum(0)
    places = torch.arange(experts + flat.numel() // rows, device=flat.device)
    expert = torch.searchsorted(ends, places, right=True).clamp(max=experts - 1)
    offset = sizes[expert] * (places - ends[expert] + tiles[expert])
    count = torch.minimum(counts[expert] - offset, sizes[expert])
    entries = torch.stack([slot_of[expert], expert, starts[expert] + offset, count], dim=1)
    as_int = torch.int32
    return Work(entries.to(as_int).contiguous(), ends[-1:].to(as_int), pairs.to(as_int))


class ChunkPlanArgs(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("expert_ids", "slot_of", "entries")),
        *((name, ctypes.c_void_p) for name in ("num_entries", "places")),
        *((name, ctypes.c_int32) for name in ("pairs", "experts", "rows", "each")),
    ]


def plan_chunk(launcher: Launcher, expert_ids: Tensor, slot_of: Tensor, rows: int) -> Work:
    """plan_rows in one launch where a CTA has room for the ids of all pairs; same parameters."""
    num_pairs, experts, device = expert_ids.numel(), slot_of.shape[0], expert_ids.device
    each = max(2, -(-num_pairs // 1024))
    each += (2 - each) % 4  # an odd number of words apart: no two threads of a warp in a bank
    shared_bytes = 4 * (1024 + 4 + 2 * 1024) + 2 * num_pairs
    if num_pairs == 0 or experts > 1024 or shared_bytes > launcher.max_shared_bytes:
        return plan_rows(expert_ids, slot_of, rows)
    room = experts + num_pairs // rows
    work = Work(
        torch.empty(room, 4, dtype=torch.int32, device=device),
        torch.empty(1, dtype=torch.int32, device=device),
        torch.empty(num_pairs, dtype=torch.int32, device=device),
    )
    args = ChunkPlanArgs(
        expert_ids.contiguous().data_ptr(),
        slot_of.data_ptr(),
        work.entries.data_ptr(),
        work.num_entries.data_ptr(),
        work.pairs.data_ptr(),
        num_pairs,
        experts,
        rows,
        each,
    )
    launcher.launch("plan_chunk", grid=experts, threads=1024, shared_bytes=shared_bytes, args=args)
    return work


def empty_tiles(
    count: int, num_rows: int, k: int, rows: int, *, fp8: bool = True, device: torch.device
) -> Tiles:
    """Room for so many tiles of `rows` rows with k columns."""
    chunks = -(-k // 128) * (1 if fp8 else 2)  # planes are padded to 128 columns
    shape = count, chunks, rows * (132 if fp8 else 128)
    return Tiles(torch.empty(shape, dtype=torch.uint8, device=device), k, rows, num_rows)


def make_tiles(
    launcher: Launcher,
    x: Tensor,
    *,
    work: Work | None = None,
    top_k: int = 1,
    fp8: bool = True,
    rows: int | None = None,
) -> Tiles:
    """x: [T, K] bf16, K % 32 == 0. fp8: e4m3 by the recipe of `stream_experts.quantise`. rows: of
    a tile, `tile_rows` by default.

    With work the tiles follow its entries, whose pairs are rows token * top_k + choice; without,
    the rows of x in order.
    """
    rows, (num_rows, k) = rows or tile_rows(launcher), x.shape
    count = -(-num_rows // rows) if work is None else work.entries.shape[0]
    tiles = empty_tiles(count, num_rows, k, rows, fp8=fp8, device=x.device)
    chunks = tiles.data.shape[1]
    args = TileArgs(x.data_ptr(), tiles.data.data_ptr())
    if work is not None:
        args.entries, args.num_entries = work.entries.data_ptr(), work.num_entries.data_ptr()
        args.pairs = work.pairs.data_ptr()
    args.num_rows, args.x_divisor, args.k, args.ld_x = num_rows, top_k, k, x.stride(0)
    args.chunks, args.tokens = chunks, rows
    if count and num_rows:
        launcher.launch(
            f"lay_tiles_{'fp8' if fp8 else 'bf16'}",
            grid=min(count * -(-chunks // CHUNKS_AT_ONCE), 8 * launcher.num_sms),
            threads=256,
            shared_bytes=0,
            args=args,
        )
    return tiles


def _shared_bytes(launcher: Launcher, name: str, rows: int, waiting: int) -> int:
    """Barriers, stages of tokens, places of weights, and waiting sums (for SwiGLU, and what the
    warpgroups exchange). Raises UnsupportedError if that is more than
    the device has. name: of the kernel, without prefill_."""
    codec, output, *_ = name.split("_")
    most, small = launcher.max_shared_bytes, tile_rows(launcher) < 128
    stages, depth = DEPTHS[name][small]
    place = 256 * CODE_BYTES[codec]
    if codec == "fp8":
        place += 64  # a scale a warp
    elif codec != "bf16":
        place += 256 * (4 if small or codec == "nvfp4" else 8)  # scales and row bases
    sums = rows // 2 * 128 * 4  # of a warpgroup
    total = 128 + stages * rows * (128 if codec == "bf16" else 132)
    total += depth * place + 2 * waiting * sums
    if output == "swiglu":
        total += sums + 2 * (rows // 2 * 144 + rows * 8)
    if total > most:
        raise UnsupportedError(
            f"prefill GEMM with {codec} weights: {total} bytes of shared memory needed, the device "
            f"has {most}"
        )
    return total


def _run(
    launcher: Launcher, name: str, codec: str, args: StreamArgs, tiles: Tiles, *, half: int
) -> None:
    args.mask_high, args.mask_w2_base = 0x88888888, 0x44444444
    args.x, args.k = tiles.data.data_ptr(), tiles.k
    args.first_half_stages = half
    waiting = 2 if args.segments > 1 or args.slices > 1 else 1
    few = tiles.rows < tile_rows(launcher)
    kernel = f"{codec}_{name}" + "_few" * few
    launcher.launch(
        f"prefill_{kernel}",
        grid=max(1, min(tiles.data.shape[0] * args.tiles, (1 + few) * launcher.num_sms)),
        threads=THREADS,
        shared_bytes=_shared_bytes(launcher, kernel, tiles.rows, waiting),
        args=args,
    )


def _half_chunks(codec: str, chunks: int, segments: int, slices: int) -> int:
    """Where the streaming kernel halves a slice's sum, in chunks."""
    if segments > 1:
        return min(2, segments) * chunks
    stages = num_stages(codec, chunks, segments, slices)
    return min(-(-stages // 2) * CHUNKS_PER_STAGE[codec], chunks // slices)


def linear(
    launcher: Launcher,
    weight: StreamLinear,
    tiles: Tiles,
    num_rows: int,
    *,
    error: Tensor,
    output: Literal["f32", "bf16"] = "bf16",
) -> Tensor:
    """tiles: of [num_rows, K], fp8 for fp8 weights, else bf16. Returns [num_rows, N] in the dtype
    of `output`, bit for bit what the streaming kernel returns."""
    dtype = torch.float32 if output == "f32" else torch.bfloat16
    out = torch.empty(num_rows, weight.out_features, dtype=dtype, device=tiles.data.device)
    args = StreamArgs(x_divisor=1, num_slots=1, segments=1, num_rows=num_rows)
    args.weights, args.bases = weight.plane.data_ptr(), pointer(weight.scale)
    args.out, args.error, args.ld_out = out.data_ptr(), error.data_ptr(), out.stride(0)
    args.chunks, args.slices = tiles.data.shape[1], weight.slices(launcher)
    assert args.chunks == weight.chunks, "tiles of other columns or another kind than the weight"
    args.padded_rows, args.columns = weight.plane.shape[0], weight.out_features
    args.tiles = args.tiles_per_segment = -(-args.padded_rows // 128)
    half = _half_chunks(weight.codec, weight.chunks, 1, args.slices)
    if num_rows:
        _run(launcher, output, weight.codec, args, tiles, half=half)
    return out


def rows_of(launcher: Launcher, weight: StreamLinear, num_rows: int, output: str) -> int | None:
    """What `make_tiles` for `linear` is given: narrow tiles where others would leave most of the
    device without one."""
    if weight.codec != "bf16" or output != "f32" or tile_rows(launcher) < 128:
        return None
    items = -(-num_rows // 128) * -(-weight.plane.shape[0] // 128)
    return FEW_ROWS if 2 * items <= launcher.num_sms else None


def run_groups(launcher: Launcher, args: StreamArgs, tiles: Tiles) -> None:
    """Launch on fp8 matrices that `args` describes, one for each group of rows, into bf16.

    tiles: of the work list in args, whose columns are summed in args.slices.
    """
    args.tiles = args.tiles_per_segment = -(-args.padded_rows // 128)
    half = _half_chunks("fp8", args.chunks, 1, args.slices)
    _run(launcher, "bf16", "fp8", args, tiles, half=half)


def gate_up(
    launcher: Launcher,
    pool: ExpertPool,
    tiles: Tiles,
    work: Work,
    *,
    pair_weight: Tensor | None,
    limit: float | None,
    error: Tensor,
) -> Tensor:
    """`ExpertPool.gate_up` on tiles of the work list. Returns [pairs, I] bf16."""
    format, num_pairs = pool.format, work.pairs.shape[0]
    codec, device = codec_of(format), tiles.data.device
    h = torch.empty(num_pairs, format.moe_intermediate_size, dtype=torch.bfloat16, device=device)
    args = StreamArgs(swiglu_limit=float("inf") if limit is None else limit, x_divisor=1)
    pool.fill(args, work, error)
    args.parts[0], args.parts[1] = pool.parts()[:2]
    args.out, args.ld_out, args.pair_weight = h.data_ptr(), h.stride(0), pointer(pair_weight)
    args.num_rows, args.columns = num_pairs, format.columns
    args.padded_rows, width = format.shapes[0]
    args.segments, args.chunks = 1, width // 128
    args.tiles_per_segment = args.padded_rows // 64
    args.tiles = args.tiles_per_segment * format.num_sub_rows
    if num_pairs:
        half = _half_chunks(codec, args.chunks, 1, 1)
        _run(launcher, "swiglu", codec, args, tiles, half=half)
    return h


def down(
    launcher: Launcher, pool: ExpertPool, tiles: Tiles, work: Work, *, error: Tensor
) -> Tensor:
    """`ExpertPool.down` on tiles of the hidden values. Returns [pairs, D] bf16."""
    format, num_pairs = pool.format, work.pairs.shape[0]
    codec, device = codec_of(format), tiles.data.device
    out = torch.empty(num_pairs, format.hidden_size, dtype=torch.bfloat16, device=device)
    args = StreamArgs(x_divisor=1)
    pool.fill(args, work, error)
    args.parts[0] = args.parts[1] = pool.parts()[2]
    args.out, args.ld_out, args.num_rows = out.data_ptr(), out.stride(0), num_pairs
    args.padded_rows, width = format.shapes[2]
    args.segments, args.chunks = format.num_sub_rows, width // 128
    args.tiles = args.tiles_per_segment = -(-args.padded_rows // 128)
    args.columns = format.hidden_size
    if num_pairs:
        half = _half_chunks(codec, args.chunks, args.segments, 1)
        _run(launcher, "bf16", codec, args, tiles, half=half)
    return out


def _few(launcher: Launcher, codec: str, pairs: int, experts: int) -> bool:
    """Whether narrow tiles are faster for so many pairs."""
    return codec == "w2" and tile_rows(launcher) == 128 and pairs <= FEW_FOR_EXPERTS * experts


def mixture(
    launcher: Launcher,
    pool: ExpertPool,
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    slot_of: Tensor,
    *,
    limit: float | None,
    error: Tensor,
    weigh_output: bool = False,
    shared: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`ExpertPool.mixture` for a prefill chunk: the same bits, weights read once per tile."""
    inner, outer = (None, weights) if weigh_output else (weights, None)
    parts = routed(
        launcher, pool, x, expert_ids, slot_of, pair_weight=inner, limit=limit, error=error
    )
    top_k = expert_ids.shape[1]
    return combine(launcher, parts, top_k=top_k, weights=outer, shared=shared, dtype=dtype)


def routed(
    launcher: Launcher,
    pool: ExpertPool,
    x: Tensor,
    expert_ids: Tensor,
    slot_of: Tensor,
    *,
    pair_weight: Tensor | None,
    limit: float | None,
    error: Tensor,
) -> Tensor:
    """What `mixture` sums: [T * top_k, D] bf16, of a token's choices in order."""
    top_k, codec, rows = expert_ids.shape[1], codec_of(pool.format), None
    if _few(launcher, codec, expert_ids.numel(), slot_of.shape[0]):
        rows = FEW_ROWS
    work = plan_chunk(launcher, expert_ids, slot_of, rows or entry_rows(launcher, codec))
    tiles = make_tiles(launcher, x, work=work, top_k=top_k, rows=rows)
    h = gate_up(launcher, pool, tiles, work, pair_weight=pair_weight, limit=limit, error=error)
    del tiles  # each of these is as large as a chunk's hidden states many times over
    h_tiles = make_tiles(launcher, h, work=work, rows=rows)
    del h
    return down(launcher, pool, h_tiles, work, error=error)


def shared_expert(
    launcher: Launcher,
    expert: SharedExpert,
    tiles: Tiles,
    num_rows: int,
    *,
    limit: float | None,
    error: Tensor,
) -> Tensor:
    """`SharedExpert` on fp8 tiles of [num_rows, D]. Returns [num_rows, D] bf16."""
    device, hidden = tiles.data.device, expert.intermediate_size
    h = torch.empty(num_rows, hidden, dtype=torch.bfloat16, device=device)
    _, rows, columns = expert.planes.shape
    args = StreamArgs(swiglu_limit=float("inf") if limit is None else limit, x_divisor=1)
    args.weights, args.bases = expert.planes.data_ptr(), expert.scales.data_ptr()
    args.parts[0] = Part(0, 0, 0)
    args.parts[1] = Part(rows * columns, 0, 4 * expert.scales[0].numel())
    args.out, args.ld_out, args.error = h.data_ptr(), hidden, error.data_ptr()
    args.num_slots, args.num_rows, args.columns = 1, num_rows, hidden
    args.segments, args.slices, args.chunks = 1, 1, columns // 128
    args.padded_rows = rows
    args.tiles = args.tiles_per_segment = rows // 64
    if num_rows:
        half = _half_chunks("fp8", args.chunks, 1, 1)
        _run(launcher, "swiglu", "fp8", args, tiles, half=half)
    return linear(launcher, expert.down, make_tiles(launcher, h), num_rows, error=error)
