"""Answers to messages while they arrive: reasoning, content and tool calls, for every model.

The parser is fed pieces and returns deltas. The deltas, joined, do not depend on how the answer was
cut. It keeps the state of one answer and nothing else.

- Markup never shows while tools are declared; without tools, only the tags around reasoning count.
- A name is sent when it is final. Arguments join to one JSON object, unless the answer was cut.
- A call may begin inside reasoning, which it ends. Text behind a block of calls is dropped.
- With tool_choice "none" calls are read and dropped.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from moet.runtime.detokenizer import Piece
from moet.server.chat.calls import Call, CallArguments, CallDelta, CallStart
from moet.server.chat.grammar import Lexicon
from moet.server.chat.lexer import Lexer, Tag
from moet.server.chat.messages import Tool, ToolChoice
from moet.types import FinishReason

State = Literal["reasoning", "content", "calls", "name", "body", "key", "gap", "value", "after"]
_PROSE = ("reasoning", "content")
_IN_CALL = ("name", "body", "key", "gap", "value")


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the answer."""

    text: str


Delta = ReasoningDelta | ContentDelta | CallDelta


@dataclass(frozen=True, slots=True)
class Finish:
    """The last deltas, and OpenAI's finish_reason.

    reasoning_is_answer: the model ended without closing its reasoning or calling a tool, so what it
    reasoned is its answer. The deltas then repeat all of it as content; an answer that is not
    streamed should have no reasoning.
    """

    deltas: list[Delta]
    finish_reason: str
    reasoning_is_answer: bool = False


def new_call_id() -> str:
    return "call_" + secrets.token_hex(12)


class OutputParser:
    """One answer's parser."""

    def __init__(
        self,
        lexicon: Lexicon,
        *,
        start: Literal["reasoning", "content"],
        tools: Sequence[Tool] = (),
        tool_choice: ToolChoice | None = None,
        parallel_tool_calls: bool = True,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        """start: as the prompt's encoding says. parallel_tool_calls False keeps the first call."""
        self.num_malformed = 0  # tags and calls that had to be dropped or mended
        self._grammar = lexicon.grammar
        self._lexer = Lexer(lexicon)
        self._tools = {tool.name: tool for tool in tools}
        self._choice = (tool_choice or ToolChoice()).kind
        self._max_calls = None if parallel_tool_calls else 1
        self._new_id = new_id
        self._state: State = start
        self._deltas: list[Delta] = []
        self._space = ""  # white space that is dropped if a call follows
        self._shown = False  # whether this stretch of prose has shown anything
        self._unclosed: list[str] | None = [] if start == "reasoning" else None
        self._in_block = False
        self._outside: State = start  # where the open call began
        self._call: Call | None = None
        self._key = ""
        self._gap = ""
        self._num_calls = 0

    def feed(self, pieces: Iterable[Piece]) -> list[Delta]:
        """The deltas that these pieces complete."""
        for token in self._lexer.feed(pieces):
            self._read(token)
        return self._take()

    def finish(self, reason: FinishReason, *, stop_reason: str | int | None = None) -> Finish:
        """End of the answer. stop_reason: what stopped it, None if the model ended it itself."""
        for token in self._lexer.finish():
            self._read(token)
        by_itself = reason == FinishReason.STOP and stop_reason is None
        whole = self._finish_call(by_itself)
        if self._shown or not self._num_calls:
            self._show(self._space)
        is_answer = by_itself and self._state == "reasoning" and bool(self._unclosed)
        if is_answer:
            self._deltas.append(ContentDelta("".join(self._unclosed or ())))
        called = reason == FinishReason.STOP and self._num_calls > 0 and whole
        if called and self._choice != "named":  # OpenAI reports "stop" for a named tool
            return Finish(self._take(), "tool_calls")
        return Finish(self._take(), reason.value, is_answer)

    def _read(self, token: str | Tag) -> None:
        if isinstance(token, str):
            self._text(token)
        elif token.kind in ("think", "end_think"):
            self._think_tag(token)
        elif not self._tools:
            self._text(token.raw)
        elif self._state == "value":
            self._tag_in_value(token)
        else:
            self._tag(token)

    def _text(self, text: str) -> None:
        call = self._call
        if call is not None and not call.started:
            call.raw += text
        if self._state in _PROSE:
            text = self._space + text
            ready = text.rstrip() if self._tools else text
            self._space = text[len(ready) :]
            self._show(ready)
        elif call is None:
            return  # between and behind calls there is nothing to say
        elif self._state == "value":
            call.value_text(text)
        elif self._state == "body":
            call.body_text(text)
        elif self._state == "name":
            call.name += text
        elif self._state == "key":
            self._key += text
        else:
            self._gap += text

    def _show(self, text: str) -> None:
        if text and self._state in _PROSE:
            self._shown = True
            if self._state == "content":
                self._deltas.append(ContentDelta(text))
                return
            self._deltas.append(ReasoningDelta(text))
            if self._unclosed is not None:
                self._unclosed.append(text)

    def _think_tag(self, tag: Tag) -> None:
        """These tags change the state in prose, are text in a value and mean nothing elsewhere."""
        if self._state == "value":
            self._text(tag.raw)
        elif self._state in _PROSE:
            self._show(self._space)
            self._space = ""
            if tag.kind == "end_think":
                self._unclosed = None
            state: State = "reasoning" if tag.kind == "think" else "content"
            self._shown = self._shown and state == self._state
            self._state = state

    def _tag_in_value(self, tag: Tag) -> None:
        if tag.kind == "end_value":
            self._end_value()
        elif tag.kind in ("unknown", "end_key"):
            self._text(tag.raw)
        else:  # anything else of a call shows that the value's end tag was lost
            self.num_malformed += 1
            self._end_value(lost_tag=True)
            self._tag(tag)

    def _tag(self, tag: Tag) -> None:
        if self._call is not None and not self._call.started:
            self._call.raw += tag.raw
        match tag.kind:
            case "calls":
                self._close_call(lost_tag=True)
                self._leave_prose()
                self._state, self._in_block = "calls", True
            case "end_calls":
                self._close_call(lost_tag=True)
                self._in_block = False
                self._after_calls()
            case "call":
                self._close_call(lost_tag=True)
                self._begin_call(tag)
            case "end_call":
                self._close_call()
            case "key" if self._call is not None:
                self._settle_gap()
                self._state, self._key = "key", ""
            case "end_key" if self._state == "key":
                self._state, self._gap = "gap", ""
            case "value" if self._call is not None:
                self._begin_value(tag)
            case "end_value" if self._state == "gap" and self._call is not None:
                self._settle_gap()
            case _:
                self._stray(tag)

    def _begin_call(self, tag: Tag) -> None:
        trusted = self._in_block or not self._grammar.wrapped
        if trusted:
            self._leave_prose()
        self._outside = self._state
        self._call = Call(self._grammar, self._tools, self._num_calls, self._new_id(), trusted)
        self._call.raw = tag.raw
        self._call.name = tag.attributes.get("name", "").strip()
        self._state = "body" if "name" in tag.attributes else "name"
        if "/" in tag.attributes:
            self._close_call()

    def _begin_value(self, tag: Tag) -> None:
        call = self._call
        assert call is not None
        if self._state == "gap" and self._gap.strip():
            self._stray(tag)
        key = tag.attributes.get("name", self._key)
        self._key = ""
        call.name = call.name.strip()
        call.begin_value(key.strip(), tag.attributes)
        self._state = "value"
        if "/" in tag.attributes:
            self._end_value()

    def _end_value(self, *, lost_tag: bool = False) -> None:
        assert self._call is not None
        self._call.end_value(lost_tag=lost_tag)
        self._flush_call()
        self._state = "body"

    def _settle_gap(self) -> None:
        """A key was followed by text instead of a value's tag: the text is the value."""
        call = self._call
        if self._state != "gap" or call is None:
            return
        self.num_malformed += 1
        if self._gap.strip():
            call.begin_value(self._key.strip(), {})
            call.value_text(self._gap)
            call.end_value()
        self._state = "body"

    def _close_call(self, *, lost_tag: bool = False) -> None:
        """End the open call, if there is one, and show it or drop it."""
        call = self._call
        if call is None:
            return
        self._settle_gap()
        self.num_malformed += lost_tag
        call.name = call.name.strip()
        if not call.close():
            self._drop(call)
            return
        if self._outside in _PROSE:  # only now it is certain that the prose has ended
            self._state = self._outside
            self._leave_prose()
            self._state = "body"
        self._flush_call()
        self._num_calls += self._accepts_calls()
        self._call = None
        self._after_calls()

    def _finish_call(self, by_itself: bool) -> bool:
        """The answer ended, perhaps inside a call; whether every call that was begun is whole."""
        call = self._call
        if call is None:
            return True
        if by_itself and self._state == "body" and call.trusted:
            self._close_call(lost_tag=True)
            return True
        if not call.started or not call.trusted:
            self._drop(call)
            return True
        self.num_malformed += by_itself
        self._flush_call()
        return not self._accepts_calls()

    def _drop(self, call: Call) -> None:
        """What looked like a call was none; the prose before it goes on."""
        self.num_malformed += 1
        self._call, self._state = None, self._outside
        if self._grammar.surface_raw:
            self._text(self._without_think_tags(call.raw))

    def _without_think_tags(self, raw: str) -> str:
        """Inside a call they were text; in prose they may not be shown."""
        tags = (self._grammar.think, self._grammar.end_think)
        while any(tag in raw for tag in tags):
            for tag in tags:
                raw = raw.replace(tag, "")
        return raw

    def _flush_call(self) -> None:
        assert self._call is not None
        deltas = self._call.take()
        if self._accepts_calls():
            self._deltas += deltas

    def _accepts_calls(self) -> bool:
        return self._choice != "none" and self._num_calls != self._max_calls

    def _after_calls(self) -> None:
        self._shown = False
        if self._in_block:
            self._state = "calls"
        elif self._state not in _PROSE:
            drops = self._grammar.wrapped and self._num_calls > 0
            self._state = "after" if drops else "content"

    def _leave_prose(self) -> None:
        """A call follows: the line ends that set it off are no part of what was said."""
        if self._state in _PROSE:
            self._show(self._space.rstrip("\n") if self._shown else "")
            self._space = ""
            self._unclosed = None

    def _stray(self, tag: Tag) -> None:
        """A tag that means nothing here is left out, and in a body that is no JSON remembered."""
        self.num_malformed += 1
        if self._grammar.surface_raw and self._state in _PROSE:
            self._text(tag.raw)

    def _take(self) -> list[Delta]:
        """All deltas since the last time, adjacent ones of a kind joined."""
        if self._call is not None and self._state == "value":
            self._flush_call()
        merged: list[Delta] = []
        for delta in self._deltas:
            merged.append(
                _join(merged.pop(), delta) if merged and _same(merged[-1], delta) else delta
            )
        self._deltas = []
        return merged


def _same(first: Delta, second: Delta) -> bool:
    if isinstance(first, CallStart) or type(first) is not type(second):
        return False
    return not isinstance(first, CallArguments) or first.index == second.index  # type: ignore[union-attr]


def _join(first: Delta, second: Delta) -> Delta:
    assert not isinstance(first, CallStart)
    assert not isinstance(second, CallStart)
    if isinstance(first, CallArguments):
        return CallArguments(first.index, first.text + second.text)
    return type(first)(first.text + second.text)
