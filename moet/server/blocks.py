"""Deltas as blocks: stretches of reasoning, stretches of content, and calls, one after the other.

For APIs whose streams announce a block, fill it and close it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from moet.server.chat.calls import CallArguments, CallStart
from moet.server.chat.parser import ContentDelta, Delta, ReasoningDelta

BlockKind = Literal["reasoning", "content", "call"]


@dataclass(eq=False, slots=True)
class Block:
    """One block as it grows; `text` of a call is its arguments' JSON."""

    index: int
    kind: BlockKind
    call: CallStart | None = None
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self.parts)


@dataclass(frozen=True, slots=True)
class Opened:
    """A block begins; it is empty."""

    block: Block


@dataclass(frozen=True, slots=True)
class Grown:
    """A block has got more text, which is never empty."""

    block: Block
    text: str


@dataclass(frozen=True, slots=True)
class Closed:
    """A block is whole. The last block of an answer that was cut may not be."""

    block: Block


BlockEvent = Opened | Grown | Closed


class Blocks:
    """One answer's blocks; at most one is open."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None

    def add(self, deltas: Iterable[Delta]) -> Iterator[BlockEvent]:
        """Sort deltas into blocks."""
        for delta in deltas:
            match delta:
                case ReasoningDelta(text):
                    yield from self._grow("reasoning", text)
                case ContentDelta(text):
                    yield from self._grow("content", text)
                case CallStart():
                    yield from self.close()
                    yield self._begin("call", delta)
                case CallArguments(_, text):
                    yield from self._grow("call", text)

    def close(self) -> Iterator[BlockEvent]:
        """Close the open block, if there is one."""
        if self._open is not None:
            block, self._open = self._open, None
            yield Closed(block)

    def _grow(self, kind: BlockKind, text: str) -> Iterator[BlockEvent]:
        block = self._open
        if block is None or block.kind != kind:
            assert kind != "call"
            yield from self.close()
            opened = self._begin(kind, None)
            yield opened
            block = opened.block
        if text:
            block.parts.append(text)
            yield Grown(block, text)

    def _begin(self, kind: BlockKind, call: CallStart | None) -> Opened:
        self._open = Block(len(self.all), kind, call)
        self.all.append(self._open)
        return Opened(self._open)
