"""Expert rows in host memory: an arena of places, filled from disk on demand or once for all.

Knows rows by number, and bytes; knows nothing of layers, devices or formats. The arena replaces by
age of the last use, where leaving the device counts as a use: what the device just gave up stays,
and what it never gives up grows old here, so that the two hold different rows in the end.
"""

from __future__ import annotations

import logging
import mmap
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic, perf_counter

import torch
from torch import Tensor

from moet.errors import CapacityError, ConfigError, ExpertReadError
from moet.runtime.experts.disk import RowFile

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 30  # of an allocation, and of a call that pins it
TOUCHING_THREADS = 16
_NO_MEMORY = (OSError, MemoryError, ValueError, RuntimeError)  # what says so
READ_TIMEOUT_S = 30.0  # after which a row counts as unreadable
RETRY_AFTER_S = 1.0  # a row that could not be read is not tried again so soon


class Arena:
    """num_places rows of host memory, page-aligned, in chunks of whole rows.

    With `pin`, chunks are registered with the CUDA driver once their memory exists, each call a
    step of `progress` (bytes done, bytes in all), and can be read by a device.
    """

    def __init__(
        self,
        num_places: int,
        row_bytes: int,
        *,
        pin: bool = False,
        fill: Callable[[int, Tensor], None] = lambda first, chunk: None,
        progress: Callable[[int, int], None] = lambda done, total: None,
        chunk_bytes: int = CHUNK_BYTES,
        least: int | None = None,
    ) -> None:
        """fill: writes the rows of a chunk, given the first one's place, before it is pinned; those
        of the next chunk meanwhile. least: so many places will do, with a warning, where all are
        not to be had; None: all are needed. Raises ConfigError if the memory is not to be had, and
        what fill raises."""
        self.rows_per_chunk = max(1, min(num_places, chunk_bytes // row_bytes))
        self.chunks: list[Tensor] = []
        self._pinned: list[Tensor] = []
        failed = self._take(num_places, row_bytes)
        if failed is None or least is not None:
            failed = self._fill(fill, pin, progress, num_places * row_bytes) or failed
        self.num_places = sum(map(len, self.chunks))
        if failed is None:
            return
        wanted, had = num_places * row_bytes, self.num_places * row_bytes
        if least is None or self.num_places < least:
            self.close()
            raise ConfigError(
                f"{wanted} bytes of host memory for expert rows are not to be had: {failed} "
                f"after {had}; lower --host-experts"
                + (" or raise the limit of locked memory (ulimit -l)" if pin else "")
            ) from failed
        logger.warning(
            "%d of %d bytes of host memory for expert rows are to be had (%s); other rows are read "
            "from disk when a token needs them%s",
            had,
            wanted,
            failed,
            ", unless ulimit -l allows more" if pin else "",
        )

    def _take(self, num_places: int, row_bytes: int) -> Exception | None:
        """Chunks for the places; why there are no more, if some are missing."""
        try:
            for first in range(0, num_places, self.rows_per_chunk):
                rows = min(self.rows_per_chunk, num_places - first)
                self.chunks.append(page_aligned(rows * row_bytes).view(rows, row_bytes))
        except _NO_MEMORY as error:
            return error
        return None

    def _fill(
        self,
        fill: Callable[[int, Tensor], None],
        pin: bool,
        progress: Callable[[int, int], None],
        total: int,
    ) -> Exception | None:
        """Fill and pin the chunks; why it ended early, with the chunks before, if it did."""
        done = 0
        with ThreadPoolExecutor(1) as filler:
            filled = [
                filler.submit(fill, n * self.rows_per_chunk, chunk)
                for n, chunk in enumerate(self.chunks)
            ]
            try:
                for each, chunk in zip(filled, self.chunks, strict=True):
                    each.result()
                    if pin:
                        _pin(chunk)
                        self._pinned.append(chunk)
                    done += 1
                    progress(min(total, done * self.chunks[0].numel()), total)
            except _NO_MEMORY as error:
                filler.shutdown(cancel_futures=True)
                self.chunks = self.chunks[:done]
                return error
            except BaseException:
                filler.shutdown(cancel_futures=True)
                self.close()
                raise
        return None

    @property
    def is_pinned(self) -> bool:
        return bool(self._pinned)

    def place(self, index: int) -> Tensor:
        """[row_bytes] uint8."""
        chunk, row = divmod(index, self.rows_per_chunk)
        return self.chunks[chunk][row]

    def close(self) -> None:
        """Unpin. The memory goes when nothing refers to it."""
        for chunk in self._pinned:
            unpin(chunk)
        self._pinned = []


def page_aligned(num_bytes: int) -> Tensor:
    """[num_bytes] uint8 of zeros at a page border, which take memory when they are written: in
    large pages where the system has them, as pinning takes time by the page."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def touch(first: int, chunk: Tensor) -> None:
    """As an Arena's fill: zeros, written by many threads, as memory comes to be when it is written.
    For rows that are copied there once it is pinned, which is faster then."""
    with ThreadPoolExecutor(TOUCHING_THREADS) as threads:
        list(threads.map(Tensor.zero_, chunk.chunk(TOUCHING_THREADS)))


def mapped_numbers(count: int, fill: int, *, pin: bool) -> Tensor:
    """[count] int32 that a device reads and writes as well, if pinned. Raises RuntimeError."""
    size = -(-4 * count // mmap.PAGESIZE) * mmap.PAGESIZE
    whole = page_aligned(size)
    whole.view(torch.int32).fill_(fill)
    if pin:
        _pin(whole)
    return whole.view(torch.int32)[:count]


def unpin(memory: Tensor) -> None:
    """Let the driver forget memory that was pinned."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]


def _pin(chunk: Tensor) -> None:
    mapped_and_portable = 3
    status = torch.cuda.cudart().cudaHostRegister(  # type: ignore[no-untyped-call]
        chunk.data_ptr(), chunk.numel(), mapped_and_portable
    )
    if int(status) != 0:
        with suppress(RuntimeError):  # the runtime keeps a fault for whoever launches next
            torch.zeros(1, device="cuda")
        raise RuntimeError(f"cudaHostRegister of {chunk.numel()} bytes failed with {status}")


@dataclass(slots=True)
class HostCounts:
    """What a host tier has done so far."""

    num_hits: int = 0
    num_reads: int = 0
    num_errors: int = 0
    wait_s: float = 0.0


@dataclass(slots=True)
class _Place:
    row: int = -1
    num_users: int = 0
    reading: Future[None] | None = None


@dataclass(slots=True)
class Lease:
    """A row that must not move until it is given back. `bytes` are valid after HostTier.wait."""

    row: int
    index: int
    bytes: Tensor
    reading: Future[None] | None = field(default=None, repr=False)
    is_late: bool = False


@dataclass(frozen=True, slots=True)
class _Failure:
    message: str
    until: float


class HostTier:
    """Rows in an arena. All calls come from one thread at a time; reads are done by the file's.

    disk None: every row that will be asked for has been loaded with `load`.
    """

    def __init__(
        self, arena: Arena, disk: RowFile | None, *, read_timeout_s: float = READ_TIMEOUT_S
    ) -> None:
        self.arena = arena
        self.disk = disk
        self.read_timeout_s = read_timeout_s
        self.counts = HostCounts()
        self._places = [_Place() for _ in range(arena.num_places)]
        self._place_of: dict[int, int] = {}
        self._free = list(range(arena.num_places))[::-1]
        self._order: OrderedDict[int, None] = OrderedDict()  # rows, oldest use first
        self._zombies: list[int] = []  # places of late reads that nobody waits for any more
        self._failures: dict[int, _Failure] = {}

    @property
    def num_free(self) -> int:
        """Places that hold nothing."""
        return len(self._free)

    def holds(self, row: int) -> bool:
        """Whether a row is in memory, or on its way there."""
        return row in self._place_of

    def rows(self) -> list[int]:
        """The rows in memory, oldest use first."""
        return list(self._order)

    def lease(self, row: int, *, scan: bool = False) -> Lease:
        """Have a row brought here, if it is not, and keep it here.

        scan: its use is no sign of more to come; it is the first to leave again. Raises
        CapacityError if every place is in use, and ExpertReadError if there is no disk or the row
        could not be read a moment ago: whoever looks for the request of a batch that needs a bad
        row asks again and again.
        """
        self._refuse(row)
        index = self._place_of.get(row)
        if index is not None and self._has_failed(index):
            self._forget(row)
            self._release(index)
            index = None
        if index is None:
            index = self._read(row, scan=scan)
        else:
            self.counts.num_hits += 1
            if not scan:
                self._order.move_to_end(row)
        place = self._places[index]
        place.num_users += 1
        return Lease(row, index, self.arena.place(index), place.reading)

    def wait(self, lease: Lease) -> None:
        """Until the bytes of a lease are there. Raises ExpertReadError if they will not come."""
        if lease.reading is None:
            return
        started = perf_counter()
        try:
            lease.reading.result(timeout=self.read_timeout_s)
        except TimeoutError:
            assert self.disk is not None
            lease.is_late = True
            self._fail(lease.row, self.disk.late(lease.row, self.read_timeout_s))
        except ExpertReadError as error:
            self._fail(lease.row, str(error))
        finally:
            self.counts.wait_s += perf_counter() - started

    def give_back(self, lease: Lease) -> None:
        """End a lease. A row that could not be read is forgotten, so that it is tried again."""
        place = self._places[lease.index]
        place.num_users -= 1
        if place.num_users or place.row != lease.row or place.reading is None:
            return
        if lease.is_late and not place.reading.done():
            self._forget(place.row)
            self._zombies.append(lease.index)
        elif place.reading.done():
            if place.reading.exception() is None:
                place.reading = None
            else:
                self._forget(place.row)
                self._release(lease.index)

    def touch(self, rows: Iterable[int]) -> None:
        """These have left the device: if they are here, they stay a while."""
        for row in rows:
            if row in self._order:
                self._order.move_to_end(row)

    def check(self) -> None:
        """Raise AssertionError unless every place has one owner."""
        held = sorted([*self._place_of.values(), *self._free, *self._zombies])
        assert held == list(range(self.arena.num_places)), "a place is lost or has two owners"
        assert set(self._order) == set(self._place_of)
        for row, index in self._place_of.items():
            assert self._places[index].row == row

    def check_idle(self) -> None:
        """Raise AssertionError if a lease was not given back."""
        self.check()
        assert not any(place.num_users for place in self._places), "a lease is still held"

    def close(self) -> None:
        """Wait for reads, let go of file and memory."""
        if self.disk is not None:
            self.disk.close()
        self.arena.close()

    def _read(self, row: int, *, scan: bool) -> int:
        if self.disk is None:
            raise ExpertReadError(f"row {row} is neither in host memory nor on disk")
        index = self._take()
        place = self._places[index]
        place.row, place.reading = row, self.disk.read(row, self.arena.place(index))
        self._place_of[row] = index
        self._order[row] = None
        if scan:
            self._order.move_to_end(row, last=False)
        self.counts.num_reads += 1
        return index

    def _take(self) -> int:
        for index in [i for i in self._zombies if self._is_done(i)]:
            self._zombies.remove(index)
            self._release(index)
        if self._free:
            return self._free.pop()
        for row in self._order:
            index = self._place_of[row]
            if self._places[index].num_users == 0 and self._is_done(index):
                self._forget(row)
                return index
        raise CapacityError(
            f"all {self.arena.num_places} places for expert rows in host memory are in use "
            "(--host-experts)"
        )

    def _fail(self, row: int, message: str) -> None:
        self.counts.num_errors += 1
        self._failures[row] = _Failure(message, monotonic() + RETRY_AFTER_S)
        raise ExpertReadError(message)

    def _refuse(self, row: int) -> None:
        failure = self._failures.get(row)
        if failure is None:
            return
        if monotonic() < failure.until:
            raise ExpertReadError(failure.message)
        del self._failures[row]

    def _has_failed(self, index: int) -> bool:
        place = self._places[index]
        reading = place.reading
        done = reading is not None and reading.done() and not place.num_users
        return done and reading is not None and reading.exception() is not None

    def _is_done(self, index: int) -> bool:
        reading = self._places[index].reading
        return reading is None or reading.done()

    def _forget(self, row: int) -> None:
        del self._place_of[row], self._order[row]

    def _release(self, index: int) -> None:
        self._places[index].row, self._places[index].reading = -1, None
        self._free.append(index)
