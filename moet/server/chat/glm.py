"""GLM-5.2's chat format: roles, thinking, effort, tools.

The checkpoint's own template is used where it ships one; the format written here is for
checkpoints without. Where a choice is left
- efforts minimal to high ask for High, all others for Max: the format knows these two, and "low"
  must not mean more than "high";
- reasoning of turns before the last user message is dropped, unless the request keeps it;
- `developer` is read as system.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from moet.errors import RequestError
from moet.runtime.tokenizer import Span, Tokenizer
from moet.server.chat.encoding import ChatOptions, EncodedPrompt
from moet.server.chat.grammar import parse_json
from moet.server.chat.messages import Message, Tool, ToolCall
from moet.server.chat.template import ChatTemplate, Shield

PREFIX = "[gMASK]<sop>"
SYSTEM, USER, ASSISTANT, OBSERVATION = "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"
THINK, END_THINK = "<think>", "</think>"
TOOL_CALL, END_TOOL_CALL = "<tool_call>", "</tool_call>"
ARG_KEY, END_ARG_KEY = "<arg_key>", "</arg_key>"
ARG_VALUE, END_ARG_VALUE = "<arg_value>", "</arg_value>"
TOOL_RESPONSE, END_TOOL_RESPONSE = "<tool_response>", "</tool_response>"
CONTROLS = (
    "[gMASK]",
    "<sop>",
    *(SYSTEM, USER, ASSISTANT, OBSERVATION),
    *(THINK, END_THINK, TOOL_CALL, END_TOOL_CALL),
    *(ARG_KEY, END_ARG_KEY, ARG_VALUE, END_ARG_VALUE),
    *(TOOL_RESPONSE, END_TOOL_RESPONSE),
)
HIGH_EFFORTS = ("minimal", "low", "medium", "high")
EFFORTS = ("none", *HIGH_EFFORTS, "xhigh", "max")

TOOLS_HEAD = """
# Tools

You may call one or more functions to help with the user's request.

The functions are described inside <tools></tools>, one JSON object per line:
<tools>
"""
TOOLS_TAIL = f"""
</tools>

Write every call as the function's name followed by its arguments, each as a key and a value:
{TOOL_CALL}function name{ARG_KEY}first key{END_ARG_KEY}{ARG_VALUE}first value{END_ARG_VALUE}\
{ARG_KEY}second key{END_ARG_KEY}{ARG_VALUE}second value{END_ARG_VALUE}...{END_TOOL_CALL}
Strings are written as they are, all other values as JSON."""
RESPONSE_HEAD = "Answer with JSON that follows this schema and with nothing else:\n"


class GlmEncoding:
    """Conversations to prompts, by the checkpoint's template or by the format written here."""

    def __init__(self, tokenizer: Tokenizer, template: str | None = None) -> None:
        """template: the text of chat_template.jinja.

        Raises ConfigError if the tokenizer lacks a control token, or the template is broken.
        """
        for text in CONTROLS:
            tokenizer.control_id(text)
        self._tokenizer = tokenizer
        self._template = None if template is None else ChatTemplate(template)

    def encode(
        self, messages: Sequence[Message], tools: Sequence[Tool], options: ChatOptions
    ) -> EncodedPrompt:
        """See ChatEncoding."""
        _check(messages, options)
        shown = [] if options.tool_choice.kind == "none" else tools
        if options.response_schema is not None:
            schema = RESPONSE_HEAD + _dumps(options.response_schema)
            messages = [Message("system", schema), *messages]
        if self._template is None:
            spans = list(_spans(messages, shown, options))
        else:
            spans = self._rendered(self._template, messages, shown, options)
        text = "".join(span.text for span in spans)
        token_ids = self._tokenizer.encode_spans(spans)
        return EncodedPrompt(token_ids, text, self._start(spans))

    def _rendered(
        self,
        template: ChatTemplate,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        options: ChatOptions,
    ) -> list[Span]:
        shield = Shield(self._tokenizer)
        variables: dict[str, Any] = {
            "messages": [_covered(message, shield) for message in messages],
            "add_generation_prompt": _wants_answer(options),
            "enable_thinking": _thinks(options),
            "reasoning_effort": "high" if options.reasoning_effort in HIGH_EFFORTS else "max",
        }
        if tools:
            variables["tools"] = [shield.cover(_wrapped(tool)) for tool in tools]
        if options.keep_reasoning:
            variables["clear_thinking"] = False
        rendered = template.render(**variables)
        if options.continue_final_message:
            last = variables["messages"][-1]["content"].strip()
            rendered = rendered[: rendered.rindex(last) + len(last)]
        return shield.uncover(rendered)

    def _start(self, spans: Sequence[Span]) -> Literal["reasoning", "content"]:
        """What the answer begins with, read from the end of the prompt whoever wrote it."""
        trusted = "".join(span.text if span.trusted else " " for span in spans)
        tail = trusted[trusted.rfind(ASSISTANT) :]
        if not tail.startswith(ASSISTANT) or any(r in tail for r in (USER, SYSTEM, OBSERVATION)):
            return "content"
        return "reasoning" if tail.rfind(THINK) > tail.rfind(END_THINK) else "content"


def _check(messages: Sequence[Message], options: ChatOptions) -> None:
    if not messages:
        raise RequestError("messages is empty; send at least one message", param="messages")
    effort = options.reasoning_effort
    if effort is not None and effort not in EFFORTS:
        text = f"reasoning_effort is {effort!r:.60}; it must be one of {', '.join(EFFORTS)}"
        raise RequestError(text, param="reasoning_effort")
    for i, message in enumerate(messages):
        if message.role == "latest_reminder" or message.task is not None:
            name = "task" if message.task is not None else "role"
            text = f"messages[{i}].{name}: this model knows no reminders and no tasks"
            raise RequestError(text, param=f"messages[{i}].{name}")
        for call in message.tool_calls:
            _arguments(call, f"messages[{i}].tool_calls")
    if not options.continue_final_message:
        return
    if options.add_generation_prompt:
        text = "continue_final_message and add_generation_prompt exclude each other; send one"
        raise RequestError(text, param="continue_final_message")
    last = messages[-1]
    if last.role != "assistant" or last.tool_calls or not last.content.strip():
        text = "continue_final_message needs a last message of role assistant with text to go on"
        raise RequestError(text + " from and without tool_calls", param="continue_final_message")


def _thinks(options: ChatOptions) -> bool:
    return options.reasoning_effort != "none" if options.thinking is None else options.thinking


def _wants_answer(options: ChatOptions) -> bool:
    return options.add_generation_prompt is not False and not options.continue_final_message


def _spans(
    messages: Sequence[Message], tools: Sequence[Tool], options: ChatOptions
) -> Iterator[Span]:
    """The prompt in the format written here."""
    yield _control(PREFIX)
    if _thinks(options):
        effort = "High" if options.reasoning_effort in HIGH_EFFORTS else "Max"
        yield _control(f"{SYSTEM}Reasoning Effort: {effort}")
    if tools:
        yield _control(SYSTEM + TOOLS_HEAD)
        yield Span("\n".join(_dumps(_schema(tool)) for tool in tools))
        yield _control(TOOLS_TAIL)
    users = [i for i, message in enumerate(messages) if message.role == "user"]
    kept_from = -1 if options.keep_reasoning or not users else users[-1]
    for i, message in enumerate(messages):
        if message.role == "assistant":
            open_end = options.continue_final_message and i == len(messages) - 1
            yield from _assistant(message, keep=i > kept_from, open_end=open_end)
        elif message.role == "tool":
            if i == 0 or messages[i - 1].role != "tool":
                yield _control(OBSERVATION)
            yield _control(TOOL_RESPONSE)
            yield Span(message.content)
            yield _control(END_TOOL_RESPONSE)
        else:
            yield _control(USER if message.role == "user" else SYSTEM)
            yield Span(message.content)
    if _wants_answer(options):
        yield _control(ASSISTANT + THINK + ("" if _thinks(options) else END_THINK))


def _assistant(message: Message, *, keep: bool, open_end: bool) -> Iterator[Span]:
    reasoning, content = message.reasoning, message.content
    if not reasoning and END_THINK in content:
        head, _, content = content.rpartition(END_THINK)
        reasoning = head.partition(END_THINK)[0].rpartition(THINK)[2].strip("\n")
    yield _control(ASSISTANT + THINK)
    if keep:
        yield Span(reasoning)
    yield _control(END_THINK)
    yield Span(content.lstrip() if open_end else content.strip())
    for call in message.tool_calls:
        yield _control(TOOL_CALL)
        yield Span(call.name)
        for key, value in _arguments(call, "tool_calls").items():
            yield _control(ARG_KEY)
            yield Span(key)
            yield _control(END_ARG_KEY + ARG_VALUE)
            yield Span(value if isinstance(value, str) else _dumps(value))
            yield _control(END_ARG_VALUE)
        yield _control(END_TOOL_CALL)


def _control(text: str) -> Span:
    return Span(text, trusted=True)


def _covered(message: Message, shield: Shield) -> dict[str, Any]:
    """A message as templates read it. Content is always text: lists of parts confuse them."""
    role = "system" if message.role == "developer" else message.role
    allowed = frozenset((THINK, END_THINK)) if role == "assistant" else frozenset[str]()
    covered = {"role": role, "content": shield.cover(message.content, allowed=allowed)}
    if message.reasoning:
        covered["reasoning_content"] = shield.cover(message.reasoning)
    if message.tool_calls:
        covered["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": shield.cover(call.name),
                    "arguments": shield.cover(_arguments(call, "tool_calls")),
                },
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        covered["tool_call_id"] = message.tool_call_id
    return covered


def _schema(tool: Tool) -> dict[str, Any]:
    fields = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _wrapped(tool: Tool) -> dict[str, Any]:
    return {"type": "function", "function": _schema(tool)}


def _arguments(call: ToolCall, where: str) -> dict[str, Any]:
    """The arguments by name. Raises RequestError if they are no JSON object."""
    if not call.arguments.strip():
        return {}
    value = parse_json(call.arguments)[1]
    if not isinstance(value, dict):
        text = (
            f"the arguments of {call.name} are {call.arguments!r:.60}; they must be a JSON object"
        )
        raise RequestError(text, param=where)
    return value


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
