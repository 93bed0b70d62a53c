"""What every request passes first: API keys, draining, and the count of what is under way."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from moet.errors import OverloadedError
from moet.server.errors import HttpError, error_response
from moet.server.page import PREFIX

OPEN_PATHS = frozenset({"/", "/health", "/ready", "/metrics"})  # and the files of the page


class Traffic:
    """Requests under way, and whether more may come. `idle` is set while there are none."""

    def __init__(self) -> None:
        self.draining = False
        self.idle = asyncio.Event()
        self.idle.set()
        self._under_way = 0

    def drain(self) -> None:
        """Let nothing more in."""
        self.draining = True

    def enter(self) -> None:
        self._under_way += 1
        self.idle.clear()

    def leave(self) -> None:
        self._under_way -= 1
        if self._under_way == 0:
            self.idle.set()


class Gate:
    """ASGI middleware: keys first, then draining, then the count of POST requests."""

    def __init__(self, app: ASGIApp, *, traffic: Traffic, api_keys: Sequence[str]) -> None:
        self.app = app
        self._traffic = traffic
        self._keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_open(scope["path"]):
            await self.app(scope, receive, send)
            return
        if not self._allowed(scope):
            await error_response(_wrong_key(), scope["path"])(scope, receive, send)
            return
        if scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        if self._traffic.draining:
            error = OverloadedError(
                "the server is shutting down; no new requests", retry_after_s=5, unavailable=True
            )
            await error_response(error, scope["path"])(scope, receive, send)
            return
        self._traffic.enter()
        try:
            await self.app(scope, receive, send)
        finally:
            self._traffic.leave()

    def _allowed(self, scope: Scope) -> bool:
        """Compare with every key in constant time, so that time tells nothing about them."""
        if not self._keys:
            return True
        offered = b""
        for name, value in scope["headers"]:
            if name == b"x-api-key":
                offered = value
            elif name == b"authorization" and value[:7].lower() == b"bearer ":
                offered = value[7:].strip()
        matches = [hmac.compare_digest(offered, key) for key in self._keys]
        return any(matches)


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(PREFIX)


def _wrong_key() -> HttpError:
    return HttpError(
        401,
        "missing or wrong API key; send Authorization: Bearer KEY or x-api-key: KEY",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )
