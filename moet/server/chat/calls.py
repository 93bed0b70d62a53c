"""One tool call of an answer, from its tags to deltas whose arguments join to one JSON object."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moet.server.chat.grammar import (
    Grammar,
    Schema,
    ValueCodec,
    json_string,
    parse_json,
)
from moet.server.chat.messages import Tool

# Keys that a model sometimes wraps all arguments in.
_WRAPPERS = ("arguments", "input")


@dataclass(frozen=True, slots=True)
class CallStart:
    """The call of this index begins; its name is final."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next part of the arguments' JSON text."""

    index: int
    text: str


CallDelta = CallStart | CallArguments


class Call:
    """A call being read. `deltas` fills as parts become certain; the parser empties it.

    A call without `trusted` is held until its end and must then prove itself: it is closed, its
    tool is declared, and the required arguments are there.
    """

    def __init__(
        self, grammar: Grammar, tools: Mapping[str, Tool], index: int, call_id: str, trusted: bool
    ) -> None:
        self.name = ""
        self.raw = ""
        self.started = False
        self._grammar = grammar
        self._tools = tools
        self._index = index
        self._id = call_id
        self.trusted = trusted
        self._deltas: list[CallDelta] = []
        self._keys: list[str] = []
        self._body = ""
        self._codec: ValueCodec | None = None  # of the value being read; None: it is dropped
        self._value = ""  # what of the value is not written yet
        self._wrapper: tuple[str, ValueCodec, str] | None = None  # key, codec, value: undecided

    def take(self) -> list[CallDelta]:
        """The deltas that are certain, once each."""
        if not self.trusted or not self.name:
            return []
        deltas, self._deltas = self._deltas, []
        return deltas

    def body_text(self, text: str) -> None:
        """Text between values, which may be all arguments as one JSON object."""
        self._body += text

    def begin_value(self, key: str, attributes: Mapping[str, str]) -> None:
        """A value begins. One without a key is dropped."""
        self._settle_wrapper()
        self._codec, self._value = None, ""
        if not key:
            return
        properties = self._properties()
        self._codec = self._grammar.value_codec(attributes, properties.get(key))
        if key in _WRAPPERS and key not in properties and not self._keys:
            self._wrapper = (key, self._codec, "")
        else:
            self._begin_pair(key, self._codec)

    def value_text(self, text: str) -> None:
        """More of the value. The newline at its end waits: it may belong to a lost end tag."""
        self._value += text
        if self._codec is not None and self._codec.streams and self._wrapper is None:
            ready = self._value.removesuffix("\n")
            self._write(json_string(ready)[1:-1])
            self._value = self._value[len(ready) :]

    def end_value(self, *, lost_tag: bool = False) -> None:
        """The value is whole. lost_tag: its end was seen by what followed."""
        value = self._value.removesuffix("\n") if lost_tag else self._value
        codec, self._codec, self._value = self._codec, None, ""
        if codec is None:
            return
        if self._wrapper is not None:
            self._wrapper = (self._wrapper[0], codec, value)
        else:
            self._end_pair(codec, value)

    def close(self) -> bool:
        """End the call; False if it proved to be none. Then nothing of it was or will be shown."""
        if not self.name:
            return False
        whole = self._whole_arguments()
        if whole is not None:
            self._start()
            self._keys = list(whole)
            self._write(json.dumps(whole, ensure_ascii=False))
        else:
            if not self._keys and self._wrapper is None and self._body.strip():
                return False
            self._settle_wrapper()
            self._start()
            self._write("}" if self._keys else "{}")
        self.trusted = self.trusted or self._is_proved()
        return self.trusted

    def _whole_arguments(self) -> dict[str, Any] | None:
        """All arguments, if they came as one JSON object: in the body, or under a wrapper key."""
        if self._keys:
            return None
        text = self._body if self._wrapper is None else self._wrapper[2]
        value = parse_json(text)[1]
        return value if isinstance(value, dict) else None

    def _is_proved(self) -> bool:
        tool = self._tools.get(self.name)
        required = (tool.parameters or {}).get("required") if tool is not None else None
        if tool is None:
            return False
        return not isinstance(required, list) or all(key in self._keys for key in required)

    def _properties(self) -> Mapping[str, Schema | None]:
        tool = self._tools.get(self.name)
        properties = (tool.parameters or {}).get("properties") if tool is not None else None
        if not isinstance(properties, dict):
            return {}
        return {k: v if isinstance(v, dict) else None for k, v in properties.items()}

    def _settle_wrapper(self) -> None:
        """What looked like a wrapper is an argument like others."""
        if self._wrapper is not None:
            (key, codec, value), self._wrapper = self._wrapper, None
            self._begin_pair(key, codec)
            self._end_pair(codec, value)

    def _begin_pair(self, key: str, codec: ValueCodec) -> None:
        self._start()
        self._write((", " if self._keys else "{") + json_string(key) + ": ")
        self._keys.append(key)
        if codec.streams:
            self._write('"')

    def _end_pair(self, codec: ValueCodec, value: str) -> None:
        self._write(json_string(value)[1:] if codec.streams else codec.encode(value))

    def _start(self) -> None:
        if not self.started:
            self.started = True
            self._deltas.append(CallStart(self._index, self._id, self.name))

    def _write(self, text: str) -> None:
        if text:
            self._deltas.append(CallArguments(self._index, text))
