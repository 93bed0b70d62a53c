"""POST /v1/chat/completions: a conversation in; content, reasoning and tool calls out."""

from __future__ import annotations

from typing import Any

from moet.runtime.engine import Engine
from moet.runtime.output import Output
from moet.runtime.tokenizer import Tokenizer
from moet.server.answers import Answer, Header, Pending, chat_logprobs, prompt_logprobs
from moet.server.chat.calls import CallArguments, CallStart
from moet.server.chat.encoding import ChatOptions
from moet.server.chat.messages import parse_messages, parse_tool_choice, parse_tools
from moet.server.chat.parser import ContentDelta, Delta, ReasoningDelta
from moet.server.chat_format import ChatFormat
from moet.server.openai import REASONING_FIELDS, ChatRequest
from moet.server.reasoning import NO_DEFAULTS, ReasoningDefaults, read_reasoning
from moet.server.structured import content_grammar, response_schema
from moet.server.turn import Prepared, Turn, prepare
from moet.types import SamplingParams, TokenLogprobs


def chat_answer(
    engine: Engine,
    form: ChatFormat,
    body: ChatRequest,
    model: str,
    defaults: ReasoningDefaults = NO_DEFAULTS,
) -> Answer:
    """Check a request and prepare its answer. RequestError names what is wrong."""
    body.check_shared()
    prepared = prepare(engine, form, chat_turn(body, engine.text.defaults, defaults))
    tokenizer = engine.text.tokenizer
    choices = [ChatChoice(body, i, prepared, tokenizer) for i in range(len(prepared.requests))]
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    header = Header("chatcmpl", kind, model, body.request_id)
    return Answer(engine, body, prepared.requests, choices, header, prompt_field="messages")


def chat_turn(body: ChatRequest, sampling: SamplingParams, defaults: ReasoningDefaults) -> Turn:
    """What a request asks for; sampling, defaults: where it says nothing."""
    body.check_modalities()
    tools = parse_tools(body.tools)
    reasoning = read_reasoning({name: getattr(body, name) for name in REASONING_FIELDS}, defaults)
    options = ChatOptions(
        thinking=reasoning.thinking,
        reasoning_effort=reasoning.effort,
        keep_reasoning=reasoning.keep,
        response_schema=response_schema(body.response_format),
        tool_choice=parse_tool_choice(body.tool_choice, tools),
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
    )
    params = body.params(
        sampling,
        max_tokens=body.token_limit(),
        logprobs=body.num_logprobs(),
        prompt_logprobs=body.prompt_logprobs,
    )
    return Turn(
        messages=parse_messages(body.messages),
        tools=tools,
        options=options,
        params=params,
        content=content_grammar(body.response_format, body.structured_outputs),
        max_thinking_tokens=reasoning.max_tokens,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        hides_reasoning=reasoning.hidden,
        n=1 if body.n is None else body.n,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
    )


class ChatChoice:
    """One sample as it grows."""

    def __init__(
        self, body: ChatRequest, index: int, prepared: Prepared, tokenizer: Tokenizer
    ) -> None:
        self._body = body
        self._index = index
        self._prompt = prepared.prompt
        self._tokenizer = tokenizer
        self._reader = prepared.reader(tokenizer)
        self._pending = Pending()
        self._all = Pending()
        self._prompt_logprobs: list[TokenLogprobs | None] = []
        self._message = Message()
        self._end: dict[str, Any] = {"finish_reason": None, "stop_reason": None}
        self._has_role = False
        self.reasoning_tokens = 0

    @property
    def num_malformed(self) -> int | None:
        """Tags and calls that had to be dropped or mended."""
        return self._reader.num_malformed

    def add(self, output: Output) -> list[dict[str, Any]]:
        """The choice objects of chunks that an increment makes; none if all of it is held back."""
        self._pending.add(output)
        self._all.add(output)
        self._prompt_logprobs += output.prompt_logprobs or []
        chunks = []
        for delta in self._reader.read(output):
            self._message.add(delta)
            chunks.append(self._chunk(delta_body(delta)))
        self.reasoning_tokens = self._reader.reasoning_tokens
        finish = self._reader.finish
        if finish is None:
            return chunks
        if finish.reasoning_is_answer and not self._body.stream:  # a stream cannot take it back
            self._message.reasoning.clear()
            self.reasoning_tokens = 0
        self._end = {"finish_reason": finish.finish_reason, "stop_reason": output.stop_reason}
        return [*chunks, {**self._chunk({}), **self._end}]

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
