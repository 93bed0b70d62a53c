"""Anthropic's conversations as values: system blocks, content blocks, tools, tool choice.

- A message's text blocks are joined by blank lines, and so are its thinking blocks: the models know
  one stretch of reasoning a turn.
- Tool results become messages of their own, in their place among the user's text.
- A reference to a tool becomes a sentence that names it; all declared tools are in the prompt.
- What only Anthropic's servers can run (their tools, and the blocks of their use) is left out.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

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
from moet.server.reasoning import unseal

logger = logging.getLogger(__name__)

# One of Claude Code's lines: it changes with every request, so that no prompt would share a prefix.
_BILLING_LINE = re.compile(r"^[ \t]*x-anthropic-billing-header:.*(?:\n|\Z)", re.I | re.M)
_ROLES = ("user", "assistant", "system")
_SERVER_SIDE = re.compile(r"server_tool_use|mcp_tool_use|container_upload|\w+_tool_result")


def read_system(raw: object) -> list[Message]:
    """The `system` field as at most one message, without the line that is there for billing."""
    if raw is None:
        return []
    text = _BILLING_LINE.sub("", text_of(raw, "system")) if isinstance(raw, str) else None
    if text is None:
        texts = [_BILLING_LINE.sub("", each) for each in _texts(raw, "system")]
        text = "\n\n".join(each for each in texts if each)
    return [Message("system", text)] if text else []


def read_messages(raw: object) -> list[Message]:
    """The `messages` field. RequestError names the block that is wrong."""
    if not isinstance(raw, list) or not raw:
        raise RequestError("messages must be a list of at least one message", param="messages")
    messages: list[Message] = []
    for i, entry in enumerate(raw):
        where = f"messages[{i}]"
        if not isinstance(entry, dict):
            raise RequestError(f"{where} is {show(entry)}; it must be an object", param=where)
        role, content = entry.get("role"), entry.get("content")
        if role not in _ROLES:
            text = f"{where}.role is {show(role)}; it must be one of {', '.join(_ROLES)}"
            raise RequestError(text, param=f"{where}.role")
        where += ".content"
        if role == "assistant":
            messages.append(_assistant(content, where))
        elif role == "system":
            messages.append(Message("system", "\n\n".join(_texts(content, where))))
        else:
            messages += _user(content, where)
    return messages


def read_tools(raw: object) -> list[Tool]:
    """The `tools` field, without the tools that Anthropic defines."""
    if raw is None:
        return []
    if not isinstance(raw, list):
        raise RequestError("tools must be a list", param="tools")
    tools = []
    for i, entry in enumerate(raw):
        where = f"tools[{i}]"
        if not isinstance(entry, dict):
            raise RequestError(f"{where} is {show(entry)}; it must be an object", param=where)
        kind = entry.get("type")
        if kind not in (None, "custom"):
            logger.info("skipping a tool of type %.60r, which only Anthropic's servers know", kind)
            continue
        tools.append(make_tool(entry, where, schema="input_schema"))
    return tools


def read_tool_choice(raw: object, tools: list[Tool]) -> tuple[ToolChoice, bool]:
    """The `tool_choice` field, and whether several calls are welcome."""
    if raw is None:
        return ToolChoice(), True
    kind = raw.get("type") if isinstance(raw, dict) else None
    if not isinstance(raw, dict) or kind not in ("auto", "any", "tool", "none"):
        message = "tool_choice.type must be auto, any, tool or none"
        raise RequestError(message, param="tool_choice")
    alone = raw.get("disable_parallel_tool_use")
    if alone is not None and not isinstance(alone, bool):
        where = "tool_choice.disable_parallel_tool_use"
        raise RequestError(f"{where} must be true or false", param=where)
    if kind == "any":
        if not tools:
            message = "tool_choice is any, but no tools are declared"
            raise RequestError(message, param="tool_choice")
        return ToolChoice("required"), not alone
    if kind == "tool":
        name = raw.get("name")
        if name not in [tool.name for tool in tools]:
            message = f"tool_choice names {show(name)}, which is not among the declared tools"
            raise RequestError(message, param="tool_choice.name")
        return ToolChoice("named", name), not alone
    return ToolChoice("none" if kind == "none" else "auto"), not alone


def _user(content: object, where: str) -> Iterator[Message]:
    texts: list[str] = []
    has_result = False
    for at, block in _blocks(content, where):
        if block.get("type") != "tool_result":
            texts += _text_of_block(block, at)
            continue
        if texts:
            yield Message("user", "\n\n".join(texts))
            texts = []
        yield _tool_result(block, at)
        has_result = True
    if texts or not has_result:  # a turn is one even where all of it is empty or left out
        yield Message("user", "\n\n".join(texts))


def _tool_result(block: Mapping[str, Any], at: str) -> Message:
    content = block.get("content")
    text = "" if content is None else "\n\n".join(_texts(content, f"{at}.content"))
    if block.get("is_error") and not text.lower().startswith("error"):
        text = f"Error: {text}"
    call_id = text_of(block.get("tool_use_id"), f"{at}.tool_use_id")
    return Message("tool", text, tool_call_id=call_id)


def _assistant(content: object, where: str) -> Message:
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[ToolCall] = []
    for at, block in _blocks(content, where):
        match block.get("type"):
            case "thinking":
                text = text_of(block.get("thinking"), f"{at}.thinking")
                reasoning.append(text or unseal(block.get("signature")) or "")
            case "redacted_thinking":
                reasoning.append(unseal(block.get("data")) or "")
            case "tool_use":
                calls.append(_tool_use(block, at))
            case _:
                texts += _text_of_block(block, at)
    return Message(
        "assistant",
        "\n\n".join(texts),
        reasoning="\n\n".join(text for text in reasoning if text),
        tool_calls=tuple(calls),
    )


def _tool_use(block: Mapping[str, Any], at: str) -> ToolCall:
    name = text_of(block.get("name"), f"{at}.name")
    check_name(name, f"{at}.name")
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise RequestError(f"{at}.input must be an object", param=f"{at}.input")
    text = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(text_of(block.get("id"), f"{at}.id"), name, text)


def _texts(content: object, where: str) -> list[str]:
    """The texts of content that may hold nothing else."""
    return [text for at, block in _blocks(content, where) for text in _text_of_block(block, at)]


def _blocks(content: object, where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Content blocks with their places; a string is one text block."""
    if isinstance(content, str):
        if content:
            yield where, {"type": "text", "text": content}
        return
    if not isinstance(content, list):
        message = f"{where} is {show(content)}; it must be a string or a list of blocks"
        raise RequestError(message, param=where)
    for i, block in enumerate(content):
        at = f"{where}[{i}]"
        if not isinstance(block, dict):
            raise RequestError(f"{at} is {show(block)}; it must be an object", param=at)
        yield at, block


def _text_of_block(block: Mapping[str, Any], at: str) -> list[str]:
    """The text of a block that has some; none of one that is left out."""
    kind = block.get("type")
    match kind:
        case "text":
            text = text_of(block.get("text"), f"{at}.text")
            return [text] if text else []
        case "tool_reference":
            name = text_of(block.get("tool_name"), f"{at}.tool_name")
            return [f"The tool {name} is available."]
        case "search_result":
            head = [text_of(block.get(name), f"{at}.{name}") for name in ("title", "source")]
            return ["\n".join([*head, *_texts(block.get("content"), f"{at}.content")])]
        case "document":
            return _document(block, at)
        case str() if _SERVER_SIDE.fullmatch(kind):
            logger.info("skipping a block of type %.60r: it belongs to Anthropic's servers", kind)
            return []
    message = f"{at} is of type {show(kind)}; this model reads text, thinking and tool blocks only"
    raise RequestError(message, param=at)


def _document(block: Mapping[str, Any], at: str) -> list[str]:
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    title = [text_of(block["title"], f"{at}.title")] if block.get("title") is not None else []
    if isinstance(source, dict) and kind == "text":
        return ["\n".join([*title, text_of(source.get("data"), f"{at}.source.data")])]
    if isinstance(source, dict) and kind == "content":
        return ["\n".join([*title, *_texts(source.get("content"), f"{at}.source.content")])]
    message = f"{at}.source is of type {show(kind)}; this model reads documents of text only"
    raise RequestError(message, param=f"{at}.source")
