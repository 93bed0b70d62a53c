"""The HTTP application over an engine: routes, who may come in, and errors by type.

Knows nothing of processes or signals; `server.run` starts it.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from moet import __version__
from moet.config import ServerConfig
from moet.runtime.engine import Engine
from moet.server.anthropic import CountTokensRequest, MessagesRequest
from moet.server.endpoints import CLIENT_GONE, Detokenize, Endpoints, Tokenize
from moet.server.errors import HttpError, error_response
from moet.server.gate import Gate, Traffic
from moet.server.openai import ChatRequest, CompletionRequest
from moet.server.page import Page
from moet.server.request_ids import RequestIds
from moet.server.responses import InputTokensRequest, ResponsesRequest
from moet.server.schema import openapi
from moet.server.served import Served
from moet.server.status import ExpertTuning, Status

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
    "/moe/settings": ExpertTuning,
}


def create_app(engine: Engine, config: ServerConfig) -> FastAPI:
    """The application; `app.state.traffic` tells who drains what is under way."""
    traffic = Traffic()
    served = Served(engine, config, traffic)
    api, status = Endpoints(served), Status(served)
    app = FastAPI(title="moet", version=__version__, docs_url=None, redoc_url=None)
    app.state.traffic = traffic
    app.state.operations = served.operations
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
        "/moe/settings": status.tune_experts,
        "/reset_prefix_cache": status.reset_prefix_cache,
    }
    gets: dict[str, Handler] = {
        "/v1/models": status.models,
        "/v1/models/{name:path}": status.model,
        "/health": status.health,
        "/ready": status.ready,
        "/metrics": status.metrics,
        "/version": status.version,
        "/server_info": status.server_info,
        "/live": status.live,
        "/moe/stats": status.experts,
        "/": page.index,
        "/static/{name}": page.file,
    }
    for method, routes in (("POST", posts), ("GET", gets)):
        for path, handler in routes.items():
            app.add_api_route(path, _guarded(handler), methods=[method], name=handler.__name__)
    for path, handler in gets.items():  # as routers, monitors and some agents ask
        app.add_api_route(path, _guarded(handler), methods=["HEAD"], include_in_schema=False)
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
        message, code = f"there is no {path} here{_instead(path)}", "unknown_route"
    return error_response(
        HttpError(error.status_code, message, code=code, headers=dict(error.headers or {})), path
    )


def _instead(path: str) -> str:
    """What a client means whose base address has one /v1 too few or too many."""
    meant = "/v1" + re.sub(r"^(/v1)*", "", path.rstrip("/"))
    return f"; you may mean {meant}" if meant in BODIES or meant == "/v1/models" else ""
