"""Input items and tools of OpenAI's Responses API as values.

- Reasoning, a message and calls that follow each other are one assistant message, in which order
  they are given; a tool's output, or a message of somebody else, ends it.
- The tools of a namespace are shown to the model as NAMESPACE__NAME; answers name both again.
- Custom tools, which take plain text, are shown as functions (`custom_tools`).
- Tools that OpenAI runs, and items of their use, are left out with a notice in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from moet.errors import RequestError
from moet.server.chat.messages import (
    Message,
    Tool,
    ToolCall,
    ToolChoice,
    check_name,
    make_tool,
    show,
    text_of,
)
from moet.server.custom_tools import arguments_of, custom_tool
from moet.server.reasoning import unseal

logger = logging.getLogger(__name__)

_ROLES = ("user", "assistant", "system", "developer")
_KINDS = ("function", "custom")  # of tools that the client runs
_TEXT_PARTS = ("input_text", "output_text", "text", "refusal")


@dataclass(frozen=True, slots=True)
class Origin:
    """A tool as the client declared it."""

    name: str
    namespace: str | None = None
    kind: Literal["function", "custom"] = "function"


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The functions that the model sees, and what each of them is to the client."""

    tools: list[Tool]
    origins: dict[str, Origin]

    def origin(self, name: str) -> Origin:
        """What the client declared as the function that the model has named."""
        return self.origins.get(name) or Origin(name)


def model_name(namespace: str | None, name: str) -> str:
    """How the model calls a function."""
    return f"{namespace.rstrip('_')}__{name}" if namespace else name


def read_toolbox(raw: object) -> Toolbox:
    """The `tools` field."""
    box = Toolbox([], {})
    if raw is None:
        return box
    if not isinstance(raw, list):
        raise RequestError("tools must be a list", param="tools")
    for where, namespace, entry in _entries(raw):
        prefix = model_name(namespace, "")
        kind: Literal["function", "custom"] = "function"
        if entry.get("type") == "custom":
            kind, tool = "custom", custom_tool(entry, where, prefix=prefix)
        else:
            tool = make_tool(entry, where, prefix=prefix)
        if tool.name in box.origins:
            message = f"{where}.name makes {tool.name}, which another tool is called already"
            raise RequestError(message, param=f"{where}.name")
        box.tools.append(tool)
        box.origins[tool.name] = Origin(entry["name"], namespace, kind)
    return box


def _entries(raw: list[Any]) -> Iterator[tuple[str, str | None, Mapping[str, Any]]]:
    """Where each function and custom tool is, its namespace, and its fields."""
    for i, entry in enumerate(raw):
        where = f"tools[{i}]"
        if not isinstance(entry, dict):
            raise RequestError(f"{where} is {show(entry)}; it must be an object", param=where)
        kind = entry.get("type")
        if kind in _KINDS:
            yield where, None, entry
        elif kind == "namespace":
            namespace = text_of(entry.get("name"), f"{where}.name")
            check_name(namespace, f"{where}.name")
            inner = entry.get("tools")
            if not isinstance(inner, list):
                raise RequestError(f"{where}.tools must be a list", param=f"{where}.tools")
            for j, tool in enumerate(inner):
                if isinstance(tool, dict) and tool.get("type", "function") in _KINDS:
                    yield f"{where}.tools[{j}]", namespace, tool
                else:
                    logger.info("skipping a tool in a namespace: it is no function")
        else:
            logger.info("skipping a tool of type %.60r: this server runs no tools", kind)


def read_tool_choice(raw: object, box: Toolbox) -> tuple[ToolChoice, list[Tool]]:
    """The `tool_choice` field, and the tools that it leaves."""
    if raw is None:
        return ToolChoice(), box.tools
    if isinstance(raw, str) and raw in ("auto", "none", "required"):
        return _choice(raw, box.tools), box.tools
    kind = raw.get("type") if isinstance(raw, dict) else None
    if isinstance(raw, dict) and kind in _KINDS:
        return ToolChoice("named", _declared(raw, box, "tool_choice").name), box.tools
    if isinstance(raw, dict) and kind == "allowed_tools":
        mode, allowed = raw.get("mode"), raw.get("tools")
        if mode not in ("auto", "required") or not isinstance(allowed, list):
            message = "tool_choice must have a mode, auto or required, and a list of tools"
            raise RequestError(message, param="tool_choice")
        tools = [
            _declared(entry, box, f"tool_choice.tools[{i}]")
            for i, entry in enumerate(allowed)
            if isinstance(entry, dict) and entry.get("type") in _KINDS
        ]
        return _choice(mode, tools), tools
    message = f"tool_choice is {show(raw)}; it must be auto, none, required, or name functions"
    raise RequestError(message, param="tool_choice")


def _choice(kind: str, tools: list[Tool]) -> ToolChoice:
    if kind == "required" and not tools:
        message = "tool_choice is required, but no functions are declared"
        raise RequestError(message, param="tool_choice")
    return ToolChoice(cast(Literal["auto", "none", "required"], kind))


def _declared(raw: Mapping[str, Any], box: Toolbox, where: str) -> Tool:
    name, namespace = raw.get("name"), raw.get("namespace")
    for tool in box.tools:
        origin = box.origin(tool.name)
        if name in (origin.name, tool.name) and namespace in (None, origin.namespace):
            return tool
    message = f"{where} names {show(name)}, which is not among the declared tools"
    raise RequestError(message, param=where)


def read_input(raw: object) -> list[Message]:
    """The `input` field. RequestError names the item that is wrong."""
    if isinstance(raw, str):
        return [Message("user", text_of(raw, "input"))]
    if not isinstance(raw, list) or not raw:
        message = "input must be a string or a list of at least one item"
        raise RequestError(message, param="input")
    conversation = _Conversation()
    for i, item in enumerate(raw):
        where = f"input[{i}]"
        if not isinstance(item, dict):
            raise RequestError(f"{where} is {show(item)}; it must be an object", param=where)
        conversation.add(item, where)
    messages = conversation.messages()
    if not messages:
        message = "input has no message, no call and no output of one; send at least one"
        raise RequestError(message, param="input")
    return messages


class _Conversation:
    """Messages in the making; the assistant's last one is still open."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._reasoning: list[str] = []
        self._texts: list[str] = []
        self._calls: list[ToolCall] = []
        self._is_open = False

    def add(self, item: Mapping[str, Any], where: str) -> None:
        """Take the next item."""
        match item.get("type") or "message":
            case "message":
                self._message(item, where)
            case "reasoning":
                self._open()
                self._reasoning += _reasoning(item, where)
            case "function_call" | "custom_tool_call":
                self._open()
                self._calls.append(_call(item, where))
            case "function_call_output" | "custom_tool_call_output":
                self._close()
                text = _text(item.get("output"), f"{where}.output")
                call_id = text_of(item.get("call_id"), f"{where}.call_id")
                self._messages.append(Message("tool", text, tool_call_id=call_id))
            case "item_reference":
                message = f"{where} refers to an item, but nothing is stored; send the item itself"
                raise RequestError(message, param=where)
            case kind:
                logger.info("skipping an input item of type %.60r", kind)

    def messages(self) -> list[Message]:
        """All messages."""
        self._close()
        return self._messages

    def _message(self, item: Mapping[str, Any], where: str) -> None:
        role = item.get("role")
        if role not in _ROLES:
            message = f"{where}.role is {show(role)}; it must be one of {', '.join(_ROLES)}"
            raise RequestError(message, param=f"{where}.role")
        text = _text(item.get("content"), f"{where}.content")
        if role == "assistant":
            if self._texts or self._calls:
                self._close()
            self._open()
            self._texts.append(text)
        else:
            self._close()
            self._messages.append(Message(role, text))

    def _open(self) -> None:
        self._is_open = True

    def _close(self) -> None:
        if not self._is_open:
            return
        self._messages.append(
            Message(
                "assistant",
                "\n\n".join(self._texts),
                reasoning="\n\n".join(self._reasoning),
                tool_calls=tuple(self._calls),
            )
        )
        self._reasoning, self._texts, self._calls = [], [], []
        self._is_open = False


def _reasoning(item: Mapping[str, Any], where: str) -> list[str]:
    """The reasoning itself if it is there, else what we sealed, else its summary."""
    content = _text(item.get("content") or [], f"{where}.content", ("reasoning_text", "text"))
    summary = _text(item.get("summary") or [], f"{where}.summary", ("summary_text",))
    text = content or unseal(item.get("encrypted_content")) or summary
    return [text] if text else []


def _call(item: Mapping[str, Any], where: str) -> ToolCall:
    name = text_of(item.get("name"), f"{where}.name")
    namespace = item.get("namespace")
    if namespace is not None:
        name = model_name(text_of(namespace, f"{where}.namespace"), name)
    check_name(name, f"{where}.name")
    call_id = text_of(item.get("call_id"), f"{where}.call_id")
    if item["type"] == "custom_tool_call":
        arguments = arguments_of(text_of(item.get("input"), f"{where}.input"))
    else:
        arguments = text_of(item.get("arguments"), f"{where}.arguments")
    return ToolCall(call_id, name, arguments)


def _text(raw: object, where: str, kinds: tuple[str, ...] = _TEXT_PARTS) -> str:
    if isinstance(raw, str):
        return text_of(raw, where)
    if not isinstance(raw, list):
        message = f"{where} is {show(raw)}; it must be a string or a list of parts"
        raise RequestError(message, param=where)
    texts = []
    for i, part in enumerate(raw):
        at = f"{where}[{i}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or kind not in kinds:
            message = f"{at} is of type {show(kind)}; this model reads text parts only"
            raise RequestError(message, param=at)
        name = "refusal" if kind == "refusal" else "text"
        texts.append(text_of(part.get(name), f"{at}.{name}"))
    return "\n\n".join(text for text in texts if text)
