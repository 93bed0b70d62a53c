"""Brings rows from disk into host memory while a device waits for them.

A device tells, through memory that both map, which rows it is about to copy; a thread reads what is
on disk only and says in the same way where it lies. What was asked for least leaves, older requests
counting less: the pool keeps what is asked for in every step, and the next ones are found here.
Makes no CUDA call, holds no lock that a step needs, and knows rows by number alone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue

import numpy as np
from torch import Tensor

from moet.runtime.experts.disk import RowFile
from moet.runtime.experts.host import RETRY_AFTER_S, Arena

logger = logging.getLogger(__name__)

POLL_S, IDLE_POLL_S = 5e-5, 1e-3  # between looks at what is asked for; a read takes a millisecond
IDLE_AFTER = 2000  # looks without a request
HEAVY = 1e100  # a weight from which on all are divided
HALF_LIFE = 3.0  # requests for each place of the arena, after which one counts half
ON_DISK, UNREADABLE = -1, -2  # as kernels.expert_cache_device.HostRows.place_of has it


@dataclass(slots=True)
class FeederCounts:
    """What was asked for so far, and what of it was read."""

    num_hits: int = 0
    num_reads: int = 0
    num_errors: int = 0
    wait_s: float = 0.0  # in which reads were under way, each by itself


@dataclass(frozen=True, slots=True)
class _Failure:
    message: str
    until: float


class RowFeeder:
    """Serves the requests of one device's cache.

    place_of: [num_rows] int32 and requests: [1 + n] int32, as HostRows has them; rows of a place
    are there already. file_rows: the row of the file that each row is. in_flight: how
    many of the last requests a fetch may be reading at most; the arena has twice as many places.
    """

    def __init__(
        self,
        arena: Arena,
        file: RowFile,
        place_of: Tensor,
        requests: Tensor,
        *,
        file_rows: Sequence[int],
        in_flight: int,
        retry_after_s: float = RETRY_AFTER_S,
    ) -> None:
        self.arena, self.file = arena, file
        self.counts = FeederCounts()
        self._place_of, self._requests = place_of.numpy(), requests.numpy()
        self._file_rows, self._in_flight, self._retry_after_s = file_rows, in_flight, retry_after_s
        self._num_seen = 0  # requests
        there = np.flatnonzero(self._place_of >= 0).tolist()
        self._is_here = self._place_of >= 0
        self._heat = np.zeros(len(self._place_of))  # of requests, each of which weighs more
        self._weight, self._growth = 1.0, 2 ** (1 / (HALF_LIFE * arena.num_places))
        taken = set(self._place_of[there].tolist())
        assert len(taken) == len(there), "two rows have one place"
        self._free = [index for index in range(arena.num_places) if index not in taken]
        self._reading: dict[int, tuple[int, float]] = {}  # row -> place, begin
        self._waiting: deque[int] = deque()  # rows for which no place was to be had
        self._recent: deque[int] = deque(maxlen=in_flight)
        self._failures: dict[int, _Failure] = {}
        self._done: SimpleQueue[tuple[int, BaseException | None]] = SimpleQueue()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Serve on a thread of its own from now on."""
        self._thread = threading.Thread(target=self._serve, name="moet-expert-feeder", daemon=True)
        self._thread.start()

    def poll(self) -> bool:
        """Take what was read and what is asked for; whether there was anything."""
        finished = self._finish()
        rows = self._asked()
        self._retry()
        waiting, self._waiting = self._waiting, deque()
        for row in (*waiting, *rows):
            self._want(row)
        return finished or bool(rows)

    def message(self) -> str | None:
        """Which rows could not be read lately, and why."""
        return "; ".join(failure.message for failure in list(self._failures.values())) or None

    @property
    def num_rows(self) -> int:
        """Rows in memory."""
        return int(self._is_here.sum())

    def rows(self) -> list[int]:
        """Rows in memory, those that were asked for most first."""
        here = np.flatnonzero(self._is_here)
        rows: list[int] = here[np.argsort(-self._heat[here], kind="stable")].tolist()
        return rows

    def check(self) -> None:
        """Raise AssertionError unless every place has one owner. Not while the thread runs."""
        owned = self._place_of[self._is_here].tolist()
        held = sorted([*owned, *self._free, *(index for index, _ in self._reading.values())])
        assert held == list(range(self.arena.num_places)), "a place is lost or has two owners"

    def close(self) -> None:
        """End the thread and wait for reads under way."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self.file.close()

    def _serve(self) -> None:
        idle = 0
        while not self._stop.is_set():
            idle = 0 if self.poll() or self._reading else idle + 1
            time.sleep(POLL_S if idle < IDLE_AFTER else IDLE_POLL_S)

    def _asked(self) -> list[int]:
        """Rows of requests that were not seen yet; of more than the ring holds, the last ones."""
        size = len(self._requests) - 1
        count = int(self._requests[0])
        num_new = (count - self._num_seen) % (1 << 32)
        if num_new == 0:
            return []
        first = count - min(num_new, size)
        rows = [int(self._requests[1 + n % size]) for n in range(first, count)]
        self._num_seen = count
        self._recent.extend(rows)
        for row in rows:
            self._heat[row] += self._weight
            self._weight *= self._growth
        if self._weight > HEAVY:
            self._heat /= self._weight
            self._weight = 1.0
        return rows

    def _want(self, row: int) -> None:
        if self._is_here[row]:
            self.counts.num_hits += 1
        elif row not in self._reading and row not in self._failures:
            index = self._take()
            if index is None:
                self._waiting.append(row)
                return
            self._reading[row] = index, time.monotonic()
            self.counts.num_reads += 1
            reading = self.file.read(self._file_rows[row], self.arena.place(index))
            reading.add_done_callback(partial(self._tell, row, index))

    def _tell(self, row: int, index: int, reading: Future[None]) -> None:
        """By the thread that read: what waits for the row does not wait for the next poll."""
        error = reading.exception()
        if error is None:
            self._place_of[row] = index  # behind its bytes, in the order of this processor
        self._done.put((row, error))

    def _finish(self) -> bool:
        any_done = False
        while True:
            try:
                row, error = self._done.get_nowait()
            except Empty:
                return any_done
            any_done = True
            index, begin = self._reading.pop(row)
            self.counts.wait_s += time.monotonic() - begin
            if error is None:
                self._is_here[row] = True
                continue
            logger.error("%s", error)
            self.counts.num_errors += 1
            self._failures[row] = _Failure(str(error), time.monotonic() + self._retry_after_s)
            self._place_of[row] = UNREADABLE
            self._free.append(index)

    def _retry(self) -> None:
        """Rows that failed a while ago count as on disk again. A fetch that was told of one before
        may look for it only now, so it is read if it was asked for of late."""
        now = time.monotonic()
        for row in [row for row, failure in self._failures.items() if failure.until <= now]:
            del self._failures[row]
            self._place_of[row] = ON_DISK
            if row in self._recent:
                self._waiting.append(row)

    def _take(self) -> int | None:
        """A place that no fetch reads; None if there is none yet.

        The row's place is withdrawn first and then requests are looked at once more: a device that
        told a row before it saw -1 keeps it, one that tells it later waits for it.
        """
        if self._free:
            return self._free.pop()
        heat = np.where(self._is_here, self._heat, np.inf)
        heat[list(self._recent)] = np.inf
        while True:
            row = int(heat.argmin())
            if heat[row] == np.inf:
                return None
            index = int(self._place_of[row])
            self._place_of[row] = ON_DISK
            late = self._asked()
            self._waiting.extend(late)
            if row not in late:
                self._is_here[row] = False
                return index
            self._place_of[row] = index
            heat[late] = np.inf
