"""The page at "/": static files that come with the package, and no other. Works offline."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

from moet.server.errors import HttpError

KINDS = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
}
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; "
        "connect-src 'self'; img-src data:; form-action 'none'; base-uri 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
PREFIX = "/static/"


class Page:
    """The files by name, read once."""

    def __init__(self) -> None:
        folder = files("moet.server").joinpath("static")
        self._files: Mapping[str, bytes] = {
            each.name: each.read_bytes()
            for each in folder.iterdir()
            if each.name.rpartition(".")[2] in KINDS
        }

    async def index(self, request: Request) -> Response:
        """GET /"""
        return self._file("index.html")

    async def file(self, request: Request) -> Response:
        """GET /static/NAME"""
        return self._file(request.path_params["name"])

    def _file(self, name: str) -> Response:
        content = self._files.get(name)
        if content is None:
            raise HttpError(404, "the page has no such file", code="unknown_route")
        kind = KINDS[name.rpartition(".")[2]]
        return Response(content, media_type=kind, headers=HEADERS)
