"""Rows of fixed size read from a file, past the page cache, by a few threads.

Knows a file, a row size and buffers that it is handed; knows nothing of experts or of who waits.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

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
        digests: Sequence[str] = (),
    ) -> None:
        """name_of: what a row is called in an error. direct: past the page cache. A row is the
        row_bytes from offset_bytes on of every stride_bytes; None: rows have no gaps. begin: what
        each reading thread does first. digests: sha256 of each row in hexadecimal digits, which its
        first reading is compared with; a later one finds the same bytes, or the drive says so."""
        assert row_bytes % ALIGNMENT_BYTES == 0
        self.path = path
        self.row_bytes = row_bytes
        self._stride_bytes, self._offset_bytes = stride_bytes or row_bytes, offset_bytes
        assert self._stride_bytes % ALIGNMENT_BYTES == offset_bytes % ALIGNMENT_BYTES == 0
        self._name_of = name_of
        self._preadv = preadv
        self._digests, self._is_checked = digests, bytearray(len(digests))
        self._file = _open(path) if direct else os.open(path, os.O_RDONLY)
        self._threads = ThreadPoolExecutor(num_readers, "moet-expert-read", begin)

    def read(self, row: int, out: Tensor) -> Future[None]:
        """Fill out, [row_bytes] uint8, with a row. The future has an ExpertReadError if that fails;
        until it is done, out belongs to the reader."""
        assert out.numel() == self.row_bytes
        assert out.data_ptr() % ALIGNMENT_BYTES == 0
        return self._threads.submit(self._read, row, out.numpy().data)

    def late(self, row: int, limit_s: float) -> str:
        """What is said of a row that was not read in time."""
        return str(self._error(row, f"not read after {limit_s:g} s"))

    def close(self) -> None:
        """Wait for reads under way and let go of the file."""
        self._threads.shutdown()
        os.close(self._file)

    def _read(self, row: int, out: memoryview) -> None:
        start, done = row * self._stride_bytes + self._offset_bytes, 0
        while done < self.row_bytes:
            try:
                count = self._preadv(self._file, [out[done:]], start + done)
            except OSError as error:
                raise self._error(row, f"{error.strerror or error} at {start + done}") from error
            if count <= 0:
                raise self._error(row, f"ends after {done} of {self.row_bytes} bytes")
            done += count
            if done < self.row_bytes and done % ALIGNMENT_BYTES:
                done -= done % ALIGNMENT_BYTES  # direct reads begin at a block
                if count < ALIGNMENT_BYTES:
                    raise self._error(row, f"ends after {done + count} of {self.row_bytes} bytes")
        if self._digests and not self._is_checked[row]:
            if hashlib.sha256(out).hexdigest() != self._digests[row]:
                raise self._error(row, "its checksum is not the pack's; moet verify tells them all")
            self._is_checked[row] = 1

    def _error(self, row: int, what: str) -> ExpertReadError:
        return ExpertReadError(f"{self.path}, row {row} ({self._name_of(row)}): {what}")


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        logger.warning("%s: its file system has no direct reads; they go through its cache", path)
        return os.open(path, os.O_RDONLY)
