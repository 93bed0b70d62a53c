"""The engine's books for whoever asks by HTTP: new ones if they come soon, else those it last gave.

An engine whose step is late, or whose process is stopped, keeps nobody waiting.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from moet.errors import OverloadedError
from moet.runtime.engine import Engine
from moet.runtime.host import Seen
from moet.runtime.metrics import CoreStats, ExpertStats

T = TypeVar("T")


class Books:
    """What an engine says of itself, and when it said so."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def stats(self, wait_s: float) -> Seen[CoreStats]:
        """Its counters. OverloadedError while it loads, EngineDeadError when it has ended."""
        engine = self._engine
        return await self._latest(engine.astats, lambda: engine.last_stats, wait_s)

    async def experts(self, wait_s: float) -> Seen[ExpertStats]:
        """The experts' books; OverloadedError if there were none so far."""
        engine = self._engine
        return await self._latest(
            lambda limit_s: engine.aexpert_stats(timeout_s=limit_s),
            lambda: engine.last_expert_stats,
            wait_s,
        )

    async def _latest(
        self,
        ask: Callable[[float], Awaitable[T]],
        last: Callable[[], Seen[T] | None],
        wait_s: float,
    ) -> Seen[T]:
        if self._may_answer():
            with suppress(OverloadedError):
                await ask(wait_s)
        seen = last()
        if seen is None:
            message = "the engine does not answer, and has not said so far what is asked for"
            raise OverloadedError(message, retry_after_s=5, unavailable=True)
        return seen

    def _may_answer(self) -> bool:
        """Whether asking is of use; one that has ended says at once that it has."""
        engine = self._engine
        if engine.state == "ready":
            return engine.late_step is None and engine.silent_s is None
        return engine.state != "loading"
