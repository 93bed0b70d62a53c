"""GLM-5.2's answers: reasoning up to a tag, and calls of keys and values typed by schema.

Values carry no type, so the tool's schema decides: the first of null, integer, number, boolean,
object, array that is allowed and fits, else the text as a string. A key whose schema says nothing
takes JSON if the value is any (no quoted string), and else a string. Accepted beyond the form that
the prompt teaches: calls inside open reasoning, a missing opening tag of a value, missing end tags.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from moet.server.chat.glm import (
    ARG_KEY,
    ARG_VALUE,
    END_ARG_KEY,
    END_ARG_VALUE,
    END_THINK,
    END_TOOL_CALL,
    THINK,
    TOOL_CALL,
)
from moet.server.chat.grammar import (
    STRING,
    Grammar,
    Schema,
    TagKind,
    TagRule,
    ValueCodec,
    parse_json,
)

_INTEGER = re.compile(r"[+-]?\d+")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_MAX_DIGITS = 4000  # beyond it Python refuses to read an integer


def schema_types(schema: Schema) -> frozenset[str]:
    """The JSON types that a schema allows, from type, enum, const and combinations; or none."""
    stated = schema.get("type")
    named = stated if isinstance(stated, list) else [stated]
    types = {name for name in named if isinstance(name, str)}
    members = schema.get("enum")
    if isinstance(members, list) and not stated:
        types.update(_type_of(member) for member in members)
    if "const" in schema and not stated:
        types.add(_type_of(schema["const"]))
    for key in ("anyOf", "oneOf", "allOf"):
        options = schema.get(key)
        for option in options if isinstance(options, list) else ():
            types |= schema_types(option) if isinstance(option, dict) else set()
    return frozenset(types)


def coerce(text: str, schema: Schema) -> Any:
    """The value that a text stands for under a schema; the text itself if no type fits."""
    types = schema_types(schema)
    for kind, read in _READERS:
        if kind in types:
            fits, value = read(text)
            if fits:
                return _coerce_inside(value, schema)
    if not types:
        parsed, value = parse_json(text)
        if parsed and not isinstance(value, str):
            return value
    return text


def value_codec(attributes: Mapping[str, str], schema: Schema | None) -> ValueCodec:
    """Strings may stream; every other value is whole before its type is certain."""
    known = schema or {}
    if schema_types(known) == {"string"}:
        return STRING
    return ValueCodec(
        streams=False, encode=lambda text: json.dumps(coerce(text, known), ensure_ascii=False)
    )


def _coerce_inside(value: Any, schema: Schema) -> Any:
    """Apply the schemas of properties and items to strings that stand for something else."""
    if isinstance(value, dict):
        properties = schema.get("properties")
        known = properties if isinstance(properties, dict) else {}
        return {k: _coerce_member(v, known.get(k)) for k, v in value.items()}
    if isinstance(value, list):
        return [_coerce_member(item, schema.get("items")) for item in value]
    return value


def _coerce_member(value: Any, schema: Any) -> Any:
    if not isinstance(schema, dict):
        return value
    if isinstance(value, str):
        types = schema_types(schema)
        return coerce(value, schema) if types and "string" not in types else value
    return _coerce_inside(value, schema)


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return kinds.get(type(value), "object")


_Reader = Callable[[str], tuple[bool, Any]]


def _null(text: str) -> tuple[bool, Any]:
    return text.strip().lower() == "null", None


def _integer(text: str) -> tuple[bool, Any]:
    text = text.strip()
    fits = len(text) < _MAX_DIGITS and bool(_INTEGER.fullmatch(text))
    return fits, int(text) if fits else None


def _number(text: str) -> tuple[bool, Any]:
    text = text.strip()
    if not _NUMBER.fullmatch(text):
        return False, None
    value = float(text)
    if not math.isfinite(value):
        return False, None
    fits, exact = _integer(text)
    if fits:
        return True, exact
    return True, int(value) if value.is_integer() else value


def _boolean(text: str) -> tuple[bool, Any]:
    text = text.strip().lower()
    return text in ("true", "false", "1", "0"), text in ("true", "1")


def _json_of(kind: type) -> _Reader:
    def read(text: str) -> tuple[bool, Any]:
        value = parse_json(text)[1]
        return isinstance(value, kind), value

    return read


_READERS: tuple[tuple[str, _Reader], ...] = (
    ("null", _null),
    ("integer", _integer),
    ("number", _number),
    ("boolean", _boolean),
    ("object", _json_of(dict)),
    ("array", _json_of(list)),
)
_TAGS: tuple[tuple[TagKind, str], ...] = (
    ("think", THINK),
    ("end_think", END_THINK),
    ("call", TOOL_CALL),
    ("end_call", END_TOOL_CALL),
    ("key", ARG_KEY),
    ("end_key", END_ARG_KEY),
    ("value", ARG_VALUE),
    ("end_value", END_ARG_VALUE),
)
_SPELLINGS = tuple(spelling for _, spelling in _TAGS)

GRAMMAR = Grammar(
    markers=_SPELLINGS,
    tags=_SPELLINGS,
    open_ended=(),
    rules=tuple(TagRule(kind, re.escape(spelling)) for kind, spelling in _TAGS),
    wrapped=False,
    value_codec=value_codec,
    surface_raw=True,
    think=THINK,
    end_think=END_THINK,
    call_markers=(TOOL_CALL,),
)
