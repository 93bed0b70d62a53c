"""Conversations as values, and their reading from OpenAI-shaped JSON. Knows no model's format."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from moet.errors import RequestError

logger = logging.getLogger(__name__)

Role = Literal["system", "developer", "user", "assistant", "tool", "latest_reminder"]
ToolChoiceKind = Literal["auto", "none", "required", "named"]

_TOOL_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_TEXT_PARTS = ("text", "input_text", "output_text")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of the history; arguments is JSON text as the client sent it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One message. `task` names a classification task of models that know some."""

    role: Role
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    task: str | None = None


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; parameters is its JSON schema.

    strict: calls must follow the schema, also where the model is free not to call.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which tools may or must be called; `name` belongs to kind "named"."""

    kind: ToolChoiceKind = "auto"
    name: str | None = None


def parse_messages(raw: object) -> list[Message]:
    """The request's `messages`. Raises RequestError naming the message and the field.

    Content is text or a list of text parts (joined by blank lines). Reasoning is read from
    `reasoning_content`, else from `reasoning`.
    """
    if not isinstance(raw, list) or not raw:
        raise RequestError("messages must be a list of at least one message", param="messages")
    return [_message(entry, f"messages[{i}]") for i, entry in enumerate(raw)]


def parse_tools(raw: object) -> list[Tool]:
    """The request's `tools`, wrapped ({"type": "function", "function": {...}}) or flat.

    Tools that are no functions are left out with a notice in the log.
    """
    if raw is None:
        return []
    if not isinstance(raw, list):
        raise RequestError("tools must be a list", param="tools")
    tools = [_tool(entry, f"tools[{i}]") for i, entry in enumerate(raw)]
    return [tool for tool in tools if tool is not None]


def parse_tool_choice(raw: object, tools: list[Tool]) -> ToolChoice:
    """The request's `tool_choice`; absent, it is auto. A named tool must be declared."""
    if raw is None:
        return ToolChoice()
    if isinstance(raw, str) and raw in ("auto", "none", "required"):
        kind: ToolChoiceKind = raw  # type: ignore[assignment]
        if kind == "required" and not tools:
            message = "tool_choice is required, but no tools are declared"
            raise RequestError(message, param="tool_choice")
        return ToolChoice(kind)
    if isinstance(raw, dict) and raw.get("type") == "function":
        function = raw.get("function", raw)
        name = function.get("name") if isinstance(function, dict) else None
        if name not in [tool.name for tool in tools]:
            message = f"tool_choice names {show(name)}, which is not among the declared tools"
            raise RequestError(message, param="tool_choice")
        return ToolChoice("named", name)
    message = f"tool_choice is {show(raw)}; it must be auto, none, required or name a function"
    raise RequestError(message, param="tool_choice")


def _message(raw: object, where: str) -> Message:
    if not isinstance(raw, dict):
        raise RequestError(f"{where} is {show(raw)}; it must be an object", param=where)
    role = raw.get("role")
    if role not in get_args(Role):
        message = f"{where}.role is {show(role)}; it must be one of {', '.join(get_args(Role))}"
        raise RequestError(message, param=f"{where}.role")
    content = raw.get("content")
    if content is None and role not in ("assistant", "tool"):
        raise RequestError(f"{where}.content is missing", param=f"{where}.content")
    reasoning = raw.get("reasoning_content")
    if reasoning is None:
        reasoning = raw.get("reasoning")
    return Message(
        role=cast(Role, role),
        content=_content(content, f"{where}.content"),
        reasoning=text_of(reasoning or "", f"{where}.reasoning_content"),
        tool_calls=_tool_calls(raw.get("tool_calls") or [], f"{where}.tool_calls"),
        tool_call_id=_optional_text(raw.get("tool_call_id"), f"{where}.tool_call_id"),
        task=_optional_text(raw.get("task"), f"{where}.task"),
    )


def _content(raw: object, where: str) -> str:
    if raw is None:
        return ""
    if not isinstance(raw, list):
        return text_of(raw, where)
    texts = []
    for i, part in enumerate(raw):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or kind not in _TEXT_PARTS:
            message = f"{where}[{i}] is of type {show(kind)}; this model reads text parts only"
            raise RequestError(message, param=f"{where}[{i}]")
        texts.append(text_of(part.get("text"), f"{where}[{i}].text"))
    return "\n\n".join(text for text in texts if text)


def _tool_calls(raw: object, where: str) -> tuple[ToolCall, ...]:
    if not isinstance(raw, list):
        raise RequestError(f"{where} must be a list", param=where)
    calls = []
    for i, entry in enumerate(raw):
        at = f"{where}[{i}]"
        function = entry.get("function") if isinstance(entry, dict) else None
        if not isinstance(entry, dict) or not isinstance(function, dict):
            raise RequestError(f"{at} must be an object with a function", param=at)
        arguments = function.get("arguments")
        if isinstance(arguments, dict):
            arguments = json.dumps(arguments, ensure_ascii=False)
        name = text_of(function.get("name"), f"{at}.function.name")
        check_name(name, f"{at}.function.name")
        call_id = text_of(entry.get("id") or "", f"{at}.id")
        calls.append(ToolCall(call_id, name, text_of(arguments or "", f"{at}.function.arguments")))
    return tuple(calls)


def _tool(raw: object, where: str) -> Tool | None:
    if not isinstance(raw, dict):
        raise RequestError(f"{where} is {show(raw)}; it must be an object", param=where)
    kind = raw.get("type", "function")
    if not isinstance(kind, str):
        message = f"{where}.type is {show(kind)}; it must be a string"
        raise RequestError(message, param=f"{where}.type")
    if kind != "function":
        logger.info("skipping a tool of type %.60r: this endpoint knows functions", kind)
        return None
    function = raw.get("function", raw)
    if not isinstance(function, dict):
        raise RequestError(f"{where}.function must be an object", param=f"{where}.function")
    return make_tool(function, f"{where}.function")


def make_tool(
    fields: Mapping[str, Any], where: str, *, schema: str = "parameters", prefix: str = ""
) -> Tool:
    """A tool from its fields, of which `schema` holds the JSON schema; prefix goes before its name.

    Raises RequestError naming the field.
    """
    name = prefix + text_of(fields.get("name"), f"{where}.name")
    check_name(name, f"{where}.name")
    parameters, at = fields.get(schema), f"{where}.{schema}"
    if parameters is not None and not isinstance(parameters, dict):
        raise RequestError(f"{at} must be a JSON schema object", param=at)
    text_of(json.dumps(parameters, ensure_ascii=False), at)
    description = _optional_text(fields.get("description"), f"{where}.description")
    strict = fields.get("strict")
    if strict is not None and not isinstance(strict, bool):
        at = f"{where}.strict"
        raise RequestError(f"{at} is {show(strict)}; it must be true or false", param=at)
    return Tool(name, description, parameters, bool(strict))


def check_name(name: str, where: str) -> None:
    """Raise RequestError if a tool cannot have this name."""
    if not _TOOL_NAME.fullmatch(name):
        message = f"{where} is {show(name)}; it must have 1 to 128 letters, digits or any of _.:/-"
        raise RequestError(message, param=where)


def _optional_text(raw: object, where: str) -> str | None:
    return None if raw is None else text_of(raw, where)


def text_of(raw: object, where: str) -> str:
    """The value if it is a string of whole characters. Raises RequestError naming the field."""
    if not isinstance(raw, str):
        raise RequestError(f"{where} is {show(raw)}; it must be a string", param=where)
    try:
        raw.encode()
    except UnicodeEncodeError as error:
        message = f"{where} has a lone surrogate at character {error.start}, which is no character"
        raise RequestError(message + "; send valid Unicode", param=where) from error
    return raw


def show(value: object) -> str:
    """A value in a message, cut to what is bearable."""
    text = ascii(value)
    return text if len(text) <= 60 else text[:60] + "..."
