"""`moet bench step`: where one step's time goes, op by op, against the bytes that each moves."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from moet.bench.results import Row
from moet.bench.rig import Shape, StepRig, load, pack_of
from moet.config import KVDtype, ModelSettings
from moet.kernels.moe import ExpertTable

OUTSIDE = "outside of ops"  # gathers, casts, Python


@dataclass(slots=True)
class OpTime:
    """What one op did in the measured steps."""

    num_calls: int = 0
    time_s: float = 0.0
    num_bytes: int = 0


@dataclass(slots=True)
class OpTimer:
    """Stands before ops at bind time and adds up their calls, times and bytes.

    Bytes of a call: its tensor arguments and results, and of experts the rows that it chose. An op
    inside another counts as part of that one.
    """

    ops: dict[str, OpTime] = field(default_factory=dict)
    _inside: bool = False

    def watch(self, name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        """As registry.watching takes it."""
        signature = inspect.signature(fn)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return fn(*args, **kwargs)
            self._inside = True
            started_s = perf_counter()
            try:
                result = fn(*args, **kwargs)
            finally:
                elapsed_s = perf_counter() - started_s
                self._inside = False
            entry = self.ops.setdefault(name, OpTime())
            entry.num_calls += 1
            entry.time_s += elapsed_s
            entry.num_bytes += _bytes(signature.bind(*args, **kwargs).arguments, result)
            return result

        return timed

    def clear(self) -> None:
        """Forget what was measured."""
        self.ops.clear()


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Per step. floor_ms: bytes at the rate at which this machine reads memory."""

    shape: Shape
    step_ms: float
    read_bytes_per_s: float
    ops: Mapping[str, OpTime]
    num_steps: int

    def rows(self) -> list[Row]:
        """One a kind of op, the slowest first, then the whole step."""
        found = []
        for name, op in sorted(self.ops.items(), key=lambda item: -item[1].time_s):
            spent_ms = 1000 * op.time_s / self.num_steps
            moved = op.num_bytes / self.num_steps
            found.append(
                Row(
                    case=name,
                    value=round(spent_ms, 4),
                    unit="ms/step",
                    better="lower",
                    floor=round(1000 * moved / self.read_bytes_per_s, 4),
                    note=f"{op.num_calls / self.num_steps:.0f} calls, {moved / 1e6:.2f} MB, "
                    f"{spent_ms / self.step_ms:.1%} of the step",
                )
            )
        shape = self.shape
        floor_ms = sum(row.floor or 0.0 for row in found)
        whole = Row(
            case="step",
            value=round(self.step_ms, 4),
            unit="ms/step",
            better="lower",
            floor=round(floor_ms, 4),
            note=f"{shape.num_seqs} sequences, {shape.num_rows} rows each, context "
            f"{shape.context}; mean of {self.num_steps} steps",
        )
        return [*found, whole]


def time_step(
    model: str,
    settings: ModelSettings,
    kv_dtype: KVDtype,
    shape: Shape,
    *,
    num_steps: int,
    unpacked: bool = True,
) -> StepTimes:
    """Load a model with every op timed and run the same step num_steps times, after one more."""
    timer = OpTimer()
    built, experts = load(pack_of(model), settings, kv_dtype, timer.watch)
    rig = StepRig(built, experts, shape, unpacked=unpacked)
    rig.step()
    timer.clear()
    started_s = perf_counter()
    for _ in range(num_steps):
        rig.step()
    total_s = perf_counter() - started_s
    in_ops_s = sum(op.time_s for op in timer.ops.values())
    ops = {**timer.ops, OUTSIDE: OpTime(num_steps, max(0.0, total_s - in_ops_s))}
    return StepTimes(
        shape=shape,
        step_ms=1000 * total_s / num_steps,
        read_bytes_per_s=read_rate(),
        ops=ops,
        num_steps=num_steps,
    )


def read_rate(num_bytes: int = 256 << 20) -> float:
    """Bytes per second at which this process streams memory: the best of five sums."""
    data = torch.ones(num_bytes // 4)
    times = []
    for _ in range(5):
        started_s = perf_counter()
        data.sum()
        times.append(perf_counter() - started_s)
    return num_bytes / min(times)


def show(times: StepTimes, console: Console) -> None:
    """Print the table that says where the time goes."""
    *rows, whole = times.rows()
    title = f"{whole.note}; memory reads at {times.read_bytes_per_s / 1e9:.1f} GB/s"
    table = Table("op", "calls", "MB", "ms/step", "share", "floor ms", "x floor", title=title)
    for row in rows:
        op = times.ops[row.case]
        calls, moved = op.num_calls / times.num_steps, op.num_bytes / times.num_steps / 1e6
        share = f"{row.value / times.step_ms:.1%}"
        table.add_row(row.case, f"{calls:.0f}", f"{moved:.2f}", *_figures(row, share))
    table.add_section()
    table.add_row("step", "", "", *_figures(whole, ""))
    console.print(table)


def _figures(row: Row, share: str) -> tuple[str, str, str, str]:
    over = f"{row.value / row.floor:,.1f}" if row.floor else ""
    return f"{row.value:.3f}", share, f"{row.floor or 0.0:.3f}", over


def _bytes(arguments: Mapping[str, Any], result: Any) -> int:
    total = _tensor_bytes(result)
    for value in arguments.values():
        if isinstance(value, ExpertTable):
            total += int(arguments["expert_ids"].unique().numel()) * value.format.row_bytes
        else:
            total += _tensor_bytes(value)
    return total


def _tensor_bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, list | tuple):
        return sum(_tensor_bytes(each) for each in value)
    return 0
