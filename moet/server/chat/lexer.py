"""Pieces of an answer to text and tags. Holds text back only while it may be part of a tag."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from moet.runtime.detokenizer import Piece
from moet.server.chat.grammar import Lexicon, TagKind

MAX_TAG_CHARS = 512


@dataclass(frozen=True, slots=True)
class Tag:
    """raw: the tag as the model spelled it."""

    kind: TagKind
    raw: str
    attributes: dict[str, str] = field(default_factory=dict)


class Lexer:
    """One answer's lexer. What it returns, joined, does not depend on how the answer was cut."""

    def __init__(self, lexicon: Lexicon) -> None:
        self._lexicon = lexicon
        self._buffer = ""

    def feed(self, pieces: Iterable[Piece]) -> Iterator[str | Tag]:
        """The text and tags that are certain now."""
        self._buffer += "".join(self._lexicon.read(piece) for piece in pieces)
        yield from self._scan(final=False)

    def finish(self) -> Iterator[str | Tag]:
        """The rest. A tag that was cut off counts only if it closes something."""
        yield from self._scan(final=True)

    def _scan(self, *, final: bool) -> Iterator[str | Tag]:
        show = self._lexicon.show
        while match := self._lexicon.first_tag.search(self._buffer):
            if match.start():
                yield show(self._buffer[: match.start()])
            self._buffer = self._buffer[match.start() :]
            tag = self._tag(match.group(), final=final)
            if tag is None:
                return
            yield tag
        held = 0 if final else self._held()
        text = self._buffer[: len(self._buffer) - held]
        self._buffer = self._buffer[len(text) :]
        if text:
            yield show(text)

    def _tag(self, opening: str, *, final: bool) -> Tag | None:
        """Take the tag that the buffer begins with; None if its end is not there yet."""
        end, cut_off = len(opening), False
        if opening in self._lexicon.open_ended:
            match = self._lexicon.tag_end.match(self._buffer, end, end + MAX_TAG_CHARS)
            if match:
                end = match.end()
            elif len(self._buffer) < end + MAX_TAG_CHARS:
                if not final:
                    return None
                end, cut_off = len(self._buffer), True
        kind, attributes = self._lexicon.classify(self._buffer[:end])
        if kind == "unknown" or (cut_off and not kind.startswith("end_")):
            kind, attributes, end = "unknown", {}, end if cut_off else len(opening)
        raw = self._lexicon.show(self._buffer[:end])
        self._buffer = self._buffer[end:]
        return Tag(kind, raw, attributes)

    def _held(self) -> int:
        """Length of the longest end of the buffer that may be the beginning of a tag."""
        longest = min(self._lexicon.longest_beginning, len(self._buffer))
        for length in range(longest, 0, -1):
            if self._buffer[-length:] in self._lexicon.tag_beginnings:
                return length
        return 0
