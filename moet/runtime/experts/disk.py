"""Rows of fixed size read from a file, past the page cache, by a few threads.

Knows a file, a row size and buffers that it is handed; knows nothing of experts or of who waits.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from threading import Lock

from torch import Tensor

from moet.errors import ExpertReadError
from moet.kernels.layout import ALIGNMENT_BYTES

logger = logging.getLogger(__name__)

NUM_READERS = 4  # requests that a drive sees at once; a row is one to thirteen MiB

Read = Callable[[int, Sequence[memoryview], int], int]


class RowFile:
    """A file of rows. `read` fills a buffer; every outcome is in the future that it returns.

    Buffers and rows are aligned to 4 KiB. `preadv` stands in for the system's in tests.
    """

    def __init__(
        self,
        path: Path,
        row_bytes: int,
        *,
        name_of: Callable[[int], str] = str,
        num_readers: int = NUM_READERS,
        preadv: Read = os.preadv,
        direct: bool = True,
        stride_bytes: int | None = None,
        offset_bytes: int = 0,
        begin: Callable[[], None] = lambda: None,
        num_pieces: int = 1,
    ) -> None:
        """name_of: what a row is called in an error. direct: past the page cache. A row is the
        row_bytes from offset_bytes on of every stride_bytes; None: rows have no gaps. begin: what
        each reading thread does first. num_pieces: of a row, which are read at the same time."""
        assert row_bytes % ALIGNMENT_BYTES == 0
        self.path = path
        self.row_bytes = row_bytes
        self.num_bytes_read = 0
        self._stride_bytes, self._offset_bytes = stride_bytes or row_bytes, offset_bytes
        assert self._stride_bytes % ALIGNMENT_BYTES == offset_bytes % ALIGNMENT_BYTES == 0
        self._lock = Lock()
        self._name_of = name_of
        self._preadv = preadv
        self._file = _open(path) if direct else os.open(path, os.O_RDONLY)
        self._threads = ThreadPoolExecutor(num_readers, "moet-expert-read", begin)
        blocks = row_bytes // ALIGNMENT_BYTES
        cuts = [n * blocks // num_pieces * ALIGNMENT_BYTES for n in range(num_pieces + 1)]
        self._pieces = [piece for piece in pairwise(cuts) if piece[0] < piece[1]]

    def read(self, row: int, out: Tensor) -> Future[None]:
        """Fill out, [row_bytes] uint8, with a row. The future has an ExpertReadError if that fails;
        until it is done, out belongs to the reader."""
        assert out.numel() == self.row_bytes
        assert out.data_ptr() % ALIGNMENT_BYTES == 0
        whole: Future[None] = Future()
        reads = [
            self._threads.submit(self._read, row, out.numpy().data, first, last)
            for first, last in self._pieces
        ]
        _follow(whole, reads)
        return whole

    def late(self, row: int, limit_s: float) -> str:
        """What is said of a row that was not read in time."""
        return str(self._error(row, f"not read after {limit_s:g} s"))

    def close(self) -> None:
        """Wait for reads under way and let go of the file."""
        self._threads.shutdown()
        os.close(self._file)

    def _read(self, row: int, out: memoryview, first: int, last: int) -> None:
        """Bytes first..last of a row."""
        start, done = row * self._stride_bytes + self._offset_bytes, first
        while done < last:
            try:
                count = self._preadv(self._file, [out[done:last]], start + done)
            except OSError as error:
                raise self._error(row, f"{error.strerror or error} at {start + done}") from error
            if count <= 0:
                raise self._error(row, f"ends after {done} of {self.row_bytes} bytes")
            done += count
            if done < last and done % ALIGNMENT_BYTES:
                done -= done % ALIGNMENT_BYTES  # direct reads begin at a block
                if count < ALIGNMENT_BYTES:
                    raise self._error(row, f"ends after {done + count} of {self.row_bytes} bytes")
        with self._lock:
            self.num_bytes_read += last - first

    def _error(self, row: int, what: str) -> ExpertReadError:
        return ExpertReadError(f"{self.path}, row {row} ({self._name_of(row)}): {what}")


def _follow(whole: Future[None], reads: Sequence[Future[None]]) -> None:
    """Settle a future when all reads are: with the error of the first one that has one."""
    lock, left = Lock(), len(reads)

    def one_is_done(_: Future[None]) -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            _settle(whole, reads)

    for read in reads:
        read.add_done_callback(one_is_done)


def _settle(whole: Future[None], reads: Sequence[Future[None]]) -> None:
    errors = [error for read in reads if (error := read.exception()) is not None]
    if errors:
        whole.set_exception(errors[0])
    else:
        whole.set_result(None)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        logger.warning("%s: its file system has no direct reads; they go through its cache", path)
        return os.open(path, os.O_RDONLY)
