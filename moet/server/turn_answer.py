"""Answers of APIs that tell one sample in blocks: the part they share.

A `Writer` per API says what its events and its body look like; knows nothing of transport.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from typing import Any

from moet.runtime.engine import Engine, Generation
from moet.runtime.output import Output
from moet.server.chat.parser import Delta
from moet.server.exchange import Exchange, Usage
from moet.server.stream import EVENT_FRAMES
from moet.server.turn import Prepared, TurnReader
from moet.types import TokenLogprobs


class Writer(ABC):
    """How an API of blocks tells one sample; events are given to a stream, or not looked at."""

    def opening(self) -> Iterable[dict[str, Any]]:
        """Events before there is any token."""
        return ()

    def beginning(self, usage: Usage) -> Iterable[dict[str, Any]]:
        """Events once the first token is there, and with it the number of cached tokens."""
        return ()

    @abstractmethod
    def add(
        self, deltas: Sequence[Delta], spoken: Sequence[TokenLogprobs]
    ) -> Iterable[dict[str, Any]]:
        """Events that deltas make. spoken: as `TurnReader` has it, of tokens up to these deltas."""

    @abstractmethod
    def end(self, output: Output, reader: TurnReader, usage: Usage) -> Iterable[dict[str, Any]]:
        """Events of the end; `output` is the last increment, whose deltas were added."""

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The answer as one body; called after `end`."""

    @abstractmethod
    def failure(self, error: Exception) -> dict[str, Any]:
        """The event that ends a stream when something goes wrong."""


class TurnAnswer(Exchange):
    """An exchange of an endpoint whose answers are one sample in blocks."""

    framing = EVENT_FRAMES

    def __init__(
        self, engine: Engine, prepared: Prepared, writer: Writer, name: str, *, field: str
    ) -> None:
        super().__init__(engine, prepared.requests, name, samples=1, field=field)
        self._reader = prepared.reader(engine.text.tokenizer)
        self._writer = writer
        self._has_begun = False

    async def chunks(self, generation: Generation) -> AsyncGenerator[dict[str, Any], None]:
        """The answer event by event."""
        for event in self._writer.opening():
            yield event
        async for output in self._outputs(generation):
            for event in self._add(output):
                yield event

    async def collect(self, generation: Generation) -> dict[str, Any]:
        """The answer as one body."""
        for _ in self._writer.opening():
            pass
        async for output in self._outputs(generation):
            for _ in self._add(output):
                pass
        return self._writer.whole()

    @property
    def num_malformed(self) -> int | None:
        """Tags and calls that had to be dropped or mended."""
        return self._reader.num_malformed

    def failure(self, error: Exception) -> dict[str, Any]:
        """The event that ends a stream when something goes wrong."""
        return self._writer.failure(error)

    def _add(self, output: Output) -> Iterator[dict[str, Any]]:
        deltas = self._reader.read(output)
        self.usage.reasoning_tokens = self._reader.reasoning_tokens
        if not self._has_begun:
            self._has_begun = True
            yield from self._writer.beginning(self.usage)
        yield from self._writer.add(deltas, self._reader.spoken)
        if output.finish_reason is not None:
            yield from self._writer.end(output, self._reader, self.usage)
