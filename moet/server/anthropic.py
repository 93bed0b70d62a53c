"""Anthropic's POST /v1/messages and /v1/messages/count_tokens: their fields, and what they ask for.

Where a request says nothing of thinking there is none, as that API has it, unless the server's
flags say otherwise. Knows nothing of transport.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from moet.errors import ContextLengthError, RequestError
from moet.runtime.engine import Engine, Generation
from moet.server.anthropic_answer import MessageWriter
from moet.server.anthropic_input import read_messages, read_system, read_tool_choice, read_tools
from moet.server.chat.encoding import ChatOptions
from moet.server.chat_format import ChatFormat
from moet.server.reasoning import NO_DEFAULTS, ReasoningDefaults, read_reasoning
from moet.server.stream import Framing
from moet.server.structured import content_grammar, response_schema
from moet.server.turn import Turn, prepare
from moet.server.turn_answer import TurnAnswer
from moet.types import GrammarSpec, SamplingParams

REFUSED = {
    "container": "the server runs no code",
    "mcp_servers": "the server calls no tools; declare them in tools",
}
PING = b'event: ping\ndata: {"type":"ping"}\n\n'


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """POST /v1/messages/count_tokens."""

    messages: Any
    model: str | None = None
    system: Any = None
    tools: Any = None
    tool_choice: Any = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None  # the older name of output_config.format
    chat_template_kwargs: dict[str, Any] | None = None
    cache_control: Any = None  # prefixes are cached whether marked or not
    context_management: Any = None
    mcp_servers: Any = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """POST /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    cache_salt: str | None = None
    spec_tokens: int | None = None
    precision: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None


class MessagesAnswer(TurnAnswer):
    """An exchange of /v1/messages."""

    framing = Framing(names_events=True, keep_alive=PING, end=b"")

    async def open(self) -> Generation:
        """Queue the request. A prompt that is too long is refused in words clients look for."""
        try:
            return await super().open()
        except ContextLengthError:
            limit = self.engine.info.max_model_len - 1
            raise RequestError(
                f"prompt is too long: {self.usage.prompt_tokens} tokens > {limit} maximum",
                code="context_length_exceeded",
            ) from None


def messages_answer(
    engine: Engine,
    form: ChatFormat,
    body: MessagesRequest,
    model: str,
    defaults: ReasoningDefaults = NO_DEFAULTS,
) -> MessagesAnswer:
    """Check a request and prepare its answer. RequestError names what is wrong."""
    if body.max_tokens < 0:
        message = f"max_tokens is {body.max_tokens}; it must be at least 0"
        raise RequestError(message, param="max_tokens")
    turn = read_turn(body, defaults, _params(body, engine.text.defaults))
    prepared = prepare(engine, form, replace(turn, cache_salt=body.cache_salt or ""))
    name = f"msg_{uuid.uuid4().hex}"
    room = prepared.requests[0].params.max_tokens
    writer = MessageWriter(
        name,
        model,
        streams=bool(body.stream),
        fills_window=room is not None and room < body.max_tokens,
        hides_reasoning=_omits(body.thinking),
    )
    return MessagesAnswer(engine, prepared, writer, name, field="messages")


def count_tokens(
    form: ChatFormat, body: CountTokensRequest, defaults: ReasoningDefaults = NO_DEFAULTS
) -> dict[str, Any]:
    """The tokens of the prompt that the same fields make at /v1/messages."""
    turn = read_turn(body, defaults, SamplingParams())
    prompt = form.encoding.encode(turn.messages, turn.tools, turn.options)
    return {"input_tokens": len(prompt.token_ids)}


def read_turn(
    body: CountTokensRequest, defaults: ReasoningDefaults, params: SamplingParams
) -> Turn:
    """What a request asks for."""
    messages = [*read_system(body.system), *read_messages(body.messages)]
    tools = read_tools(body.tools)
    tool_choice, parallel = read_tool_choice(body.tool_choice, tools)
    reasoning = read_reasoning(
        {
            "thinking": body.thinking,
            "output_config": body.output_config,
            "chat_template_kwargs": body.chat_template_kwargs,
        },
        defaults,
        unless_asked=False,
    )
    schema, content = _format(body)
    options = ChatOptions(
        thinking=reasoning.thinking,
        reasoning_effort=reasoning.effort,
        keep_reasoning=reasoning.keep,
        response_schema=schema,
        tool_choice=tool_choice,
        continue_final_message=messages[-1].role == "assistant",
    )
    return Turn(
        messages=messages,
        tools=tools,
        options=options,
        params=params,
        content=content,
        max_thinking_tokens=reasoning.max_tokens,
        parallel_tool_calls=parallel,
    )


def _params(body: MessagesRequest, defaults: SamplingParams) -> SamplingParams:
    given = {
        name: value
        for name in ("temperature", "top_p", "top_k", "seed", "spec_tokens", "precision")
        if (value := getattr(body, name)) is not None
    }
    stop = tuple(body.stop_sequences or ())
    return msgspec.structs.replace(defaults, **given, stop=stop, max_tokens=body.max_tokens)


def _format(body: CountTokensRequest) -> tuple[dict[str, Any] | None, GrammarSpec | None]:
    """The schema for the prompt and the grammar of the content."""
    for param, form in (
        ("output_config.format", (body.output_config or {}).get("format")),
        ("output_format", body.output_format),
    ):
        if form is None:
            continue
        if not isinstance(form, dict) or form.get("type") != "json_schema":
            message = f"{param} must be an object of type json_schema"
            raise RequestError(message, param=param)
        if not isinstance(form.get("schema"), dict):
            message = f"{param}.schema must be a JSON schema object"
            raise RequestError(message, param=param)
        described = {"type": "json_schema", "json_schema": {"schema": form["schema"]}}
        content = content_grammar(described, param=param)
        return response_schema(described), content
    return None, None


def _omits(thinking: Mapping[str, Any] | None) -> bool:
    """Whether thinking goes back and forth unread; read_reasoning has checked the field."""
    return (thinking or {}).get("display") == "omitted"
