"""The server's own OpenAPI description, from the types that bodies are checked against."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

REFERENCE = "#/components/schemas/{name}"
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def openapi(app: FastAPI, bodies: Mapping[str, type[msgspec.Struct]]) -> dict[str, Any]:
    """The description of an application; bodies: what each POST route reads, by path."""
    made: dict[str, Any] = get_openapi(title=app.title, version=app.version, routes=app.routes)
    references, components = msgspec.json.schema_components(bodies.values(), ref_template=REFERENCE)
    made["components"] = {"schemas": {**components, "Error": ERROR}}
    error = _json({"$ref": REFERENCE.format(name="Error")})
    for operations in made["paths"].values():
        for operation in operations.values():
            operation["responses"] = {
                "200": {"description": "the answer"},
                "default": {"description": "an error", "content": error},
            }
    for path, reference in zip(bodies, references, strict=True):
        body = {"required": True, "content": _json(reference)}
        made["paths"][path]["post"]["requestBody"] = body
    for path, operations in made["paths"].items():
        if "{name}" in path:
            name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
            operations["get"]["parameters"] = [name]
    return made


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
