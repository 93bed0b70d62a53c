"""A pass over prompts that is carried out some parts at a time, between the steps of sequences that
decode: these wait for a few layers, not for all. Knows no model and decides nothing."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace

from torch import Tensor

from moet.models.base import finished
from moet.runtime.batch import Admit, Command, Release, Restore, SetPages, SwapIn, SwapOut
from moet.runtime.chunk_runner import PendingChunks
from moet.runtime.queues import Moment, Queue


class DividedPass:
    """Parts of a pass that are left. To be called where queue and inference mode are set.

    slots: of its rows. indices: of the rows it has, among those that it was begun with. fault: [1]
    int32 that kernels set, or None: what they set in these parts is kept from the steps between.
    """

    def __init__(
        self,
        parts: Generator[None, None, PendingChunks],
        *,
        slots: Sequence[int],
        indices: Sequence[int],
        queue: Queue,
        fault: Tensor | None,
    ) -> None:
        self.indices = indices
        self.made: PendingChunks | None = None
        self.error: Exception | None = None
        self._parts, self._slots = parts, frozenset(slots)
        self._queue, self._fault = queue, fault
        self._kept = None if fault is None else fault.new_zeros(1)

    def is_touched(self, commands: Sequence[Command]) -> bool:
        """Whether commands change what the pass still needs: its sequences leave, for example."""
        named = Admit | Release | Restore | SetPages | SwapIn | SwapOut
        return any(isinstance(c, named) and c.slot in self._slots for c in commands)

    def advance(self, num_parts: int) -> tuple[Moment, Moment]:
        """Queue some parts, not the last one; returns when they begin and end."""
        started = self._queue.moment()
        try:
            for _ in range(num_parts if self.error is None else 0):
                next(self._parts)
        except Exception as error:  # its sequences end with it, when their results are due
            self.error = error
        if self._fault is not None and self._kept is not None:
            self._kept |= self._fault
            self._fault.zero_()
        return started, self._queue.moment()

    def finish(self) -> None:
        """Queue all parts that are left: `made` or `error` is there then."""
        if self.made is not None or self.error is not None:
            return
        if self._fault is not None and self._kept is not None:
            self._fault |= self._kept
        started = self._queue.moment()
        try:
            self.made = replace(finished(self._parts), started=started)
        except Exception as error:
            self.error = error
