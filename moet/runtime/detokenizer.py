"""Token ids to text as they arrive, and stop strings on that text.

Text is released only when no later token can change it: a character waits for all of its bytes, the
possible beginning of a stop string waits for the rest. Control tokens travel as pieces of their own
that carry their id, so that a parser need not find them in text. Knows nothing of chat formats.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from moet.runtime.tokenizer import Tokenizer


class Piece(NamedTuple):
    """Some text, or one control token: then `token_id` is its id and `text` its spelling.

    `special` pieces (the end token) never belong into a text that a user sees.
    """

    text: str
    token_id: int | None = None
    special: bool = False


def plain_text(pieces: Iterable[Piece]) -> str:
    """What a user sees who asked for text alone."""
    return "".join(piece.text for piece in pieces if not piece.special)


class Detokenizer:
    """Incremental decoding of one sequence.

    The texts of all pieces joined equal the one-shot decode of all ids, however they were cut.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Iterable[int]) -> list[Piece]:
        """The pieces that these tokens complete, adjacent text joined, none of them empty."""
        pieces: list[Piece] = []
        run: list[bytes] = []
        for token_id in token_ids:
            spelling = self._tokenizer.token_bytes(token_id)
            if self._tokenizer.is_control(token_id):
                self._text(pieces, run, final=True)  # no character spans a control token
                special = self._tokenizer.is_special(token_id)
                pieces.append(Piece(spelling.decode(), token_id, special))
            else:
                run.append(spelling)
        self._text(pieces, run, final=False)
        return pieces

    def finish(self) -> list[Piece]:
        """The rest: U+FFFD if the sequence ended within a character. Call once, at the end."""
        pieces: list[Piece] = []
        self._text(pieces, [], final=True)
        return pieces

    def _text(self, pieces: list[Piece], run: list[bytes], *, final: bool) -> None:
        text = self._decoder.decode(b"".join(run), final)
        if text:
            pieces.append(Piece(text))
        run.clear()


class StopChecker:
    """Finds the first stop string to be completed in a stream of pieces.

    What is released never holds any part of the stop string that ends the stream (unless it is to
    be included), and never waits for longer than a stop string may still be completed. The result
    does not depend on how the text was cut. If several are completed by the same character, the
    longest counts.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = [_StopString(stop) for stop in dict.fromkeys(stops)]
        self._include_stop = include_stop
        self._held: list[Piece] = []
        self.matched: str | None = None

    def push(self, pieces: Iterable[Piece]) -> list[Piece]:
        """The pieces that may be shown now. Once `matched` is set, the stream has ended."""
        if not self._stops:
            return list(pieces)
        for piece in pieces:
            if self.matched is not None:
                break
            if piece.special:
                self._held.append(piece)
                continue
            end = self._scan(piece.text)
            if end is None:
                self._held.append(piece)
            else:
                self._cut(piece, end)
        if self.matched is not None:
            released, self._held = self._held, []
            return released
        return self._release(max(stop.progress for stop in self._stops))

    def finish(self) -> list[Piece]:
        """What was held back. Call once, at the end of the sequence."""
        released, self._held = self._held, []
        return released

    def _scan(self, text: str) -> int | None:
        """Advance every stop string through the text; the offset behind the first match, if any."""
        best: tuple[int, int] | None = None  # (end, -length)
        for stop in self._stops:
            end = stop.advance(text)
            if end is not None and (best is None or (end, -len(stop.text)) < best):
                best = (end, -len(stop.text))
                self.matched = stop.text
        return None if best is None else best[0]

    def _cut(self, piece: Piece, end: int) -> None:
        """Keep in `_held` what comes before the match (or its end, if it is to be included)."""
        assert self.matched is not None
        self._held.append(
            Piece(piece.text[:end], piece.token_id if end == len(piece.text) else None)
        )
        if self._include_stop:
            return
        excess = len(self.matched)
        while excess > 0:
            last = self._held.pop()
            if last.special:
                continue
            if len(last.text) > excess:
                self._held.append(Piece(last.text[: len(last.text) - excess]))
            excess -= len(last.text)

    def _release(self, hold: int) -> list[Piece]:
        """Let go of everything before the last `hold` characters; control tokens stay whole."""
        first = len(self._held)
        while first > 0 and hold > 0:
            first -= 1
            piece = self._held[first]
            if piece.special:
                continue
            if len(piece.text) > hold and piece.token_id is None:
                released = [*self._held[:first], Piece(piece.text[:-hold])]
                self._held = [Piece(piece.text[-hold:]), *self._held[first + 1 :]]
                return released
            hold -= len(piece.text)
        released, self._held = self._held[:first], self._held[first:]
        return released


class _StopString:
    """How much of one stop string the text ends with (Knuth, Morris and Pratt)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.progress = 0
        self._fallback = [0, 0]  # longest proper border of each prefix, by its length
        for i in range(1, len(text)):
            border = self._fallback[i]
            while border > 0 and text[border] != text[i]:
                border = self._fallback[border]
            self._fallback.append(border + 1 if text[border] == text[i] else 0)

    def advance(self, text: str) -> int | None:
        """Read on; the offset behind the character that completes the string, or None."""
        start = 0
        if self.progress == 0:
            start = text.find(self.text[0])
            if start < 0:
                return None
        for i in range(start, len(text)):
            char = text[i]
            while self.progress > 0 and self.text[self.progress] != char:
                self.progress = self._fallback[self.progress]
            if self.text[self.progress] == char:
                self.progress += 1
            if self.progress == len(self.text):
                return i + 1
        return None
