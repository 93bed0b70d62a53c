"""Every answer carries an id: the caller's own, if it sent one that is fit for a header.

Handlers find it in the request's state, and name it in the log.
"""

from __future__ import annotations

import re
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_FIT = re.compile(rb"[!-~]{1,128}")
_NAMES = (b"x-request-id", b"request-id")  # the second is what Anthropic's clients read


class RequestIds:
    """ASGI middleware: sets X-Request-Id and Request-Id on every response."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == _NAMES[0]), b"")
        request_id = given if _FIT.fullmatch(given) else uuid.uuid4().hex.encode()

        scope.setdefault("state", {})["request_id"] = request_id.decode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                ids = [(name, request_id) for name in _NAMES]
                message = {**message, "headers": [*message.get("headers", ()), *ids]}
            await send(message)

        await self.app(scope, receive, send_with_id)
