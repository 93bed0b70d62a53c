"""How each model writes tool calls, as grammars: the forms that their prompts teach."""

from __future__ import annotations

from collections.abc import Sequence

from moet.runtime.tokenizer import Tokenizer
from moet.server.chat.deepseek_v4 import DSML
from moet.server.chat.glm import (
    ARG_KEY,
    ARG_VALUE,
    END_ARG_KEY,
    END_ARG_VALUE,
    END_TOOL_CALL,
    TOOL_CALL,
)
from moet.server.chat.grammar import Schema
from moet.server.chat.messages import Tool
from moet.server.chat.tags import (
    ANY_KEY,
    ANY_TEXT,
    ANY_VALUE,
    Format,
    Parameters,
    const,
    dispatch,
    either,
    json_value,
    optional,
    plus,
    raw_string,
    sequence,
    star,
    token,
    value_types,
)


class DsmlCalls:
    """DeepSeek V4: one block of invocations; parameters say whether they are strings."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises ConfigError if the tokenizer lacks the marker."""
        self._marker_id = tokenizer.control_id(DSML)
        self._marker = token(self._marker_id)

    def calls(self, tools: Sequence[Tool], *, only_one: bool) -> Format:
        """See CallWriter."""
        return sequence(const("\n\n<"), self._marker, self._block(tools, only_one))

    def text_with_calls(self, tools: Sequence[Tool], *, only_one: bool) -> Format:
        """See CallWriter. The block ends the answer."""
        return dispatch(self._marker_id, self._block(tools, only_one), again=False)

    def _block(self, tools: Sequence[Tool], only_one: bool) -> Format:
        """What follows the marker that opens a block."""
        one = either([self._invoke(tool) for tool in tools])
        return sequence(
            const("tool_calls>\n"), one if only_one else plus(one), *self._close("tool_calls>")
        )

    def _invoke(self, tool: Tool) -> Format:
        parameters = Parameters(tool)
        parts = [self._open(f'invoke name="{tool.name}">\n')]
        for name, schema, required in parameters:
            part = self._parameter(const(f'parameter name="{name}" '), schema)
            parts.append(part if required else optional(part))
        if parameters.takes_others:
            key = sequence(const('parameter name="'), ANY_KEY, const('" '))
            parts.append(star(self._parameter(key, {})))
        if not any(required for _, _, required in parameters):
            parts.append(optional(const("\n")))  # the blank line of a call without parameters
        return sequence(*parts, *self._close("invoke>\n"))

    def _parameter(self, head: Format, schema: Schema) -> Format:
        types = value_types(schema)
        values = []
        if "string" in types or not types:
            values.append(sequence(const('string="true">'), raw_string(schema)))
        if types != {"string"}:
            value = json_value(schema) if schema else ANY_VALUE
            values.append(sequence(const('string="false">'), value))
        return sequence(
            const("<"), self._marker, head, either(values), *self._close("parameter>\n")
        )

    def _open(self, rest: str) -> Format:
        return sequence(const("<"), self._marker, const(rest))

    def _close(self, rest: str) -> tuple[Format, ...]:
        return const("</"), self._marker, const(rest)


class GlmCalls:
    """GLM: calls of keys and values between tags; strings are written as they are."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises ConfigError if the tokenizer lacks a tag."""
        self._begin_id = tokenizer.control_id(TOOL_CALL)
        self._end = token(tokenizer.control_id(END_TOOL_CALL))
        self._key = [token(tokenizer.control_id(tag)) for tag in (ARG_KEY, END_ARG_KEY)]
        self._value = [token(tokenizer.control_id(tag)) for tag in (ARG_VALUE, END_ARG_VALUE)]

    def calls(self, tools: Sequence[Tool], *, only_one: bool) -> Format:
        """See CallWriter."""
        one = sequence(token(self._begin_id), self._rest(tools))
        return one if only_one else plus(one)

    def text_with_calls(self, tools: Sequence[Tool], *, only_one: bool) -> Format:
        """See CallWriter."""
        return dispatch(self._begin_id, self._rest(tools), again=not only_one)

    def _rest(self, tools: Sequence[Tool]) -> Format:
        """What follows the tag that opens a call."""
        return sequence(either([self._call(tool) for tool in tools]), self._end)

    def _call(self, tool: Tool) -> Format:
        parameters = Parameters(tool)
        parts = [const(tool.name)]
        for name, schema, required in parameters:
            part = self._pair(const(name), schema)
            parts.append(part if required else optional(part))
        if parameters.takes_others:
            parts.append(star(self._pair(ANY_KEY, {})))
        return sequence(*parts)

    def _pair(self, key: Format, schema: Schema) -> Format:
        types = value_types(schema)
        if types == {"string"}:
            value = raw_string(schema)
        elif "string" in types or not types:
            value = ANY_TEXT  # whatever it is, the parser makes a value of one of the types of it
        else:
            value = json_value(schema)
        (open_key, close_key), (open_value, close_value) = self._key, self._value
        return sequence(open_key, key, close_key, open_value, value, close_value)
