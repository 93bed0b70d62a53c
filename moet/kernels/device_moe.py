"""The layer of experts on a GPU, from kernels of their own: router, work list, experts, sum.

Few rows stream the weights, many share tiles; both give a row the same bits. Knows tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

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


@dataclass(frozen=True, slots=True)
class _Layer:
    """What the op got: rows, and the weights of a layer. As in `moe_layer.moe`."""

    x: Activations
    token_ids: Tensor
    positions: Tensor
    router: RouterWeights
    table: ExpertTable
    shared: SharedWeights
    limit: float | None
    weigh_output: bool

    @property
    def device(self) -> Device:
        return device_of(self.router)

    def route(self) -> tuple[Tensor, Tensor]:
        return route(self.x, self.token_ids, self.positions, self.router)

    def inner(self, weights: Tensor) -> Tensor | None:
        """The weights, if they weigh what goes into the down projections."""
        return None if self.weigh_output else weights

    def outer(self, weights: Tensor) -> Tensor | None:
        """The weights, if they weigh what comes out."""
        return weights if self.weigh_output else None

    def coded(self) -> _Layer:
        """The same with the codes of few rows made."""
        x = Activations(self.x.values, *stream_experts.coded(self.device.launcher, self.x))
        return replace(self, x=x)


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
    layer = _Layer(x, token_ids, positions, router, table, shared, limit, weigh_output)
    if isinstance(table, SplitTable):
        return _split(layer, table)
    device, pool, expert = layer.device, pool_of(table), shared.packed
    if (
        expert is not None
        and x.num_rows <= device.paired_rows
        and paired_experts.fits(device.launcher, pool, expert)
    ):
        few = _few(layer, pool, expert)
        readable = x.num_rows <= device_streams.TELL_ROWS and router.top_k <= MAX_CHOICES
        return few if on_read and readable else few.add()
    if x.num_rows > device_gemm.STREAM_ROWS:
        many = _many(layer, pool)
        return many if on_read and device_streams.mixes_on_read(device, many) else many.add()
    layer = layer.coded()
    if device.beside is not None and expert is not None and type(table) is ExpertTable:
        return _beside(layer, pool)
    return _some(layer, pool)


def _many(layer: _Layer, pool: ExpertPool) -> Mixture:
    """For rows enough to share tiles."""
    device, table = layer.device, layer.table
    expert_ids, weights = layer.route()
    table.prepare(expert_ids)  # what has to come does so while the shared expert runs
    dense = _shared(layer, device)
    table.join()
    parts = prefill_gemm.routed(
        device.launcher,
        pool,
        layer.x.plain(),
        expert_ids,
        table.slot_of,
        pair_weight=layer.inner(weights),
        limit=layer.limit,
        error=device.error,
    )
    return Mixture(
        parts, dense, layer.outer(weights), expert_ids, _adder(layer, parts, weights, dense)
    )


def _some(layer: _Layer, pool: ExpertPool) -> Tensor:
    """For some rows with codes: the shared expert, then the routed ones."""
    device, table = layer.device, layer.table
    expert_ids, weights = layer.route()
    table.prepare(expert_ids)
    resident = type(table) is ExpertTable  # then where rows are is known, and their reading may
    work = None  # begin while the shared expert ends
    if resident:
        work = _plan(expert_ids, pool, table.slot_of, device)
    dense = _shared(layer, device)
    table.join()
    if work is None:
        work = _plan(expert_ids, pool, table.slot_of, device)
    parts = _routed(layer, pool, work, weights, early=resident)
    return _sum(layer, parts, weights, dense)


def _beside(layer: _Layer, pool: ExpertPool) -> Tensor:
    """As _some where all experts are there: the shared one on a stream of its own.

    It runs beside the choice, and what is left of it beside the routed ones.
    """
    device = layer.device
    assert device.beside is not None
    with device.beside.forked():
        dense = _shared(layer, replace(device, counters=device.beside.counters))
    expert_ids, weights = layer.route()
    work = _plan(expert_ids, pool, layer.table.slot_of, device)
    parts = _routed(layer, pool, work, weights, early=False)
    device.beside.join()
    return _sum(layer, parts, weights, dense)


def _plan(expert_ids: Tensor, pool: ExpertPool, slot_of: Tensor, device: Device) -> Work:
    """The work list of streamed rows."""
    rows = stream_experts.entry_rows(pool.format, expert_ids.numel(), len(slot_of))
    return stream_experts.plan(device.launcher, expert_ids, slot_of, error=device.error, rows=rows)


def _routed(layer: _Layer, pool: ExpertPool, work: Work, weights: Tensor, *, early: bool) -> Tensor:
    """The routed experts' outputs [T * top_k, D] bf16. early: of gate and up, as in `gate_up`."""
    device, x = layer.device, layer.x
    assert x.codes is not None
    assert x.scale is not None
    hidden = pool.gate_up(
        device.launcher,
        x.codes,
        x.scale,
        work,
        top_k=layer.router.top_k,
        pair_weight=layer.inner(weights),
        limit=layer.limit,
        error=device.error,
        early=early,
    )
    return pool.down(device.launcher, hidden, work, error=device.error, early=True)


def _adder(layer: _Layer, parts: Tensor, weights: Tensor, shared: Tensor) -> Callable[[], Tensor]:
    """Makes the layer's output, [T, D] bf16; holds nothing else of the layer."""
    return partial(
        stream_experts.combine,
        layer.device.launcher,
        parts,
        top_k=layer.router.top_k,
        weights=layer.outer(weights),
        shared=shared,
        dtype=torch.bfloat16,
    )


def _sum(layer: _Layer, parts: Tensor, weights: Tensor, shared: Tensor) -> Tensor:
    return _adder(layer, parts, weights, shared)()


def _gated(gate_up: Tensor, limit: float | None) -> Tensor:
    if not gate_up.is_cuda:  # in emulation
        return swiglu_halves(gate_up, limit=limit)
    from moet.kernels import triton_swiglu  # which needs Triton; a CPU may have none

    return triton_swiglu.swiglu_halves(gate_up, limit=limit)


def _shared(layer: _Layer, device: Device) -> Tensor:
    """The shared expert alone, of few rows with codes or many with values. Returns [T, D] bf16.

    device: the layer's, maybe with counters of its own.
    """
    x, shared, limit = layer.x, layer.shared, layer.limit
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


def _split(layer: _Layer, table: SplitTable) -> Tensor:
    """With experts of two tables: both make parts of all choices, and each choice has that of its
    own table."""
    expert_ids, weights = layer.route()
    table.prepare(expert_ids)
    if layer.x.num_rows <= device_gemm.STREAM_ROWS:
        layer = layer.coded()
    dense = _shared(layer, layer.device)
    table.join()
    cold, hot = (
        _parts(layer, pool_of(of), expert_ids, weights, slot_of)
        for of, slot_of in zip(table.parts(), table.places(), strict=True)
    )
    parts = torch.where(table.is_hot(expert_ids).view(-1, 1), hot, cold)
    return _sum(layer, parts, weights, dense)


def _parts(
    layer: _Layer, pool: ExpertPool, expert_ids: Tensor, weights: Tensor, slot_of: Tensor
) -> Tensor:
    """[T * top_k, D] bf16: what each choice's expert gives."""
    device, x, limit = layer.device, layer.x, layer.limit
    launcher, error, top_k = device.launcher, device.error, layer.router.top_k
    pair_weight = layer.inner(weights)
    if x.codes is not None and x.scale is not None and x.num_rows <= device_gemm.STREAM_ROWS:
        work = _plan(expert_ids, pool, slot_of, device)
        hidden = pool.gate_up(
            launcher,
            x.codes,
            x.scale,
            work,
            top_k=top_k,
            pair_weight=pair_weight,
            limit=limit,
            error=error,
        )
        return pool.down(launcher, hidden, work, error=error)
    return prefill_gemm.routed(
        launcher,
        pool,
        x.plain(),
        expert_ids,
        slot_of,
        pair_weight=pair_weight,
        limit=limit,
        error=error,
    )


def _few(layer: _Layer, pool: ExpertPool, shared: SharedExpert) -> Mixture:
    """For few rows: in four launches, the shared expert beside the choice and the routed ones."""
    device, x, router, table = layer.device, layer.x, layer.router, layer.table
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
        limit=layer.limit,
        error=device.error,
        workspace=Workspace(partial, device.counters),
        token_ids=None if router.table is None else layer.token_ids,
        positions=layer.positions,
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
        limit=layer.limit,
        error=device.error,
        weigh_output=layer.weigh_output,
    )
