"""Rows of a file on their way to a device in bulk, through a small buffer in host memory: for
prompts, which ask for whole layers, where memory does not hold all. What steps keep there stays."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from moet.runtime.experts.disk import RowFile
from moet.runtime.experts.host import Arena

START_READERS = 16  # threads that read in bulk; rows come from the page cache if they are there
ROWS_AT_ONCE = 32  # that are read while as many are copied


class StagedRows:
    """file_rows: the row of the file that each row is."""

    def __init__(
        self,
        file: RowFile,
        file_rows: Sequence[int],
        *,
        pin: bool,
        rows_at_once: int = ROWS_AT_ONCE,
    ) -> None:
        """pin: for a device that reads host memory. Raises ConfigError without that memory."""
        self._file, self._file_rows, self._count = file, file_rows, rows_at_once
        self._arena = Arena(2 * rows_at_once, file.row_bytes, pin=pin)
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def copy(self, first: int, out: Tensor) -> None:
        """Bring rows first..first+n into out [n, row_bytes], on its device's current stream.
        Returns when they are read. Raises ExpertReadError."""
        for begin in range(0, len(out), self._count):
            part = out[begin : begin + self._count]
            half, self._turn = self._turn % 2, self._turn + 1
            copied = self._copied[half]
            if copied is not None:
                copied.synchronize()
            places = [self._arena.place(half * self._count + n) for n in range(len(part))]
            rows = self._file_rows[first + begin : first + begin + len(part)]
            read_rows(self._file, rows, places)
            for place, row in zip(places, part, strict=True):
                row.copy_(place, non_blocking=True)
            if out.is_cuda:
                event = self._copied[half] = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(torch.cuda.current_stream(out.device))

    def close(self) -> None:
        """Let go of file and memory; no copy may be under way."""
        self._file.close()
        self._arena.close()


def read_rows(file: RowFile, rows: Iterable[int], out: Iterable[Tensor]) -> None:
    """Rows of a file into the rows of out, several at a time. Raises ExpertReadError."""
    under_way: deque[Future[None]] = deque()
    try:
        for row, place in zip(rows, out, strict=True):
            if len(under_way) == 2 * START_READERS:
                under_way.popleft().result()
            under_way.append(file.read(row, place))
        while under_way:
            under_way.popleft().result()
    finally:
        for reading in under_way:  # behind an error: what is still written belongs to the reader
            reading.exception()
