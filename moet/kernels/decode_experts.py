"""Who is chosen in a decode step, and experts of two formats in one launch.

For up to eight tokens: `choose` runs the router and lists the chosen experts on the device, `mix`
runs gate, up, SwiGLU, down and the weighted sum of routed and shared experts, in which experts of a
second pool go first. Experts of one format are faster in several launches (`paired_experts.py`).
Joins tensors with the kernels of `csrc/moe_decode.cu`; knows no model, request or residency.
"""

from __future__ import annotations

import ctypes
import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from moet.errors import UnsupportedError
from moet.kernels.stream_experts import ExpertPool, SharedExpert, Work, codec_of
from moet.kernels.stream_gemm import (
    CHUNKS_PER_STAGE,
    THREADS,
    Launcher,
    Part,
    StreamLinear,
    Workspace,
    inverse,
    num_stages,
    pointer,
)

MAX_TOKENS = 8
MAX_EXPERTS = 512
MAX_TOP_K = 32
CODEC_IDS = {"w2": 0, "mxfp4": 1, "fp8": 2, "nvfp4": 4}
STAGE_BYTES = 76 * THREADS  # of the ring
MIXED_STAGES = 2
SHARED_SOURCE = 2
Precision = Literal["bf16", "f32"]


class Source(ctypes.Structure):
    """One format's weights, field for field `struct Source` of the source."""

    _fields_: ClassVar = [
        ("rows", ctypes.c_void_p * 2),
        ("bases", ctypes.c_void_p * 2),
        ("row_stride", ctypes.c_uint64),
        ("base_stride", ctypes.c_uint64),
        ("segment_stride", ctypes.c_uint32),
        ("base_segment_stride", ctypes.c_uint32),
        ("parts", Part * 3),
        *((name, ctypes.c_int32) for name in ("codec", "num_slots", "up_half", "down_half")),
        *((name, ctypes.c_int32) for name in ("down_segments", "down_chunks")),
        *((name, ctypes.c_int32) for name in ("up_tiles_per_segment", "up_columns")),
    ]


class MoeArgs(ctypes.Structure):
    """The kernel's only parameter, field for field `struct MoeArgs` of the source."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("x", "x_codes", "x_scale", "hidden", "parts")),
        *((name, ctypes.c_void_p) for name in ("out", "chosen", "num_chosen", "expert_ids")),
        *((name, ctypes.c_void_p) for name in ("weights", "counters", "error")),
        ("sources", Source * 3),
        *((name, ctypes.c_int32) for name in ("tokens", "top_k", "k", "x_chunks")),
        *((name, ctypes.c_int32) for name in ("intermediate", "dim", "max_chosen")),
        *((name, ctypes.c_int32) for name in ("up_tiles", "down_tiles", "has_shared")),
        *((name, ctypes.c_int32) for name in ("weigh_output", "bf16")),
        ("swiglu_limit", ctypes.c_float),
        ("mask_high", ctypes.c_uint32),
        ("mask_w2_base", ctypes.c_uint32),
    ]


class ChooseArgs(ctypes.Structure):
    """Field for field `struct ChooseArgs` of the source."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "table", "token_ids")),
        ("positions", ctypes.c_void_p),
        ("slot_of", ctypes.c_void_p * 2),
        *((name, ctypes.c_void_p) for name in ("expert_ids", "weights", "chosen", "num_chosen")),
        *((name, ctypes.c_void_p) for name in ("counters", "partial", "arrived", "error")),
        *((name, ctypes.c_void_p) for name in ("entries", "num_entries", "places")),
        *((name, ctypes.c_int32) for name in ("tokens", "k", "chunks", "experts", "top_k")),
        *((name, ctypes.c_int32) for name in ("tiles", "slices", "slice_stages")),
        *((name, ctypes.c_int32) for name in ("first_half_stages", "num_counters", "ctas")),
        *((name, ctypes.c_uint32) for name in ("slices_inverse", "experts_inverse")),
        *((name, ctypes.c_uint32) for name in ("top_k_inverse", "sigmoid")),
        ("scaling_factor", ctypes.c_float),
    ]


@dataclass(frozen=True, slots=True)
class Router:
    """Which experts a token goes to. weight: a bf16 StreamLinear of [experts, D]."""

    weight: StreamLinear
    top_k: int
    scaling_factor: float
    bias: Tensor | None = None  # [experts] fp32, chooses and does not weigh
    table: Tensor | None = None  # [vocabulary, top_k] int64: experts that are given by token id
    sigmoid: bool = False  # scores: sigmoid, else sqrt(softplus)


@dataclass(frozen=True, slots=True)
class Choice:
    """The experts of a step's tokens, on the device.

    expert_ids, weights: [T, top_k], -1 and 0 for a token at a position below 0. chosen: per chosen
    expert 16 bytes (slot, expert and source, which choice of each token). counters: zeros, which
    the launch that follows uses up, so that a Choice serves one `mix`. work: the same list for
    the separate launches, with room for every pair; of the first pool alone.
    """

    expert_ids: Tensor
    weights: Tensor
    chosen: Tensor  # int32 [max_chosen, 4]
    num_chosen: Tensor  # int32 [1]
    counters: Tensor  # int32
    work: Work


def _max_chosen(tokens: int, top_k: int, experts: int) -> int:
    """Room in the list: any expert, the one that stands for invalid ids, and the shared one."""
    return min(tokens * top_k, experts + 1) + 1


def _empty_choice(tokens: int, top_k: int, experts: int, dim: int, x: Tensor) -> Choice:
    most, pairs = _max_chosen(tokens, top_k, experts), tokens * top_k
    counters = most + 4 * -(-dim // 64)
    sizes = [4 * most, 4, 4 * pairs, 4, pairs, counters]  # 16-byte places for the lists
    numbers = torch.empty(sum(sizes), dtype=torch.int32, device=x.device)
    chosen, count, entries, num_entries, places, counts = torch.split_with_sizes(numbers, sizes)
    return Choice(
        torch.empty(tokens, top_k, dtype=torch.int64, device=x.device),
        torch.empty(tokens, top_k, dtype=torch.float32, device=x.device),
        chosen.view(most, 4),
        count[:1],
        counts,
        Work(entries.view(pairs, 4), num_entries[:1], places, tokens),
    )


def _check(tokens: int, top_k: int, experts: int) -> None:
    if tokens > MAX_TOKENS or top_k > MAX_TOP_K or experts > MAX_EXPERTS:
        raise UnsupportedError(
            f"{tokens} tokens, top {top_k} of {experts} experts: the fused decode step holds "
            f"{MAX_TOKENS}, {MAX_TOP_K} and {MAX_EXPERTS}; send fewer tokens at once or use "
            "stream_experts"
        )


def choose(
    launcher: Launcher,
    x: Tensor,
    router: Router,
    slot_of: Tensor,
    *,
    error: Tensor,
    workspace: Workspace,
    token_ids: Tensor | None = None,
    positions: Tensor | None = None,
    preferred: Tensor | None = None,
) -> Choice:
    """Router scores, the best experts and the work list, in one launch.

    x: [T, D] bf16 contiguous, T <= 8. slot_of: [experts] int64, -1 where an expert is not in the
    first pool; preferred: the same of a second pool, which goes first. token_ids: [T] int64, for a
    router with a table. positions: [T] int64; below 0 a token reads no expert. An expert without a
    slot sets a bit of error once its rows are computed. Raises UnsupportedError beyond the limits.
    """
    choice, args = choose_arguments(
        launcher,
        x,
        router,
        slot_of,
        error=error,
        workspace=workspace,
        token_ids=token_ids,
        positions=positions,
        preferred=preferred,
    )
    if args.tokens:
        _launch_choose(launcher, args)
    return choice


def choose_arguments(
    launcher: Launcher,
    x: Tensor,
    router: Router,
    slot_of: Tensor,
    *,
    error: Tensor,
    workspace: Workspace,
    token_ids: Tensor | None = None,
    positions: Tensor | None = None,
    preferred: Tensor | None = None,
) -> tuple[Choice, ChooseArgs]:
    """What a launch of `choose` makes, and what it needs to know. See choose."""
    (tokens, k), experts = x.shape, slot_of.shape[0]
    _check(tokens, router.top_k, experts)
    if (router.table is None) != (token_ids is None):
        raise ValueError("a router with a table needs token_ids, one without takes none")
    choice = _empty_choice(tokens, router.top_k, experts, k, x)
    args = _choose_args(choice, slot_of, preferred, tokens, error)
    linear = router.weight
    args.x, args.weight, args.k = x.data_ptr(), linear.plane.data_ptr(), k
    args.bias, args.table = pointer(router.bias), pointer(router.table)
    args.token_ids, args.positions = pointer(token_ids), pointer(positions)
    args.sigmoid, args.scaling_factor = router.sigmoid, router.scaling_factor
    args.chunks, args.slices = linear.chunks, linear.slices(launcher)
    args.tiles = linear.plane.shape[0] // 64
    args.slice_stages = num_stages("bf16", linear.chunks, 1, args.slices)
    args.first_half_stages = -(-args.slice_stages // 2)
    args.ctas, args.slices_inverse = args.tiles * args.slices, inverse(args.slices)
    floats = args.slices * tokens * experts
    if floats > workspace.partial.numel():
        raise ValueError(f"workspace of {workspace.partial.numel()} floats; {floats} are needed")
    args.partial, args.arrived = workspace.partial.data_ptr(), workspace.counters.data_ptr()
    return choice, args


def given(
    launcher: Launcher,
    expert_ids: Tensor,
    weights: Tensor,
    slot_of: Tensor,
    dim: int,
    *,
    error: Tensor,
    preferred: Tensor | None = None,
) -> Choice:
    """The work list of experts that something else has chosen. dim: outputs of the mixture.

    expert_ids: [T, top_k] int64, distinct in a row; -1 throughout a row for a token without
    experts. weights: [T, top_k] fp32. Both must be contiguous; they become part of the Choice.
    """
    (tokens, top_k), experts = expert_ids.shape, slot_of.shape[0]
    _check(tokens, top_k, experts)
    empty = _empty_choice(tokens, top_k, experts, dim, expert_ids)
    choice = dataclasses.replace(empty, expert_ids=expert_ids, weights=weights)
    args = _choose_args(choice, slot_of, preferred, tokens, error)
    args.ctas = 1
    if tokens:
        _launch_choose(launcher, args)
    return choice


def _choose_args(
    choice: Choice, slot_of: Tensor, preferred: Tensor | None, tokens: int, error: Tensor
) -> ChooseArgs:
    args = ChooseArgs(tokens=tokens, experts=slot_of.shape[0], top_k=choice.expert_ids.shape[1])
    args.slot_of[0], args.slot_of[1] = slot_of.data_ptr(), pointer(preferred)
    args.expert_ids, args.weights = choice.expert_ids.data_ptr(), choice.weights.data_ptr()
    args.chosen, args.num_chosen = choice.chosen.data_ptr(), choice.num_chosen.data_ptr()
    args.counters, args.num_counters = choice.counters.data_ptr(), choice.counters.numel()
    args.error, args.entries = error.data_ptr(), choice.work.entries.data_ptr()
    args.experts_inverse, args.top_k_inverse = inverse(args.experts), inverse(args.top_k)
    args.num_entries, args.places = choice.work.num_entries.data_ptr(), choice.work.pairs.data_ptr()
    return args


def _launch_choose(launcher: Launcher, args: ChooseArgs) -> None:
    launcher.launch(
        "choose_experts",
        grid=args.ctas,
        threads=THREADS,
        shared_bytes=choose_shared_bytes(args),
        args=args,
    )


def choose_shared_bytes(args: ChooseArgs) -> int:
    """What a CTA needs: the router's operands, later everything that it lists."""
    lists: int = args.experts * (2 * MAX_TOKENS * 4 + MAX_TOKENS + 4 + 4)
    lists += MAX_TOKENS + 4 * MAX_TOKENS * MAX_TOP_K + 4 + THREADS // 32 * 4
    product: int = args.slice_stages * 2048 + 2048
    return max(lists, product)


def mix(
    launcher: Launcher,
    x: Tensor,
    choice: Choice,
    pool: ExpertPool,
    *,
    limit: float | None,
    error: Tensor,
    x_scale: Tensor | None = None,
    preferred: ExpertPool | None = None,
    shared: SharedExpert | None = None,
    weigh_output: bool = False,
    output: Precision = "bf16",
) -> Tensor:
    """Sum over a token's experts, then its shared expert; the bits of `ExpertPool.mixture`.

    x: [T, D] bf16, or with x_scale [T, ceil(D/128)] fp32 e4m3 codes in MMA order, contiguous.
    preferred: the second pool that `choose` was given slots of. weigh_output: weights multiply the
    experts' outputs instead of their hidden values. Returns [T, D].
    """
    tokens, k = x.shape
    format, top_k = pool.format, choice.expert_ids.shape[1]
    dtype = torch.float32 if output == "f32" else torch.bfloat16
    out = torch.empty(tokens, k, dtype=dtype, device=x.device)
    if tokens == 0:
        return out
    inter = format.moe_intermediate_size
    most = choice.chosen.shape[0]
    between = torch.empty(
        tokens, top_k + 1, inter + k, dtype=torch.bfloat16, device=x.device
    ).flatten()
    args = MoeArgs(tokens=tokens, top_k=top_k, k=k, intermediate=inter, dim=k, max_chosen=most)
    args.hidden = between.data_ptr()
    args.parts = between.data_ptr() + 2 * tokens * (top_k + 1) * inter
    if x_scale is None:
        args.x = x.data_ptr()
    else:
        args.x_codes, args.x_scale = x.data_ptr(), x_scale.data_ptr()
    args.out, args.error, args.bf16 = out.data_ptr(), error.data_ptr(), output == "bf16"
    args.chosen, args.num_chosen = choice.chosen.data_ptr(), choice.num_chosen.data_ptr()
    args.expert_ids, args.weights = choice.expert_ids.data_ptr(), choice.weights.data_ptr()
    args.counters = choice.counters.data_ptr()
    args.x_chunks, args.down_tiles = -(-k // 128), -(-k // 64)
    args.up_tiles = format.shapes[0][0] // 32 * format.num_sub_rows
    args.weigh_output, args.swiglu_limit = weigh_output, float("inf") if limit is None else limit
    args.mask_high, args.mask_w2_base = 0x88888888, 0x44444444
    args.sources[0] = args.sources[1] = args.sources[SHARED_SOURCE] = _routed_source(pool)
    if preferred is not None:
        args.sources[1] = _routed_source(preferred)
    if shared is not None:
        if shared.intermediate_size != inter:
            raise UnsupportedError(
                f"shared expert of {shared.intermediate_size} hidden values beside routed ones "
                f"of {inter}: the fused decode step needs them equal"
            )
        args.sources[SHARED_SOURCE], args.has_shared = _shared_source(shared), 1
    _launch_mix(launcher, args)
    return out


def _launch_mix(launcher: Launcher, args: MoeArgs) -> None:
    chunks = -(-args.x_chunks // 4) * 4
    for source in args.sources:
        per_stage = 1 if source.codec == CODEC_IDS["fp8"] else 4 if source.codec == 0 else 2
        padded = -(-source.down_chunks // per_stage) * per_stage
        chunks = max(chunks, source.down_segments * padded)
    needed = chunks * 1024 + 4096 + chunks * MAX_TOKENS + MIXED_STAGES * STAGE_BYTES
    if needed > launcher.max_shared_bytes:
        raise UnsupportedError(
            f"{args.k} columns need {needed} bytes of shared memory for a fused decode step; the "
            f"device has {launcher.max_shared_bytes}"
        )
    ctas = min(2, (launcher.max_shared_bytes + 1024) // (needed + 1024))
    items = args.max_chosen * (args.up_tiles + args.down_tiles)
    launcher.launch(
        "moe_mixed",
        grid=max(1, min(items, ctas * launcher.num_sms)),
        threads=THREADS,
        shared_bytes=needed,
        args=args,
    )


def _halves(codec: str, chunks: int, segments: int) -> int:
    """Where the streaming GEMM halves a sum, in this kernel's stages."""
    stages = num_stages(codec, chunks, segments, 1)
    half = 2 * stages // segments if segments > 1 else -(-stages // 2)
    if codec == "fp8":  # whose stages are single chunks here
        return min(half * CHUNKS_PER_STAGE[codec], chunks)
    return min(half, stages)


def _routed_source(pool: ExpertPool) -> Source:
    format, codec = pool.format, codec_of(pool.format)
    source = Source(codec=CODEC_IDS[codec], num_slots=pool.rows.shape[0])
    for i in range(2):
        source.rows[i], source.bases[i] = pool.rows.data_ptr(), pool.bases.data_ptr()
    source.row_stride = pool.rows.stride(0)
    source.segment_stride = format.sub_row_bytes
    source.base_segment_stride = sum(n for n, _ in format.shapes)
    source.base_stride = source.base_segment_stride * format.num_sub_rows
    for i, part in enumerate(pool.parts()):
        source.parts[i] = part
    chunks = format.shapes[0][1] // 128
    source.up_half = _halves(codec, chunks, 1)
    source.down_segments, source.down_chunks = format.num_sub_rows, format.shapes[2][1] // 128
    source.down_half = _halves(codec, source.down_chunks, source.down_segments)
    source.up_tiles_per_segment, source.up_columns = format.shapes[0][0] // 32, format.columns
    return source


def _shared_source(shared: SharedExpert) -> Source:
    assert shared.down.scale is not None
    _, rows, columns = shared.planes.shape
    source = Source(codec=CODEC_IDS["fp8"], num_slots=1, down_segments=1)
    source.rows[0], source.rows[1] = shared.planes.data_ptr(), shared.down.plane.data_ptr()
    source.bases[0], source.bases[1] = shared.scales.data_ptr(), shared.down.scale.data_ptr()
    source.parts[1] = Part(rows * columns, 0, 4 * shared.scales[0].numel())
    source.up_half = _halves("fp8", columns // 128, 1)
    source.down_chunks = shared.down.chunks
    source.down_half = _halves("fp8", source.down_chunks, 1)
    source.up_tiles_per_segment, source.up_columns = rows // 32, shared.intermediate_size
    return source
