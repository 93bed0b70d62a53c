"""Where a device's step goes: every op of one step timed by itself, against the bytes it moves, and
the kernels that a step launches.

An op's calls of a whole step are captured together and played as one: each reads other weights, so
that nothing is measured out of a cache, and no time of the host counts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from moet.kernels import moe_layer
from moet.kernels.cache import Cache
from moet.kernels.device_gemm import Device
from moet.kernels.moe import ExpertTable
from moet.kernels.rows import Rows
from moet.runtime.queues import Capture, Queue

PLAYS = 5


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an op: the form that was bound, what it got and what it made."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    def __call__(self) -> None:
        self.fn(*self.args, **self.kwargs)


@dataclass(slots=True)
class OpRecorder:
    """Stands before ops at bind time; while it is on, it keeps their calls with all they touch.

    An op inside another is part of that one.
    """

    calls: dict[str, list[Call]] = field(default_factory=dict)
    is_on: bool = False
    _inside: bool = False

    def watch(self, name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        """As registry.watching takes it."""

        def recorded(*args: Any, **kwargs: Any) -> Any:
            if not self.is_on or self._inside:
                return fn(*args, **kwargs)
            self._inside = True
            try:
                result = fn(*args, **kwargs)
            finally:
                self._inside = False
            self.calls.setdefault(name, []).append(Call(fn, args, kwargs, result))
            return result

        return recorded

    def record(self, work: Callable[[], object]) -> None:
        """Keep the calls that some work makes, and only those."""
        self.calls.clear()
        self.is_on = True
        try:
            work()
        finally:
            self.is_on = False


@dataclass(frozen=True, slots=True)
class OpCost:
    """What an op costs in a whole step."""

    name: str
    num_calls: int
    time_ms: float
    num_bytes: int


@torch.inference_mode()
def time_ops(recorder: OpRecorder, queue: Queue, capture: Capture) -> list[OpCost]:
    """The recorded ops, the slowest first."""
    found = []
    for name, calls in recorder.calls.items():
        time_ms = _time_ms(calls, queue, capture)
        found.append(OpCost(name, len(calls), time_ms, sum(map(num_bytes, calls))))
    return sorted(found, key=lambda cost: -cost.time_ms)


def _time_ms(calls: Sequence[Call], queue: Queue, capture: Capture) -> float:
    def work() -> None:
        for call in calls:
            call()

    with queue.working():
        play = capture(work)
        times = []
        for _ in range(PLAYS):
            started = queue.moment()
            play()
            ended = queue.moment()
            ended.wait()
            times.append(1e3 * started.seconds_to(ended))
    return median(times)


def num_bytes(call: Call) -> int:
    """Bytes that a call must move: its weights, inputs and results, and of experts the rows that
    were chosen. What it reads of KV pages is not counted."""
    given = list(inspect.signature(call.fn).bind(*call.args, **call.kwargs).arguments.values())
    seen: set[int] = set()
    total = sum(_bytes(value, seen) for value in [*given, call.result])
    tables = [value for value in given if isinstance(value, ExpertTable)]
    if tables:
        total += _num_experts(call) * tables[0].format.row_bytes
    return total


def _num_experts(call: Call) -> int:
    """How many experts a call reads."""
    given = inspect.signature(call.fn).bind(*call.args, **call.kwargs).arguments
    expert_ids = given.get("expert_ids")
    if expert_ids is None:
        names = ("x", "token_ids", "positions", "router")
        x, token_ids, positions, router = (given[name] for name in names)
        on_device = isinstance(token_ids, Tensor) and token_ids.device.type != "cpu"
        route = moe_layer.route.impls[0].fn if on_device else moe_layer.route.reference
        expert_ids, _ = route(x, token_ids, positions, router)
    return int(expert_ids.unique().numel())


def _bytes(value: Any, seen: set[int]) -> int:
    if isinstance(value, Tensor):
        if value.data_ptr() in seen:
            return 0
        seen.add(value.data_ptr())
        return value.numel() * value.element_size()
    if isinstance(value, list | tuple):
        return sum(_bytes(each, seen) for each in value)
    skipped = isinstance(value, ExpertTable | Cache | Rows | Device | type)
    if is_dataclass(value) and not skipped:
        return sum(_bytes(getattr(value, each.name), seen) for each in fields(value))
    return 0


@dataclass(frozen=True, slots=True)
class KernelCost:
    """One kernel's launches in a step."""

    name: str
    num_launches: float
    time_us: float


def profile_kernels(work: Callable[[], object], num_times: int = 3) -> list[KernelCost]:
    """The kernels that some work launches on a GPU, per time, the longest in sum first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(num_times):
            work()
        torch.cuda.synchronize()
    found = [
        KernelCost(event.key, event.count / num_times, float(event.device_time_total) / num_times)
        for event in profiled.key_averages()
        if event.device_time_total > 0
    ]
    return sorted(found, key=lambda cost: -cost.time_us)


def read_rate(queue: Queue, capture: Capture, total_bytes: int = 2 << 30) -> float:
    """Bytes per second of the better of two streams over much memory: a sum and a copy."""
    with queue.working():
        source = torch.ones(total_bytes // 4, device=queue.device)
        target = torch.empty_like(source)
        out = torch.empty((), device=queue.device)

        def add() -> None:
            torch.sum(source, 0, out=out)

        calls: list[tuple[Callable[[], object], int]] = [
            (add, total_bytes),
            (partial(target.copy_, source), 2 * total_bytes),
        ]
        return max(
            moved / (1e-3 * _time_ms([Call(fn, (), {}, None)], queue, capture))
            for fn, moved in calls
        )
