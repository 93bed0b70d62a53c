"""DeepSeek V4's chat format: roles, thinking, tools, effort. The checkpoint ships no template.

Where the known encoders of this format differ, this one
- joins leading system messages by a blank line and leaves later ones in place: moving them to the
  front would change the prompt's beginning and lose its cached prefix;
- reads `developer` as system;
- opens every assistant message with a header, also one that follows another;
- renders arguments that are no JSON object as one string parameter `arguments`;
- thinks when the request says nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from moet.errors import RequestError
from moet.runtime.tokenizer import Span, Tokenizer
from moet.server.chat.encoding import ChatOptions, EncodedPrompt
from moet.server.chat.grammar import parse_json
from moet.server.chat.messages import Message, Tool, ToolCall

Ladder = Literal["preview", "0731"]

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
THINK, END_THINK = "<think>", "</think>"
DSML = "｜DSML｜"
REMINDER = "<｜latest_reminder｜>"
TASKS = ("action", "query", "authority", "domain", "title", "read_url")
FIM_BEGIN, FIM_HOLE, FIM_END = "<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"

EFFORT_HIGH = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to "
    "resolve the root cause, rigorously stress-testing your logic against all potential paths, "
    "edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, "
    "considered alternative, and rejected hypothesis to ensure absolutely no assumption is left "
    "unchecked.\n\n"
)
EFFORT_MAX = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: "
    "exhaustively decompose the problem into its most fundamental components, trace every causal "
    "chain to its root, and resolve the underlying cause rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles "
    "and are certain that no assumption remains unchecked and no error remains undiscovered.\n\n"
)
# What each revision was trained to read; None is the effort of a request that names none.
EFFORT_PREFIX: Mapping[Ladder, Mapping[str | None, str]] = {
    "preview": {
        "minimal": "",
        "low": "",
        "medium": "",
        "high": "",
        None: "",
        "xhigh": EFFORT_HIGH,
        "max": EFFORT_HIGH,
    },
    "0731": {
        "minimal": "",
        "low": "",
        "medium": EFFORT_HIGH,
        "high": EFFORT_HIGH,
        None: EFFORT_HIGH,
        "xhigh": EFFORT_HIGH,
        "max": EFFORT_MAX,
    },
}

TOOLS_HEAD = f"""## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by \
writing a "<{DSML}tool_calls>" block like the following:

<{DSML}tool_calls>
<{DSML}invoke name="$TOOL_NAME">
<{DSML}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML}parameter>
...
</{DSML}invoke>
<{DSML}invoke name="$TOOL_NAME2">
...
</{DSML}invoke>
</{DSML}tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types \
(numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {THINK}), you MUST output your complete reasoning inside \
{THINK}...{END_THINK} BEFORE any tool calls or final response.

Otherwise, output directly after {END_THINK} with tool calls or final response.

### Available Tool Schemas

"""
TOOLS_TAIL = (
    "\n\nYou MUST strictly follow the above defined tool name and parameter schemas "
    "to invoke tool calls.\n"
)
RESPONSE_HEAD = (
    "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
)


class DeepseekV4Encoding:
    """Conversations and fill-in-the-middle requests to prompts of one revision of the model."""

    def __init__(self, tokenizer: Tokenizer, ladder: Ladder) -> None:
        """Raises ConfigError if the tokenizer lacks a control token of the format."""
        for text in (BOS, EOS, USER, ASSISTANT, THINK, END_THINK, DSML):
            tokenizer.control_id(text)
        self._tokenizer = tokenizer
        self._ladder = ladder

    def encode(
        self, messages: Sequence[Message], tools: Sequence[Tool], options: ChatOptions
    ) -> EncodedPrompt:
        """See ChatEncoding."""
        _check(messages, options)
        for i, message in enumerate(messages):
            if message.role == "latest_reminder":
                self._require(REMINDER, f"messages[{i}].role")
            if message.task is not None:
                self._require(f"<｜{message.task}｜>", f"messages[{i}].task")
        thinking, prefix = self._effort(options)
        shown_tools = [] if options.tool_choice.kind == "none" else list(tools)
        prompt = _Prompt(messages, thinking, bool(shown_tools) or bool(options.keep_reasoning))
        prompt.control(BOS + prefix)
        prompt.head(shown_tools, options)
        prompt.body(options)
        token_ids = self._tokenizer.encode_spans(prompt.spans)
        return EncodedPrompt(token_ids, "".join(span.text for span in prompt.spans), prompt.start)

    def encode_fim(self, prefix: str, suffix: str) -> list[int]:
        """A prompt whose completion belongs between prefix and suffix."""
        for text in (FIM_BEGIN, FIM_HOLE, FIM_END):
            self._require(text, "suffix")
        return self._tokenizer.encode_spans(
            [
                Span(BOS + FIM_BEGIN, trusted=True),
                Span(prefix),
                Span(FIM_HOLE, trusted=True),
                Span(suffix),
                Span(FIM_END, trusted=True),
            ]
        )

    def _require(self, control: str, param: str) -> None:
        """Some tokenizers of the format lack the rarer control tokens."""
        if not self._tokenizer.has_control(control):
            message = f"{param} needs the control token {control}, which this model does not have"
            raise RequestError(message, param=param)

    def _effort(self, options: ChatOptions) -> tuple[bool, str]:
        """Whether to think, and the text that asks for how much."""
        effort, prefixes = options.reasoning_effort, EFFORT_PREFIX[self._ladder]
        if effort not in prefixes and effort != "none":
            known = ", ".join(["none", *(name for name in prefixes if name)])
            message = f"reasoning_effort is {effort!r:.60}; it must be one of {known}"
            raise RequestError(message, param="reasoning_effort")
        thinking = effort != "none" if options.thinking is None else options.thinking
        if not thinking:
            return False, ""
        return True, prefixes[None if effort == "none" else effort]


def _check(messages: Sequence[Message], options: ChatOptions) -> None:
    if not messages:
        raise RequestError("messages is empty; send at least one message", param="messages")
    for i, message in enumerate(messages):
        if message.task is not None and (message.role != "user" or message.task not in TASKS):
            text = f"messages[{i}].task is {message.task!r:.60}; user messages may have one of "
            raise RequestError(text + ", ".join(TASKS), param=f"messages[{i}].task")
    if not options.continue_final_message:
        return
    if options.add_generation_prompt:
        text = "continue_final_message and add_generation_prompt exclude each other; send one"
        raise RequestError(text, param="continue_final_message")
    if messages[-1].role != "assistant" or messages[-1].tool_calls:
        text = "continue_final_message needs a last message of role assistant without tool_calls"
        raise RequestError(text, param="continue_final_message")


class _Prompt:
    """A prompt in the making: spans so far, and whether an assistant header is open."""

    def __init__(self, messages: Sequence[Message], thinking: bool, keep_all: bool) -> None:
        self.spans: list[Span] = []
        self.start: Literal["reasoning", "content"] = "content"
        self._messages = messages
        self._thinking = thinking
        turns = [i for i, message in enumerate(messages) if message.role in ("user", "tool")]
        self._kept_from = -1 if keep_all or not turns else turns[-1]
        self._open = False

    def control(self, text: str) -> None:
        self.spans.append(Span(text, trusted=True))

    def text(self, text: str) -> None:
        self.spans.append(Span(text))

    def head(self, tools: Sequence[Tool], options: ChatOptions) -> None:
        """System text, tools and response format, each set off by a blank line."""
        self.text(
            "\n\n".join(m.content for m in self._messages[: self._num_leading()] if m.content)
        )
        if tools:
            self.control("\n\n" + TOOLS_HEAD)
            self.text("\n".join(_schema(tool) for tool in tools))
            self.control(TOOLS_TAIL)
        if options.response_schema is not None:
            self.control("\n\n" + RESPONSE_HEAD)
            self.text(_dumps(options.response_schema))

    def body(self, options: ChatOptions) -> None:
        """Every message after the leading system messages, and what the model is to go on from."""
        wanted = options.add_generation_prompt is not False and not options.continue_final_message
        i = self._num_leading()
        while i < len(self._messages):
            message = self._messages[i]
            if message.role in ("user", "tool"):
                end = self._user_turn_end(i)
                self._user_turn(self._messages[i:end], i)
                i, task = end, self._messages[end - 1].task
                if i < len(self._messages) or task is not None or wanted:
                    self._header(message_idx=i, task=task)
                continue
            if message.role == "assistant":
                continued = options.continue_final_message and i == len(self._messages) - 1
                self._assistant(i, continued)
            elif message.role == "latest_reminder":
                self.control(REMINDER)
                self.text(message.content)
            else:
                self.text(message.content)
            i += 1
        if wanted and not self._open:
            self._header(message_idx=i, task=None)

    def _num_leading(self) -> int:
        """How many system messages the conversation begins with."""
        roles = [message.role for message in self._messages]
        return next((i for i, role in enumerate(roles) if role not in _SYSTEM), len(roles))

    def _user_turn_end(self, begin: int) -> int:
        """One turn: tool results, then text; a task ends it, a tool result after text opens one."""
        end = begin
        while end < len(self._messages):
            role = self._messages[end].role
            results_again = (
                role == "tool" and end > begin and self._messages[end - 1].role != "tool"
            )
            if role not in ("user", "tool", *_SYSTEM) or results_again:
                break
            end += 1
            if self._messages[end - 1].task is not None:
                break
        return end

    def _user_turn(self, turn: Sequence[Message], begin: int) -> None:
        self._open = False
        self.control(USER)
        results = [message for message in turn if message.role == "tool"]
        order = self._call_order(begin)
        results.sort(key=lambda message: order.get(message.tool_call_id, 0))
        texts = [m.content for m in turn if m.role != "tool" and m.content]
        blocks = [f"<tool_result>{message.content}</tool_result>" for message in results]
        self.text("\n\n".join(blocks + texts))

    def _call_order(self, begin: int) -> dict[str | None, int]:
        """Place of each call of the latest assistant message before `begin`, by call id."""
        for message in reversed(self._messages[:begin]):
            if message.role == "assistant":
                return {call.id: i for i, call in enumerate(message.tool_calls)}
        return {}

    def _header(self, *, message_idx: int, task: str | None) -> None:
        """Open the assistant message at or, behind reminders, after message_idx; or a new one."""
        self._open = True
        if task is not None and task != "action":
            self.control(f"<｜{task}｜>")
            return
        while self._role(message_idx) == "latest_reminder":
            message_idx += 1
        thinks = self._thinking and message_idx > self._kept_from
        self.control(ASSISTANT + (THINK if thinks else END_THINK))
        if task is not None:
            self.control(f"<｜{task}｜>")
        elif self._role(message_idx) is None:
            self.start = "reasoning" if thinks else "content"

    def _role(self, message_idx: int) -> str | None:
        return self._messages[message_idx].role if message_idx < len(self._messages) else None

    def _assistant(self, message_idx: int, continued: bool) -> None:
        message = self._messages[message_idx]
        after_task = message_idx > 0 and self._messages[message_idx - 1].task is not None
        if not self._open:
            self._header(message_idx=message_idx, task=None)
        if self._thinking and message_idx > self._kept_from and not after_task:
            self.text(message.reasoning)
            if continued and not message.content:
                self.start = "reasoning"
                return
            self.control(END_THINK)
        self.text(message.content)
        if message.tool_calls:
            self._calls(message.tool_calls)
        if not continued:
            self.control(EOS)
        self._open = False

    def _calls(self, calls: Sequence[ToolCall]) -> None:
        self.control(f"\n\n<{DSML}tool_calls>\n")
        for call in calls:
            self.control(f'<{DSML}invoke name="')
            self.text(call.name)
            self.control('">\n')
            for i, (key, value) in enumerate(_arguments(call).items()):
                is_string = isinstance(value, str)
                self.control(("\n" if i else "") + f'<{DSML}parameter name="')
                self.text(key)
                self.control(f'" string="{"true" if is_string else "false"}">')
                self.text(value if is_string else _dumps(value))
                self.control(f"</{DSML}parameter>")
            self.control(f"\n</{DSML}invoke>\n")
        self.control(f"</{DSML}tool_calls>")


_SYSTEM = ("system", "developer")


def _schema(tool: Tool) -> str:
    fields = {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": tool.parameters,
    }
    return _dumps(fields)


def _arguments(call: ToolCall) -> dict[str, Any]:
    """The arguments by name; whatever is no JSON object becomes one string, so nothing is lost."""
    if not call.arguments.strip():
        return {}
    value = parse_json(call.arguments)[1]
    return value if isinstance(value, dict) else {"arguments": call.arguments}


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
