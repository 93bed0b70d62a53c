"""An answer as Anthropic's Messages API tells it: content blocks, streamed or whole."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic_core import from_json

from moet.runtime.output import Output
from moet.server.blocks import Block, BlockEvent, Blocks, Closed, Grown, Opened
from moet.server.chat.parser import Delta
from moet.server.errors import anthropic_error_object
from moet.server.exchange import Usage
from moet.server.reasoning import seal
from moet.server.turn import TurnReader
from moet.server.turn_answer import Writer
from moet.types import FinishReason, TokenLogprobs


class MessageWriter(Writer):
    """One message as it grows."""

    def __init__(
        self,
        name: str,
        model: str,
        *,
        streams: bool,
        fills_window: bool,
        hides_reasoning: bool,
    ) -> None:
        """fills_window: the window, not max_tokens, limits the answer.

        hides_reasoning: it goes into signatures, to be handed back unread.
        """
        self._message: dict[str, Any] = {
            "id": name,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {},
        }
        self._streams = streams
        self._fills_window = fills_window
        self._hides_reasoning = hides_reasoning
        self._blocks = Blocks()

    def beginning(self, usage: Usage) -> Iterator[dict[str, Any]]:
        """message_start, which tells how much of the prompt was cached."""
        yield {"type": "message_start", "message": {**self._message, "usage": usage_body(usage)}}

    def add(
        self, deltas: Sequence[Delta], spoken: Sequence[TokenLogprobs]
    ) -> Iterator[dict[str, Any]]:
        """Events that deltas make."""
        for event in self._blocks.add(deltas):
            yield from self._events(event)

    def end(self, output: Output, reader: TurnReader, usage: Usage) -> Iterator[dict[str, Any]]:
        """The last block's end, why the answer ended, and what it took."""
        for event in self._blocks.close():
            yield from self._events(event)
        assert reader.finish is not None
        blocks = self._blocks.all
        if reader.finish.reasoning_is_answer and not self._streams:
            blocks = [block for block in blocks if block.kind != "reasoning"]
            usage.reasoning_tokens = 0
        ending = {
            "stop_reason": self._stop_reason(output, reader),
            "stop_sequence": output.stop_reason if isinstance(output.stop_reason, str) else None,
        }
        if reader.made_calls:
            ending["stop_sequence"] = None
        self._message |= ending
        self._message["usage"] = usage_body(usage)
        self._message["content"] = [self._whole_block(block) for block in blocks]
        yield {"type": "message_delta", "delta": ending, "usage": usage_body(usage)}
        yield {"type": "message_stop"}

    def whole(self) -> dict[str, Any]:
        """The message."""
        return self._message

    def failure(self, error: Exception) -> dict[str, Any]:
        """The error event."""
        return anthropic_error_object(error)

    def _stop_reason(self, output: Output, reader: TurnReader) -> str:
        if reader.made_calls:
            return "tool_use"
        if output.finish_reason == FinishReason.LENGTH:
            return "model_context_window_exceeded" if self._fills_window else "max_tokens"
        return "end_turn" if output.stop_reason is None else "stop_sequence"

    def _events(self, event: BlockEvent) -> Iterator[dict[str, Any]]:
        index = event.block.index
        match event:
            case Opened(block):
                start = {"type": "content_block_start", "index": index}
                yield {**start, "content_block": _empty_block(block)}
            case Grown(block, text) if not (self._hides_reasoning and block.kind == "reasoning"):
                yield _delta(index, *_DELTAS[block.kind], text)
            case Closed(block):
                if block.kind == "reasoning":
                    signature = self._signature(block)
                    yield _delta(index, "signature_delta", "signature", signature)
                yield {"type": "content_block_stop", "index": index}

    def _whole_block(self, block: Block) -> dict[str, Any]:
        whole = _empty_block(block)
        match block.kind:
            case "content":
                whole["text"] = block.text
            case "reasoning":
                whole["thinking"] = "" if self._hides_reasoning else block.text
                whole["signature"] = self._signature(block)
            case "call":
                whole["input"] = _arguments(block.text)
        return whole

    def _signature(self, block: Block) -> str:
        """Something for clients that want one; the reasoning itself where it is not shown."""
        if self._hides_reasoning:
            return seal(block.text)
        return hashlib.blake2b(block.text.encode(), digest_size=16).hexdigest()


def usage_body(usage: Usage) -> dict[str, Any]:
    """Anthropic's usage object: what was cached is not among input_tokens."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


_DELTAS = {
    "content": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


def _delta(index: int, kind: str, name: str, text: str) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": {"type": kind, name: text}}


def _empty_block(block: Block) -> dict[str, Any]:
    match block.kind:
        case "content":
            return {"type": "text", "text": ""}
        case "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}
        case "call":
            assert block.call is not None
            return {"type": "tool_use", "id": block.call.id, "name": block.call.name, "input": {}}


def _arguments(text: str) -> dict[str, Any]:
    """A call's arguments; of a call that was cut, what there is of them."""
    try:
        value = from_json(text, allow_partial="trailing-strings")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
