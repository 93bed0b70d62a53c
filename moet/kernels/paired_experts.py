"""A decode step's mixture in four launches, in two of which the shared expert has some of the CTAs.

Who is chosen, beside gate and up of the shared expert; gate and up of the routed ones, beside its
down; their down; the sum (`csrc/moe_pair.cu`). So the shared expert's weights flow while the rest
waits for the router. The bits are those of the separate kernels (`stream_experts.py`). Knows
tensors and a Launcher; not where experts come from.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moet.errors import UnsupportedError
from moet.kernels.decode_experts import (
    Choice,
    ChooseArgs,
    Router,
    choose_arguments,
    choose_shared_bytes,
)
from moet.kernels.mixture import Mixture
from moet.kernels.stream_experts import ExpertPool, SharedExpert, codec_of, combine, rows_of
from moet.kernels.stream_gemm import (
    CHUNK_BYTES,
    LIST_BYTES,
    LIST_ROWS,
    LISTED,
    THREADS,
    Codec,
    Instance,
    Launcher,
    Output,
    StreamArgs,
    Workspace,
    complete,
    num_stages,
    share_among,
)

ROWS = 8  # of an item
OTHERS_COST = 1.5  # of a routed expert's byte, which is decoded and comes after the choice
LISTED_TOKENS = 4  # at most, whose work list is read at once: of more tokens it is a longer wait
RING_STAGES = {"w2": 3, "mxfp4": 2, "nvfp4": 2, "fp8": 2}
# Of the shared expert beside the choice, where CTAs have whole SMs: the deepest that fits.
BEGIN_STAGES = {"pair_begin": 4, "pair_begin_small": 1}


class BeginArgs(ctypes.Structure):
    """Field for field `struct BeginArgs` of the source."""

    _fields_: ClassVar = [("choose", ChooseArgs), ("shared", StreamArgs)]


class PairArgs(ctypes.Structure):
    """Field for field `struct PairArgs` of the source."""

    _fields_: ClassVar = [
        ("routed", StreamArgs),
        ("shared", StreamArgs),
        ("shared_ctas", ctypes.c_int32),
    ]


@dataclass(frozen=True, slots=True)
class Begun:
    """A step whose experts are chosen. hidden: [T, I] bf16, of the shared expert."""

    choice: Choice
    hidden: Tensor


def begin(
    launcher: Launcher,
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    router: Router,
    slot_of: Tensor,
    shared: SharedExpert,
    *,
    limit: float | None,
    error: Tensor,
    workspace: Workspace,
    token_ids: Tensor | None = None,
    positions: Tensor | None = None,
) -> Begun:
    """`decode_experts.choose` beside gate and up of the shared expert.

    x: [T, D] bf16, T <= 8; codes: the same as e4m3 in MMA order with scale [T, ceil(D/128)] fp32.
    """
    choice, choosing = choose_arguments(
        launcher,
        x,
        router,
        slot_of,
        error=error,
        workspace=workspace,
        token_ids=token_ids,
        positions=positions,
    )
    choosing.num_counters = 0  # which `mix` alone has a use for
    tokens = x.shape[0]
    hidden = torch.empty(tokens, shared.intermediate_size, dtype=torch.bfloat16, device=x.device)
    if tokens:
        up = shared.up_arguments(codes, scale, hidden, limit, error)
        stages = complete(up, "fp8")
        name, needed = _beginning(launcher, stages)
        own = max(1, min(up.tiles, launcher.num_sms))
        share_among(up, own, up.tiles)
        launcher.launch(
            name,
            grid=choosing.ctas + own,
            threads=THREADS,
            shared_bytes=max(needed, choose_shared_bytes(choosing)),
            args=BeginArgs(choosing, up),
        )
    return Begun(choice, hidden)


def mix_on_read(
    launcher: Launcher,
    codes: Tensor,
    scale: Tensor,
    begun: Begun,
    pool: ExpertPool,
    shared: SharedExpert,
    *,
    limit: float | None,
    error: Tensor,
    weigh_output: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    shared_ctas: int | None = None,
) -> Mixture:
    """Sum over a token's experts, then its shared expert; the bits of `ExpertPool.mixture`.

    codes: [T, D] e4m3 in MMA order, T <= 8, with scale [T, ceil(D/128)] fp32. begun: of `begin`,
    for one pool. shared_ctas: how many CTAs stream the shared expert, by default its share of the
    bytes. dtype: of the sum. Raises UnsupportedError for formats without a kernel and for
    rows that the shared memory does not hold.
    """
    codec, choice = codec_of(pool.format), begun.choice
    if codec not in RING_STAGES:
        raise UnsupportedError(f"{pool.format.name} experts have no paired kernel")
    (tokens, dim), top_k = codes.shape, choice.expert_ids.shape[1]
    rows, listed = tokens * top_k, tokens <= LISTED_TOKENS
    hidden, own = (
        torch.empty(shape, dtype=torch.bfloat16, device=codes.device)
        for shape in ((rows, pool.format.moe_intermediate_size), (tokens, dim))
    )
    if tokens:
        up = pool.up_arguments(
            codes,
            scale,
            choice.work,
            hidden,
            None if weigh_output else choice.weights,
            top_k,
            limit,
            error,
            early=False,
        )
        down = shared.down.arguments(begun.hidden, None, own, slices=1, error=error)
        few = rows_of(pool.format, choice.work) < ROWS
        name = f"pair_{codec}_few" if few else f"pair_{codec}"
        _launch_pair(launcher, name, codec, up, down, rows, shared_ctas, listed=listed)
    parts = pool.down(launcher, hidden, choice.work, error=error, early=True, listed=listed)
    weights, ids = choice.weights if weigh_output else None, choice.expert_ids

    def add() -> Tensor:
        return combine(
            launcher,
            parts,
            top_k=top_k,
            weights=weights,
            shared=own,
            dtype=dtype,
            expert_ids=ids,
        )

    return Mixture(parts, own, weights, ids, add)


def _launch_pair(
    launcher: Launcher,
    name: str,
    codec: Codec,
    routed: StreamArgs,
    shared: StreamArgs,
    entries: int,
    shared_ctas: int | None,
    *,
    listed: bool,
) -> None:
    needed = _up_bytes(codec, complete(routed, codec))
    if listed and name in LISTED and entries <= LIST_ROWS:
        name, needed = f"{name}_listed", needed + LIST_BYTES
    needed = max(needed, _down_bytes(complete(shared, "fp8")))
    if needed > launcher.max_shared_bytes:
        raise UnsupportedError(
            f"{routed.k} columns need {needed} bytes of shared memory for a pair of experts; the "
            f"device has {launcher.max_shared_bytes}"
        )
    resident = min(2, (launcher.max_shared_bytes + 1024) // (needed + 1024)) * launcher.num_sms
    items, own_items = entries * routed.tiles, -(-shared.num_rows // ROWS) * shared.tiles
    own = shared_ctas or _share(
        resident,
        own_items,
        own_items * shared.chunks * CHUNK_BYTES["fp8"],
        items * routed.chunks * CHUNK_BYTES[codec],
    )
    own = min(own, own_items, resident - 1)
    others = max(1, min(items, resident - own))
    share_among(shared, own, own_items)
    share_among(routed, others, items)
    launcher.launch(
        name,
        grid=own + others,
        threads=THREADS,
        shared_bytes=needed,
        args=PairArgs(routed, shared, own),
    )


def _share(ctas: int, items: int, num_bytes: int, other_bytes: int) -> int:
    """CTAs for items that have num_bytes beside others', so that none has one more than another."""
    wanted = max(1, round(ctas * num_bytes / (num_bytes + OTHERS_COST * other_bytes)))
    return -(-items // -(-items // wanted))


def _up_bytes(codec: Codec, stages: int) -> int:
    output: Output = "swiglu"
    return Instance(codec, ROWS, output, False, RING_STAGES[codec], 2).shared_bytes(stages)


def _down_bytes(stages: int) -> int:
    return Instance("fp8", ROWS, "bf16", True, RING_STAGES["fp8"], 2).shared_bytes(stages)


def _beginning(launcher: Launcher, stages: int) -> tuple[str, int]:
    """The kernel that begins with `stages` of the shared expert, and its shared memory."""
    needed = {
        name: Instance("fp8", ROWS, "swiglu", False, depth, 1).shared_bytes(stages)
        for name, depth in BEGIN_STAGES.items()
    }
    fitting = [name for name in needed if needed[name] <= launcher.max_shared_bytes]
    name = fitting[0] if fitting else "pair_begin_small"
    return name, needed[name]


def fits(launcher: Launcher, pool: ExpertPool, shared: SharedExpert) -> bool:
    """Whether this device has a kernel for these experts that holds their columns."""
    format, codec = pool.format, codec_of(pool.format)
    if codec not in RING_STAGES:
        return False
    needed = (
        _up_bytes(codec, num_stages(codec, format.shapes[0][1] // 128, 1, 1)),
        _down_bytes(num_stages("fp8", shared.down.chunks, 1, 1)),
        _beginning(launcher, num_stages("fp8", shared.planes.shape[2] // 128, 1, 1))[1],
    )
    return max(needed) <= launcher.max_shared_bytes
