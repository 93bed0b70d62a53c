"""What the server asks of a model's chat format: a conversation in, a prompt out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from moet.server.chat.messages import Message, Tool, ToolChoice


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatOptions:
    """How a conversation becomes a prompt.

    thinking None: as reasoning_effort says, else on. reasoning_effort None: the model's default.
    keep_reasoning None: the model's own rule for the reasoning of earlier turns; True keeps all.
    response_schema: a JSON schema that the answer is asked to follow. tool_choice "none" leaves
    the tools out of the prompt. add_generation_prompt None: unless continue_final_message, which
    leaves the last assistant message open.
    """

    thinking: bool | None = None
    reasoning_effort: str | None = None
    keep_reasoning: bool | None = None
    response_schema: dict[str, Any] | None = None
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """text: what was tokenized, for people. start: where the answer begins, for the parser."""

    token_ids: list[int]
    text: str
    start: Literal["reasoning", "content"]


class ChatEncoding(Protocol):
    """One model's chat format, bound to its tokenizer."""

    def encode(
        self, messages: Sequence[Message], tools: Sequence[Tool], options: ChatOptions
    ) -> EncodedPrompt:
        """Build the prompt. Raises RequestError naming the field that cannot be served.

        Text of the conversation never becomes a control token.
        """
        ...
