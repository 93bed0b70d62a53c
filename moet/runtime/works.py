"""Captured work by what it is for. Knows nothing of what the work does."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from moet.errors import ConfigError
from moet.runtime.queues import Capture, Queue, Work


class Works:
    """Captures each piece of work once; after `seal` nothing more, as there may be no memory."""

    def __init__(self, queue: Queue, capture: Capture) -> None:
        self.queue = queue
        self._capture = capture
        self._works: dict[Hashable, Work] = {}
        self._is_sealed = False

    def __len__(self) -> int:
        return len(self._works)

    def ready(self, key: Hashable, work: Work, clear: Callable[[], None]) -> Work:
        """The captured work of a key, captured now if it is new.

        clear: makes what the work reads such that a run of it touches nothing. Raises ConfigError
        for a new key after `seal`.
        """
        if key not in self._works:
            if self._is_sealed:
                raise ConfigError(f"no graph was captured for {key}")
            with self.queue.working(), torch.inference_mode():
                clear()
                self._works[key] = self._capture(work)
        return self._works[key]

    def forget(self) -> None:
        """Let go of everything; what is asked for next is captured anew."""
        self._works.clear()
        self._is_sealed = False

    def seal(self) -> None:
        """What is not captured by now is refused."""
        self._is_sealed = True
