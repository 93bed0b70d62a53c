"""A decode step's mixture in four launches: who is chosen, gate and up, down, and the sum.

In each of the middle two the routed experts and the shared one run side by side
(`csrc/moe_pair.cu`), so that their weights are one stream of bytes. The bits are those of the
separate kernels (`stream_experts.py`). Knows tensors and a Launcher; not who routed.
"""

from __future__ import annotations

import ctypes
from typing import ClassVar, Literal

import torch
from torch import Tensor

from moet.errors import UnsupportedError
from moet.kernels.decode_experts import Choice
from moet.kernels.stream_experts import ExpertPool, SharedExpert, codec_of, combine
from moet.kernels.stream_gemm import (
    CHUNK_BYTES,
    THREADS,
    Codec,
    Instance,
    Launcher,
    Output,
    StreamArgs,
    complete,
    num_stages,
)

ROWS = 8  # of an item
RING_STAGES = {"w2": 3, "mxfp4": 2, "fp8": 2}


class PairArgs(ctypes.Structure):
    """The kernel's only parameter, field for field `struct PairArgs` of the source."""

    _fields_: ClassVar = [
        ("routed", StreamArgs),
        ("shared", StreamArgs),
        ("shared_ctas", ctypes.c_int32),
    ]


def mix_in_pairs(
    launcher: Launcher,
    codes: Tensor,
    scale: Tensor,
    choice: Choice,
    pool: ExpertPool,
    shared: SharedExpert,
    *,
    limit: float | None,
    error: Tensor,
    weigh_output: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    shared_ctas: int | None = None,
) -> Tensor:
    """Sum over a token's experts, then its shared expert; the bits of `ExpertPool.mixture`.

    codes: [T, D] e4m3 in MMA order, T <= 8, with scale [T, ceil(D/128)] fp32. choice: what
    `choose` or `given` listed, of one pool. shared_ctas: how many CTAs stream the shared expert,
    by default one an item, at most one an SM, or their share of the bytes where a CTA fills an SM.
    Returns [T, D] in dtype. Raises UnsupportedError for
    formats without a kernel and for rows that the shared memory does not hold.
    """
    if codec_of(pool.format) not in RING_STAGES:
        raise UnsupportedError(
            f"{pool.format.name} experts have no paired kernel; use decode_experts.mix"
        )
    (tokens, dim), top_k = codes.shape, choice.expert_ids.shape[1]
    rows = tokens * top_k
    width = pool.format.moe_intermediate_size
    shapes = (rows, width), (tokens, shared.intermediate_size), (rows, dim), (tokens, dim)
    hidden, own_hidden, parts, own = (
        torch.empty(shape, dtype=torch.bfloat16, device=codes.device) for shape in shapes
    )
    if tokens:
        weights = None if weigh_output else choice.weights
        up = pool.up_arguments(
            codes, scale, choice.work, hidden, weights, top_k, limit, error, early=False
        )
        own_up = shared.up_arguments(codes, scale, own_hidden, limit, error)
        _launch(launcher, codec_of(pool.format), "up", up, own_up, rows, 0, shared_ctas)
        down = pool.down_arguments(hidden, choice.work, parts, error, early=True)
        own_down = shared.down.arguments(own_hidden, None, own, slices=1, error=error)
        half = pool.down_half()
        _launch(launcher, codec_of(pool.format), "down", down, own_down, rows, half, shared_ctas)
    return combine(
        launcher,
        parts,
        top_k=top_k,
        weights=choice.weights if weigh_output else None,
        shared=own,
        dtype=dtype,
        expert_ids=choice.expert_ids,
    )


def _launch(
    launcher: Launcher,
    codec: Codec,
    kind: Literal["up", "down"],
    routed: StreamArgs,
    shared: StreamArgs,
    entries: int,
    half_stages: int,
    shared_ctas: int | None,
) -> None:
    stages = complete(routed, codec, half_stages), complete(shared, "fp8")
    needed = max(_shared_bytes(c, kind, n) for c, n in zip((codec, "fp8"), stages, strict=True))
    if needed > launcher.max_shared_bytes:
        raise UnsupportedError(
            f"{routed.k} columns need {needed} bytes of shared memory for a pair of experts; the "
            f"device has {launcher.max_shared_bytes}"
        )
    per_sm = min(2, (launcher.max_shared_bytes + 1024) // (needed + 1024))
    resident = per_sm * launcher.num_sms
    items, own_items = entries * routed.tiles, -(-shared.num_rows // ROWS) * shared.tiles
    own = shared_ctas or launcher.num_sms
    if shared_ctas is None and per_sm == 1:  # then each has a whole SM: by bytes
        own_bytes = own_items * shared.chunks * CHUNK_BYTES["fp8"]
        others = items * routed.chunks * routed.segments * CHUNK_BYTES[codec]
        own = max(1, round(resident * own_bytes / (own_bytes + others)))
    own = min(own, own_items, resident - 1)
    launcher.launch(
        f"pair_{codec}_{kind}",
        grid=own + max(1, min(items, resident - own)),
        threads=THREADS,
        shared_bytes=needed,
        args=PairArgs(routed, shared, own),
    )


def _shared_bytes(codec: str, kind: Literal["up", "down"], stages: int) -> int:
    output: Output = "swiglu" if kind == "up" else "bf16"
    instance = Instance(codec, ROWS, output, kind == "down", RING_STAGES[codec], 2)  # type: ignore[arg-type]
    return instance.shared_bytes(stages)


def fits(launcher: Launcher, pool: ExpertPool, shared: SharedExpert) -> bool:
    """Whether this device has a kernel for these experts that holds their columns."""
    format, codec = pool.format, codec_of(pool.format)
    if codec not in RING_STAGES:
        return False
    up_chunks, down_chunks = format.shapes[0][1] // 128, format.shapes[2][1] // 128
    needed = (
        _shared_bytes(codec, "up", num_stages(codec, up_chunks, 1, 1)),
        _shared_bytes(codec, "down", num_stages(codec, down_chunks, format.num_sub_rows, 1)),
        _shared_bytes("fp8", "up", num_stages("fp8", shared.planes.shape[2] // 128, 1, 1)),
        _shared_bytes("fp8", "down", num_stages("fp8", shared.down.chunks, 1, 1)),
    )
    return max(needed) <= launcher.max_shared_bytes
