"""Server-sent events: frames, comments while it is quiet, and the end when the client is gone.

A stream ends once: with its last frames or with one error frame, and, in OpenAI's older endpoints,
then `[DONE]`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any, TypeVar

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from moet.server.errors import error_object

logger = logging.getLogger(__name__)

T = TypeVar("T")

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@dataclass(frozen=True, slots=True)
class Framing:
    """How chunks become events. names_events: by their `type`. end: what follows the last one."""

    names_events: bool
    keep_alive: bytes
    end: bytes

    def frame(self, chunk: dict[str, Any]) -> bytes:
        """One event."""
        name = f"event: {chunk['type']}\n".encode() if self.names_events else b""
        return name + b"data: " + orjson.dumps(chunk) + b"\n\n"


DATA_FRAMES = Framing(False, b": keep-alive\n\n", b"data: [DONE]\n\n")
EVENT_FRAMES = Framing(True, b": keep-alive\n\n", b"")

Failure = Callable[[Exception], dict[str, Any]]
"""Makes the chunk that ends a stream when something goes wrong."""


async def terminated(
    chunks: AsyncGenerator[dict[str, Any], None], framing: Framing, failure: Failure
) -> AsyncGenerator[bytes, None]:
    """Chunks as events with exactly one end: an error, if there is one, becomes the last chunk."""
    try:
        async for chunk in chunks:
            yield framing.frame(chunk)
    except Exception as error:
        yield framing.frame(failure(error))
    finally:
        await chunks.aclose()
    if framing.end:
        yield framing.end


class EventStream(Response):
    """Sends chunks as they come.

    A sign of life is sent after `keep_alive_s` of silence. When the client leaves, the generator of
    the chunks is closed at once, wherever it waits; `close` is called at the end in any case, since
    a generator that was never begun cleans nothing up.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[dict[str, Any], None],
        close: Callable[[], None],
        *,
        keep_alive_s: float,
        framing: Framing = DATA_FRAMES,
        failure: Failure = error_object,
    ) -> None:
        self.frames = terminated(chunks, framing, failure)
        self._framing = framing
        self._close = close
        self.keep_alive_s = keep_alive_s
        self.background = None
        self.status_code = 200
        self._last_sent = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        keep_alive = asyncio.create_task(self._keep_alive(send))
        try:
            await or_gone(self._pump(send), receive)
        finally:
            keep_alive.cancel()
            await self.frames.aclose()
            self._close()

    async def _pump(self, send: Send) -> None:
        try:
            self._last_sent = monotonic()
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            async for data in self.frames:
                await self._send(send, data)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:
            logger.debug("a client left while its stream was written")

    async def _keep_alive(self, send: Send) -> None:
        self._last_sent = monotonic()
        while True:
            await asyncio.sleep(self.keep_alive_s - (monotonic() - self._last_sent))
            if monotonic() - self._last_sent >= self.keep_alive_s:
                await self._send(send, self._framing.keep_alive)

    async def _send(self, send: Send, data: bytes) -> None:
        self._last_sent = monotonic()
        await send({"type": "http.response.body", "body": data, "more_body": True})


async def or_gone(
    work: Awaitable[T], receive: Callable[[], Awaitable[Any]], *, gone: T | None = None
) -> T | None:
    """Await work, but cancel it when the client leaves; then return `gone`."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        return gone
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnect(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
