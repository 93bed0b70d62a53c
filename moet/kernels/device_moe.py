"""The layer of experts on a GPU, from kernels of their own: router, work list, experts, sum.

Few rows stream the weights, many share tiles; both give a row the same bits. Knows tensors.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from moet.errors import UnsupportedError
from moet.kernels import (
    decode_experts,
    device_gemm,
    device_streams,
    paired_experts,
    prefill_gemm,
    stream_experts,
)
from moet.kernels.device_gemm import Device, PackedMatrix
from moet.kernels.layout import ExpertRows
from moet.kernels.mixture import MAX_CHOICES, Mixture
from moet.kernels.moe import ExpertTable, swiglu_halves
from moet.kernels.moe_layer import RouterWeights, SharedWeights
from moet.kernels.quant import Activations, as_activations
from moet.kernels.split_experts import SplitTable
from moet.kernels.stream_experts import ExpertPool, SharedExpert, Work
from moet.kernels.stream_gemm import Workspace


def device_of(router: RouterWeights) -> Device:
    """Where a router's weights are."""
    assert isinstance(router.weight, PackedMatrix), "a GPU multiplies with packed weights"
    return router.weight.device


def route(
    x: Tensor | Activations, token_ids: Tensor, positions: Tensor, router: RouterWeights
) -> tuple[Tensor, Tensor]:
    device = device_of(router)
    assert isinstance(router.weight, PackedMatrix)
    logits = device_gemm.multiply(x, router.weight, output="f32")
    return stream_experts.route(
        device.launcher,
        logits,
        top_k=router.top_k,
        scaling_factor=router.scaling_factor,
        bias=router.bias,
        given=None if router.table is None else router.table[token_ids],
        positions=positions,
        sigmoid=router.sigmoid,
    )


def pool_of(table: ExpertTable) -> ExpertPool:
    """The rows of a table as the kernels take them. Raises UnsupportedError for other formats."""
    if not isinstance(table.format, ExpertRows) or table.bases is None:
        raise UnsupportedError(f"no kernel reads {table.format.name} experts without row bases")
    return ExpertPool(table.format, table.rows, table.bases)


def moe(
    x: Tensor | Activations,
    token_ids: Tensor,
    positions: Tensor,
    router: RouterWeights,
    table: ExpertTable,
    shared: SharedWeights,
    *,
    limit: float | None,
    weigh_output: bool,
    on_read: bool = False,
) -> Tensor | Mixture:
    x = as_activations(x)
    if isinstance(table, SplitTable):
        return _split(x, token_ids, positions, router, table, shared, limit, weigh_output)
    device, pool = device_of(router), pool_of(table)
    expert = shared.packed
    if (
        expert is not None
        and x.num_rows <= device.paired_rows
        and paired_experts.fits(device.launcher, pool, expert)
    ):
        few = _few(x, token_ids, positions, router, table, pool, expert, limit, weigh_output)
        readable = x.num_rows <= device_streams.MIXED_ROWS and router.top_k <= MAX_CHOICES
        return few if on_read and readable else few.add()
    few_enough = x.num_rows <= device_gemm.STREAM_ROWS
    if few_enough:
        x = Activations(x.values, *stream_experts.coded(device.launcher, x))
        if device.beside is not None and expert is not None and type(table) is ExpertTable:
            return _beside(
                x, token_ids, positions, router, table, pool, shared, limit, weigh_output
            )
    expert_ids, weights = route(x, token_ids, positions, router)
    table.prepare(expert_ids)  # what has to come does so while the shared expert runs
    if not few_enough:
        dense = _shared(x, shared, device, limit)
        table.join()
        return prefill_gemm.mixture(
            device.launcher,
            pool,
            x.plain(),
            expert_ids,
            weights,
            table.slot_of,
            limit=limit,
            error=device.error,
            weigh_output=weigh_output,
            shared=dense,
            dtype=torch.bfloat16,
        )
    resident = type(table) is ExpertTable  # then where rows are is known, and their reading may
    work = None  # begin while the shared expert ends
    if resident:
        work = _plan(expert_ids, pool, table.slot_of, device)
    dense = _shared(x, shared, device, limit)
    table.join()
    if work is None:
        work = _plan(expert_ids, pool, table.slot_of, device)
    inner, outer = (None, weights) if weigh_output else (weights, None)
    parts = _routed(x, pool, work, device, router.top_k, inner, limit, early=resident)
    return _sum(parts, device, router.top_k, outer, dense)


def _beside(
    x: Activations,
    token_ids: Tensor,
    positions: Tensor,
    router: RouterWeights,
    table: ExpertTable,
    pool: ExpertPool,
    shared: SharedWeights,
    limit: float | None,
    weigh_output: bool,
) -> Tensor:
    """For some rows with codes, where all experts are there: the shared one on a stream of its own.

    It runs beside the choice, and what is left of it beside the routed ones.
    """
    device = device_of(router)
    assert device.beside is not None
    with device.beside.forked():
        dense = _shared(x, shared, replace(device, counters=device.beside.counters), limit)
    expert_ids, weights = route(x, token_ids, positions, router)
    work = _plan(expert_ids, pool, table.slot_of, device)
    inner, outer = (None, weights) if weigh_output else (weights, None)
    parts = _routed(x, pool, work, device, router.top_k, inner, limit, early=False)
    device.beside.join()
    return _sum(parts, device, router.top_k, outer, dense)


def _plan(expert_ids: Tensor, pool: ExpertPool, slot_of: Tensor, device: Device) -> Work:
    """The work list of streamed rows."""
    rows = stream_experts.entry_rows(pool.format, expert_ids.numel(), len(slot_of))
    return stream_experts.plan(device.launcher, expert_ids, slot_of, error=device.error, rows=rows)


def _routed(
    x: Activations,
    pool: ExpertPool,
    work: Work,
    device: Device,
    top_k: int,
    pair_weight: Tensor | None,
    limit: float | None,
    *,
    early: bool,
) -> Tensor:
    """The routed experts' outputs [T * top_k, D] bf16. early: of gate and up, as in `gate_up`."""
    assert x.codes is not None
    assert x.scale is not None
    hidden = pool.gate_up(
        device.launcher,
        x.codes,
        x.scale,
        work,
        top_k=top_k,
        pair_weight=pair_weight,
        limit=limit,
        error=device.error,
        early=early,
    )
    return pool.down(device.launcher, hidden, work, error=device.error, early=True)


def _sum(
    parts: Tensor, device: Device, top_k: int, weights: Tensor | None, shared: Tensor
) -> Tensor:
    return stream_experts.combine(
        device.launcher, parts, top_k=top_k, weights=weights, shared=shared, dtype=torch.bfloat16
    )


def _gated(gate_up: Tensor, limit: float | None) -> Tensor:
    if not gate_up.is_cuda:  # in emulation
        return swiglu_halves(gate_up, limit=limit)
    from moet.kernels import triton_swiglu  # which needs Triton; a CPU may have none

    return triton_swiglu.swiglu_halves(gate_up, limit=limit)


def _shared(x: Activations, shared: SharedWeights, device: Device, limit: float | None) -> Tensor:
    """The shared expert alone. x: few rows with codes, many with values. Returns [T, D] bf16."""
    expert = shared.packed
    if expert is None:
        gate_up, down = shared.gate_up, shared.down
        assert isinstance(gate_up, PackedMatrix)
        assert isinstance(down, PackedMatrix)
        return device_gemm.multiply(_gated(device_gemm.multiply(x, gate_up), limit), down)
    if x.num_rows > device_gemm.STREAM_ROWS:
        tiles = prefill_gemm.make_tiles(device.launcher, x.plain())
        return prefill_gemm.shared_expert(
            device.launcher, expert, tiles, x.num_rows, limit=limit, error=device.error
        )
    assert x.codes is not None
    assert x.scale is not None
    return expert(
        device.launcher,
        x.codes,
        x.scale,
        limit=limit,
        error=device.error,
        workspace=device.workspace(
            expert.down.slices(device.launcher), x.num_rows * expert.down.out_features
        ),
    )


def _split(
    x: Activations,
    token_ids: Tensor,
    positions: Tensor,
    router: RouterWeights,
    table: SplitTable,
    shared: SharedWeights,
    limit: float | None,
    weigh_output: bool,
) -> Tensor:
    """With experts of two tables: both make parts of all choices, and each choice has that of its
    own table."""
    device = device_of(router)
    expert_ids, weights = route(x, token_ids, positions, router)
    table.prepare(expert_ids)
    if x.num_rows <= device_gemm.STREAM_ROWS:
        x = Activations(x.values, *stream_experts.coded(device.launcher, x))
    dense = _shared(x, shared, device, limit)
    table.join()
    inner, outer = (None, weights) if weigh_output else (weights, None)
    cold, hot = (
        _parts(x, expert_ids, pool_of(of), slot_of, inner, limit, device)
        for of, slot_of in zip(table.parts(), table.places(), strict=True)
    )
    return stream_experts.combine(
        device.launcher,
        torch.where(table.is_hot(expert_ids).view(-1, 1), hot, cold),
        top_k=router.top_k,
        weights=outer,
        shared=dense,
        dtype=torch.bfloat16,
    )


def _parts(
    x: Activations,
    expert_ids: Tensor,
    pool: ExpertPool,
    slot_of: Tensor,
    pair_weight: Tensor | None,
    limit: float | None,
    device: Device,
) -> Tensor:
    """[T * top_k, D] bf16: what each choice's expert gives. x: few rows with codes, or values."""
    launcher, error, top_k = device.launcher, device.error, expert_ids.shape[1]
    if x.codes is not None and x.scale is not None and x.num_rows <= device_gemm.STREAM_ROWS:
        work = _plan(expert_ids, pool, slot_of, device)
        hidden = pool.gate_up(
            *(launcher, x.codes, x.scale, work),
            top_k=top_k,
            pair_weight=pair_weight,
            limit=limit,
            error=error,
        )
        return pool.down(launcher, hidden, work, error=error)
    rows = prefill_gemm.entry_rows(launcher, stream_experts.codec_of(pool.format))
    work = prefill_gemm.plan_chunk(launcher, expert_ids, slot_of, rows)
    tiles = prefill_gemm.make_tiles(launcher, x.plain(), work=work, top_k=top_k)
    hidden = prefill_gemm.gate_up(
        launcher, pool, tiles, work, pair_weight=pair_weight, limit=limit, error=error
    )
    tiles = prefill_gemm.make_tiles(launcher, hidden, work=work)
    return prefill_gemm.down(launcher, pool, tiles, work, error=error)


def _few(
    x: Activations,
    token_ids: Tensor,
    positions: Tensor,
    router: RouterWeights,
    table: ExpertTable,
    pool: ExpertPool,
    shared: SharedExpert,
    limit: float | None,
    weigh_output: bool,
) -> Mixture:
    """For few rows: in four launches, the shared expert beside the choice and the routed ones."""
    device = device_of(router)
    assert isinstance(router.weight, PackedMatrix)
    stored = router.weight.stored
    codes, scale = stream_experts.coded(device.launcher, x)
    partial = torch.empty(
        stored.slices(device.launcher) * x.num_rows * stored.out_features,
        dtype=torch.float32,
        device=device.torch_device,
    )
    begun = paired_experts.begin(
        device.launcher,
        x.plain(),
        codes,
        scale,
        decode_experts.Router(
            stored, router.top_k, router.scaling_factor, router.bias, router.table, router.sigmoid
        ),
        table.slot_of,
        shared,
        limit=limit,
        error=device.error,
        workspace=Workspace(partial, device.counters),
        token_ids=None if router.table is None else token_ids,
        positions=positions,
    )
    choice = begun.choice
    table.prepare(
        choice.expert_ids,
        (choice.chosen, choice.num_chosen),
        (choice.work.entries, choice.work.num_entries),
    )
    return paired_experts.mix_on_read(
        device.launcher,
        codes,
        scale,
        begun,
        pool,
        shared,
        limit=limit,
        error=device.error,
        weigh_output=weigh_output,
    )
