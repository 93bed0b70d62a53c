"""Structural tags: grammars as JSON values, in the form that the grammar compiler reads.

A control token is asked for by its id, so that no text can stand for it. Knows no model's markup.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from moet.runtime.grammar_check import schemas_in
from moet.server.chat.glm_grammar import schema_types
from moet.server.chat.grammar import Schema
from moet.server.chat.messages import Tool

Format = dict[str, Any]
MAX_WHITESPACE = 20  # in one place of a JSON value
MAX_PATTERN_LENGTH = 256


class CallWriter(Protocol):
    """How one model writes tool calls, as a grammar."""

    def calls(self, tools: Sequence[Tool], *, only_one: bool) -> Format:
        """At least one call of these tools, and nothing else."""
        ...

    def text_with_calls(self, tools: Sequence[Tool], *, only_one: bool) -> Format:
        """Any text, in which whatever begins a call goes on as one."""
        ...


def whole(form: Format) -> str:
    """A format as the text of a structural tag."""
    return json.dumps({"type": "structural_tag", "format": form}, ensure_ascii=False)


def sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def either(options: Sequence[Format]) -> Format:
    """One of the options; there must be one."""
    assert options
    return options[0] if len(options) == 1 else {"type": "or", "elements": list(options)}


def const(text: str) -> Format:
    return {"type": "const_string", "value": text}


def token(token_id: int) -> Format:
    return {"type": "token", "token": token_id}


def optional(content: Format) -> Format:
    return {"type": "optional", "content": content}


def star(content: Format) -> Format:
    return {"type": "star", "content": content}


def plus(content: Format) -> Format:
    return {"type": "plus", "content": content}


def regex(pattern: str) -> Format:
    return {"type": "regex", "pattern": pattern}


def json_value(schema: object, *, exact: bool = False) -> Format:
    """JSON of a schema.

    The compiler would let control characters into strings of a stated length. They get a pattern
    instead, which keeps out escaped characters, too. Lengths that are too long for that, or stand
    beside a pattern, are dropped, or if `exact` kept.
    """
    schema = copy.deepcopy(schema)
    for inside in schemas_in(schema):
        low, high = inside.get("minLength", 0), inside.get("maxLength")
        short = (
            isinstance(low, int)
            and isinstance(high, int)
            and low <= high <= MAX_PATTERN_LENGTH
            and "pattern" not in inside
        )
        if short:
            inside["pattern"] = f"^.{{{low},{high}}}$"
        if short or not exact:
            inside.pop("minLength", None)
            inside.pop("maxLength", None)
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_WHITESPACE}


def dispatch(token_id: int, rest: Format, *, again: bool) -> Format:
    """Any tokens; behind one of this id, `rest` has to follow, then the end or, `again`, any."""
    return {"type": "token_dispatch", "rules": [[token_id, rest]], "loop": again}


ANY_TEXT: Format = {"type": "any_text"}
ANY_KEY = regex(r'[^"<>\n]+')
ANY_VALUE = json_value(True)


class Parameters:
    """A tool's parameters one by one, each with a schema that stands alone."""

    def __init__(self, tool: Tool) -> None:
        self._schema = tool.parameters or {}
        properties = self._schema.get("properties")
        self._properties: Mapping[str, Any] = properties if isinstance(properties, dict) else {}
        required = self._schema.get("required")
        names = required if isinstance(required, list) else ()
        self._required = {name for name in names if isinstance(name, str)}

    def __iter__(self) -> Iterator[tuple[str, Schema, bool]]:
        """(name, schema, required), in the order of the schema."""
        shared = _definitions(self._schema)
        for name, schema in self._properties.items():
            own = schema if isinstance(schema, dict) else {}
            yield name, {**own, **shared}, name in self._required

    @property
    def takes_others(self) -> bool:
        """Whether names that the schema does not list may be used."""
        if "additionalProperties" in self._schema:
            return self._schema["additionalProperties"] is not False
        return bool(self._schema) and "properties" not in self._schema


def value_types(schema: Schema) -> frozenset[str]:
    """The JSON types that a schema allows, seen through references inside it; or none."""
    for _ in range(8):  # references to references, but no circles
        reference = schema.get("$ref")
        match = _REFERENCE.fullmatch(reference) if isinstance(reference, str) else None
        target = schema.get(match[1], {}).get(match[2]) if match else None
        if not isinstance(target, dict):
            break
        schema = {**target, **_definitions(schema)}
    return schema_types(schema)


def _definitions(schema: Schema) -> dict[str, Any]:
    """What references inside a schema point to."""
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema}


_REFERENCE = re.compile(r"#/(\$defs|definitions)/([^/]+)")


def raw_string(schema: Schema) -> Format:
    """A string that is written as it is: one of the strings that the schema lists, or any text."""
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    texts = [text for text in listed if isinstance(text, str)] if isinstance(listed, list) else []
    return either([const(text) for text in texts if text]) if any(texts) else ANY_TEXT
