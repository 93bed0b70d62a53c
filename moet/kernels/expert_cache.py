"""The slot table of a device's expert cache: who is resident, who leaves, what is to be fetched.

`resolve` turns the ids of a layer's router into hits and a fetch list and updates the tables;
`fetch` copies the listed rows. Both have a reference here and a kernel in csrc/expert_cache.cu, and
give the same tables bit for bit. Knows rows by number alone: no model, no file, no tier.

The policy is a clock with a use count per slot. A hit raises the count up to MAX_USES. A hand goes
over the slots: it passes those that the call itself needs, takes a slot whose count is 0 and lowers
the others by one. It is an order of n victims among s slots in O(s) at worst and O(n) mostly, needs
no list and no time stamps, and reads the same serially and a thousand slots at a time.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moet.errors import CapacityError
from moet.kernels.moe import ExpertTable
from moet.kernels.stream_gemm import Launcher, pointer

MAX_USES = 3  # of the use count; more would only keep yesterday's rows
STATIC_USES = 255  # of a slot that is never taken
MAX_EXPERTS = 1024  # of a layer, in the kernel: one thread each
RESOLVE_THREADS = 1024
FETCH_THREADS = 256
FETCH_CTAS = 8  # saturate a PCIe 5 link and leave the other SMs to the resident experts
PIECE_BYTES = 16384  # of a row, that a CTA copies at a time
ERROR_CAPACITY, ERROR_TIMEOUT, ERROR_READ = 1 << 8, 1 << 9, 1 << 10  # bits of the error word


@dataclass(frozen=True, slots=True)
class CacheTables:
    """Tables of a pool of slots over rows (experts of all layers), all on the pool's device.

    slot_of: [num_rows] int64, -1 where a row is not resident. row_of: [num_slots] int32, -1 where a
    slot is empty. uses: [num_slots] int32, 0..MAX_USES or STATIC_USES. hand: [1] int32.
    """

    slot_of: Tensor
    row_of: Tensor
    uses: Tensor
    hand: Tensor

    @classmethod
    def empty(
        cls, num_rows: int, num_slots: int, device: torch.device | str = "cpu"
    ) -> CacheTables:
        """Tables of a pool that holds nothing."""
        with torch.inference_mode(False):  # to stay writable outside of a forward pass
            return cls(
                torch.full((num_rows,), -1, dtype=torch.int64, device=device),
                torch.full((num_slots,), -1, dtype=torch.int32, device=device),
                torch.zeros(num_slots, dtype=torch.int32, device=device),
                torch.zeros(1, dtype=torch.int32, device=device),
            )

    def check(self) -> None:
        """Raise AssertionError unless slots and rows name each other."""
        taken = (self.row_of >= 0).nonzero()[:, 0]
        assert torch.equal(self.slot_of[self.row_of[taken].long()], taken)
        assert int((self.slot_of >= 0).sum()) == len(taken), "a row names a slot of another"
        assert 0 <= int(self.hand) < max(1, len(self.row_of))
        counts = self.uses[self.uses != STATIC_USES]
        assert bool(((counts >= 0) & (counts <= MAX_USES)).all())


@dataclass(frozen=True, slots=True)
class Fetch:
    """What a call of resolve asks for: rows and their slots, by ascending row."""

    rows: list[int]
    slots: list[int]
    evicted: list[int]  # rows that had to leave; as many as slots, -1 for a slot that was empty
    num_hits: int


def resolve(tables: CacheTables, expert_ids: Tensor, first_row: int, num_experts: int) -> Fetch:
    """Give every expert that is asked for a slot, and say which rows are to be copied there.

    expert_ids: any shape, int64; ids below 0 are of rows that do not count. Expert e of the layer
    is row first_row + e. Raises CapacityError, changing nothing, if the slots that may be taken are
    too few.
    """
    wanted = sorted({i for i in expert_ids.flatten().tolist() if 0 <= i < num_experts})
    slot_of, uses = tables.slot_of, tables.uses.tolist()
    slots = slot_of[first_row : first_row + num_experts].tolist()
    misses = [first_row + e for e in wanted if slots[e] < 0]
    protected = {slots[e] for e in wanted if slots[e] >= 0}
    free = sum(u != STATIC_USES for u in uses) - sum(uses[s] != STATIC_USES for s in protected)
    if len(misses) > free:
        raise CapacityError(
            f"{len(wanted)} experts of a layer are asked for at once and {len(protected)} of them "
            f"are resident; {free} slots are left for the others"
        )
    for slot in protected:
        if uses[slot] < MAX_USES:
            uses[slot] += 1
    chosen, hand = clock_victims(uses, protected, int(tables.hand), len(misses))
    row_of = tables.row_of.tolist() if misses else []
    evicted = [row_of[slot] for slot in chosen]
    for row, slot in zip(evicted, chosen, strict=True):
        if row >= 0:
            slot_of[row] = -1
        uses[slot] = 0
    if misses:
        at = torch.tensor(chosen)
        slot_of[torch.tensor(misses)] = at
        tables.row_of[at] = torch.tensor(misses, dtype=torch.int32)
    tables.uses.copy_(torch.tensor(uses, dtype=torch.int32))
    tables.hand.fill_(hand)
    return Fetch(misses, chosen, evicted, len(protected))


def clock_victims(
    uses: list[int], protected: set[int], hand: int, num_wanted: int
) -> tuple[list[int], int]:
    """Slots that the hand takes, in order, and where it stops.

    uses: by slot; lowered in place where the hand passes. protected: slots that it must not take.
    There must be num_wanted others that are not static.
    """
    chosen: list[int] = []
    taken = set(protected)
    while len(chosen) < num_wanted:
        if hand not in taken and uses[hand] != STATIC_USES:
            if uses[hand] == 0:
                chosen.append(hand)
                taken.add(hand)
            else:
                uses[hand] -= 1
        hand = (hand + 1) % len(uses)
    return chosen, hand


def fetch(pool: Tensor, source: Tensor, places: list[int], slots: list[int]) -> None:
    """Copy rows: pool[slots[i]] = source[places[i]]. Both [n, row_bytes] uint8."""
    for place, slot in zip(places, slots, strict=True):
        pool[slot].copy_(source[place])


class ResolveArgs(ctypes.Structure):
    """As csrc/expert_cache.cu has it."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("expert_ids", "slot_of", "row_of", "uses", "hand")),
        *((name, ctypes.c_void_p) for name in ("fetch_rows", "fetch_slots", "num_fetch")),
        *((name, ctypes.c_void_p) for name in ("counters", "error", "requests", "progress")),
        *((name, ctypes.c_int32) for name in ("pairs", "experts", "first_row", "slots")),
        ("request_slots", ctypes.c_int32),
    ]


class FetchArgs(ctypes.Structure):
    """As csrc/expert_cache.cu has it."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("pool", "chunks", "place_of")),
        *((name, ctypes.c_void_p) for name in ("fetch_rows", "fetch_slots", "num_fetch")),
        *((name, ctypes.c_void_p) for name in ("progress", "ctas_done", "error")),
        *((name, ctypes.c_int64) for name in ("row_bytes", "timeout_ns")),
        *((name, ctypes.c_int32) for name in ("rows_per_chunk", "waits")),
    ]


@dataclass(frozen=True, slots=True)
class FetchList:
    """A fetch list on the device, for layers of at most so many experts, and what was counted.

    rows, slots: [num_experts] int32. count: [1] int32. counters: [2] int64, hits and misses so far.
    """

    rows: Tensor
    slots: Tensor
    count: Tensor
    counters: Tensor

    @classmethod
    def on(cls, device: torch.device | str, num_experts: int) -> FetchList:
        """An empty one."""
        numbers = torch.zeros(2 * num_experts + 1, dtype=torch.int32, device=device)
        rows, slots, count = torch.split_with_sizes(numbers, [num_experts, num_experts, 1])
        return cls(rows, slots, count, torch.zeros(2, dtype=torch.int64, device=device))


@dataclass(frozen=True, slots=True)
class DiskRequests:
    """How a device asks the host for rows on disk; both in memory that the two of them map.

    ring: [1 + n] int32, how many rows were asked for so far and the last n of them. progress: [2]
    int32, fetches that have begun and have ended: while these differ, the host may move no row that
    a fetch may be reading.
    """

    ring: Tensor
    progress: Tensor


@dataclass(frozen=True, slots=True)
class HostRows:
    """Rows in host memory as a device sees them.

    chunks: [n] int64 device addresses of chunks of rows_per_chunk rows, on the device. place_of:
    [num_rows] int32 in memory that host and device both map (or on the device, without a disk): the
    place of a row among all chunks, -1 while it is on disk only, -2 if it could not be read.
    ctas_done: [1] int32 on the device, 0 between fetches. requests: None if nothing is on disk.
    """

    chunks: Tensor
    rows_per_chunk: int
    place_of: Tensor
    ctas_done: Tensor
    requests: DiskRequests | None = None


def resolve_on_device(
    launcher: Launcher,
    tables: CacheTables,
    expert_ids: Tensor,
    out: FetchList,
    *,
    first_row: int,
    num_experts: int,
    error: Tensor,
    requests: DiskRequests | None = None,
) -> None:
    """As `resolve`, in one kernel. Where slots are too few, ERROR_CAPACITY is set in error [1] and
    the experts without a slot stay at -1.

    expert_ids: int64, contiguous, on the device. requests: where to ask for the rows, too. Raises
    ValueError for more experts than the kernel holds.
    """
    if num_experts > MAX_EXPERTS:
        raise ValueError(f"{num_experts} experts in a layer; resolve_experts holds {MAX_EXPERTS}")
    ring, progress = (None, None) if requests is None else (requests.ring, requests.progress)
    args = ResolveArgs(
        *(t.data_ptr() for t in (expert_ids, tables.slot_of, tables.row_of, tables.uses)),
        *(t.data_ptr() for t in (tables.hand, out.rows, out.slots, out.count, out.counters)),
        *(error.data_ptr(), pointer(ring), pointer(progress)),
        *(expert_ids.numel(), num_experts, first_row, len(tables.row_of)),
        0 if ring is None else len(ring) - 1,
    )
    launcher.launch(
        "resolve_experts",
        grid=1,
        threads=RESOLVE_THREADS,
        shared_bytes=4 * (4 * RESOLVE_THREADS + 1),
        args=args,
    )


def fetch_on_device(
    launcher: Launcher,
    pool: Tensor,
    host: HostRows,
    wanted: FetchList,
    *,
    error: Tensor,
    num_ctas: int = FETCH_CTAS,
    timeout_s: float = 2.0,
) -> None:
    """Copy the wanted rows from host memory into pool [num_slots, row_bytes] uint8.

    row_bytes must be a multiple of 16. Rows on disk are waited for: ERROR_TIMEOUT or ERROR_READ is
    set where they do not come, and their slots hold anything.
    """
    requests = host.requests
    args = FetchArgs(
        *(t.data_ptr() for t in (pool, host.chunks, host.place_of)),
        *(t.data_ptr() for t in (wanted.rows, wanted.slots, wanted.count)),
        pointer(None if requests is None else requests.progress),
        *(host.ctas_done.data_ptr(), error.data_ptr(), pool.shape[1], int(timeout_s * 1e9)),
        *(host.rows_per_chunk, int(requests is not None)),
    )
    launcher.launch(
        "fetch_experts",
        grid=num_ctas,
        threads=FETCH_THREADS,
        shared_bytes=4 * 2 * MAX_EXPERTS,
        args=args,
    )


@dataclass(frozen=True, slots=True)
class DeviceCache:
    """A pool of slots on a GPU that fetches rows itself, with what its two kernels need.

    side: a stream on which rows are copied while the current one goes on; None: they come in turn.
    """

    launcher: Launcher
    pool: Tensor
    tables: CacheTables
    host: HostRows
    wanted: FetchList
    error: Tensor
    side: torch.cuda.Stream | None = None
    num_ctas: int = FETCH_CTAS

    def prepare(self, expert_ids: Tensor, first_row: int, num_experts: int) -> None:
        """Find slots and start to fetch; the rows are there behind `join`."""
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
            self._fetch()
            return
        self.side.wait_stream(torch.cuda.current_stream(self.pool.device))
        with torch.cuda.stream(self.side):
            self._fetch()

    def join(self) -> None:
        """Let the current stream wait for the rows."""
        if self.side is not None:
            torch.cuda.current_stream(self.pool.device).wait_stream(self.side)

    def _fetch(self) -> None:
        fetch_on_device(
            self.launcher,
            self.pool,
            self.host,
            self.wanted,
            error=self.error,
            num_ctas=self.num_ctas,
        )


@dataclass(frozen=True, slots=True)
class CachedTable(ExpertTable):
    """A layer's table whose experts are fetched when they are asked for."""

    cache: DeviceCache | None = None
    first_row: int = 0

    def prepare(self, expert_ids: Tensor) -> None:
        """As ExpertTable.prepare."""
        assert self.cache is not None
        self.cache.prepare(expert_ids, self.first_row, len(self.slot_of))

    def join(self) -> None:
        """As ExpertTable.join."""
        assert self.cache is not None
        self.cache.join()
