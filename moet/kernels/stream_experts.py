"""Routed experts on a GPU: the decode step's kernels from expert ids to the summed output.

Joins the streaming GEMM (`stream_gemm.py`) with the small kernels of `csrc/moe.cu`. Knows tensors
and a Launcher; not models, residency or requests.
"""

from __future__ import annotations

import ctypes
import dataclasses
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from moet.errors import UnsupportedError
from moet.kernels.layout import ExpertRows
from moet.kernels.quant import Activations
from moet.kernels.stream_gemm import (
    Codec,
    Launcher,
    Part,
    StreamArgs,
    StreamLinear,
    Workspace,
    choose,
    num_stages,
    pointer,
    rows_at_once,
    run,
)

QuantisedDense = tuple[Tensor, Tensor]
MAX_EXPERTS = 1023  # of the plan kernel
PLAN_THREADS = 1024
MAX_PAIRS = 16384  # the plan kernel keeps their ids in shared memory
FEW_TOKENS = 256  # beyond, a thread of a sum takes eight columns
WIDE_FROM_PAIRS = 64  # from how many (token, choice) pairs on the wide instances are faster
FEW_ROWS = 4  # of an entry for which NVFP4 has instances of its own


class QuantiseArgs(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("x", "q", "scale")),
        *((name, ctypes.c_int32) for name in ("rows", "k", "ld_x", "groups")),
        *((name, ctypes.c_int32) for name in ("scale_row_stride", "scale_group_stride")),
    ]


class PlanArgs(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("expert_ids", "slot_of", "entries")),
        *((name, ctypes.c_void_p) for name in ("num_entries", "places", "error")),
        *((name, ctypes.c_int32) for name in ("pairs", "experts", "rows")),
    ]


class RouteArgs(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("logits", "bias", "table", "positions")),
        *((name, ctypes.c_void_p) for name in ("expert_ids", "weights")),
        *((name, ctypes.c_int32) for name in ("tokens", "experts", "top_k", "sigmoid")),
        ("scaling_factor", ctypes.c_float),
    ]


class CombineArgs(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("parts", "weights", "shared", "out", "expert_ids")),
        *((name, ctypes.c_int32) for name in ("tokens", "top_k", "dim", "bf16")),
    ]


def route(
    launcher: Launcher,
    logits: Tensor,
    *,
    top_k: int,
    scaling_factor: float,
    bias: Tensor | None = None,
    given: Tensor | None = None,
    positions: Tensor | None = None,
    sigmoid: bool = False,
) -> tuple[Tensor, Tensor]:
    """The experts of each token and their weights.

    logits: [T, E] fp32, E <= 512, top_k <= 32. bias: [E] fp32 chooses and does not weigh. given:
    [T, top_k] int64 fixes the choice. positions: [T] int64; below 0 a row means nothing and chooses
    what the first one does, which is read anyway. sigmoid: those scores, else sqrt(softplus).
    Returns ids [T, top_k] int64, best first, and weights [T, top_k] fp32; a row's sum to
    scaling_factor.
    """
    tokens, experts = logits.shape
    if experts > 512 or top_k > 32:
        raise ValueError(f"{experts} experts, top {top_k}: the route kernel holds 512 and 32")
    ids = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    args = RouteArgs(
        *(pointer(x) for x in (logits, bias, given, positions, ids, weights)),
        *(tokens, experts, top_k, sigmoid, scaling_factor),
    )
    if tokens:
        launcher.launch("route_experts", grid=tokens, threads=32, shared_bytes=0, args=args)
    return ids, weights


def quantise(launcher: Launcher, x: Tensor) -> tuple[Tensor, Tensor]:
    """x: [T, K] bf16, K % 32 == 0, rows contiguous. Returns e4m3 bytes [T, K] in MMA order and
    fp32 scales [T, ceil(K/128)], powers of two by the checkpoints' recipe."""
    rows, k = x.shape
    groups = -(-k // 128)
    q = torch.empty(rows, k, dtype=torch.uint8, device=x.device)
    scale = torch.empty(rows, groups, dtype=torch.float32, device=x.device)
    args = QuantiseArgs(x.data_ptr(), q.data_ptr(), scale.data_ptr(), rows, k, x.stride(0), groups)
    args.scale_row_stride, args.scale_group_stride = scale.stride()
    if rows:
        grid = min(-(-rows * groups * 4 // 256), 8 * launcher.num_sms)
        launcher.launch("quantise_rows", grid=grid, threads=256, shared_bytes=0, args=args)
    return q, scale


def coded(launcher: Launcher, x: Activations) -> tuple[Tensor, Tensor]:
    """Codes and scales of activations, as `quantise` makes them where their maker did not."""
    if x.codes is None or x.scale is None:
        return quantise(launcher, x.plain().contiguous())
    return x.codes, x.scale


@dataclass(frozen=True, slots=True)
class Work:
    """Which rows go to which expert, on the device.

    entries: [max_entries, 4] int32 (slot, expert, first place, count), num_entries: [1] int32,
    pairs: [num_pairs] int32, the (token * top_k + choice) of each place. rows: most of an entry.
    """

    entries: Tensor
    num_entries: Tensor
    pairs: Tensor
    rows: int = 8


def plan(
    launcher: Launcher, expert_ids: Tensor, slot_of: Tensor, *, error: Tensor, rows: int = 8
) -> Work:
    """Sort the pairs by expert. expert_ids: [T, top_k] int64; slot_of: [num_experts] int64. rows:
    most of an entry; an expert with more has several.

    An id out of range or without a slot sets a bit of error and makes its rows NaN.
    Raises ValueError for more experts or pairs than the kernel holds.
    """
    pairs, experts = expert_ids.numel(), slot_of.shape[0]
    if experts > MAX_EXPERTS or pairs > MAX_PAIRS:
        raise ValueError(
            f"{pairs} pairs over {experts} experts; the plan kernel holds {MAX_PAIRS} over "
            f"{MAX_EXPERTS}: send fewer rows at once"
        )
    most = max(1, min(pairs, experts + 1 + pairs // rows))
    make = torch.empty if pairs else torch.zeros  # no pairs, no kernel to write the count
    numbers = make(4 * most + 1 + pairs, dtype=torch.int32, device=expert_ids.device)
    entries, num_entries, places = torch.split_with_sizes(numbers, [4 * most, 1, pairs])
    work = Work(entries.view(most, 4), num_entries, places, rows)
    if pairs:
        args = PlanArgs(
            *(x.data_ptr() for x in (expert_ids, slot_of, work.entries)),
            *(x.data_ptr() for x in (work.num_entries, work.pairs, error)),
            pairs,
            experts,
            rows,
        )
        shared_bytes = 4 * (3 * PLAN_THREADS + pairs)
        launcher.launch(
            "plan_experts", grid=1, threads=PLAN_THREADS, shared_bytes=shared_bytes, args=args
        )
    return work


def combine(
    launcher: Launcher,
    parts: Tensor,
    *,
    top_k: int,
    weights: Tensor | None = None,
    shared: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    expert_ids: Tensor | None = None,
) -> Tensor:
    """Sum a token's parts in the order of its choices, in fp32, then add the shared expert.

    parts: [T * top_k, D] bf16, D even; weights: [T, top_k] fp32; shared: [T, D] bf16. expert_ids:
    [T, top_k] int64, where a token whose first one is below 0 has no parts.
    Returns [T, D] fp32 or bf16.
    """
    tokens, dim = parts.shape[0] // top_k, parts.shape[1]
    out = torch.empty(tokens, dim, dtype=dtype, device=parts.device)
    args = CombineArgs(
        *(pointer(x) for x in (parts, weights, shared, out, expert_ids)), tokens, top_k, dim
    )
    args.bf16 = dtype == torch.bfloat16
    many = tokens > FEW_TOKENS and dim % 8 == 0
    columns = 8 if many else 2  # of a thread
    ctas = 9 if many else 8  # of an SM: whole waves, as it holds 3 or 4 at once
    grid = min(-(-tokens * dim // (256 * columns)), ctas * launcher.num_sms)
    if grid:
        name = "combine_many" if many else "combine_experts"
        launcher.launch(name, grid=grid, threads=256, shared_bytes=0, args=args)
    return out


@lru_cache(maxsize=16)
def _strides(format: ExpertRows) -> tuple[int, int]:
    """From a sub-row to the next, of its bytes and of its row bases."""
    return format.sub_row_bytes, sum(n for n, _ in format.shapes)


@lru_cache(maxsize=16)
def _parts(format: ExpertRows) -> tuple[Part, Part, Part]:
    part_bytes, scales = format.part_bytes, format.scale_bytes
    codes = (0, part_bytes[0], sum(part_bytes[:2]))
    scale_starts = [sum(part_bytes[:3]) + sum(scales[:i]) for i in range(3)]
    rows = [n for n, _ in format.shapes]
    bases = [sum(rows[:i]) for i in range(3)]
    if format.name == "nvfp4":  # whose tensor scales follow the scale planes
        bases = [scale_starts[2] + scales[2] + 4 * i for i in range(3)]
    gate, up, down = (Part(codes[i], scale_starts[i], bases[i]) for i in range(3))
    return gate, up, down


@dataclass(frozen=True, slots=True)
class ExpertPool:
    """Expert rows on the device: rows [num_slots, row_bytes] uint8, bases [experts, ...] uint8."""

    format: ExpertRows
    rows: Tensor
    bases: Tensor

    def fill(self, args: StreamArgs, work: Work, error: Tensor) -> None:
        """Set what depends on the rows and the work alone."""
        args.weights, args.bases = self.rows.data_ptr(), self.bases.data_ptr()
        args.entries, args.num_entries = work.entries.data_ptr(), work.num_entries.data_ptr()
        args.pairs, args.error = work.pairs.data_ptr(), error.data_ptr()
        args.row_stride, args.num_slots = self.rows.stride(0), self.rows.shape[0]
        args.segment_stride, args.base_segment_stride = _strides(self.format)
        args.base_stride = args.base_segment_stride * self.format.num_sub_rows
        args.slices = 1

    def parts(self) -> tuple[Part, Part, Part]:
        """Where gate, up and down lie in a sub-row."""
        return _parts(self.format)

    def gate_up(
        self,
        launcher: Launcher,
        x: Tensor,
        x_scale: Tensor,
        work: Work,
        *,
        top_k: int,
        pair_weight: Tensor | None,
        limit: float | None,
        error: Tensor,
        early: bool = False,
    ) -> Tensor:
        """silu(min(w1 x, limit)) * clamp(w3 x, limit) * pair_weight for every pair.

        x: [T, D] e4m3 bytes in MMA order, x_scale: [T, ceil(D/128)] fp32; pair_weight: [T, top_k]
        fp32. early: the kernel ahead in the stream is not the one that wrote the work, so weights
        may be fetched before that one ends. Returns [T * top_k, I] bf16.
        """
        format, num_pairs = self.format, x.shape[0] * top_k
        h = torch.empty(
            num_pairs, format.moe_intermediate_size, dtype=torch.bfloat16, device=x.device
        )
        chunks = format.shapes[0][1] // 128
        instance = choose(
            codec_of(format),
            rows_of(format, work),
            "swiglu",
            quantise=False,
            wide=work.rows > 8 or num_pairs >= WIDE_FROM_PAIRS,
            stages=num_stages(codec_of(format), chunks, 1, 1),
            max_shared_bytes=launcher.max_shared_bytes,
        )
        args = self.up_arguments(x, x_scale, work, h, pair_weight, top_k, limit, error, early)
        if num_pairs:
            run(launcher, instance, args, items=work.entries.shape[0] * args.tiles)
        return h

    def up_arguments(
        self,
        x: Tensor,
        x_scale: Tensor,
        work: Work,
        h: Tensor,
        pair_weight: Tensor | None,
        top_k: int,
        limit: float | None,
        error: Tensor,
        early: bool,
    ) -> StreamArgs:
        """What a launch of gate and up needs to know; see gate_up. h is the result."""
        format = self.format
        args = StreamArgs(swiglu_limit=float("inf") if limit is None else limit, early=early)
        self.fill(args, work, error)
        parts = self.parts()
        args.parts[0], args.parts[1] = parts[0], parts[1]
        args.x, args.x_scale, args.out = x.data_ptr(), x_scale.data_ptr(), h.data_ptr()
        args.pair_weight = pointer(pair_weight)
        args.num_rows, args.x_divisor, args.k = h.shape[0], top_k, x.shape[1]
        args.ld_x, args.ld_out = x.stride(0), h.stride(0)
        args.ld_x_scale, args.x_group_stride = x_scale.stride(0), x_scale.stride(1)
        args.segments, args.chunks = 1, format.shapes[0][1] // 128
        args.tiles_per_segment = format.shapes[0][0] // 32
        args.tiles = args.tiles_per_segment * format.num_sub_rows
        args.columns = format.columns
        return args

    def down(
        self,
        launcher: Launcher,
        h: Tensor,
        work: Work,
        *,
        error: Tensor,
        early: bool = False,
        listed: bool = False,
    ) -> Tensor:
        """w2 h for every pair. h: [pairs, I] bf16, made e4m3 per 128 on the way in.

        Entries of at most 8 rows. listed: the work has room for an entry of every pair, and may be
        read at once. Returns [pairs, D] bf16; slices of I are (0 + 1) + (2 + 3).
        """
        format = self.format
        out = torch.empty(h.shape[0], format.hidden_size, dtype=torch.bfloat16, device=h.device)
        chunks = format.shapes[2][1] // 128
        stages = num_stages(codec_of(format), chunks, format.num_sub_rows, 1)
        instance = choose(
            codec_of(format),
            rows_of(format, work),
            "bf16",
            quantise=True,
            wide=h.shape[0] >= WIDE_FROM_PAIRS,
            stages=stages,
            max_shared_bytes=launcher.max_shared_bytes,
        )
        args = self.down_arguments(h, work, out, error, early)
        if h.shape[0]:
            items = work.entries.shape[0] * args.tiles
            half = self.down_half()
            run(launcher, instance, args, items=items, half_stages=half, listed=listed)
        return out

    def down_half(self) -> int:
        """After how many stages the sum over the columns of down is halved; 0: in the middle."""
        format = self.format
        if format.num_sub_rows == 1:
            return 0
        chunks = format.shapes[2][1] // 128
        stages = num_stages(codec_of(format), chunks, format.num_sub_rows, 1)
        return 2 * stages // format.num_sub_rows

    def down_arguments(
        self, h: Tensor, work: Work, out: Tensor, error: Tensor, early: bool
    ) -> StreamArgs:
        """What a launch of down needs to know; see down. out is the result."""
        format = self.format
        args = StreamArgs(early=early, x_divisor=1)
        self.fill(args, work, error)
        args.parts[0] = args.parts[1] = self.parts()[2]
        args.x, args.out = h.data_ptr(), out.data_ptr()
        args.num_rows, args.k = h.shape[0], h.shape[1]
        args.ld_x, args.ld_out = h.stride(0), out.stride(0)
        args.segments, args.chunks = format.num_sub_rows, format.shapes[2][1] // 128
        args.tiles = args.tiles_per_segment = format.shapes[2][0] // 64
        args.columns = format.hidden_size
        return args

    def mixture(
        self,
        launcher: Launcher,
        x: Tensor,
        expert_ids: Tensor,
        weights: Tensor,
        slot_of: Tensor,
        *,
        limit: float | None,
        error: Tensor,
        weigh_output: bool = False,
        shared: Tensor | None = None,
        rows: int = 8,
    ) -> Tensor:
        """The whole routed mixture of a decode step: x [T, D] bf16 -> [T, D] fp32.

        expert_ids [T, top_k] int64; weights [T, top_k] fp32 multiply the hidden values, or with
        weigh_output the experts' outputs. Activations are e4m3 per 128 before each product. rows:
        most of an entry of the work list.
        """
        top_k = expert_ids.shape[1]
        work = plan(launcher, expert_ids, slot_of, error=error, rows=rows)
        q, scale = quantise(launcher, x)
        h = self.gate_up(
            launcher,
            q,
            scale,
            work,
            top_k=top_k,
            pair_weight=None if weigh_output else weights,
            limit=limit,
            error=error,
            early=True,
        )
        parts = self.down(launcher, h, work, error=error, early=True)
        outer = weights if weigh_output else None
        return combine(launcher, parts, top_k=top_k, weights=outer, shared=shared)


def rows_of(format: ExpertRows, work: Work) -> int:
    """Rows of an entry that the instance for this work takes."""
    few = format.name == "nvfp4" and work.rows <= FEW_ROWS
    return FEW_ROWS if few else max(8, work.rows)


def entry_rows(format: ExpertRows, num_pairs: int, experts: int) -> int:
    """Most rows of an entry with which a step of so many pairs is fastest: few of NVFP4, where
    next to no expert has more and is then read twice."""
    return FEW_ROWS if format.name == "nvfp4" and num_pairs <= experts else 8


def codec_of(format: ExpertRows) -> Codec:
    """The kernel's name for a row format."""
    codecs: dict[str, Codec] = {"w2": "w2", "mxfp4": "mxfp4", "nvfp4": "nvfp4"}
    return codecs[format.name]


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """A dense SwiGLU block with fp8 weights: gate and up planes in one tensor, and down."""

    planes: Tensor  # uint8: gate, then up
    scales: Tensor  # fp32 [2, ceil(I/128), chunks]
    down: StreamLinear
    intermediate_size: int

    @classmethod
    def fp8(cls, w1: QuantisedDense, w3: QuantisedDense, w2: QuantisedDense) -> SharedExpert:
        """Each a weight [N, K] (one byte an element) and its fp32 scales per 128 x 128 block."""
        gate, up = StreamLinear.fp8(*w1), StreamLinear.fp8(*w3)
        assert gate.scale is not None
        assert up.scale is not None
        planes = torch.stack([gate.plane, up.plane])
        down = dataclasses.replace(StreamLinear.fp8(*w2), fixed_slices=1)
        return cls(planes, torch.stack([gate.scale, up.scale]), down, gate.out_features)

    @classmethod
    def joined(cls, gate_up: StreamLinear, down: StreamLinear) -> SharedExpert:
        """Of gate and up as one fp8 matrix, gate first, each of a multiple of 128 rows."""
        hidden = gate_up.out_features // 2
        assert gate_up.scale is not None
        if hidden % 128:
            raise UnsupportedError(
                f"a shared expert of {hidden} columns; on a GPU that takes a multiple of 128"
            )
        planes = gate_up.plane.view(2, hidden, -1)
        return cls(planes, gate_up.scale.view(2, hidden // 128, -1), down, hidden)

    def to(self, device: torch.device | str) -> SharedExpert:
        return SharedExpert(
            self.planes.to(device),
            self.scales.to(device),
            self.down.to(device),
            self.intermediate_size,
        )

    def __call__(
        self,
        launcher: Launcher,
        q: Tensor,
        scale: Tensor,
        *,
        limit: float | None,
        error: Tensor,
        workspace: Workspace | None,
    ) -> Tensor:
        """q: [T, D] e4m3 in MMA order with scale [T, ceil(D/128)]. Returns [T, D] bf16."""
        h = torch.empty(q.shape[0], self.intermediate_size, dtype=torch.bfloat16, device=q.device)
        args = self.up_arguments(q, scale, h, limit, error)
        stages = num_stages("fp8", args.chunks, 1, 1)
        rows = rows_at_once(launcher, "fp8", "swiglu", q.shape[0], stages)
        instance = choose(
            "fp8",
            rows,
            "swiglu",
            quantise=False,
            wide=True,
            stages=stages,
            max_shared_bytes=launcher.max_shared_bytes,
        )
        if q.shape[0]:
            run(launcher, instance, args, items=-(-q.shape[0] // rows) * args.tiles)
        options: dict[str, Any] = {"error": error, "workspace": workspace}
        stages = num_stages("fp8", self.down.chunks, 1, 1)
        rows = rows_at_once(launcher, "fp8", "bf16", q.shape[0], stages)
        if rows > 8:
            return self.down(launcher, *quantise(launcher, h), rows=rows, **options)
        return self.down(launcher, h, None, **options)

    def up_arguments(
        self, q: Tensor, scale: Tensor, h: Tensor, limit: float | None, error: Tensor
    ) -> StreamArgs:
        """What a launch of gate and up needs to know. h: [T, I] bf16, the result."""
        _, rows, columns = self.planes.shape
        args = StreamArgs(swiglu_limit=float("inf") if limit is None else limit, x_divisor=1)
        args.weights, args.bases = self.planes.data_ptr(), self.scales.data_ptr()
        args.parts[0] = Part(0, 0, 0)
        args.parts[1] = Part(rows * columns, 0, 4 * self.scales[0].numel())
        args.x, args.x_scale, args.out = q.data_ptr(), scale.data_ptr(), h.data_ptr()
        args.error, args.num_slots, args.num_rows = error.data_ptr(), 1, q.shape[0]
        args.k, args.ld_x, args.ld_out = q.shape[1], q.stride(0), h.stride(0)
        args.ld_x_scale, args.x_group_stride = scale.stride(0), scale.stride(1)
        args.segments, args.slices, args.chunks = 1, 1, columns // 128
        args.tiles = args.tiles_per_segment = rows // 32
        args.columns = self.intermediate_size
        return args
