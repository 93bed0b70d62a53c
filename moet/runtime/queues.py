"""Where a step's work is queued: a CUDA stream, or the CPU, which does it at once; and how work is
captured, to be queued again by one call. Knows nothing of models and batches."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter, sleep
from typing import Protocol
from weakref import WeakSet

import torch
from torch import Tensor

Work = Callable[[], None]
"""Reads and writes tensors whose places do not change, and decides nothing by their values."""

Capture = Callable[[Work], Work]
"""Runs some work once, and returns what queues the same again."""


class Moment(Protocol):
    """A point in a queue."""

    def wait(self) -> None:
        """Return when everything that was queued before is done."""
        ...

    def seconds_to(self, later: Moment) -> float:
        """Time between two moments of one queue, both over."""
        ...


class Queue(Protocol):
    """Work is carried out in the order it was given. One thread gives it."""

    device: torch.device

    def working(self) -> AbstractContextManager[object]:
        """Work that is launched inside goes to this queue."""
        ...

    def host_tensor(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Zeros in memory that copies to and from the device need not wait for."""
        ...

    def moment(self) -> Moment:
        """Now, in the queue."""
        ...

    def settle(self) -> None:
        """Wait for all work of the device, also what was launched outside of this queue."""
        ...


@dataclass(frozen=True, slots=True)
class _Instant:
    time_s: float

    def wait(self) -> None:
        pass

    def seconds_to(self, later: Moment) -> float:
        assert isinstance(later, _Instant)
        return later.time_s - self.time_s


class CpuQueue:
    """Everything is done when the call that gave it returns."""

    device = torch.device("cpu")

    def working(self) -> AbstractContextManager[object]:
        return nullcontext()

    def host_tensor(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    def moment(self) -> Moment:
        return _Instant(perf_counter())

    def settle(self) -> None:
        pass


class _Event:
    def __init__(self, stream: torch.cuda.Stream, watch: Callable[[], None] | None) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record(stream)
        self._watch = watch

    def wait(self) -> None:
        if self._watch is None:
            self._event.synchronize()
            return
        while not self._event.query():  # type: ignore[no-untyped-call]
            self._watch()
            sleep(0)  # lets other threads go on

    def seconds_to(self, later: Moment) -> float:
        assert isinstance(later, _Event)
        return float(self._event.elapsed_time(later._event)) / 1000


class CudaQueue:
    """A stream of its own on one device. watch: called while the host waits for it, and may raise
    to end that."""

    def __init__(
        self, device: torch.device | str = "cuda", watch: Callable[[], None] | None = None
    ) -> None:
        self.device, self._watch = torch.device(device), watch
        self.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def working(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.stream)

    def host_tensor(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, pin_memory=True)

    def moment(self) -> Moment:
        return _Event(self.stream, self._watch)

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)


def uncaptured(work: Work) -> Work:
    """Queues every launch of the work anew: for devices without graphs, and to debug."""
    work()
    return work


class CudaGraphs:
    """Captures CUDA graphs that share one memory pool, so no two of them may run at once.

    Other threads may use the device meanwhile; a call that waits for it fails the capture.
    """

    def __init__(self, queue: CudaQueue) -> None:
        self.queue = queue
        self._alive = WeakSet[torch.cuda.CUDAGraph]()
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> Work:
        with self.queue.working():
            work()  # compiles and allocates what only a first call does
            self.queue.stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            if not self._alive:  # a pool that no graph uses any more cannot be used again
                self._pool = torch.cuda.graph_pool_handle()
            with _keeping_garbage():
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    work()
                finally:
                    graph.capture_end()
        self._alive.add(graph)
        return graph.replay


@contextmanager
def _keeping_garbage() -> Iterator[None]:
    """Pinned memory that is freed leaves an event on the streams that used it; on one that is being
    captured it would be an event that nobody can ask, and no pinned memory could be had again."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def to_queue(values: Tensor, queue: Queue) -> Tensor:
    """A small host tensor on the queue's device, without waiting for what is queued."""
    if queue.device.type == "cpu":
        return values
    return values.pin_memory().to(queue.device, non_blocking=True)
