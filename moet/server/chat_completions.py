"""POST /v1/chat/completions: a conversation in; content, reasoning and tool calls out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from moet.errors import RequestError
from moet.runtime.engine import Engine
from moet.runtime.output import Output
from moet.runtime.tokenizer import Tokenizer
from moet.server.answers import Answer, Header, Pending, chat_logprobs, prompt_logprobs
from moet.server.chat.calls import CallArguments, CallStart
from moet.server.chat.encoding import ChatOptions, EncodedPrompt
from moet.server.chat.grammar import ReasoningCounter
from moet.server.chat.messages import (
    Tool,
    ToolChoice,
    parse_messages,
    parse_tool_choice,
    parse_tools,
)
from moet.server.chat.parser import ContentDelta, Delta, OutputParser, ReasoningDelta
from moet.server.chat_format import ChatFormat
from moet.server.openai import ChatRequest
from moet.server.structured import (
    answer_grammar,
    behind_reasoning,
    content_grammar,
    response_schema,
)
from moet.types import GrammarSpec, ThinkingBudget, TokenLogprobs

T = TypeVar("T", bool, str)

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def chat_answer(
    engine: Engine,
    form: ChatFormat,
    body: ChatRequest,
    model: str,
    *,
    max_thinking_tokens: int | None = None,
) -> Answer:
    """Check a request and prepare its answer. RequestError names what is wrong.

    max_thinking_tokens: of the server; a request may ask for less.
    """
    body.check_shared()
    tools = parse_tools(body.tools)
    tool_choice = parse_tool_choice(body.tool_choice, tools)
    options = chat_options(body, tool_choice)
    prompt = form.encoding.encode(parse_messages(body.messages), tools, options)
    params = body.params(
        engine.text.defaults,
        max_tokens=body.token_limit(),
        logprobs=body.num_logprobs(),
        prompt_logprobs=body.prompt_logprobs,
    )
    budget = thinking_budget(body, max_thinking_tokens)
    if budget is not None:
        params = msgspec.structs.replace(params, thinking=_forced_end(form, prompt, budget))
    requests = engine.requests(
        prompt.token_ids,
        params,
        n=1 if body.n is None else body.n,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        grammar=chat_grammar(body, form, tools, tool_choice, prompt),
    )
    choices = [
        ChatChoice(body, index, prompt, form, tools, tool_choice, engine.text.tokenizer)
        for index in range(len(requests))
    ]
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    header = Header("chatcmpl", kind, model, body.request_id)
    return Answer(engine, body, requests, choices, header, prompt_field="messages")


def chat_grammar(
    body: ChatRequest,
    form: ChatFormat,
    tools: list[Tool],
    tool_choice: ToolChoice,
    prompt: EncodedPrompt,
) -> GrammarSpec | None:
    """What the answer is held to, if anything."""
    content = content_grammar(body.response_format, body.structured_outputs)
    spec, from_the_start = answer_grammar(
        content, tools, tool_choice, form.calls, only_one=body.parallel_tool_calls is False
    )
    if spec is None:
        return None
    if body.continue_final_message:
        message = "continue_final_message cannot go with a grammar, which is for whole answers"
        raise RequestError(message, param="continue_final_message")
    return spec if from_the_start else behind_reasoning(spec, prompt, form.lexicon)


def thinking_budget(body: ChatRequest, limit: int | None) -> int | None:
    """Reasoning tokens of the answer at most: the request's number, or the server's if less."""
    wanted = body.thinking_token_budget
    if wanted is None:
        wanted = (body.thinking or {}).get("budget_tokens")
        if wanted is not None and (isinstance(wanted, bool) or not isinstance(wanted, int)):
            message = "thinking.budget_tokens must be an integer"
            raise RequestError(message, param="thinking.budget_tokens")
    return min((each for each in (wanted, limit) if each is not None), default=None)


def _forced_end(form: ChatFormat, prompt: EncodedPrompt, max_tokens: int) -> ThinkingBudget:
    lexicon = form.lexicon
    return ThinkingBudget(
        max_tokens=max_tokens,
        start_token_id=lexicon.think_id,
        end_token_id=lexicon.end_think_id,
        other_end_token_ids=lexicon.call_marker_ids,
        starts_open=prompt.start == "reasoning",
    )


class ChatChoice:
    """One sample as it grows."""

    def __init__(
        self,
        body: ChatRequest,
        index: int,
        prompt: EncodedPrompt,
        form: ChatFormat,
        tools: list[Tool],
        tool_choice: ToolChoice,
        tokenizer: Tokenizer,
    ) -> None:
        self._body = body
        self._index = index
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._parser = OutputParser(
            form.lexicon,
            start=prompt.start,
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=body.parallel_tool_calls is not False,
        )
        self._reasoning = ReasoningCounter(
            form.lexicon.grammar, tokenizer, in_reasoning=prompt.start == "reasoning"
        )
        self._pending = Pending()
        self._all = Pending()
        self._prompt_logprobs: list[TokenLogprobs | None] = []
        self._message = Message()
        self._end: dict[str, Any] = {"finish_reason": None, "stop_reason": None}
        self._has_role = False
        self.reasoning_tokens = 0

    def add(self, output: Output) -> list[dict[str, Any]]:
        """The choice objects of chunks that an increment makes; none if all of it is held back."""
        self._pending.add(output)
        self._all.add(output)
        self._prompt_logprobs += output.prompt_logprobs or []
        self._reasoning.push(output.token_ids)
        self.reasoning_tokens = self._reasoning.count
        deltas = self._parser.feed(output.pieces)
        if output.finish_reason is None:
            return self._chunks(deltas)
        finish = self._parser.finish(output.finish_reason, stop_reason=output.stop_reason)
        chunks = self._chunks([*deltas, *finish.deltas])
        if finish.reasoning_is_answer and not self._body.stream:  # a stream cannot take it back
            self._message.reasoning.clear()
            self.reasoning_tokens = 0
        self._end = {"finish_reason": finish.finish_reason, "stop_reason": output.stop_reason}
        return [*chunks, {**self._chunk({}), **self._end}]

    def _chunks(self, deltas: Iterable[Delta]) -> list[dict[str, Any]]:
        shown = []
        for delta in deltas:
            if isinstance(delta, ReasoningDelta) and self._body.hides_reasoning:
                continue
            self._message.add(delta)
            shown.append(self._chunk(delta_body(delta)))
        return shown

    def _chunk(self, delta: dict[str, Any]) -> dict[str, Any]:
        if not self._has_role:
            delta = {"role": "assistant", **delta}
            self._has_role = True
        chunk = {"index": self._index, "delta": delta, "logprobs": None, **self._end}
        self._add_tokens(chunk, self._pending)
        return chunk

    def _add_tokens(self, choice: dict[str, Any], pending: Pending) -> None:
        token_ids, entries = pending.take()
        if self._body.logprobs:
            choice["logprobs"] = chat_logprobs(self._tokenizer, entries)
        if self._body.return_token_ids:
            choice["token_ids"] = token_ids

    def whole(self) -> dict[str, Any]:
        """Everything added so far as the choice object of one body."""
        choice: dict[str, Any] = {
            "index": self._index,
            "message": self._message.body(),
            "logprobs": None,
            **self._end,
        }
        self._add_tokens(choice, self._all)
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self._tokenizer, self._prompt_logprobs)
        if self._body.return_token_ids:
            choice["prompt_token_ids"] = self._prompt.token_ids
        return choice


class Message:
    """The parts of an answer, joined at the end."""

    def __init__(self) -> None:
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self._calls: list[CallStart] = []
        self._arguments: list[list[str]] = []

    def add(self, delta: Delta) -> None:
        """Append a delta."""
        match delta:
            case ContentDelta(text):
                self.content.append(text)
            case ReasoningDelta(text):
                self.reasoning.append(text)
            case CallStart():
                self._calls.append(delta)
                self._arguments.append([])
            case CallArguments(index, text):
                self._arguments[index].append(text)

    def body(self) -> dict[str, Any]:
        """OpenAI's message object; reasoning goes by both of its names."""
        content = "".join(self.content)
        reasoning = "".join(self.reasoning) or None
        body: dict[str, Any] = {
            "role": "assistant",
            "content": None if self._calls and not content else content,
            "reasoning_content": reasoning,
            "reasoning": reasoning,
            "refusal": None,
        }
        if self._calls:
            body["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": "".join(arguments)},
                }
                for call, arguments in zip(self._calls, self._arguments, strict=True)
            ]
        return body


def delta_body(delta: Delta) -> dict[str, Any]:
    """OpenAI's delta object; reasoning goes by both of its names."""
    match delta:
        case ContentDelta(text):
            return {"content": text}
        case ReasoningDelta(text):
            return {"reasoning_content": text, "reasoning": text}
        case CallStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            call = {"index": index, "id": call_id, "type": "function", "function": function}
            return {"tool_calls": [call]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def chat_options(body: ChatRequest, tool_choice: ToolChoice) -> ChatOptions:
    """How the conversation becomes a prompt. Every spelling of thinking and effort counts.

    Of several, the first wins: reasoning_effort, reasoning, thinking, chat_template_kwargs.
    """
    template = body.chat_template_kwargs or {}
    reasoning = body.reasoning or {}
    thinking = body.thinking or {}
    efforts = {
        "reasoning_effort": body.reasoning_effort,
        "reasoning.effort": reasoning.get("effort"),
        "chat_template_kwargs.reasoning_effort": template.get("reasoning_effort"),
    }
    switches = {
        "reasoning.enabled": reasoning.get("enabled"),
        "thinking.type": _thinking_type(thinking),
        "chat_template_kwargs.thinking": template.get("thinking"),
        "chat_template_kwargs.enable_thinking": template.get("enable_thinking"),
    }
    drop = _first({"chat_template_kwargs.drop_thinking": template.get("drop_thinking")}, bool)
    clear = _first({"chat_template_kwargs.clear_thinking": template.get("clear_thinking")}, bool)
    drop = clear if drop is None else drop
    effort = _first(efforts, str)
    if effort is not None and effort not in EFFORTS:
        message = f"reasoning_effort must be one of {', '.join(EFFORTS)}"
        raise RequestError(message, param="reasoning_effort")
    return ChatOptions(
        thinking=_first(switches, bool),
        reasoning_effort=effort,
        keep_reasoning=None if drop is None else not drop,
        response_schema=response_schema(body.response_format),
        tool_choice=tool_choice,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
    )


def _first(values: Mapping[str, object], kind: type[T]) -> T | None:
    """The first value that is there; each must be of the kind."""
    found: T | None = None
    for name, value in values.items():
        if value is None:
            continue
        if not isinstance(value, kind):
            words = {bool: "true or false", str: "a string"}
            raise RequestError(f"{name} must be {words[kind]}", param=name)
        found = value if found is None else found
    return found


def _thinking_type(thinking: Mapping[str, Any]) -> bool | None:
    kind = thinking.get("type")
    if kind not in (None, "enabled", "disabled", "adaptive"):
        message = "thinking.type must be enabled, disabled or adaptive"
        raise RequestError(message, param="thinking.type")
    return None if kind in (None, "adaptive") else kind == "enabled"
