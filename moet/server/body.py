"""Request bodies: size, content type, JSON and types are settled here, before any work starts."""

from __future__ import annotations

import json
import logging
import re
from typing import Any, TypeVar

import msgspec
import orjson
from starlette.requests import Request

from moet.errors import RequestError
from moet.server.errors import HttpError
from moet.server.nesting import MAX_DEPTH, is_too_deep

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct)

MAX_UNKNOWN_FIELDS = 1000  # remembered, so that each is logged once
_AT = re.compile(r" - at `(?:key in )?\$\.?(.*?)`$")
_EXPECTED = re.compile(r"Expected ([a-z |]+), got \w+")
_KINDS = {
    "int": "an integer of at most 64 bits",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}
_MISSING = re.compile(r"missing required field `(.*?)`")


class BodyReader:
    """Reads bodies for one server; remembers which unknown fields it has mentioned in the log."""

    def __init__(self, max_body_bytes: int) -> None:
        self.max_body_bytes = max_body_bytes
        self._mentioned: set[str] = set()

    async def read(self, request: Request, kind: type[T], refused: dict[str, str]) -> T:
        """The body as `kind`.

        refused: fields that are known and not served, with the reason; null counts as absent.
        Raises HttpError 413 or 415, or RequestError naming the field.
        """
        _require_json(request.headers.get("content-type", ""))
        _require_plain(request.headers.get("content-encoding", "identity"))
        data = parse_json(await self._bytes(request))
        for name, reason in refused.items():
            if data.get(name) not in (None, False, [], {}):
                raise RequestError(f"{name} is not supported: {reason}", param=name)
        self._mention_unknown(data.keys() - set(kind.__struct_fields__) - refused.keys())
        return convert(data, kind)

    async def _bytes(self, request: Request) -> bytes:
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self.max_body_bytes:
            raise self._too_large()
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > self.max_body_bytes:
                raise self._too_large()
        return bytes(body)

    def _too_large(self) -> HttpError:
        limit = f"the body is larger than {self.max_body_bytes} bytes (--max-body-bytes)"
        return HttpError(413, limit, code="request_too_large", headers={"Connection": "close"})

    def _mention_unknown(self, names: set[str]) -> None:
        for name in names - self._mentioned:
            if len(self._mentioned) < MAX_UNKNOWN_FIELDS:
                self._mentioned.add(name)
                logger.info("ignoring unknown request field %.100r", name)


def _require_json(content_type: str) -> None:
    media = content_type.split(";")[0].strip().lower()
    if media != "application/json" and not media.endswith("+json"):
        said = f"content type is {media[:100]!r}" if media else "there is no content type"
        raise HttpError(415, f"{said}; send Content-Type: application/json", code="bad_media_type")


def _require_plain(encoding: str) -> None:
    if encoding.strip().lower() not in ("", "identity"):
        message = f"content encoding is {encoding[:100]!r}; send the body uncompressed"
        raise HttpError(415, message, code="bad_content_encoding")


def parse_json(body: bytes) -> dict[str, Any]:
    """A JSON object out of bytes. RequestError says what is wrong, by position or by field."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise _why_not_json(body, error) from None
    if not isinstance(data, dict):
        raise RequestError(f"the body is a JSON {_json_type(data)}; it must be an object")
    if is_too_deep(data):
        raise RequestError(f"the body nests deeper than {MAX_DEPTH} levels; send flatter JSON")
    return data


def _json_type(value: object) -> str:
    names = {list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def _why_not_json(body: bytes, error: orjson.JSONDecodeError) -> RequestError:
    if not body.strip():
        return RequestError("the body is empty; it must be a JSON object")
    try:
        text = body.decode()
    except UnicodeDecodeError as wrong:
        return RequestError(f"the body is not UTF-8: invalid byte at offset {wrong.start}")
    try:
        field = find_surrogate(json.loads(text))
    except (ValueError, RecursionError):
        field = None
    if field is not None:
        message = f"{field} holds half of a UTF-16 surrogate pair; send whole characters"
        return RequestError(message, param=field)
    message = f"the body is not valid JSON: {error.msg} at offset {error.pos}"
    return RequestError(message)


def find_surrogate(data: object) -> str | None:
    """The path of the first string in a JSON value that is not valid Unicode."""
    todo: list[tuple[str, object]] = [("", data)]
    while todo:
        path, value = todo.pop()
        if isinstance(value, str):
            if any("\ud800" <= char <= "\udfff" for char in value):
                return path
        elif isinstance(value, list):
            todo += [(f"{path}[{i}]", value[i]) for i in reversed(range(len(value)))]
        elif isinstance(value, dict):
            dot = path and path + "."
            todo += [(f"{dot}{key}", value[key]) for key in reversed(value)]
            todo += [(path or "the body", key) for key in value]
    return None


def convert(data: dict[str, Any], kind: type[T]) -> T:
    """Check types, strictly. RequestError names the field, not its value."""
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        message = str(error)
        at, missing = _AT.search(message), _MISSING.search(message)
        message = _AT.sub("", message).replace("`", "")
        param = at[1] if at else None
        if missing:
            param = f"{param}.{missing[1]}" if param else missing[1]
            message = "it is required"
        if message.startswith("Invalid enum value"):
            message = "it is not one of the allowed values"
        message = _EXPECTED.sub(_in_words, message)
        raise RequestError(f"{param or 'the body'}: {message}", param=param) from None


def _in_words(expected: re.Match[str]) -> str:
    kinds = [kind for kind in expected[1].split(" | ") if kind != "null"]
    return "it must be " + " or ".join(_KINDS.get(kind, kind) for kind in kinds)
