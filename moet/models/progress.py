"""How far a long job on bytes has come: rate and time left. Knows no terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """One report. `resumed_bytes` of `done_bytes` were there before this run began."""

    what: str
    done_bytes: int
    total_bytes: int
    resumed_bytes: int
    elapsed_s: float

    @property
    def bytes_per_s(self) -> float:
        """Mean rate of this run; 0 until something is done."""
        return (self.done_bytes - self.resumed_bytes) / self.elapsed_s if self.elapsed_s > 0 else 0

    @property
    def eta_s(self) -> float | None:
        """Seconds left at that rate; None while no rate is known."""
        rate = self.bytes_per_s
        return (self.total_bytes - self.done_bytes) / rate if rate > 0 else None


ProgressCallback = Callable[[Progress], None]


class ProgressMeter:
    """Counts bytes and reports after every piece."""

    def __init__(
        self, total_bytes: int, callback: ProgressCallback | None, *, resumed_bytes: int = 0
    ) -> None:
        self.total_bytes = total_bytes
        self.resumed_bytes = resumed_bytes
        self.done_bytes = resumed_bytes
        self._callback = callback
        self._start = time.monotonic()

    def advance(self, num_bytes: int, what: str) -> None:
        """Add num_bytes of work on `what` and report."""
        self.done_bytes += num_bytes
        if self._callback is not None:
            elapsed_s = time.monotonic() - self._start
            self._callback(
                Progress(what, self.done_bytes, self.total_bytes, self.resumed_bytes, elapsed_s)
            )
