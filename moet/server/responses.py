"""OpenAI's POST /v1/responses, stateless: its fields, and what the engine is asked for.

Nothing is stored, whatever `store` says: a client sends the whole conversation every time. Knows
nothing of transport.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import replace
from typing import Any, Literal

import msgspec

from moet.errors import RequestError
from moet.runtime.engine import Engine
from moet.server.chat.encoding import ChatOptions
from moet.server.chat.messages import Message, text_of
from moet.server.chat_format import ChatFormat
from moet.server.openai import checked_top_logprobs
from moet.server.reasoning import NO_DEFAULTS, ReasoningDefaults, read_reasoning
from moet.server.responses_answer import ResponseWriter
from moet.server.responses_input import Toolbox, read_input, read_tool_choice, read_toolbox
from moet.server.structured import content_grammar, response_schema
from moet.server.turn import Turn, prepare
from moet.server.turn_answer import TurnAnswer
from moet.types import GrammarSpec, SamplingParams

REFUSED = {
    "previous_response_id": "nothing is stored; send the whole conversation in input",
    "conversation": "nothing is stored; send the whole conversation in input",
    "background": "nothing is stored; stream instead",
    "prompt": "nothing is stored; send instructions and input",
}
SEALED_REASONING = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"
SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "seed", "spec_tokens", "precision")


class InputTokensRequest(msgspec.Struct, kw_only=True):
    """POST /v1/responses/input_tokens."""

    input: Any
    model: str | None = None
    instructions: str | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    thinking: dict[str, Any] | None = None
    thinking_token_budget: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ResponsesRequest(InputTokensRequest, kw_only=True):
    """POST /v1/responses."""

    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    top_logprobs: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    include: list[str] | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    max_tool_calls: int | None = None  # of the server's own tools, which there are none of
    cache_salt: str | None = None
    priority: int | None = None
    spec_tokens: int | None = None
    precision: str | None = None


def responses_answer(
    engine: Engine,
    form: ChatFormat,
    body: ResponsesRequest,
    model: str,
    defaults: ReasoningDefaults = NO_DEFAULTS,
) -> TurnAnswer:
    """Check a request and prepare its answer. RequestError names what is wrong."""
    limit = body.max_output_tokens
    if limit is not None and limit < 1:
        message = f"max_output_tokens is {limit}; it must be at least 1"
        raise RequestError(message, param="max_output_tokens")
    box = read_toolbox(body.tools)
    params = _params(body, engine.text.defaults)
    turn = read_turn(body, box, defaults, params)
    turn = replace(turn, priority=body.priority or 0, cache_salt=body.cache_salt or "")
    prepared = prepare(engine, form, turn)
    name = f"resp_{uuid.uuid4().hex}"
    writer = ResponseWriter(
        _response(body, name, model, params),
        box,
        engine.text.tokenizer,
        streams=bool(body.stream),
        summarizes=_summarizes(body),
        seals=SEALED_REASONING in (body.include or ()),
    )
    return TurnAnswer(engine, prepared, writer, name, field="input")


def count_input_tokens(
    form: ChatFormat, body: InputTokensRequest, defaults: ReasoningDefaults = NO_DEFAULTS
) -> dict[str, Any]:
    """The tokens of the prompt that the same fields make at /v1/responses."""
    turn = read_turn(body, read_toolbox(body.tools), defaults, SamplingParams())
    prompt = form.encoding.encode(turn.messages, turn.tools, turn.options)
    return {"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)}


def read_turn(
    body: InputTokensRequest, box: Toolbox, defaults: ReasoningDefaults, params: SamplingParams
) -> Turn:
    """What a request asks for."""
    if body.truncation == "auto":
        message = "truncation must be disabled: the server drops nothing; shorten the input"
        raise RequestError(message, param="truncation")
    messages = read_input(body.input)
    if body.instructions:
        messages.insert(0, Message("system", text_of(body.instructions, "instructions")))
    tool_choice, tools = read_tool_choice(body.tool_choice, box)
    reasoning = read_reasoning(
        {
            "reasoning_effort": body.reasoning_effort,
            "reasoning": body.reasoning,
            "enable_thinking": body.enable_thinking,
            "thinking": body.thinking,
            "thinking_token_budget": body.thinking_token_budget,
            "chat_template_kwargs": body.chat_template_kwargs,
        },
        defaults,
    )
    schema, content = _format(body)
    options = ChatOptions(
        thinking=reasoning.thinking,
        reasoning_effort=reasoning.effort,
        keep_reasoning=reasoning.keep,
        response_schema=schema,
        tool_choice=tool_choice,
    )
    return Turn(
        messages=messages,
        tools=tools,
        options=options,
        params=params,
        content=content,
        max_thinking_tokens=reasoning.max_tokens,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        hides_reasoning=reasoning.hidden,
    )


def _params(body: ResponsesRequest, defaults: SamplingParams) -> SamplingParams:
    given = {name: value for name in SAMPLING_FIELDS if (value := getattr(body, name)) is not None}
    return msgspec.structs.replace(
        defaults, **given, max_tokens=body.max_output_tokens, logprobs=_num_logprobs(body)
    )


def _num_logprobs(body: ResponsesRequest) -> int | None:
    """Alternatives to report per token of the text; None for no log-probabilities at all."""
    number = checked_top_logprobs(body.top_logprobs)
    return number if number or LOGPROBS in (body.include or ()) else None


def _format(body: InputTokensRequest) -> tuple[dict[str, Any] | None, GrammarSpec | None]:
    """The schema for the prompt and the grammar of the content, from text.format."""
    form = (body.text or {}).get("format")
    if form is None:
        return None, None
    kind = form.get("type") if isinstance(form, dict) else None
    if not isinstance(form, dict) or kind not in ("text", "json_object", "json_schema"):
        message = "text.format.type must be text, json_object or json_schema"
        raise RequestError(message, param="text.format")
    if kind == "json_schema" and not isinstance(form.get("schema"), dict):
        message = "text.format.schema must be a JSON schema object"
        raise RequestError(message, param="text.format.schema")
    described = {"type": kind, "json_schema": form}
    content = content_grammar(described, param="text.format")
    return response_schema(described), content


def _summarizes(body: ResponsesRequest) -> bool:
    """Whether the client reads summaries of reasoning; it gets all of it there."""
    wanted = (body.reasoning or {}).get("summary")
    if wanted not in (None, "auto", "concise", "detailed"):
        message = "reasoning.summary must be auto, concise or detailed"
        raise RequestError(message, param="reasoning.summary")
    return wanted is not None


def _response(
    body: ResponsesRequest, name: str, model: str, params: SamplingParams
) -> dict[str, Any]:
    """The response object as it is at the beginning."""
    reasoning = body.reasoning or {}
    return {
        "id": name,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "service_tier": "default",
        "store": False,
        "temperature": params.temperature,
        "text": {"format": {"type": "text"}, **(body.text or {})},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": body.tools or [],
        "top_logprobs": params.logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }
