"""An answer as OpenAI's Responses API tells it: output items, streamed or whole."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from moet.runtime.output import Output
from moet.server.blocks import Block, BlockEvent, Blocks, Closed, Grown, Opened
from moet.server.chat.parser import Delta
from moet.server.errors import as_http_error, shown_message
from moet.server.exchange import Usage
from moet.server.reasoning import seal
from moet.server.responses_input import Toolbox
from moet.server.turn import TurnReader
from moet.server.turn_answer import Writer
from moet.types import FinishReason

_PREFIX = {"reasoning": "rs", "content": "msg", "call": "fc"}


class ResponseWriter(Writer):
    """One response as it grows."""

    def __init__(
        self,
        response: dict[str, Any],
        box: Toolbox,
        *,
        streams: bool,
        summarizes: bool,
        seals: bool,
    ) -> None:
        """response: the object as it is at the beginning.

        summarizes: reasoning goes into its summary, for clients that read only that. seals: it is
        also given as encrypted_content, to be handed back.
        """
        self._response = response
        self._box = box
        self._streams = streams
        self._summarizes = summarizes
        self._seals = seals
        self._blocks = Blocks()
        self._ids: list[str] = []
        self._num_events = 0

    def opening(self) -> Iterator[dict[str, Any]]:
        """The response is there, and nothing in it."""
        yield self._event("response.created", response=self._response)
        yield self._event("response.in_progress", response=self._response)

    def add(self, deltas: Sequence[Delta]) -> Iterator[dict[str, Any]]:
        """Events that deltas make."""
        for event in self._blocks.add(deltas):
            yield from self._events(event, "completed")

    def end(self, output: Output, reader: TurnReader, usage: Usage) -> Iterator[dict[str, Any]]:
        """The last item's end, and the response with everything in it."""
        is_cut = output.finish_reason == FinishReason.LENGTH
        status = "incomplete" if is_cut else "completed"
        last = self._blocks.all[-1] if self._blocks.all else None
        for event in self._blocks.close():
            yield from self._events(event, status)
        assert reader.finish is not None
        blocks = self._blocks.all
        if reader.finish.reasoning_is_answer and not self._streams:
            blocks = [block for block in blocks if block.kind != "reasoning"]
            usage.reasoning_tokens = 0
        self._response = {
            **self._response,
            "status": status,
            "completed_at": None if is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [
                self._item(block, status if block is last else "completed") for block in blocks
            ],
            "usage": usage_body(usage),
        }
        yield self._event(f"response.{status}", response=self._response)

    def whole(self) -> dict[str, Any]:
        """The response."""
        return self._response

    def failure(self, error: Exception) -> dict[str, Any]:
        """The response as a failed one."""
        reason = {"code": "server_error", "message": shown_message(as_http_error(error))}
        failed = {**self._response, "status": "failed", "error": reason}
        return self._event("response.failed", response=failed)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        event = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return event

    def _events(self, event: BlockEvent, status: str) -> Iterator[dict[str, Any]]:
        block = event.block
        match event:
            case Opened():
                self._ids.append(f"{_PREFIX[block.kind]}_{uuid.uuid4().hex}")
                item = self._item(block, "in_progress")
                yield self._event("response.output_item.added", output_index=block.index, item=item)
                yield from self._part_events(block, "added")
            case Grown(_, text):
                yield self._text_event(block, "delta", delta=text)
            case Closed():
                final = "arguments" if block.kind == "call" else "text"
                yield self._text_event(block, "done", **{final: block.text})
                yield from self._part_events(block, "done")
                item = self._item(block, status)
                yield self._event("response.output_item.done", output_index=block.index, item=item)

    def _part_events(self, block: Block, what: str) -> Iterator[dict[str, Any]]:
        """A call has no parts; any other item has one."""
        if block.kind == "call":
            return
        part = self._part(block, block.text)
        if self._in_summary(block):
            kind, place = f"response.reasoning_summary_part.{what}", {"summary_index": 0}
        else:
            kind, place = f"response.content_part.{what}", {"content_index": 0}
        yield self._event(kind, **self._where(block), **place, part=part)

    def _text_event(self, block: Block, what: str, **text: str) -> dict[str, Any]:
        where = self._where(block)
        if block.kind == "call":
            if what == "done":
                text["name"] = self._client_name(block)[1]
            return self._event(f"response.function_call_arguments.{what}", **where, **text)
        if block.kind == "content":
            kind = f"response.output_text.{what}"
            return self._event(kind, **where, content_index=0, **text, logprobs=[])
        if self._in_summary(block):
            kind = f"response.reasoning_summary_text.{what}"
            return self._event(kind, **where, summary_index=0, **text)
        return self._event(f"response.reasoning_text.{what}", **where, content_index=0, **text)

    def _where(self, block: Block) -> dict[str, Any]:
        return {"item_id": self._ids[block.index], "output_index": block.index}

    def _in_summary(self, block: Block) -> bool:
        return self._summarizes and block.kind == "reasoning"

    def _part(self, block: Block, text: str) -> dict[str, Any]:
        if block.kind == "content":
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        kind = "summary_text" if self._summarizes else "reasoning_text"
        return {"type": kind, "text": text}

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        """A block as an output item; one that is in progress is empty yet."""
        item: dict[str, Any] = {"id": self._ids[block.index], "status": status}
        is_whole = status != "in_progress"
        parts = [self._part(block, block.text)] if is_whole else []
        match block.kind:
            case "content":
                return item | {"type": "message", "role": "assistant", "content": parts}
            case "reasoning":
                name, other = ("summary", "content")[:: 1 if self._summarizes else -1]
                item |= {"type": "reasoning", name: parts, other: []}
                item["encrypted_content"] = seal(block.text) if self._seals and is_whole else None
                return item
            case "call":
                assert block.call is not None
                namespace, function = self._client_name(block)
                item |= {"type": "function_call", "call_id": block.call.id, "name": function}
                item["arguments"] = block.text if is_whole else ""
                return item if namespace is None else item | {"namespace": namespace}

    def _client_name(self, block: Block) -> tuple[str | None, str]:
        assert block.call is not None
        return self._box.client_name(block.call.name)


def usage_body(usage: Usage) -> dict[str, Any]:
    """The Responses API's usage object."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
