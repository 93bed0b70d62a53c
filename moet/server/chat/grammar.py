"""What a model's answers are made of, as data: its tags, and how it writes argument values.

One parser (parser.py) reads the answers of every model; a model file states a Grammar. A grammar is
bound to a tokenizer before use, so that tags built on control tokens are told from text that merely
looks like them by the ids of the tokens.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from moet.runtime.detokenizer import Piece
from moet.runtime.tokenizer import Tokenizer
from moet.server.nesting import is_too_deep

TagKind = Literal[
    "think",
    "end_think",
    "calls",  # opens a block of calls
    "end_calls",
    "call",  # may carry the name, and may close itself
    "end_call",
    "key",
    "end_key",
    "value",  # may carry the key
    "end_value",
    "unknown",
]
Schema = Mapping[str, Any]


class ValueCodec(NamedTuple):
    """How one argument value becomes JSON: as a string while it arrives, or whole by `encode`."""

    streams: bool
    encode: Callable[[str], str]


class TagRule(NamedTuple):
    """A tag whose whole spelling matches `pattern`; the rest of it is read as attributes."""

    kind: TagKind
    pattern: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Grammar:
    """One model's markup.

    markers: the control tokens that tags are made of. tags: beginnings of tags; a tag ends there
    or, for those in open_ended, at a ">" outside of quotes. rules: tried in order on whole tags.
    wrapped: calls belong into a block; one that stands alone needs proof. value_codec: by the
    attributes of the value's tag and the schema of its key, if known. surface_raw: whether markup
    that is no call goes to the content as it is; otherwise it is left out, and counted.
    think, end_think: the markers around reasoning. call_markers: those that end reasoning, too.
    """

    markers: tuple[str, ...]
    tags: tuple[str, ...]
    open_ended: tuple[str, ...]
    rules: tuple[TagRule, ...]
    wrapped: bool
    value_codec: Callable[[Mapping[str, str], Schema | None], ValueCodec]
    surface_raw: bool
    think: str
    end_think: str
    call_markers: tuple[str, ...]


class Lexicon:
    """A grammar bound to a tokenizer, or to plain text alone. Immutable, shared by requests.

    Bound to a tokenizer, each marker is one character that no text can hold (a noncharacter of
    Unicode), so that a marker spelled by ordinary tokens stays ordinary text.
    """

    def __init__(self, grammar: Grammar, tokenizer: Tokenizer | None) -> None:
        """Raises ConfigError if the tokenizer lacks a marker."""
        self.grammar = grammar
        self._tokenizer = tokenizer
        self._char_of: dict[int, str] = {}
        self._stand_ins: dict[str, str] = {}
        if tokenizer is not None:
            for i, marker in enumerate(grammar.markers):
                stand_in = chr(0xFDD0 + i)
                self._stand_ins[marker] = stand_in
                self._char_of[tokenizer.control_id(marker)] = stand_in
        self._forbidden = {ord(char): "\ufffd" for char in self._stand_ins.values()}
        tags = sorted(map(self._disguise, grammar.tags), key=len, reverse=True)
        self.first_tag = re.compile("|".join(map(re.escape, tags)))
        # Up to ">" outside of quotes; a new tag or line ends a tag that lost its ">".
        new = "<" + "".join(c for marker, c in self._stand_ins.items() if marker[0] == "<")
        inside = f'[^{new}>"\\n]*'
        self.tag_end = re.compile(rf'{inside}(?:"[^"]*"{inside})*(?:>|(?=[{new}\n]))')
        self.open_ended = frozenset(map(self._disguise, grammar.open_ended))
        self.tag_beginnings = frozenset(tag[:n] for tag in tags for n in range(1, len(tag)))
        self.longest_beginning = max(map(len, self.tag_beginnings), default=0)
        self._rules = [
            (rule.kind, re.compile(self._disguise(rule.pattern), re.DOTALL))
            for rule in grammar.rules
        ]

    @property
    def think_id(self) -> int:
        """The token that opens reasoning. Like the others, only where there is a tokenizer."""
        return self._id(self.grammar.think)

    @property
    def end_think_id(self) -> int:
        """The token that ends reasoning."""
        return self._id(self.grammar.end_think)

    @property
    def call_marker_ids(self) -> tuple[int, ...]:
        """The tokens of calls that end reasoning, too."""
        return tuple(map(self._id, self.grammar.call_markers))

    def _id(self, marker: str) -> int:
        assert self._tokenizer is not None
        return self._tokenizer.control_id(marker)

    def read(self, piece: Piece) -> str:
        """The piece as this lexicon's patterns see it; the end token is no text."""
        if piece.special:
            return ""
        if piece.token_id in self._char_of:
            return self._char_of[piece.token_id]
        return piece.text.translate(self._forbidden)

    def show(self, text: str) -> str:
        """What `read` made, as it was spelled."""
        for marker, stand_in in self._stand_ins.items():
            text = text.replace(stand_in, marker)
        return text

    def classify(self, tag: str) -> tuple[TagKind, dict[str, str]]:
        """The kind of a whole tag, and its attributes."""
        for kind, pattern in self._rules:
            if pattern.fullmatch(tag):
                attributes = {key: self.show(text) for key, text in _ATTRIBUTE.findall(tag)}
                if tag.endswith("/>"):
                    attributes["/"] = ""
                return kind, attributes
        return "unknown", {}

    def _disguise(self, text: str) -> str:
        for marker, stand_in in self._stand_ins.items():
            text = text.replace(marker, stand_in)
        return text


class ReasoningCounter:
    """Counts the generated tokens of the reasoning, the tags that end it not among them."""

    def __init__(self, grammar: Grammar, tokenizer: Tokenizer, *, in_reasoning: bool) -> None:
        self.count = 0
        self._in_reasoning = in_reasoning
        self._think = tokenizer.control_id(grammar.think)
        self._ends = {tokenizer.control_id(t) for t in (grammar.end_think, *grammar.call_markers)}
        self._tokenizer = tokenizer

    def push(self, token_id: int) -> bool:
        """Take the next token; whether it is one of the reasoning."""
        if token_id in self._ends:
            self._in_reasoning = False
        elif token_id == self._think:
            self._in_reasoning = True
        elif self._in_reasoning and not self._tokenizer.is_special(token_id):
            self.count += 1
            return True
        return False


_ATTRIBUTE = re.compile(r'(\w+)\s*=\s*"([^"]*)"')


def parse_json(text: str) -> tuple[bool, Any]:
    """(True, value) if the text is JSON whose value can be written again, else (False, None).

    So numbers are finite, strings are whole characters, and nothing nests too deep.
    """
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return False, None
    if is_too_deep(value) or (_HALF_CHARACTER.search(text) and not _is_unicode(value)):
        return False, None
    return True, value


def _refuse(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text:.40} is beyond what a number can be")
    return value


_HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")


def _is_unicode(value: object) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def json_string(text: str) -> str:
    """The text as a JSON string, non-ASCII kept."""
    return json.dumps(text, ensure_ascii=False)


def json_or_string(text: str) -> str:
    """The text itself if it is JSON, else as a JSON string."""
    return text.strip() if parse_json(text)[0] else json_string(text)


def is_string_schema(schema: Schema | None) -> bool:
    """Whether only strings satisfy the schema's type."""
    return schema is not None and schema.get("type") in ("string", ["string"])


STRING = ValueCodec(streams=True, encode=json_string)
JSON = ValueCodec(streams=False, encode=json_or_string)
