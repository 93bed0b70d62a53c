"""The HTTP application over an engine: routes, who may come in, and errors by type.

Knows nothing of processes or signals; `server.run` starts it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import cached_property
from time import monotonic
from typing import Any, Protocol, TypeVar

import msgspec
import orjson
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from moet import __version__
from moet.config import ServerConfig
from moet.errors import EngineDeadError, RequestError
from moet.runtime.engine import Engine
from moet.server import anthropic, metrics, responses
from moet.server.anthropic import CountTokensRequest, MessagesRequest, messages_answer
from moet.server.body import BodyReader
from moet.server.chat_completions import chat_answer
from moet.server.chat_format import ChatFormat, chat_format
from moet.server.completions import completion_answer
from moet.server.errors import HttpError, error_response
from moet.server.exchange import Exchange
from moet.server.gate import Gate, Traffic
from moet.server.openai import (
    REFUSED_CHAT,
    REFUSED_COMPLETION,
    ChatRequest,
    CompletionRequest,
)
from moet.server.operations import Operations
from moet.server.page import Page
from moet.server.raw_log import RawLog
from moet.server.reasoning import ReasoningDefaults, reasoning_defaults
from moet.server.request_ids import RequestIds
from moet.server.responses import InputTokensRequest, ResponsesRequest, responses_answer
from moet.server.schema import openapi
from moet.server.stream import EventStream, or_gone
from moet.server.tracing import make_tracer

logger = logging.getLogger(__name__)

CLIENT_GONE = 499  # nobody reads it; the access log does


class Tokenize(msgspec.Struct, kw_only=True):
    """POST /tokenize."""

    prompt: str
    model: str | None = None
    allow_special: bool = True


class Detokenize(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None
    skip_special_tokens: bool = False


class NamesModel(Protocol):
    """A body that may say which model it is for."""

    model: str | None


TurnBody = TypeVar("TurnBody", ChatRequest, MessagesRequest, ResponsesRequest)
Make = Callable[[Engine, ChatFormat, TurnBody, str, ReasoningDefaults], Exchange]
"""Prepares the answer to a body, given the model's name as the client knows it."""


class Api:
    """The handlers; holds what they share."""

    def __init__(self, engine: Engine, config: ServerConfig, traffic: Traffic) -> None:
        self.traffic = traffic
        self.engine = engine
        self.config = config
        self.names = config.served_model_names or (engine.model,)
        self.bodies = BodyReader(config.max_body_bytes)
        self.operations = Operations(
            request_timeout_s=config.request_timeout_s,
            raw_log=None if config.raw_log_folder is None else RawLog(config.raw_log_folder),
            tracer=make_tracer(config.otlp_endpoint),
        )
        self.reasoning = reasoning_defaults(config)

    # Generation

    async def completions(self, request: Request) -> Response:
        body = await self.bodies.read(request, CompletionRequest, REFUSED_COMPLETION)
        model = self.model_of(body)
        answer = await asyncio.to_thread(completion_answer, self.engine, body, model)
        return await self._answer(request, answer, stream=bool(body.stream))

    async def chat(self, request: Request) -> Response:
        return await self._turn(request, ChatRequest, REFUSED_CHAT, chat_answer)

    async def messages(self, request: Request) -> Response:
        return await self._turn(request, MessagesRequest, anthropic.REFUSED, messages_answer)

    async def responses(self, request: Request) -> Response:
        return await self._turn(request, ResponsesRequest, responses.REFUSED, responses_answer)

    async def _turn(
        self, request: Request, kind: type[TurnBody], refused: dict[str, str], make: Make[TurnBody]
    ) -> Response:
        """Answer a turn of a conversation, whichever API it comes by."""
        body = await self.bodies.read(request, kind, refused)
        model, defaults = self.model_of(body), self.reasoning
        answer = await asyncio.to_thread(make, self.engine, self.form, body, model, defaults)
        return await self._answer(request, answer, stream=bool(body.stream))

    async def count_tokens(self, request: Request) -> Response:
        body = await self.bodies.read(request, CountTokensRequest, anthropic.REFUSED)
        self.model_of(body)
        count = anthropic.count_tokens
        return json_response(await asyncio.to_thread(count, self.form, body, self.reasoning))

    async def input_tokens(self, request: Request) -> Response:
        body = await self.bodies.read(request, InputTokensRequest, responses.REFUSED)
        self.model_of(body)
        count = responses.count_input_tokens
        return json_response(await asyncio.to_thread(count, self.form, body, self.reasoning))

    @cached_property
    def form(self) -> ChatFormat:
        """The model's chat format; there is one as soon as the model is loaded."""
        return chat_format(self.engine.text)

    async def _answer(self, request: Request, answer: Exchange, *, stream: bool) -> Response:
        answer.operations = self.operations
        generation = await answer.open()
        if stream:
            return EventStream(
                answer.chunks(generation),
                generation.close,
                keep_alive_s=self.config.keep_alive_s,
                framing=answer.framing,
                failure=answer.failure,
            )
        try:
            body = await or_gone(answer.collect(generation), request.receive)
        finally:
            generation.close()
        return Response(status_code=CLIENT_GONE) if body is None else json_response(body)

    def model_of(self, body: NamesModel) -> str:
        """The model's name as the client gave it; 404 for one that is not served."""
        if not body.model:
            return self.names[0]
        if body.model not in self.names:
            raise _unknown_model(self.names)
        return body.model

    # Text

    async def tokenize(self, request: Request) -> Response:
        body = await self.bodies.read(request, Tokenize, {})
        self.model_of(body)
        tokens = await asyncio.to_thread(
            self.engine.text.tokenizer.encode, body.prompt, allow_special=body.allow_special
        )
        limit = self.engine.info.max_model_len
        return json_response({"count": len(tokens), "max_model_len": limit, "tokens": tokens})

    async def detokenize(self, request: Request) -> Response:
        body = await self.bodies.read(request, Detokenize, {})
        self.model_of(body)
        limit = self.engine.info.vocab_size
        if any(not 0 <= token_id < limit for token_id in body.tokens):
            message = f"tokens has an id that is not in the vocabulary of 0 to {limit - 1}"
            raise RequestError(message, param="tokens")
        text = self.engine.text.tokenizer.decode(body.tokens, skip_special=body.skip_special_tokens)
        return json_response({"prompt": text})

    # State

    async def models(self, request: Request) -> Response:
        """The list as OpenAI's clients and as Anthropic's read it."""
        return json_response(
            {
                "object": "list",
                "data": [self._card(name) for name in self.names],
                "has_more": False,
                "first_id": self.names[0],
                "last_id": self.names[-1],
            }
        )

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self.names:
            raise _unknown_model(self.names)
        return json_response(self._card(name))

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
        if self.engine.late_step is not None:
            message = f"a step takes longer than --step-timeout: {self.engine.late_step}"
            raise HttpError(503, message, kind="server_error", code="late_step")
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        state = self.engine.state
        stage, done = self.engine.load_progress
        status = "draining" if self.traffic.draining else state
        body = {"status": status, "stage": stage, "progress": round(done, 4)}
        return json_response(body, status=200 if status == "ready" else 503)

    async def metrics(self, request: Request) -> Response:
        stats = await self.engine.astats()
        text = metrics.render(stats, self.engine.info, self.names[0], self.operations.counters)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def live(self, request: Request) -> Response:
        """What the page at "/" shows: the books and the clock they were read at."""
        stats = await self.engine.astats()
        return json_response(
            {
                "time": monotonic(),
                "version": __version__,
                "models": self.names,
                "state": "draining" if self.traffic.draining else self.engine.state,
                "late_step": self.engine.late_step,
                "info": msgspec.to_builtins(self.engine.info),
                "stats": msgspec.to_builtins(stats),
                "server": dataclasses.asdict(self.operations.counters),
            }
        )

    async def experts(self, request: Request) -> Response:
        """Where the routed experts are, and how many rows each has had, by layer."""
        return json_response(msgspec.to_builtins(await self.engine.aexpert_stats()))

    async def version(self, request: Request) -> Response:
        return json_response({"version": __version__})

    async def server_info(self, request: Request) -> Response:
        stats = await self.engine.astats()
        return json_response(
            {
                "version": __version__,
                "models": self.names,
                "state": self.engine.state,
                "engine": msgspec.to_builtins(self.engine.info),
                "stats": msgspec.to_builtins(stats),
            }
        )


Handler = Callable[[Request], Awaitable[Response]]

BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/responses/input_tokens": InputTokensRequest,
    "/tokenize": Tokenize,
    "/detokenize": Detokenize,
}


def create_app(engine: Engine, config: ServerConfig) -> FastAPI:
    """The application; `app.state.traffic` tells who drains what is under way."""
    traffic = Traffic()
    api = Api(engine, config, traffic)
    app = FastAPI(title="moet", version=__version__, docs_url=None, redoc_url=None)
    app.state.traffic = traffic
    app.state.operations = api.operations
    page = Page()
    app.add_middleware(Gate, traffic=traffic, api_keys=config.api_keys)
    app.add_middleware(RequestIds)
    if config.allowed_origins:  # outermost, since a browser asks before it sends a key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Request-Id", "Retry-After"],
        )
    app.add_exception_handler(HTTPException, _no_such_route)
    posts: dict[str, Handler] = {
        "/v1/chat/completions": api.chat,
        "/v1/completions": api.completions,
        "/v1/messages": api.messages,
        "/v1/messages/count_tokens": api.count_tokens,
        "/v1/responses": api.responses,
        "/v1/responses/input_tokens": api.input_tokens,
        "/tokenize": api.tokenize,
        "/detokenize": api.detokenize,
    }
    gets: dict[str, Handler] = {
        "/v1/models": api.models,
        "/v1/models/{name:path}": api.model,
        "/health": api.health,
        "/ready": api.ready,
        "/metrics": api.metrics,
        "/version": api.version,
        "/server_info": api.server_info,
        "/live": api.live,
        "/moe/stats": api.experts,
        "/": page.index,
        "/static/{name}": page.file,
    }
    for method, routes in (("POST", posts), ("GET", gets)):
        for path, handler in routes.items():
            app.add_api_route(path, _guarded(handler), methods=[method], name=handler.__name__)
    app.openapi = lambda: openapi(app, BODIES)  # type: ignore[method-assign]
    return app


def _guarded(handler: Handler) -> Handler:
    """Answer errors by their type; nothing raised gets any further."""

    async def endpoint(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)
        except Exception as error:
            return error_response(error, request.url.path)

    return endpoint


async def _no_such_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path[:100]
    if error.status_code == 405:
        message, code = f"{request.method[:20]} is not allowed on {path}", "method_not_allowed"
    elif path == "/v1/embeddings":
        message, code = "this server generates text; it has no embeddings", "unknown_route"
    else:
        message, code = f"there is no {path} here", "unknown_route"
    return error_response(
        HttpError(error.status_code, message, code=code, headers=dict(error.headers or {})), path
    )


def _unknown_model(names: Sequence[str]) -> HttpError:
    served = ", ".join(names)
    message = f"that model is not served here; this server has: {served}"
    return HttpError(404, message, code="model_not_found", param="model")


def json_response(body: object, *, status: int = 200) -> Response:
    """A JSON body."""
    return Response(orjson.dumps(body), status_code=status, media_type="application/json")
