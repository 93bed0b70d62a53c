"""What the server does around every generation: times it, limits it, counts, records and traces it.

Knows increments and clocks; knows nothing of endpoints, chat formats or HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from time import monotonic, time
from types import TracebackType
from typing import Any, Protocol

from moet.runtime.output import Output
from moet.server.errors import HttpError
from moet.server.raw_log import RawLog
from moet.server.tracing import NO_TRACES, Tracer

logger = logging.getLogger(__name__)


class Increments(Protocol):
    """What `runtime.router.Generation` is here: increments that can be given up."""

    async def __anext__(self) -> Output: ...
    def __aiter__(self) -> Increments: ...
    async def __aenter__(self) -> Increments: ...
    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


@dataclass(slots=True)
class ServerCounters:
    """What only the server can count."""

    num_timeouts: int = 0  # requests that took longer than --request-timeout
    num_parsed: int = 0  # chat answers that a parser has read
    num_malformed: int = 0  # tags and calls in them that had to be dropped or mended


@dataclass(slots=True)
class Operations:
    """Everything that one server does around its generations."""

    request_timeout_s: float | None = None
    raw_log: RawLog | None = None
    tracer: Tracer = NO_TRACES
    counters: ServerCounters = field(default_factory=ServerCounters)

    async def follow(
        self, generation: Increments, clock: Clock, *, answer_id: str, model: str
    ) -> AsyncGenerator[Output, None]:
        """Pass a generation's increments on; closes it at the end, whatever the end is.

        Raises HttpError 504 when the time is up, and what ended a request by a fault.
        """
        span = self.tracer.start(answer_id, model, clock)
        record = None if self.raw_log is None else self.raw_log.record(answer_id, model)
        try:
            async with generation:
                while True:
                    output = await self._next(generation, clock)
                    if output is None:
                        break
                    clock.see(output)
                    if record is not None:
                        record.add(output)
                    output.raise_if_failed()
                    yield output
        except Exception as error:
            span.fail(error)
            raise
        finally:
            span.end(clock)
            if record is not None and self.raw_log is not None:
                self.raw_log.write(record)

    def count(self, num_malformed: int | None) -> None:
        """Count an answer that is complete; None: no parser has read it."""
        if num_malformed is not None:
            self.counters.num_parsed += 1
            self.counters.num_malformed += num_malformed

    def close(self) -> None:
        """Send what is not sent yet."""
        self.tracer.close()

    async def _next(self, generation: Increments, clock: Clock) -> Output | None:
        limit_s = self.request_timeout_s
        if limit_s is None:
            return await anext(generation, None)
        try:
            async with asyncio.timeout(max(0.0, clock.opened + limit_s - monotonic())):
                return await anext(generation, None)
        except TimeoutError:
            self.counters.num_timeouts += 1
            message = f"the answer took longer than {limit_s:g} s (--request-timeout)"
            raise HttpError(504, message, kind="server_error", code="request_timeout") from None


class Clock:
    """One answer's times and counts, as the server sees them."""

    def __init__(self, num_prompt_tokens: int) -> None:
        """num_prompt_tokens: of all its prompts."""
        self.num_prompt_tokens = num_prompt_tokens
        self.num_cached_tokens = 0  # set by who knows which samples share a prompt
        self.num_tokens = 0
        self.drafts = Drafts()
        self.finish_reasons: list[str] = []
        self.opened_at = time()  # wall clock, for traces; everything else is monotonic
        self.opened = monotonic()
        self.first = self.last = 0.0

    def see(self, output: Output) -> None:
        """Take an increment into account."""
        if output.finish_reason is not None:
            self.finish_reasons.append(output.finish_reason.value)
        self.drafts.see(output)
        if not output.token_ids:
            return
        self.last = monotonic()
        self.first = self.first or self.last
        self.num_tokens += len(output.token_ids)

    def timings(self) -> dict[str, Any]:
        """llama.cpp's timings object. The prompt's time includes the wait for a first step."""
        prompt_s = max(0.0, (self.first or monotonic()) - self.opened)
        predicted_s = max(0.0, self.last - self.first)
        num_computed = max(0, self.num_prompt_tokens - self.num_cached_tokens)
        timings: dict[str, Any] = {
            "prompt_n": num_computed,
            "cache_n": self.num_cached_tokens,
            "prompt_ms": round(1000 * prompt_s, 3),
            "prompt_per_second": _rate(num_computed, prompt_s),
            "predicted_n": self.num_tokens,
            "predicted_ms": round(1000 * predicted_s, 3),
            "predicted_per_second": _rate(self.num_tokens - 1, predicted_s),
        }
        return timings | self.drafts.body()


class Drafts:
    """What one answer's samples drafted, and what of it held, by place among a step's drafts."""

    def __init__(self) -> None:
        self.tried: list[int] = []
        self.held: list[int] = []
        self._so_far: dict[int, tuple[int, int]] = {}  # by sample

    def see(self, output: Output) -> None:
        """Add the run of drafts that came since the sample's last increment, if there was one."""
        tried, held = self._so_far.get(output.index, (0, 0))
        self._so_far[output.index] = output.num_draft_tokens, output.num_accepted_tokens
        num_tried, num_held = output.num_draft_tokens - tried, output.num_accepted_tokens - held
        missing = [0] * (num_tried - len(self.tried))
        self.tried += missing
        self.held += missing
        for position in range(num_tried):
            self.tried[position] += 1
            self.held[position] += position < num_held

    def body(self) -> dict[str, Any]:
        """llama.cpp's counts, and the same by place; nothing where nothing was drafted."""
        if not self.tried:
            return {}
        return {
            "draft_n": sum(self.tried),
            "draft_n_accepted": sum(self.held),
            "draft_n_by_position": self.tried,
            "draft_n_accepted_by_position": self.held,
        }


def _rate(number: int, seconds: float) -> float | None:
    """None where nothing was measured: JSON has no infinity."""
    return round(number / seconds, 3) if seconds > 0 and number > 0 else None
