"""The output items of OpenAI's Responses API: what each block of an answer is there.

A block's item has its shapes: the item itself, its one part if it has parts, the names of its
events. In which order events come is told elsewhere.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from typing import Any

from moet.server.blocks import Block
from moet.server.custom_tools import CustomInput
from moet.server.reasoning import seal
from moet.server.responses_input import Origin


class Item(ABC):
    """One output item as it grows."""

    prefix: str  # of its id
    event: str  # of its text: response.EVENT.delta and .done
    part_event: str | None = None  # of its part: response.PART_EVENT.added and .done
    final = "text"  # the field of the done event that holds all of it

    def __init__(self, block: Block) -> None:
        self.block = block
        self.id = f"{self.prefix}_{uuid.uuid4().hex}"

    @property
    def place(self) -> dict[str, Any]:
        """The fields that say where in the response the item's text is."""
        return {"item_id": self.id, "output_index": self.block.index}

    @property
    def text(self) -> str:
        """All of it so far."""
        return self.block.text

    def grow(self, text: str) -> str:
        """What a client is to see of the block's next text."""
        return text

    def rest(self) -> str:
        """What it is to see yet, now that the block is whole. Called once."""
        return ""

    def part(self) -> dict[str, Any]:
        """Its part, if it has one."""
        return {}

    def more(self, *, done: bool) -> dict[str, Any]:
        """Further fields of its text's events."""
        return {}

    def body(self, status: str) -> dict[str, Any]:
        """The item; one that is in progress is empty yet."""
        fields = self.fields(is_whole=status != "in_progress")
        return {"id": self.id, "status": status, **fields}

    @abstractmethod
    def fields(self, *, is_whole: bool) -> dict[str, Any]:
        """The item's own fields."""


class MessageItem(Item):
    """A stretch of content; logprobs are those of its tokens, if any were asked for."""

    prefix, event, part_event = "msg", "output_text", "content_part"

    def __init__(self, block: Block) -> None:
        super().__init__(block)
        self.logprobs: list[dict[str, Any]] = []
        self.new_logprobs: list[dict[str, Any]] = []  # of the text that grew last

    @property
    def place(self) -> dict[str, Any]:
        return {**super().place, "content_index": 0}

    def part(self) -> dict[str, Any]:
        return {
            "type": "output_text",
            "text": self.text,
            "annotations": [],
            "logprobs": list(self.logprobs),
        }

    def more(self, *, done: bool) -> dict[str, Any]:
        return {"logprobs": list(self.logprobs if done else self.new_logprobs)}

    def fields(self, *, is_whole: bool) -> dict[str, Any]:
        parts = [self.part()] if is_whole else []
        return {"type": "message", "role": "assistant", "content": parts}


class ReasoningItem(Item):
    """A stretch of reasoning. seals: it is also given as encrypted_content, to be handed back."""

    prefix, event, part_event = "rs", "reasoning_text", "content_part"
    holder, other = "content", "summary"

    def __init__(self, block: Block, *, seals: bool) -> None:
        super().__init__(block)
        self._seals = seals

    @property
    def place(self) -> dict[str, Any]:
        return {**super().place, f"{self.holder}_index": 0}

    def part(self) -> dict[str, Any]:
        return {"type": self.event, "text": self.text}

    def fields(self, *, is_whole: bool) -> dict[str, Any]:
        return {
            "type": "reasoning",
            self.holder: [self.part()] if is_whole else [],
            self.other: [],
            "encrypted_content": seal(self.text) if self._seals and is_whole else None,
        }


class SummaryItem(ReasoningItem):
    """A stretch of reasoning, all of it in its summary."""

    event, part_event = "reasoning_summary_text", "reasoning_summary_part"
    holder, other = "summary", "content"

    def part(self) -> dict[str, Any]:
        return {"type": "summary_text", "text": self.text}


class CallItem(Item):
    """A call of a function."""

    prefix, event, final = "fc", "function_call_arguments", "arguments"
    kind = "function_call"

    def __init__(self, block: Block, origin: Origin) -> None:
        super().__init__(block)
        self._origin = origin

    def more(self, *, done: bool) -> dict[str, Any]:
        return {"name": self._origin.name} if done else {}

    def fields(self, *, is_whole: bool) -> dict[str, Any]:
        assert self.block.call is not None
        namespace = self._origin.namespace
        return {
            "type": self.kind,
            "call_id": self.block.call.id,
            "name": self._origin.name,
            self.final: self.text if is_whole else "",
            **({} if namespace is None else {"namespace": namespace}),
        }


class CustomCallItem(CallItem):
    """A call of a custom tool."""

    prefix, event, final = "ctc", "custom_tool_call_input", "input"
    kind = "custom_tool_call"

    def __init__(self, block: Block, origin: Origin) -> None:
        super().__init__(block, origin)
        self._input = CustomInput()

    @property
    def text(self) -> str:
        return self._input.text

    def grow(self, text: str) -> str:
        return self._input.add(text)

    def rest(self) -> str:
        return self._input.rest()

    def more(self, *, done: bool) -> dict[str, Any]:
        return {}
