"""The expert cache that a device keeps by itself: csrc/expert_cache.cu and what it needs.

`resolve` and `fetch` of expert_cache.py as two kernels between others of a captured step. Rows come
from mapped host memory; a row that is on disk only is waited for. Knows rows by number alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moet.kernels.expert_cache import CacheTables
from moet.kernels.moe import ExpertTable
from moet.kernels.stream_gemm import Launcher, pointer

MAX_EXPERTS = 1024  # of a layer, in the kernel: one thread each
RESOLVE_THREADS = 1024
FETCH_THREADS = 256
FETCH_CTAS = 16  # to saturate a PCIe 5 link; 8 were estimated to reach four fifths of it
RESOLVE_SHARED_BYTES, FETCH_SHARED_BYTES = 4 * (4 * RESOLVE_THREADS + 3), 4 * 2 * MAX_EXPERTS
ERROR_CAPACITY, ERROR_TIMEOUT, ERROR_READ = 1 << 8, 1 << 9, 1 << 10  # bits of the error word


class ResolveArgs(ctypes.Structure):
    """As csrc/expert_cache.cu has it."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("expert_ids", "slot_of", "row_of", "uses", "hand")),
        *((name, ctypes.c_void_p) for name in ("fetch_rows", "fetch_slots", "num_fetch")),
        *((name, ctypes.c_void_p) for name in ("counters", "error", "num_posted", "requests")),
        *((name, ctypes.c_void_p * 2) for name in ("listed", "num_listed")),
        *((name, ctypes.c_int32) for name in ("pairs", "experts", "first_row", "slots")),
        ("request_slots", ctypes.c_int32),
    ]


class FetchArgs(ctypes.Structure):
    """As csrc/expert_cache.cu has it."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("pool", "chunks", "place_of")),
        *((name, ctypes.c_void_p) for name in ("fetch_rows", "fetch_slots", "num_fetch")),
        *((name, ctypes.c_void_p) for name in ("slot_of", "row_of", "counters")),
        *((name, ctypes.c_void_p) for name in ("ctas_done", "error")),
        *((name, ctypes.c_int64) for name in ("row_bytes", "timeout_ns")),
        *((name, ctypes.c_int32) for name in ("rows_per_chunk", "waits")),
    ]


class BringArgs(ctypes.Structure):
    """As csrc/expert_cache.cu has it."""

    _fields_: ClassVar = [
        ("resolve", ResolveArgs),
        ("fetch", FetchArgs),
        ("ready", ctypes.c_void_p),
    ]


@dataclass(frozen=True, slots=True)
class FetchList:
    """A fetch list on the device, for layers of at most so many experts, and what was counted.

    rows, slots: [num_experts] int32. count: [1] int32. num_posted: [1] int32, rows that were ever
    listed. ready: [3] int32, of `bring_on_device`. counters: [num_layers, 3] int64, hits, misses
    and nanoseconds of copying so far.
    """

    rows: Tensor
    slots: Tensor
    count: Tensor
    num_posted: Tensor
    ready: Tensor
    counters: Tensor

    @classmethod
    def on(cls, device: torch.device | str, num_experts: int, num_layers: int) -> FetchList:
        """An empty one."""
        with torch.inference_mode(False):  # to stay writable outside of a forward pass
            numbers = torch.zeros(2 * num_experts + 5, dtype=torch.int32, device=device)
            counters = torch.zeros(num_layers, 3, dtype=torch.int64, device=device)
        sizes = [num_experts, num_experts, 1, 1, 3]
        rows, slots, count, posted, ready = numbers.split_with_sizes(sizes)
        return cls(rows, slots, count, posted, ready, counters)


@dataclass(frozen=True, slots=True)
class HostRows:
    """Rows in host memory as a device sees them.

    chunks: [n] int64 device addresses of chunks of rows_per_chunk rows, on the device. place_of:
    [num_rows] int32 in memory that host and device both map (or on the device, without a disk): the
    place of a row among all chunks, -1 while it is on disk only, -2 if it could not be read.
    ctas_done: [1] int32 on the device, 0 between fetches. requests: [1 + n] int32 in memory that
    both map, how many rows were asked for so far and the last n of them, n a power of two and not
    below the experts of a layer; None if nothing is on disk.

    A place may be given to another row once its own one has been at -1 in place_of and then was not
    among those that were asked for: a fetch reads place_of after its rows were told.
    """

    chunks: Tensor
    rows_per_chunk: int
    place_of: Tensor
    ctas_done: Tensor
    requests: Tensor | None = None


def resolve_on_device(
    launcher: Launcher,
    tables: CacheTables,
    expert_ids: Tensor,
    out: FetchList,
    *,
    first_row: int,
    num_experts: int,
    error: Tensor,
    requests: Tensor | None = None,
    lists: Sequence[tuple[Tensor, Tensor]] = (),
) -> None:
    """As `resolve`, in one kernel. Where slots are too few, ERROR_CAPACITY is set in error [1] and
    the experts without a slot stay at -1.

    expert_ids: int64, contiguous, on the device. requests: where to ask for the rows, too. lists:
    up to two of [n, 4] int32 with their lengths [1], made before the experts had slots: the first
    number becomes the slot of the expert that the second one names in its lower 16 bits. Raises
    ValueError for more experts than the kernel holds.
    """
    launcher.launch(
        "resolve_experts",
        grid=1,
        threads=RESOLVE_THREADS,
        shared_bytes=RESOLVE_SHARED_BYTES,
        args=_resolve_args(tables, expert_ids, out, first_row, num_experts, error, requests, lists),
    )


def _resolve_args(
    tables: CacheTables,
    expert_ids: Tensor,
    out: FetchList,
    first_row: int,
    num_experts: int,
    error: Tensor,
    requests: Tensor | None,
    lists: Sequence[tuple[Tensor, Tensor]],
) -> ResolveArgs:
    if num_experts > MAX_EXPERTS:
        raise ValueError(f"{num_experts} experts in a layer; resolve_experts holds {MAX_EXPERTS}")
    counters = out.counters[first_row // num_experts]
    return ResolveArgs(
        *(t.data_ptr() for t in (expert_ids, tables.slot_of, tables.row_of, tables.uses)),
        *(t.data_ptr() for t in (tables.hand, out.rows, out.slots, out.count, counters)),
        *(error.data_ptr(), out.num_posted.data_ptr(), pointer(requests)),
        *(_pointers([entries for entries, _ in lists]), _pointers([count for _, count in lists])),
        *(expert_ids.numel(), num_experts, first_row, len(tables.row_of)),
        0 if requests is None else len(requests) - 1,
    )


def _pointers(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * 2)(*(tensor.data_ptr() for tensor in tensors))


def fetch_on_device(
    launcher: Launcher,
    pool: Tensor,
    tables: CacheTables,
    host: HostRows,
    wanted: FetchList,
    *,
    layer: int,
    error: Tensor,
    num_ctas: int = FETCH_CTAS,
    timeout_s: float = 2.0,
) -> None:
    """Copy the wanted rows from host memory into pool [num_slots, row_bytes] uint8.

    row_bytes must be a multiple of 16. layer: the place in the counters. Rows on disk are waited
    for; where they do not come, ERROR_TIMEOUT or ERROR_READ is set and they lose their slots again.
    """
    launcher.launch(
        "fetch_experts",
        grid=num_ctas,
        threads=FETCH_THREADS,
        shared_bytes=FETCH_SHARED_BYTES,
        args=_fetch_args(pool, tables, host, wanted, layer, error, timeout_s),
    )


def _fetch_args(
    pool: Tensor,
    tables: CacheTables,
    host: HostRows,
    wanted: FetchList,
    layer: int,
    error: Tensor,
    timeout_s: float,
) -> FetchArgs:
    return FetchArgs(
        *(t.data_ptr() for t in (pool, host.chunks, host.place_of)),
        *(t.data_ptr() for t in (wanted.rows, wanted.slots, wanted.count)),
        *(t.data_ptr() for t in (tables.slot_of, tables.row_of, wanted.counters[layer])),
        *(host.ctas_done.data_ptr(), error.data_ptr(), pool.shape[1], int(timeout_s * 1e9)),
        *(host.rows_per_chunk, int(host.requests is not None)),
    )


def bring_on_device(
    launcher: Launcher,
    pool: Tensor,
    tables: CacheTables,
    host: HostRows,
    wanted: FetchList,
    expert_ids: Tensor,
    *,
    first_row: int,
    num_experts: int,
    error: Tensor,
    lists: Sequence[tuple[Tensor, Tensor]],
    num_ctas: int = FETCH_CTAS,
    timeout_s: float = 2.0,
) -> None:
    """resolve_on_device and then fetch_on_device in one launch, whose CTAs wait for each other, and
    leave at once where the first list says that all are there.

    lists: the first one must have every expert of expert_ids once, with its slot or -1, and room
    for as many as these are.
    """
    launcher.launch(
        "bring_experts",
        grid=num_ctas,
        threads=RESOLVE_THREADS,
        shared_bytes=RESOLVE_SHARED_BYTES,
        args=BringArgs(
            _resolve_args(
                tables, expert_ids, wanted, first_row, num_experts, error, host.requests, lists
            ),
            _fetch_args(pool, tables, host, wanted, first_row // num_experts, error, timeout_s),
            wanted.ready.data_ptr(),
        ),
    )


@dataclass(frozen=True, slots=True)
class DeviceCache:
    """A pool of slots on a GPU that fetches rows itself, with what its two kernels need.

    side: a stream on which rows are copied while the current one goes on; None: they come in turn.
    timeout_s: after which a fetch gives up on rows from disk.
    """

    launcher: Launcher
    pool: Tensor
    tables: CacheTables
    host: HostRows
    wanted: FetchList
    error: Tensor
    side: torch.cuda.Stream | None = None
    num_ctas: int = FETCH_CTAS
    timeout_s: float = 2.0

    def prepare(
        self,
        expert_ids: Tensor,
        first_row: int,
        num_experts: int,
        lists: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> None:
        """Find slots and start to fetch; the rows are there behind `join`.

        lists: what the experts are read by, next; so nothing could go on meanwhile.
        """
        layer = first_row // num_experts
        if lists:
            bring_on_device(
                self.launcher,
                self.pool,
                self.tables,
                self.host,
                self.wanted,
                expert_ids,
                first_row=first_row,
                num_experts=num_experts,
                error=self.error,
                lists=lists,
                num_ctas=self.num_ctas,
                timeout_s=self.timeout_s,
            )
            return
        resolve_on_device(
            self.launcher,
            self.tables,
            expert_ids,
            self.wanted,
            first_row=first_row,
            num_experts=num_experts,
            error=self.error,
            requests=self.host.requests,
        )
        if self.side is None:
            self._fetch(layer)
            return
        self.side.wait_stream(torch.cuda.current_stream(self.pool.device))
        with torch.cuda.stream(self.side):
            self._fetch(layer)

    def join(self) -> None:
        """Let the current stream wait for the rows of the last `prepare` without lists."""
        if self.side is not None:
            torch.cuda.current_stream(self.pool.device).wait_stream(self.side)

    def _fetch(self, layer: int) -> None:
        fetch_on_device(
            self.launcher,
            self.pool,
            self.tables,
            self.host,
            self.wanted,
            layer=layer,
            error=self.error,
            num_ctas=self.num_ctas,
            timeout_s=self.timeout_s,
        )


@dataclass(frozen=True, slots=True)
class CachedTable(ExpertTable):
    """A layer's table whose experts are fetched when they are asked for."""

    cache: DeviceCache | None = None
    first_row: int = 0

    def prepare(self, expert_ids: Tensor, *lists: tuple[Tensor, Tensor]) -> None:
        """As ExpertTable.prepare."""
        assert self.cache is not None
        self.cache.prepare(expert_ids, self.first_row, len(self.slot_of), lists)

    def join(self) -> None:
        """As ExpertTable.join."""
        assert self.cache is not None
        self.cache.join()
