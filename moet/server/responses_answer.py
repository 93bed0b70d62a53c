"""An answer as OpenAI's Responses API tells it: output items, streamed or whole."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from moet.runtime.output import Output
from moet.runtime.tokenizer import Tokenizer
from moet.server.answers import token_logprobs
from moet.server.blocks import Block, BlockEvent, Blocks, Closed, Grown, Opened
from moet.server.chat.parser import Delta
from moet.server.errors import as_http_error, shown_message
from moet.server.exchange import Usage
from moet.server.responses_input import Toolbox
from moet.server.responses_items import (
    CallItem,
    CustomCallItem,
    Item,
    MessageItem,
    ReasoningItem,
    SummaryItem,
)
from moet.server.turn import TurnReader
from moet.server.turn_answer import Writer
from moet.types import FinishReason, TokenLogprobs


class ResponseWriter(Writer):
    """One response as it grows."""

    def __init__(
        self,
        response: dict[str, Any],
        box: Toolbox,
        tokenizer: Tokenizer,
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
        self._tokenizer = tokenizer
        self._streams = streams
        self._summarizes = summarizes
        self._seals = seals
        self._blocks = Blocks()
        self._items: list[Item] = []
        self._spoken: list[TokenLogprobs] = []  # of text that is held back
        self._num_events = 0

    def opening(self) -> Iterator[dict[str, Any]]:
        """The response is there, and nothing in it."""
        yield self._event("response.created", response=self._response)
        yield self._event("response.in_progress", response=self._response)

    def add(
        self, deltas: Sequence[Delta], spoken: Sequence[TokenLogprobs]
    ) -> Iterator[dict[str, Any]]:
        """Events that deltas make."""
        self._spoken += spoken
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
                self._items[block.index].body(status if block is last else "completed")
                for block in blocks
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
        if isinstance(event, Opened):
            self._items.append(self._make_item(block))
        item = self._items[block.index]
        match event:
            case Opened():
                yield self._item_event(item, "added", "in_progress")
                yield from self._part_events(item, "added")
            case Grown(_, text):
                self._hand_out_logprobs(item)
                yield from self._deltas(item, item.grow(text))
            case Closed():
                yield from self._deltas(item, item.rest())
                final = {item.final: item.text, **item.more(done=True)}
                yield self._event(f"response.{item.event}.done", **item.place, **final)
                yield from self._part_events(item, "done")
                yield self._item_event(item, "done", status)

    def _make_item(self, block: Block) -> Item:
        if block.call is not None:
            origin = self._box.origin(block.call.name)
            return (CustomCallItem if origin.kind == "custom" else CallItem)(block, origin)
        if block.kind == "content":
            return MessageItem(block)
        return (SummaryItem if self._summarizes else ReasoningItem)(block, seals=self._seals)

    def _hand_out_logprobs(self, item: Item) -> None:
        """To content those of its tokens; anything else was told by tokens that are not shown."""
        spoken, self._spoken = self._spoken, []
        if isinstance(item, MessageItem):
            item.new_logprobs = token_logprobs(self._tokenizer, spoken)
            item.logprobs += item.new_logprobs

    def _deltas(self, item: Item, text: str) -> Iterator[dict[str, Any]]:
        if text:
            more = item.more(done=False)
            yield self._event(f"response.{item.event}.delta", **item.place, delta=text, **more)

    def _part_events(self, item: Item, what: str) -> Iterator[dict[str, Any]]:
        if item.part_event is not None:
            kind = f"response.{item.part_event}.{what}"
            yield self._event(kind, **item.place, part=item.part())

    def _item_event(self, item: Item, what: str, status: str) -> dict[str, Any]:
        kind, index = f"response.output_item.{what}", item.block.index
        return self._event(kind, output_index=index, item=item.body(status))


def usage_body(usage: Usage) -> dict[str, Any]:
    """The Responses API's usage object."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
