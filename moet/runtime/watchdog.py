"""Watches the step loop: a step that takes too long is told of while it still hangs.

Knows time and threads; what a step is doing it is told by whoever runs it.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

logger = logging.getLogger(__name__)

MAX_POLL_S = 1.0


class Watchdog:
    """Looks from a thread of its own whether the current step began more than limit_s ago.

    `tell` is called from that thread with what the step was doing, once per late step, and from the
    step's own thread with None when it ended after all.
    """

    def __init__(
        self, limit_s: float, activity: Callable[[], str], tell: Callable[[str | None], None]
    ) -> None:
        self._limit_s = limit_s
        self._activity = activity
        self._tell = tell
        self._began: float | None = None
        self._late = False
        self._lock = threading.Lock()  # so that "late" and "over" are told in this order
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, name="moet-watchdog", daemon=True)
        self._thread.start()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Watch the block; it counts as one step."""
        self._began = monotonic()
        try:
            yield
        finally:
            with self._lock:
                took_s, self._began = monotonic() - self._began, None
                late, self._late = self._late, False
            if late:
                logger.warning("the late step ended after %.1f s", took_s)
                self._tell(None)

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._closed.wait(min(self._limit_s / 4, MAX_POLL_S)):
            with self._lock:
                began = self._began
                if began is None or self._late or monotonic() - began < self._limit_s:
                    continue
                self._late = True
                doing = self._activity()
                logger.error(
                    "a step has taken more than %.1f s (--step-timeout): %s\n%s",
                    self._limit_s,
                    doing,
                    _stacks(except_for=threading.get_ident()),
                )
                self._tell(doing)


def _stacks(*, except_for: int) -> str:
    """Where every other thread of this process is: functions and lines, no values."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        if ident != except_for:
            lines = [
                f"  {each.name} ({each.filename.rsplit('/', 1)[-1]}:{each.lineno})"
                for each in traceback.extract_stack(frame)
            ]
            parts.append(f"thread {names.get(ident, ident)}:\n" + "\n".join(lines))
    return "\n".join(parts)
