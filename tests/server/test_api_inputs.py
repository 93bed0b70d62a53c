"""Whatever JSON comes as a conversation: it is read, or refused with a reason, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moet.errors import RequestError
from moet.server import anthropic_input, responses_input
from moet.server.chat.messages import Message

KEYS = (
    "type", "role", "content", "text", "name", "input", "id", "tool_use_id", "source", "thinking",
    "signature", "data", "tools", "output", "call_id", "arguments", "summary", "namespace", "title",
    "encrypted_content", "is_error", "mode", "tool_name", "parameters", "input_schema",
)  # fmt: skip
WORDS = (
    "user", "assistant", "system", "text", "tool_use", "tool_result", "thinking", "document",
    "redacted_thinking", "search_result", "tool_reference", "function", "namespace", "message",
    "function_call", "function_call_output", "reasoning", "input_text", "output_text", "refusal",
    "custom_tool_call", "allowed_tools", "required", "auto", "any", "tool", "moet1:YQ==",
)  # fmt: skip
LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.sampled_from(WORDS)
JSON = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(KEYS), inner | st.sampled_from(WORDS), max_size=6)
    ),
    max_leaves=20,
)


def read_or_refuse(read: Callable[..., Any], *arguments: object) -> Any:
    """What is read; None if it is refused, which has to name a field in few words."""
    refusal = None
    try:
        return read(*arguments)
    except RequestError as error:
        refusal = error
    assert refusal.param
    assert len(str(refusal)) < 1000
    return None


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(JSON, JSON)
def test_messages_are_read_or_refused(first: object, second: object) -> None:
    said = [{"role": "assistant", "content": [first, second]}]
    asked = [{"role": "user", "content": [second, first]}]
    for raw in (first, said, asked):
        messages = read_or_refuse(anthropic_input.read_messages, raw)
        assert all(isinstance(message, Message) for message in messages or ())
    read_or_refuse(anthropic_input.read_system, first)
    read_or_refuse(anthropic_input.read_tools, first)
    read_or_refuse(anthropic_input.read_tool_choice, first, [])


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(JSON, JSON)
def test_items_are_read_or_refused(first: object, second: object) -> None:
    for raw in (first, [first, second]):
        messages = read_or_refuse(responses_input.read_input, raw)
        assert all(isinstance(message, Message) for message in messages or ())
        box = read_or_refuse(responses_input.read_toolbox, raw)
        if box is not None:
            read_or_refuse(responses_input.read_tool_choice, second, box)
