"""Reading conversations from OpenAI-shaped JSON: both spellings, and faults named by field."""

import pytest

from moet.errors import RequestError
from moet.server.chat.messages import (
    Message,
    Tool,
    ToolCall,
    ToolChoice,
    parse_messages,
    parse_tool_choice,
    parse_tools,
)


def test_all_roles_and_fields():
    raw = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "r",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
                {"function": {"name": "g", "arguments": {"é": 1}}},
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "out", "name": "ignored"},
        {"role": "user", "content": "t", "task": "title"},
    ]
    assert parse_messages(raw) == [
        Message("system", "s"),
        Message("user", "a\n\nb"),
        Message("assistant", "", "r", (ToolCall("1", "f", "{}"), ToolCall("", "g", '{"é": 1}'))),
        Message("tool", "out", tool_call_id="1"),
        Message("user", "t", task="title"),
    ]


@pytest.mark.bug("P13")
def test_p13_reasoning_is_read_under_both_names():
    def reasoning(**fields):
        return parse_messages([{"role": "assistant", "content": "", **fields}])[0].reasoning

    assert reasoning(reasoning_content="R1") == reasoning(reasoning="R1") == "R1"
    assert reasoning(reasoning_content="R1", reasoning="R2") == "R1"
    assert reasoning(reasoning_content=None, reasoning="R2") == "R2"
    assert reasoning() == ""


@pytest.mark.bug("P04")
def test_p04_a_tool_result_may_be_text_or_parts():
    as_text = {"role": "tool", "tool_call_id": "c1", "content": "Sunny, 22 degrees"}
    as_parts = {**as_text, "content": [{"type": "text", "text": "Sunny, 22 degrees"}]}
    assert parse_messages([as_text]) == parse_messages([as_parts])


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "critic", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": []}]}], "messages[0].content[0]"),
        ([{"role": [], "content": ""}], "messages[0].role"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "assistant", "tool_calls": {}}], None),
        ([{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0]"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": 'a"b'}}]}],
            "messages[0].tool_calls[0].function.name",
        ),
        ([{"role": "assistant", "reasoning": 1}], "messages[0].reasoning_content"),
    ],
)
def test_faults_name_the_field(raw, param):
    if param is None:
        assert parse_messages(raw)[0].tool_calls == ()
        return
    with pytest.raises(RequestError) as caught:
        parse_messages(raw)
    assert caught.value.param == param
    assert param in str(caught.value)


@pytest.mark.bug("P20")
@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "cut \ud83d"},
        {"role": "user", "content": [{"type": "text", "text": "cut \ud83d"}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "\ud83d"}}]},
        {
            "role": "assistant",
            "tool_calls": [{"function": {"name": "f", "arguments": {"\ud83d": 1}}}],
        },
        {"role": "assistant", "reasoning": "\ud83d"},
    ],
)
def test_p20_a_lone_surrogate_names_its_field(message):
    with pytest.raises(RequestError, match="lone surrogate") as caught:
        parse_messages([{"role": "user", "content": "\U0001f600"}, message])
    assert caught.value.param.startswith("messages[1].")
    str(caught.value).encode()


@pytest.mark.bug("P20")
def test_p20_in_tools():
    for function in (
        {"name": "f", "description": "\ud83d"},
        {"name": "f", "parameters": {"properties": {"\ud83d": {}}}},
    ):
        with pytest.raises(RequestError, match=r"tools\[0\]\.function") as caught:
            parse_tools([{"type": "function", "function": function}])
        str(caught.value).encode()


def test_tools_wrapped_and_flat():
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
    expected = [Tool("f", "d", {"type": "object"}, strict=True)]
    assert parse_tools([{"type": "function", "function": function}]) == expected
    assert parse_tools([{"type": "web_search"}, {"type": "function", **function}]) == expected
    assert parse_tools(None) == parse_tools([]) == []


@pytest.mark.parametrize(
    "raw",
    [
        {},
        ["x"],
        [{"type": 5}],
        [{"type": "function", "function": "f"}],
        [{"type": "function", "function": {}}],
        [{"type": "function", "function": {"name": ""}}],
        [{"type": "function", "function": {"name": "<b>"}}],
        [{"type": "function", "function": {"name": "f", "parameters": []}}],
    ],
)
def test_wrong_tools_are_refused(raw):
    with pytest.raises(RequestError) as caught:
        parse_tools(raw)
    assert caught.value.param.startswith("tools")


def test_tool_choice():
    tools = [Tool("f")]
    assert parse_tool_choice(None, tools) == ToolChoice("auto")
    assert parse_tool_choice("none", []) == ToolChoice("none")
    assert parse_tool_choice("required", tools) == ToolChoice("required")
    named = {"type": "function", "function": {"name": "f"}}
    assert parse_tool_choice(named, tools) == ToolChoice("named", "f")
    for raw in ("any", 5, {"type": "x"}, {"type": "function", "function": {"name": "g"}}):
        with pytest.raises(RequestError) as caught:
            parse_tool_choice(raw, tools)
        assert caught.value.param == "tool_choice"
    with pytest.raises(RequestError, match="no tools"):
        parse_tool_choice("required", [])
