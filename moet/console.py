"""Progress of long commands: a bar on a terminal, JSON lines elsewhere. Knows no job."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from moet.models.progress import Progress as Report
from moet.models.progress import ProgressCallback

LINE_INTERVAL_S = 1.0


@contextmanager
def byte_progress(title: str) -> Iterator[ProgressCallback]:
    """A callback for jobs on bytes; writes to stderr."""
    if sys.stderr.isatty():
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        ) as bar:
            task = bar.add_task(title, total=None)

            def show(report: Report) -> None:
                bar.update(task, completed=report.done_bytes, total=report.total_bytes)

            yield show
    else:
        yield JsonLines(title)


class JsonLines:
    """Writes at most one line a second, and the last one."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._next = 0.0

    def __call__(self, report: Report) -> None:
        """Write a line if it is time for one."""
        now = time.monotonic()
        if now < self._next and report.done_bytes < report.total_bytes:
            return
        self._next = now + LINE_INTERVAL_S
        line = {
            "stage": self._title,
            "what": report.what,
            "done_bytes": report.done_bytes,
            "total_bytes": report.total_bytes,
            "bytes_per_s": round(report.bytes_per_s),
            "eta_s": None if report.eta_s is None else round(report.eta_s, 1),
        }
        sys.stderr.write(msgspec.json.encode(line).decode() + "\n")
        sys.stderr.flush()
