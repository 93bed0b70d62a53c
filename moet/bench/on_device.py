"""`moet bench step` on a GPU: the captured step as the engine replays it, then op by op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import torch
from rich.console import Console
from rich.table import Table

from moet.bench.device_rig import WARM_STEPS, DeviceRig, StepTimes
from moet.bench.device_step import OpCost, OpRecorder, profile_kernels, read_rate, time_ops
from moet.bench.results import Row
from moet.bench.rig import Shape, pack_of
from moet.config import EngineConfig
from moet.errors import ConfigError
from moet.kernels.device_gemm import Device
from moet.kernels.registry import watching
from moet.models.base import ExpertProvider, Model
from moet.models.config_json import read_config
from moet.runtime.device_runner import DeviceModel
from moet.runtime.device_start import (
    load_dummy,
    load_dummy_tiers,
    load_pack,
    place,
    plan_device,
    settle_device,
)
from moet.runtime.dummy import dummy_folder
from moet.runtime.experts.serving_gpu import DeviceServed
from moet.runtime.metrics import ExpertStats
from moet.runtime.text_side import model_folder


def device_for(config: EngineConfig) -> tuple[EngineConfig, Device | None]:
    """The config with the ops of the device that a model would run on, and the GPU if it is one.

    Raises ConfigError if a GPU was asked for and there is none.
    """
    dummy = config.target.weights == "dummy"
    folder = dummy_folder(config.model) if dummy else model_folder(config.model)
    known = folder / "config.json"
    config, gpu = settle_device(config, read_config(known) if known.is_file() else None)
    if dummy and gpu is None:
        raise ConfigError("--weights dummy makes a model of full size on a GPU; there is none here")
    return config, gpu


def measure(config: EngineConfig, gpu: Device, shape: Shape, *, num_steps: int) -> list[Row]:
    """Load a model, time its captured step, and every op of it."""
    recorder = OpRecorder()
    more_rows = replace(config.scheduler, num_spec_tokens=shape.num_rows - 1)
    config = replace(config, scheduler=more_rows)  # so that rings have room for them
    with watching(recorder.watch):
        model, experts, served = _loaded(config, gpu)
    rig = DeviceRig(
        cast(DeviceModel, model),
        experts,
        place(config, gpu),
        num_seqs=shape.num_seqs,
        num_rows=shape.num_rows,
        longest=shape.context,
        others=shape.context,
    )
    stats = served.stats if served is not None and served.caches else None
    rows = time_rig(rig, recorder, shape, num_steps=num_steps, stats=stats)
    if served is not None:
        served.close()
    return rows


def _loaded(config: EngineConfig, gpu: Device) -> tuple[Model, ExpertProvider, DeviceServed | None]:
    """A model, the experts that it decodes with, and what serves them unless all are there."""

    def quiet(stage: str, done: float) -> None: ...

    if config.target.weights != "dummy":
        pack = pack_of(config.model)
        config, plan = plan_device(config, pack.config, gpu)
        model, served = load_pack(config, pack, gpu, quiet, plan)
        return model, served.precisions.decoding, served
    raw = read_config(dummy_folder(config.model) / "config.json")
    if not config.experts.has_tiers:
        return *load_dummy(config, raw, gpu, quiet), None
    config, plan = plan_device(config, raw, gpu)
    model, served = load_dummy_tiers(config, raw, gpu, quiet, plan)
    return model, served.precisions.decoding, served


def time_rig(
    rig: DeviceRig,
    recorder: OpRecorder,
    shape: Shape,
    *,
    num_steps: int,
    stats: Callable[[], ExpertStats] | None = None,
) -> list[Row]:
    """The whole step first, then its experts' tiers, then its ops, the slowest first.

    The model must have been bound while the recorder watched. stats: of experts in tiers.
    """
    rig.fill()
    before = None if stats is None else stats()
    times = rig.time_steps(shape, num_steps)
    tiers = []
    if stats is not None and before is not None:
        tiers = tier_rows(before, stats(), WARM_STEPS + num_steps)
    work = rig.step_work(shape)
    work()
    recorder.record(work)
    queue, capture = rig.queue, rig.placement.capture
    costs = time_ops(recorder, queue, capture)
    rate = read_rate(queue, capture, (2 << 30) if queue.device.type == "cuda" else (1 << 24))
    recorder.calls.clear()
    num_kernels = 0.0
    if queue.device.type == "cuda":
        kernels = profile_kernels(lambda: rig.replay(shape))
        num_kernels = sum(kernel.num_launches for kernel in kernels)
    whole = _whole(shape, times, costs, rate, num_kernels)
    return [*whole, *tiers, *(_op(cost, rate) for cost in costs)]


def tier_rows(before: ExpertStats, after: ExpertStats, num_steps: int) -> list[Row]:
    """What steps asked of each format's pool: hits, missed bytes and the time that copies took,
    with the layers that waited longest."""
    rows = []
    for old, new in zip(before.tiers, after.tiers, strict=True):
        hits, misses, stall_s = (
            new.total(what) - old.total(what) for what in ("num_hits", "num_misses", "stall_s")
        )
        waits = sorted(
            ((b.stall_s - a.stall_s, b.layer) for a, b in zip(old.layers, new.layers, strict=True)),
            reverse=True,
        )
        longest = ", ".join(f"{layer}: {1e6 * s / num_steps:.0f} us" for s, layer in waits[:3])
        share = 100 * hits / max(1.0, hits + misses)
        note = f"{new.num_slots} slots of {new.num_rows} rows; {misses / num_steps:.2f} miss a step"
        missed_mb = misses / num_steps * new.row_bytes / 1e6
        stall_ms = 1e3 * stall_s / num_steps
        rows += [
            Row(case=f"{new.format} hits", value=share, unit="%", better="higher", note=note),
            _row(f"{new.format} missed bytes", missed_mb, "MB/step", None, ""),
            _row(f"{new.format} copies", stall_ms, "ms/step", None, f"longest in layers {longest}"),
        ]
    return rows


def _whole(
    shape: Shape, times: StepTimes, costs: Sequence[OpCost], rate: float, num_kernels: float
) -> list[Row]:
    floor_ms = round(1e3 * sum(cost.num_bytes for cost in costs) / rate, 4)
    note = (
        f"{shape.num_seqs} sequences, {shape.num_rows} rows each, context {shape.context}; "
        f"memory reads at {rate / 1e9:.0f} GB/s; launching takes the host {times.host_us:.0f} us"
    )
    return [
        _row("step", times.step_ms, "ms/step", floor_ms, note),
        _row("gap between steps", times.gap_us, "us", 0.0, ""),
        _row("kernels of a step", num_kernels, "launches", None, ""),
    ]


def _op(cost: OpCost, rate: float) -> Row:
    note = f"{cost.num_calls} calls, {cost.num_bytes / 1e6:.2f} MB"
    return _row(cost.name, cost.time_ms, "ms/step", 1e3 * cost.num_bytes / rate, note)


def _row(case: str, value: float, unit: str, floor: float | None, note: str) -> Row:
    floor = None if floor is None else round(floor, 4)
    return Row(case=case, value=round(value, 4), unit=unit, better="lower", floor=floor, note=note)


def show(rows: Sequence[Row], console: Console) -> None:
    """Print the table that says where the time goes."""
    table = Table("what", "value", "unit", "floor", "x floor", "note")
    for row in rows:
        over = f"{row.value / row.floor:,.1f}" if row.floor else ""
        floor = "" if row.floor is None else f"{row.floor:.3f}"
        table.add_row(row.case, f"{row.value:,.3f}", row.unit, floor, over, row.note)
    console.print(table)


def hardware() -> str:
    """The GPU's name and torch's version."""
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
