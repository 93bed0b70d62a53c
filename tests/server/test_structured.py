"""Structured answers over HTTP, from a model that would rather write something else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from moet.config import ServerConfig
from moet.runtime.engine import Engine
from moet.runtime.host import ThreadHost
from moet.server.app import create_app
from tests.server.serving import MODEL, Caller
from tests.server.test_app import error_of
from tests.server.test_chat import HI, LS, PATH, Joined
from tests.texts import text_side
from tests.writing import WritingModel, wanting, writing_core

ANSWER = {
    "type": "object",
    "properties": {"answer": {"type": "string", "maxLength": 8}},
    "required": ["answer"],
    "additionalProperties": False,
}
PLACE = {"type": "object", "properties": {"in": {"enum": ["/", "/tmp"]}}, "required": ["in"]}
CD = {"type": "function", "function": {"name": "cd", "parameters": PLACE}}
NAMED = {"type": "function", "function": {"name": "ls"}}
OFF = {"reasoning_effort": "none"}
GUIDED = "guided_"  # how fields were called that are no more
CALL = (
    '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="ls">\n'
    '<｜DSML｜parameter name="path" string="true">/x'
    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)


def json_schema(schema: object, **fields: object) -> dict[str, Any]:
    described = {"name": "a", "schema": schema, **fields}
    return {"response_format": {"type": "json_schema", "json_schema": described}}


@contextmanager
def writer(
    text: str, config: ServerConfig | None = None, *, overlap: bool = True
) -> Iterator[Caller]:
    """An application over a real core whose model wants to write this behind its prompt."""
    core = writing_core(WritingModel(wanting(text), page_size=16), overlap=overlap)
    engine = Engine.over(ThreadHost(lambda progress: core), text_side, model=MODEL)
    engine.wait_until_ready(60)
    with engine:
        yield Caller(create_app(engine, config or ServerConfig()), core, engine)  # type: ignore[arg-type]
        stats = engine.stats()
        assert (stats.num_running, stats.num_used_pages) == (0, 0)


def answer(api: Caller, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The message and the reason, the same in both modes."""
    body = {"max_tokens": 300, "temperature": 0, **body}
    response = api.post(PATH, body)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    joined = Joined(api.chunks(PATH, body))
    message = choice["message"]
    assert joined.content == (message["content"] or "")
    assert joined.reasoning == (message["reasoning"] or "")
    assert joined.reasons[-1] == choice["finish_reason"]
    calls = [call["function"] for call in message.get("tool_calls", ())]
    assert calls == [
        {"name": call["name"], "arguments": call["arguments"]} for call in joined.calls.values()
    ]
    return message, choice["finish_reason"]


def content_of(stream: str) -> str:
    """The content of a streamed answer of any endpoint, put together."""
    text = ""
    for line in stream.splitlines():
        data = line.removeprefix("data: ")
        if data == line or data == "[DONE]":
            continue
        event = json.loads(data)
        match event.get("type"):
            case "response.output_text.delta":
                text += event["delta"]
            case "content_block_delta":
                text += event["delta"].get("text", "")
            case None:
                text += "".join(c["delta"].get("content") or "" for c in event["choices"])
    return text


# Content


@pytest.mark.bug("P17")
@pytest.mark.bug("S11")
def test_p17_s11_a_schema_holds_behind_the_reasoning_and_not_inside_it() -> None:
    with writer('2+15 is 17</think>{"answer":"17"}') as api:
        message, reason = answer(api, {**HI, **json_schema(ANSWER, strict=True)})
        assert message["reasoning"] == "2+15 is 17"
        assert json.loads(message["content"]) == {"answer": "17"}
        assert reason == "stop"
        message, _ = answer(api, {**HI, **OFF, **json_schema(ANSWER)})
        assert message["reasoning"] is None
        assert json.loads(message["content"]).keys() == {"answer"}


@pytest.mark.bug("S11")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_s11_every_endpoint_gives_the_same_guarantee(stream: bool) -> None:
    form = {"type": "json_schema", "name": "a", "schema": ANSWER}
    bodies = {
        "/v1/responses": {"input": "hi", "text": {"format": form}},
        "/v1/messages": {
            **HI,
            "max_tokens": 200,
            "output_config": {"format": form},
            "thinking": {"type": "enabled", "budget_tokens": 100},
        },
        PATH: {**HI, **json_schema(ANSWER)},
    }
    with writer('2+15 is 17</think>{"answer":"17"} and more') as api:
        for path, body in bodies.items():
            response = api.post(path, {**body, "temperature": 0, "stream": stream})
            assert response.status_code == 200, response.text
            if stream:
                assert content_of(response.text) == '{"answer":"17"}'
            else:
                assert "2+15 is 17" in response.text
                assert '"{\\"answer\\":\\"17\\"}"' in response.text


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_a_model_that_wants_to_chat_is_held_to_the_schema(overlap: bool) -> None:
    with writer("hm</think>Sure! The answer is 17.", overlap=overlap) as api:
        message, reason = answer(api, {**HI, **json_schema(ANSWER)})
        assert message["reasoning"] == "hm"
        assert json.loads(message["content"]).keys() == {"answer"}
        assert reason == "stop"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, ["yes"]),
        ({"structured_outputs": {"regex": "y[a-e]s"}}, ["yes"]),
        ({"structured_outputs": {"grammar": 'root ::= "yes" | "no"'}}, ["yes"]),
        ({"structured_outputs": {"json": {"const": 5}}}, ["5"]),
        ({"structured_outputs": {"json": '{"const": 5}'}}, ["5"]),
    ],
)
def test_every_kind_of_grammar(fields: dict[str, Any], expected: list[str]) -> None:
    with writer("</think>yes, of course") as api:
        assert answer(api, {**HI, **fields})[0]["content"] in expected
        body = {
            "prompt": "<｜Assistant｜><think></think>",
            "max_tokens": 20,
            "temperature": 0,
            **fields,
        }
        choice = api.post("/v1/completions", body).json()["choices"][0]
        assert choice["text"] in expected
        assert choice["finish_reason"] == "stop"


def test_any_object() -> None:
    with writer('</think>{"a": [1, {"b": null}]}') as api:
        for fields in (
            {"response_format": {"type": "json_object"}},
            {"structured_outputs": {"json_object": True}},
        ):
            message, _ = answer(api, {**HI, **fields})
            assert json.loads(message["content"]) == {"a": [1, {"b": None}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (json_schema({"type": "strin"}), "response_format"),
        (json_schema({"not": {}}), "response_format"),
        (json_schema({"$ref": "#/nowhere"}), "response_format"),
        (json_schema("x"), "response_format.json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"structured_outputs": {}, **json_schema(False)}, "response_format.json_schema"),
        ({"structured_outputs": {"json": {}}, **json_schema(ANSWER)}, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "[a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "root :="}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"json_object": "a"}}, "structured_outputs.json_object"),
        ({**json_schema(ANSWER), "ignore_eos": True}, "ignore_eos"),
        ({GUIDED + "json": {"type": "object"}}, GUIDED + "json"),
        ({GUIDED + "choice": ["a"]}, GUIDED + "choice"),
    ],
    ids=map(str, range(21)),
)
def test_what_cannot_be_held_is_refused_before_a_token(fields: dict[str, Any], param: str) -> None:
    with writer("</think>ok") as api:
        for stream in ({}, {"stream": True}):
            error = error_of(api.post(PATH, {**HI, **stream, **fields}), 400)
            assert error["param"] == param
            assert len(error["message"]) < 500
        if param.startswith(GUIDED):
            assert "structured_outputs." in error["message"]
        assert api.engine.stats().generation_tokens == 0
        assert answer(api, HI)[0]["content"] == "ok"


def test_a_continued_answer_has_no_grammar_of_its_own() -> None:
    messages = [*HI["messages"], {"role": "assistant", "content": '{"ans'}]
    body = {"messages": messages, "continue_final_message": True, **json_schema(ANSWER)}
    with writer("ok") as api:
        assert error_of(api.post(PATH, body), 400)["param"] == "continue_final_message"


def test_ten_schemas_at_once() -> None:
    async def all_at_once(api: Caller) -> list[dict[str, Any]]:
        transport = httpx.ASGITransport(api.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://moet") as client:
            bodies = [
                {
                    **HI,
                    "max_tokens": 100,
                    "temperature": 0,
                    **json_schema(
                        {
                            "type": "object",
                            "properties": {f"k{i}": {"const": i}},
                            "required": [f"k{i}"],
                            "additionalProperties": False,
                        }
                    ),
                }
                for i in range(10)
            ]
            responses = await asyncio.gather(*(client.post(PATH, json=body) for body in bodies))
            return [response.json()["choices"][0]["message"] for response in responses]

    with writer("hm</think>whatever") as api:
        messages = asyncio.run(all_at_once(api))
        assert [json.loads(m["content"]) for m in messages] == [{f"k{i}": i} for i in range(10)]
        assert {m["reasoning"] for m in messages} == {"hm"}


# Calls


@pytest.mark.bug("P10")
@pytest.mark.parametrize("text", [f"why</think>\n\n{CALL}", "why</think>I will not call."])
@pytest.mark.parametrize(
    ("choice", "called"),
    [
        ("auto", {f"why</think>\n\n{CALL}": "tool_calls", "why</think>I will not call.": "stop"}),
        ("required", "tool_calls"),
        (NAMED, "stop"),
        ("none", "stop"),
    ],
    ids=["auto", "required", "named", "none"],
)
def test_p10_each_choice_of_tools_in_both_modes(text: str, choice: Any, called: Any) -> None:
    reason = called if isinstance(called, str) else called[text]
    with writer(text) as api:
        message, got = answer(api, {**HI, "tools": [LS], "tool_choice": choice})
        assert got == reason
        calls = message.get("tool_calls", [])
        if choice == "none":
            assert not calls
        elif choice != "auto" or "DSML" in text:
            assert {call["function"]["name"] for call in calls} == {"ls"}
            assert json.loads(calls[0]["function"]["arguments"]).keys() == {"path"}
        assert message["reasoning"] == "why"
        assert "DSML" not in json.dumps(message, ensure_ascii=False)


def test_a_named_tool_is_called_once_with_arguments_of_its_schema() -> None:
    with writer(f"</think>\n\n{CALL}") as api:
        choice = {"type": "function", "function": {"name": "cd"}}
        body = {**HI, **OFF, "tools": [LS, CD], "tool_choice": choice}
        message, _ = answer(api, body)
        [call] = message["tool_calls"]
        assert call["function"]["name"] == "cd"
        assert json.loads(call["function"]["arguments"])["in"] in ("/", "/tmp")


def test_one_call_where_no_more_are_wanted() -> None:
    two = CALL.replace("</｜DSML｜tool_calls>", CALL.partition("\n")[2])
    body = {**HI, "tools": [LS], "tool_choice": "required"}
    with writer(f"</think>\n\n{two}") as api:
        assert len(answer(api, body)[0]["tool_calls"]) == 2
        message, _ = answer(api, {**body, "parallel_tool_calls": False})
        assert len(message["tool_calls"]) == 1


def test_a_call_cannot_take_the_place_of_reasoning_that_is_open() -> None:
    with writer(f"let me\n\n{CALL}") as api:
        body = {**HI, "tools": [LS], "tool_choice": "required", "thinking_token_budget": 30}
        message, reason = answer(api, body)
        assert reason == "tool_calls"
        assert message["reasoning"].startswith("let me")


def test_strict_tools_hold_the_calls_that_the_model_chooses_to_make() -> None:
    wrong = CALL.replace('"ls"', '"cd"').replace('"path"', '"in"').replace("/x", "/home")
    strict = {"type": "function", "function": {**CD["function"], "strict": True}}  # type: ignore[dict-item]
    with writer(f"hm</think>Look:\n\n{wrong}") as api:
        message, _ = answer(api, {**HI, "tools": [CD]})
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"in": "/home"}
        message, reason = answer(api, {**HI, "tools": [LS, strict]})
        assert reason == "tool_calls"
        assert message["content"] == "Look:"
        assert json.loads(message["tool_calls"][0]["function"]["arguments"])["in"] in ("/", "/tmp")
    with writer("hm</think>Nothing to do.") as api:
        message, reason = answer(api, {**HI, "tools": [strict]})
        assert (message["content"], reason) == ("Nothing to do.", "stop")


def test_with_tools_an_answer_is_of_the_schema_or_a_call() -> None:
    fields = {**HI, "tools": [LS], **json_schema(ANSWER)}
    with writer('</think>{"answer":"x"}') as api:
        message, reason = answer(api, fields)
        assert (json.loads(message["content"]), reason) == ({"answer": "x"}, "stop")
    with writer(f"</think>\n\n{CALL}") as api:
        message, reason = answer(api, fields)
        assert reason == "tool_calls"
        assert not message["content"]
    with writer("</think>chat") as api:
        message, reason = answer(api, {**fields, "tool_choice": "none"})
        assert json.loads(message["content"]).keys() == {"answer"}


def limited(most: int) -> dict[str, Any]:
    text = {"type": "string", "maxLength": most}
    return {"type": "object", "properties": {"answer": text}, "required": ["answer"]}


def test_a_schema_that_cannot_be_held_beside_tools_is_refused() -> None:
    with writer('</think>{"answer":"xyz"}') as api:
        for schema in ({"allOf": [ANSWER, {"type": "object"}]}, limited(5000)):
            form = json_schema(schema)
            error = error_of(api.post(PATH, {**HI, "tools": [LS], **form}), 400)
            assert error["param"] == "response_format"
            assert json.loads(answer(api, {**HI, **form})[0]["content"]) == {"answer": "xyz"}
        message, _ = answer(api, {**HI, "tools": [LS], **json_schema(limited(2))})
        assert json.loads(message["content"]) == {"answer": "xy"}


def test_a_tool_whose_schema_is_broken_is_refused_when_it_has_to_be_called() -> None:
    broken = {"type": "object", "properties": {"x": {"type": "strin"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": broken}}
    with writer("</think>ok") as api:
        assert answer(api, {**HI, "tools": [tool]})[1] == "stop"
        body = {**HI, "tools": [tool], "tool_choice": "required"}
        assert error_of(api.post(PATH, body), 400)["param"] == "tools"


# Thinking budget


@pytest.mark.parametrize(
    ("fields", "limit", "tokens"),
    [
        ({"thinking_token_budget": 4}, None, 4),
        ({"thinking_token_budget": 0}, None, 0),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, None, 5),
        ({}, 6, 6),
        ({"thinking_token_budget": 3}, 6, 3),
        ({"thinking_token_budget": 9}, 6, 6),
        ({"thinking_token_budget": 100}, None, 12),
    ],
)
def test_reasoning_ends_at_its_budget(fields: Any, limit: int | None, tokens: int) -> None:
    config = ServerConfig(max_thinking_tokens=limit)
    with writer("reasoning...</think>answer", config) as api:
        body = {"max_tokens": 60, "temperature": 0, **HI, **fields}
        response = api.post(PATH, body).json()
        message, usage = response["choices"][0]["message"], response["usage"]
        assert (message["reasoning"] or "") == "reasoning..."[:tokens]
        assert message["content"].endswith("answer"[max(0, tokens - 12) :][-3:])
        assert usage["completion_tokens_details"]["reasoning_tokens"] == tokens
        assert answer(api, body)[0] == message
        streamed = api.chunks(PATH, {**body, "stream_options": {"include_usage": True}})
        assert streamed[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] == tokens
        assert streamed[-1]["usage"]["completion_tokens"] == usage["completion_tokens"]


def test_a_budget_and_a_schema_together() -> None:
    with writer("thinking for ever and ever and") as api:
        fields = {"thinking_token_budget": 8, **json_schema(ANSWER)}
        message, reason = answer(api, {**HI, **fields})
        assert message["reasoning"] == "thinking"
        assert json.loads(message["content"]).keys() == {"answer"}
        assert reason == "stop"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"thinking_token_budget": "many"}, "thinking_token_budget"),
        ({"thinking": {"budget_tokens": True}}, "thinking.budget_tokens"),
        ({"thinking": {"budget_tokens": "5"}}, "thinking.budget_tokens"),
    ],
)
def test_wrong_budgets_are_refused(fields: dict[str, Any], param: str) -> None:
    with writer("</think>ok") as api:
        assert error_of(api.post(PATH, {**HI, **fields}), 400)["param"] == param
