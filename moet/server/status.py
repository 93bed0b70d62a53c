"""The handlers that tell what is served and how it does."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import suppress
from time import monotonic
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from moet import __version__
from moet.errors import EngineDeadError, MoetError, RequestError
from moet.server import metrics
from moet.server.body import BodyReader
from moet.server.books import Books
from moet.server.errors import HttpError
from moet.server.served import Served, json_response

GIB = 1 << 30
MAX_GIB = 1 << 20
BOOKS_WAIT_S = 2.0  # for new books, before those that came last do
LIVE_WAIT_S = 0.1


class ExpertTuning(msgspec.Struct, kw_only=True):
    """POST /moe/settings. expert_pool_gib: device memory for experts of the default precision.
    kv_gib: for pages of the KV cache, while no request is under way."""

    tau: float | None = None
    expert_pool_gib: float | None = None
    kv_gib: float | None = None

    def size_bytes(self, name: Literal["expert_pool_gib", "kv_gib"]) -> int | None:
        """A size, if it is asked for; RequestError beyond what any machine has."""
        size: float | None = getattr(self, name)
        if size is None:
            return None
        if not 0 <= size <= MAX_GIB:
            raise RequestError(f"{name} is {size}; it must be from 0 to {MAX_GIB}", param=name)
        return int(size * GIB)


class Status:
    """The handlers."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.bodies = BodyReader(served.config.max_body_bytes)
        self.engine = served.engine
        self.books = Books(served.engine)

    async def models(self, request: Request) -> Response:
        """The list as OpenAI's clients and as Anthropic's read it."""
        return json_response(
            {
                "object": "list",
                "data": [self._card(name) for name in self.served.names],
                "has_more": False,
                "first_id": self.served.names[0],
                "last_id": self.served.names[-1],
            }
        )

    async def model(self, request: Request) -> Response:
        return json_response(self._card(self.served.name_of(request.path_params["name"])))

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "type": "model",
            "display_name": name,
            "created": 0,
            "created_at": "1970-01-01T00:00:00Z",
            "owned_by": "moet",
            "root": self.engine.model,
            "max_model_len": self.engine.info.max_model_len,
        }

    async def health(self, request: Request) -> Response:
        if self.engine.state in ("dead", "closed"):
            raise EngineDeadError(f"the engine is {self.engine.state}")
        silent_s = self.engine.silent_s
        if silent_s is not None:
            message = (
                f"the engine's process has not been heard of for {silent_s:.0f} s, longer than "
                "--step-timeout: it is stopped or stuck"
            )
            raise HttpError(503, message, kind="server_error", code="engine_silent")
        if self.engine.late_step is not None:
            message = f"a step takes longer than --step-timeout: {self.engine.late_step}"
            raise HttpError(503, message, kind="server_error", code="late_step")
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        state = self.engine.state
        stage, done = self.engine.load_progress
        status = "draining" if self.served.traffic.draining else state
        body = {"status": status, "stage": stage, "progress": round(done, 4)}
        return json_response(body, status=200 if status == "ready" else 503)

    async def metrics(self, request: Request) -> Response:
        info = self.engine.info
        stats, experts = await asyncio.gather(
            self.books.stats(BOOKS_WAIT_S), self.books.experts(BOOKS_WAIT_S)
        )
        text = metrics.render(
            stats.value,
            info,
            self.served.names[0],
            self.served.operations.counters,
            experts.value,
            self.engine.load_times_s,
            age_s=monotonic() - min(stats.at_s, experts.at_s),
        )
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def live(self, request: Request) -> Response:
        """What the page at "/" shows: the books and the clock they were read at.

        Answered by this process, whatever the engine does: `info` and `stats` are null while it
        loads, and what they last were when it gives none.
        """
        info = None
        with suppress(MoetError):  # it loads, or has ended: what came last is all there is
            info = msgspec.to_builtins(self.engine.info)
            await self.books.stats(LIVE_WAIT_S)
        last = self.engine.last_stats
        stage, done = self.engine.load_progress
        return json_response(
            {
                "time": monotonic() if last is None else last.at_s,
                "version": __version__,
                "models": self.served.names,
                "state": "draining" if self.served.traffic.draining else self.engine.state,
                "stage": stage,
                "progress": round(done, 4),
                "late_step": self.engine.late_step,
                "silent_s": self.engine.silent_s,
                "info": info,
                "stats": None if last is None else msgspec.to_builtins(last.value),
                "server": dataclasses.asdict(self.served.operations.counters),
            }
        )

    async def experts(self, request: Request) -> Response:
        """Where the routed experts are, and how many rows each has had, by layer."""
        return json_response(msgspec.to_builtins(await self.engine.aexpert_stats()))

    async def tune_experts(self, request: Request) -> Response:
        """Change the gate's tau, the expert pool or the pages between two steps; answers as
        /moe/stats."""
        body = await self.bodies.read(request, ExpertTuning, {})
        stats = await self.engine.aexpert_stats(
            tau=body.tau,
            pool_bytes=body.size_bytes("expert_pool_gib"),
            kv_bytes=body.size_bytes("kv_gib"),
        )
        return json_response(msgspec.to_builtins(stats))

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Have no later request start from what is cached now; requests under way go on."""
        await self.engine.areset_prefix_cache()
        return json_response({"status": "ok"})

    async def version(self, request: Request) -> Response:
        return json_response({"version": __version__})

    async def server_info(self, request: Request) -> Response:
        info = self.engine.info
        stats = await self.books.stats(BOOKS_WAIT_S)
        return json_response(
            {
                "version": __version__,
                "models": self.served.names,
                "state": self.engine.state,
                "engine": msgspec.to_builtins(info),
                "stats": msgspec.to_builtins(stats.value),
                "stats_age_s": monotonic() - stats.at_s,
            }
        )
