"""The handlers that take a body: generation in every API's shape, and text to tokens and back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from moet.errors import ContextLengthError, RequestError
from moet.runtime.engine import Engine
from moet.server import anthropic, responses
from moet.server.anthropic import CountTokensRequest, MessagesRequest, messages_answer
from moet.server.body import BodyReader
from moet.server.chat_completions import chat_answer
from moet.server.chat_format import ChatFormat
from moet.server.completions import completion_answer
from moet.server.exchange import Exchange
from moet.server.openai import (
    REFUSED,
    REFUSED_CHAT,
    ChatRequest,
    CompletionRequest,
)
from moet.server.reasoning import ReasoningDefaults, reasoning_defaults
from moet.server.responses import InputTokensRequest, ResponsesRequest, responses_answer
from moet.server.served import Served, json_response
from moet.server.stream import EventStream, or_gone

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


Given = ParamSpec("Given")
Made = TypeVar("Made")
TurnBody = TypeVar("TurnBody", ChatRequest, MessagesRequest, ResponsesRequest)
Make = Callable[[Engine, ChatFormat, TurnBody, str, ReasoningDefaults], Exchange]
"""Prepares the answer to a body, given the model's name as the client knows it."""


class Endpoints:
    """The handlers."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.engine = served.engine
        self.bodies = BodyReader(served.config.max_body_bytes)
        self.reasoning = reasoning_defaults(served.config)

    # Generation

    async def completions(self, request: Request) -> Response:
        body = await self.bodies.read(request, CompletionRequest, REFUSED)
        model = self.served.name_of(body.model)
        answer = await _made("prompt", completion_answer, self.engine, body, model, self._fill_in)
        return await self._answer(request, answer, stream=bool(body.stream))

    async def chat(self, request: Request) -> Response:
        return await self._turn(request, ChatRequest, REFUSED_CHAT, chat_answer, "messages")

    async def messages(self, request: Request) -> Response:
        refused = anthropic.REFUSED
        return await self._turn(request, MessagesRequest, refused, messages_answer, "messages")

    async def responses(self, request: Request) -> Response:
        refused = responses.REFUSED
        return await self._turn(request, ResponsesRequest, refused, responses_answer, "input")

    async def _turn(
        self,
        request: Request,
        kind: type[TurnBody],
        refused: dict[str, str],
        make: Make[TurnBody],
        field: str,
    ) -> Response:
        """Answer a turn of a conversation, whichever API it comes by. field: the prompt's."""
        body = await self.bodies.read(request, kind, refused)
        model, defaults = self.served.name_of(body.model), self.reasoning
        answer = await _made(field, make, self.engine, self.served.form, body, model, defaults)
        return await self._answer(request, answer, stream=bool(body.stream))

    async def count_tokens(self, request: Request) -> Response:
        body = await self.bodies.read(request, CountTokensRequest, anthropic.REFUSED)
        self.served.name_of(body.model)
        count = anthropic.count_tokens
        return json_response(await _made("messages", count, self.served.form, body, self.reasoning))

    async def input_tokens(self, request: Request) -> Response:
        body = await self.bodies.read(request, InputTokensRequest, responses.REFUSED)
        self.served.name_of(body.model)
        count = responses.count_input_tokens
        return json_response(await _made("input", count, self.served.form, body, self.reasoning))

    async def _answer(self, request: Request, answer: Exchange, *, stream: bool) -> Response:
        answer.operations = self.served.operations
        answer.request_id = request.state.request_id
        generation = await answer.open()
        if stream:
            return EventStream(
                answer.chunks(generation),
                generation.close,
                keep_alive_s=self.served.config.keep_alive_s,
                framing=answer.framing,
                failure=answer.failure,
            )
        try:
            body = await or_gone(answer.collect(generation), request.receive)
        finally:
            generation.close()
        return Response(status_code=CLIENT_GONE) if body is None else json_response(body)

    def _fill_in(self, before: str, behind: str) -> list[int]:
        """The prompt whose completion stands between two texts; RequestError if there is none."""
        fill_in = self.served.form.fill_in
        if fill_in is None:
            message = "suffix is not supported: this model's way to fill in the middle is unknown"
            raise RequestError(message, param="suffix")
        return fill_in(before, behind)

    # Text

    async def tokenize(self, request: Request) -> Response:
        body = await self.bodies.read(request, Tokenize, {})
        self.served.name_of(body.model)
        encode = partial(self.engine.text.tokenizer.encode, allow_special=body.allow_special)
        tokens = await _made("prompt", encode, body.prompt)
        limit = self.engine.info.max_model_len
        return json_response({"count": len(tokens), "max_model_len": limit, "tokens": tokens})

    async def detokenize(self, request: Request) -> Response:
        body = await self.bodies.read(request, Detokenize, {})
        self.served.name_of(body.model)
        limit = self.engine.info.vocab_size
        if any(not 0 <= token_id < limit for token_id in body.tokens):
            message = f"tokens has an id that is not in the vocabulary of 0 to {limit - 1}"
            raise RequestError(message, param="tokens")
        decode = partial(self.engine.text.tokenizer.decode, skip_special=body.skip_special_tokens)
        return json_response({"prompt": await asyncio.to_thread(decode, body.tokens)})


async def _made(
    field: str, make: Callable[Given, Made], *given: Given.args, **named: Given.kwargs
) -> Made:
    """What `make` returns, on a thread; a prompt in `field` that it finds too long is named so."""
    try:
        return await asyncio.to_thread(make, *given, **named)
    except ContextLengthError as error:
        error.param = field
        raise
