"""Custom tools of OpenAI's Responses API: those that take plain text instead of arguments.

The model sees a function with one string, `input`; the client gets that string. A grammar that the
input should follow is told to the model, as a schema of a function that is not strict is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from moet.errors import RequestError
from moet.server.chat.grammar import parse_json
from moet.server.chat.messages import Tool, make_tool, show, text_of

INPUT = "input"
_OPENING = json.dumps({INPUT: ""})[:-2]
_WHOLE_CHARACTERS = re.compile(r'(?:[^"\\]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*')
_SYNTAXES = ("lark", "regex")


def custom_tool(fields: Mapping[str, Any], where: str, *, prefix: str = "") -> Tool:
    """A custom tool as the function that the model sees; prefix goes before its name.

    Raises RequestError naming the field.
    """
    described = text_of(fields.get("description") or "", f"{where}.description")
    demand = _demand(fields.get("format"), f"{where}.format")
    function = {
        "name": fields.get("name"),
        "description": "\n\n".join(text for text in (described, demand) if text) or None,
        "parameters": {
            "type": "object",
            "properties": {INPUT: {"type": "string"}},
            "required": [INPUT],
        },
    }
    return make_tool(function, where, prefix=prefix)


def _demand(raw: object, where: str) -> str:
    """What a format asks of the input, in words."""
    if raw is None or (isinstance(raw, dict) and raw.get("type") == "text"):
        return ""
    if not isinstance(raw, dict) or raw.get("type") != "grammar":
        message = f"{where} is {show(raw)}; its type must be text or grammar"
        raise RequestError(message, param=where)
    if raw.get("syntax") not in _SYNTAXES:
        message = f"{where}.syntax is {show(raw.get('syntax'))}; it must be lark or regex"
        raise RequestError(message, param=f"{where}.syntax")
    kind = {"lark": "Lark grammar", "regex": "regular expression"}[raw["syntax"]]
    definition = text_of(raw.get("definition"), f"{where}.definition")
    return f"The input must follow this {kind}:\n{definition}"


def arguments_of(text: str) -> str:
    """The arguments' JSON of a call whose input is text."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


class CustomInput:
    """The input of one call, out of its arguments' JSON as that grows."""

    def __init__(self) -> None:
        self._arguments = ""
        self._sent = ""
        self._read = len(_OPENING)

    def add(self, part: str) -> str:
        """The text that is certain now; nothing while the arguments may be of another shape."""
        self._arguments += part
        if not self._arguments.startswith(_OPENING):
            return ""
        match = _WHOLE_CHARACTERS.match(self._arguments, self._read)
        assert match is not None
        self._read = match.end()
        text: str = json.loads(f'"{match.group()}"')
        self._sent += text
        return text

    def rest(self) -> str:
        """What is still to be sent now that the call has ended. Call once."""
        text = self._whole().removeprefix(self._sent)
        self._sent += text
        return text

    @property
    def text(self) -> str:
        """All that was sent."""
        return self._sent

    def _whole(self) -> str:
        """The input; where there is none but something else, all of the arguments."""
        if self._arguments.startswith(_OPENING):
            return self._sent
        value = parse_json(self._arguments)[1]
        found = value.get(INPUT) if isinstance(value, dict) else None
        return found if isinstance(found, str) else self._arguments
