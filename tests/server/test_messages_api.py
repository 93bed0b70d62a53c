"""/v1/messages: the anthropic SDK against a live server of either format, and the wire in place."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import pytest

from moet.config import ServerConfig
from moet.runtime.engine import Engine
from moet.runtime.host import ThreadHost
from moet.server.app import create_app
from tests.scripted import FAULT, ScriptedCore, endless
from tests.server.sdk import DEEPSEEK, FORMATS, Format
from tests.server.serving import MODEL, Caller, saying, serving
from tests.server.test_chat import CALL, prompt_of
from tests.server.test_streams import wait_until_idle
from tests.texts import EOS, ids, text_side

PATH = "/v1/messages"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 500}
SCHEMA = {
    "type": "object",
    "properties": {"item": {"type": "string"}, "depth": {"type": "integer"}},
}
STOCK: Any = {"name": "stock", "description": "counts", "input_schema": SCHEMA}
THINK: Any = {"type": "enabled", "budget_tokens": 1024}
LS = {"name": "ls", "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}}}


def events(api: Caller, body: dict[str, Any]) -> list[dict[str, Any]]:
    """A stream's events; each is named by its type, and nothing follows message_stop."""
    response = api.post(PATH, {**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.text.endswith("\n\n")
    found = []
    for frame in response.text.split("\n\n")[:-1]:
        name, _, data = frame.partition("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"type", "error"}
    assert body["type"] == "error"
    assert body["error"].keys() == {"type", "message"}
    return body["error"]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.model_type)
def test_the_sdk_calls_a_tool_and_reads_the_answer(form: Format) -> None:
    with form.serving() as (url, core):
        client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
        history: list[Any] = [{"role": "user", "content": "How many bolts?"}]
        asked: Any = {
            "model": MODEL, "max_tokens": 2000, "tools": [STOCK], "thinking": THINK,
            "system": [{"type": "text", "text": "Count.", "cache_control": {"type": "ephemeral"}}],
        }  # fmt: skip
        whole = client.messages.create(messages=history, **asked)
        with client.messages.stream(messages=history, **asked) as stream:
            first = stream.get_final_message()
        assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
        thinking, text, call = first.content
        assert thinking.type == "thinking"
        assert thinking.thinking == "Ask."
        assert thinking.signature
        assert text.type == "text"
        assert text.text == "Wait."
        assert call.type == "tool_use"
        assert (call.name, call.input) == ("stock", {"item": "bolt", "depth": 2})
        assert first.stop_reason == whole.stop_reason == "tool_use"
        assert first.usage == whole.usage
        assert [b.to_dict() | {"id": 0} for b in whole.content] == [
            b.to_dict() | {"id": 0} for b in first.content
        ]
        results: Any = [
            {"type": "tool_result", "tool_use_id": call.id, "content": [
                {"type": "text", "text": '{"left": 41}'}]},
        ]  # fmt: skip
        history += [first.to_param(), {"role": "user", "content": results}]
        last = client.messages.create(messages=history, **asked)
        assert [block.type for block in last.content] == ["thinking", "text"]
        assert last.content[1].to_dict() == {"type": "text", "text": "There are 41."}
        assert last.stop_reason == "end_turn"
        counted = client.messages.count_tokens(
            messages=history, model=MODEL, tools=[STOCK], thinking=THINK, system=asked["system"]
        )
        usage = last.usage
        assert usage.cache_read_input_tokens
        assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    prompts = form.prompts(core)
    assert prompts[0] == prompts[1]
    assert prompts[2].startswith(prompts[1] + "Ask.</think>Wait.")  # what was said is a prefix
    assert '{"left": 41}' in prompts[2]


def test_the_beta_address_is_the_same() -> None:
    with DEEPSEEK.serving() as (url, _):
        client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
        message = client.beta.messages.create(
            model=MODEL, max_tokens=100, messages=HI["messages"], betas=["interleaved-thinking"]
        )
        assert message.content[0].to_dict()["text"] == "There are 41."


def test_the_sdk_lists_the_models() -> None:
    with DEEPSEEK.serving() as (url, _):
        client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
        assert [model.id for model in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).display_name == MODEL


def test_the_events_of_a_stream_in_their_order() -> None:
    with serving(saying(CALL)) as api:
        found = events(api, {**HI, "tools": [LS], "thinking": THINK})
        kinds = [event["type"] for event in found]
        assert kinds[0] == "message_start"
        assert kinds[-2:] == ["message_delta", "message_stop"]
        assert found[0]["message"]["content"] == []
        assert found[0]["message"]["stop_reason"] is None
        usage = found[0]["message"]["usage"]
        assert usage["cache_read_input_tokens"] > 0
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(
            api.core.submitted[-1].prompt_token_ids
        )
        open_index = None
        deltas = set()
        for event in found[1:-2]:
            if event["type"] == "content_block_start":
                assert open_index is None
                open_index = event["index"]
            elif event["type"] == "content_block_stop":
                assert event["index"] == open_index
                open_index = None
            else:
                assert event["index"] == open_index
                deltas.add(event["delta"]["type"])
                assert all(event["delta"].values())  # no delta is empty
        assert open_index is None
        assert deltas == {"thinking_delta", "signature_delta", "text_delta", "input_json_delta"}
        starts = [e["content_block"] for e in found if e["type"] == "content_block_start"]
        assert [b["type"] for b in starts] == ["thinking", "text", "tool_use", "tool_use"]
        assert starts[2]["input"] == {}
        assert found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
        assert found[-2]["usage"]["output_tokens"] > 0


@pytest.mark.parametrize(
    ("fields", "said", "reason", "sequence"),
    [
        ({}, "answer", "end_turn", None),
        ({"max_tokens": 3}, "answer", "max_tokens", None),
        ({"max_tokens": 10_000}, "x" * 9000, "model_context_window_exceeded", None),
        ({"stop_sequences": ["red kite"]}, "a red kite sings", "stop_sequence", "red kite"),
        ({"tools": [LS]}, CALL.partition("</think>")[2], "tool_use", None),
        ({"tools": [LS], "tool_choice": {"type": "any"}}, CALL.partition("</think>")[2],
         "tool_use", None),
        ({"tools": [LS], "tool_choice": {"type": "tool", "name": "ls"}},
         CALL.partition("</think>")[2], "tool_use", None),
        ({"tools": [LS], "tool_choice": {"type": "none"}}, CALL.partition("</think>")[2],
         "end_turn", None),
    ],
    ids=["end", "max_tokens", "window", "stop", "auto", "any", "tool", "none"],
)  # fmt: skip
def test_stop_reasons_are_the_same_in_both_modes(
    fields: dict[str, Any], said: str, reason: str, sequence: str | None
) -> None:
    with serving(saying(said)) as api:
        whole = api.post(PATH, {**HI, **fields}).json()
        assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
        delta = events(api, {**HI, **fields})[-2]
        assert delta["delta"] == {"stop_reason": reason, "stop_sequence": sequence}
        assert delta["usage"] == whole["usage"]
        calls = [block for block in whole["content"] if block["type"] == "tool_use"]
        assert bool(calls) == (reason == "tool_use")


def test_one_call_at_a_time_if_that_is_wanted() -> None:
    with serving(saying(CALL.partition("</think>")[2])) as api:
        choice = {"type": "auto", "disable_parallel_tool_use": True}
        whole = api.post(PATH, {**HI, "tools": [LS], "tool_choice": choice}).json()
        assert [block["type"] for block in whole["content"]] == ["text", "tool_use"]


def test_a_call_that_is_cut_keeps_what_it_has() -> None:
    said = CALL.partition("</think>")[2]
    with serving(saying(said)) as api:
        limit = len(ids(said[: said.index(">&1")]))
        whole = api.post(PATH, {**HI, "tools": [LS], "max_tokens": limit}).json()
        assert whole["stop_reason"] == "max_tokens"
        assert whole["content"][-1]["input"] == {"path": "/x 2"}


def test_thinking_is_off_unless_asked_for_or_the_server_says_so() -> None:
    on = ServerConfig(default_chat_template_kwargs={"enable_thinking": True})
    for config, fields, thinks in (
        (None, {}, False),
        (None, {"thinking": {"type": "disabled"}}, False),
        (None, {"thinking": {"type": "adaptive"}}, True),
        (None, {"thinking": THINK}, True),
        (None, {"output_config": {"effort": "high"}}, True),
        (on, {}, True),
        (on, {"thinking": {"type": "disabled"}}, False),
    ):
        with serving(saying("why</think>a"), config) as api:
            api.post(PATH, {**HI, **fields})
            assert prompt_of(api.core).endswith("<think>" if thinks else "</think>")


def test_a_thinking_budget_reaches_the_sampler() -> None:
    with serving(saying("why</think>a")) as api:
        api.post(PATH, {**HI, "thinking": THINK})
        budget = api.core.submitted[-1].params.thinking
        assert budget is not None
        assert budget.max_tokens == 1024


def test_thinking_that_is_omitted_comes_back_by_its_signature() -> None:
    with serving(saying("secret</think>a")) as api:
        body = {**HI, "thinking": {"type": "adaptive", "display": "omitted"}}
        whole = api.post(PATH, body).json()
        thinking, _ = whole["content"]
        assert thinking["thinking"] == ""
        assert "secret" not in json.dumps(events(api, body))
        history = [*HI["messages"], {"role": "assistant", "content": whole["content"]}]
        more = [*history, {"role": "user", "content": "more"}]
        keep = {"drop_thinking": False}
        api.post(PATH, {**body, "messages": more, "chat_template_kwargs": keep})
        assert "secret</think>a" in prompt_of(api.core)


@pytest.mark.bug("P11")
def test_an_answer_without_thinking_is_text() -> None:
    with serving(saying("The port is 8080.")) as api:
        whole = api.post(PATH, {**HI, "thinking": THINK}).json()
        assert whole["content"] == [{"type": "text", "text": "The port is 8080."}]
        starts = [e for e in events(api, {**HI, "thinking": THINK}) if "content_block" in e]
        assert [e["content_block"]["type"] for e in starts] == ["thinking", "text"]


def test_several_thinking_blocks_are_told_apart() -> None:
    with serving(saying("one</think>a<think>two</think>b")) as api:
        whole = api.post(PATH, {**HI, "thinking": THINK}).json()
        parts = [block.get("thinking") or block.get("text") for block in whole["content"]]
        assert parts == ["one", "a", "two", "b"]


@pytest.mark.parametrize("system", ["string", "blocks"])
def test_the_billing_line_does_not_break_the_prefix(system: str) -> None:
    """U37: the line changes with every request."""
    prompts = set()
    with serving(saying("a")) as api:
        for nonce in ("cch=1f2e3;", "cch=99999;"):
            line = f"x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; {nonce}"
            text: Any = f"{line}\nYou help."
            if system == "blocks":
                text = [{"type": "text", "text": line}, {"type": "text", "text": "You help."}]
            api.post(PATH, {**HI, "system": text})
            prompts.add(prompt_of(api.core))
        api.post(PATH, {**HI, "system": "You help."})
        assert prompts == {prompt_of(api.core)}


def test_the_history_reads_as_the_same_chat_does() -> None:
    """Both endpoints make one prompt of one conversation; string and parts are the same (U05)."""
    call = {"type": "tool_use", "id": "c1", "name": "ls", "input": {"path": "/é"}}
    function = {"name": "ls", "arguments": '{"path": "/é"}'}
    for content in ("out", [{"type": "text", "text": "out"}]):
        with serving(saying("</think>a")) as api:
            result = {"type": "tool_result", "tool_use_id": "c1", "content": content}
            api.post(PATH, {
                "max_tokens": 9,
                "thinking": THINK,
                "system": "S",
                "tools": [LS],
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                    {"role": "assistant", "content": [
                        {"type": "thinking", "thinking": "R1", "signature": "s"},
                        {"type": "text", "text": "T1"},
                        call,
                    ]},
                    {"role": "user", "content": [result, {"type": "text", "text": "go on"}]},
                ],
            })  # fmt: skip
            mine = prompt_of(api.core)
            tool = {"name": "ls", "parameters": LS["input_schema"]}
            api.post("/v1/chat/completions", {
                "tools": [{"type": "function", "function": tool}],
                "messages": [
                    {"role": "system", "content": "S"},
                    {"role": "user", "content": "hi"},
                    {"role": "assistant", "content": "T1", "reasoning": "R1", "tool_calls": [
                        {"id": "c1", "type": "function", "function": function}]},
                    {"role": "tool", "tool_call_id": "c1", "content": "out"},
                    {"role": "user", "content": "go on"},
                ],
            })  # fmt: skip
            assert mine == prompt_of(api.core)
            assert "R1" in mine


def test_results_that_failed_and_tools_that_were_found_are_said_in_words() -> None:
    """U06: a reference names its tool."""
    call = {"type": "tool_use", "id": "c1", "name": "ls", "input": {}}
    with serving(saying("a")) as api:
        for content, extra, shown in (
            ("no such file", {"is_error": True}, "Error: no such file"),
            ("Error 5", {"is_error": True}, "<tool_result>Error 5"),
            ([{"type": "tool_reference", "tool_name": "mcp__a__b"}], {}, "mcp__a__b"),
            (None, {}, "<tool_result></tool_result>"),
        ):
            result = {"type": "tool_result", "tool_use_id": "c1", "content": content, **extra}
            messages = [
                *HI["messages"],
                {"role": "assistant", "content": [call]},
                {"role": "user", "content": [result]},
            ]
            assert api.post(PATH, {**HI, "messages": messages, "tools": [LS]}).status_code == 200
            assert shown in prompt_of(api.core)


def test_tools_and_blocks_of_anthropics_servers_are_left_out() -> None:
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    history = [
        *HI["messages"],
        {"role": "assistant", "content": [
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
            {"type": "text", "text": "found"},
        ]},
        {"role": "user", "content": "and?"},
    ]  # fmt: skip
    with serving(saying("a")) as api:
        response = api.post(PATH, {**HI, "messages": history, "tools": [search, LS]})
        assert response.status_code == 200, response.text
        assert "web_search" not in prompt_of(api.core)
        assert '"ls"' in prompt_of(api.core)
        for nothing in ({"type": "container_upload", "file_id": "f"}, {"type": "text", "text": ""}):
            asked = [{"role": "user", "content": [nothing]}]
            assert api.post(PATH, {**HI, "messages": asked}).status_code == 200


def test_an_answer_that_was_begun_is_continued() -> None:
    begun = [*HI["messages"], {"role": "assistant", "content": "The answer is ("}]
    with serving(saying("4)")) as api:
        whole = api.post(PATH, {**HI, "messages": begun}).json()
        assert prompt_of(api.core).endswith("The answer is (")
        assert whole["content"] == [{"type": "text", "text": "4)"}]


def test_a_schema_becomes_a_grammar() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    form = {"type": "json_schema", "schema": schema}
    with serving(saying('{"a": "b"}')) as api:
        for fields in ({"output_config": {"format": form}}, {"output_format": form}):
            assert api.post(PATH, {**HI, **fields}).status_code == 200
            grammar = api.core.submitted[-1].grammar
            assert grammar is not None
            assert json.loads(grammar.text) == schema


def test_counting_takes_what_answering_takes() -> None:
    with serving(saying("a")) as api:
        fields = {"system": "S", "tools": [LS], "thinking": {"type": "adaptive"}}
        api.post(PATH, {**HI, **fields})
        counted = api.post(f"{PATH}/count_tokens", {"messages": HI["messages"], **fields})
        assert counted.json() == {"input_tokens": len(api.core.submitted[-1].prompt_token_ids)}
        assert len(api.core.submitted) == 1


def test_a_prompt_that_is_too_long_is_refused_in_words_that_clients_know() -> None:
    with serving(max_model_len=50) as api:
        body = {**HI, "messages": [{"role": "user", "content": "x" * 60}]}
        for stream in (False, True):
            error = error_of(api.post(PATH, {**body, "stream": stream}), 400)
            assert error["type"] == "invalid_request_error"
            assert error["message"] == "prompt is too long: 64 tokens > 49 maximum"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]},
         "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
         "messages[0].content[0].tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [
            {"type": "tool_use", "id": "a", "name": "f", "input": "x"}]}]},
         "messages[0].content[0].input"),
        ({"system": 5}, "system"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"tools": 5}, "tools"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "a", "input_schema": 5}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": [LS], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"thinking": {"type": "loud"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": "5"}}, "thinking.budget_tokens"),
        ({"output_config": {"effort": "colossal"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"temperature": -1}, "temperature"),
        ({"mcp_servers": [{"url": "u"}]}, "mcp_servers"),
    ],
    ids=map(str, range(24)),
)  # fmt: skip
def test_wrong_fields_are_refused_by_name_in_anthropics_shape(
    fields: dict[str, Any], field: str
) -> None:
    body = {name: value for name, value in {**HI, **fields}.items() if value is not None}
    with serving(saying("a")) as api:
        for stream in ({}, {"stream": True}):
            error = error_of(api.post(PATH, {**body, **stream}), 400)
            assert error["type"] == "invalid_request_error"
            assert field in error["message"]
        assert not api.core.submitted


def test_errors_of_the_door_have_the_shape_too() -> None:
    with serving(saying("a"), ServerConfig(api_keys=("k",))) as api:
        assert error_of(api.post(PATH, HI), 401)["type"] == "authentication_error"
        key = {"x-api-key": "k"}
        assert api.post(PATH, HI, headers=key).status_code == 200
        wrong = api.post(PATH, {**HI, "model": "other"}, headers=key)
        assert error_of(wrong, 404)["type"] == "not_found_error"
        assert error_of(api.get(f"{PATH}/x", headers=key), 404)["type"] == "not_found_error"
        text = api.request("POST", PATH, content=b"{", headers={**key, "content-type": "text/x"})
        assert error_of(text, 415)["type"] == "invalid_request_error"
    with serving(max_open=0) as api:
        busy = api.post(PATH, HI)
        assert error_of(busy, 429)["type"] == "rate_limit_error"
        assert busy.headers["retry-after"]


def test_a_fault_in_the_middle_of_a_stream_is_its_last_event() -> None:
    core = ScriptedCore(lambda request: [*ids("ab"), FAULT])
    with Engine.over(ThreadHost(lambda progress: core), text_side, model=MODEL) as engine:
        engine.wait_until_ready(60)
        found = events(Caller(create_app(engine, ServerConfig()), core, engine), HI)
        assert found[-1]["type"] == "error"
        assert found[-1]["error"]["type"] == "api_error"
        assert "message_stop" not in [event["type"] for event in found]


def test_silence_is_filled_with_pings() -> None:
    config = ServerConfig(keep_alive_s=0.02)
    with serving(saying("a"), config, step_s=0.2) as api:
        found = events(api, HI)
        assert "ping" in [event["type"] for event in found]
        assert next(e["type"] for e in found if e["type"] != "ping") == "message_start"


@pytest.mark.parametrize("path", [PATH, "/v1/responses"])
def test_a_client_that_leaves_ends_its_request(path: str) -> None:
    body = {**HI, "input": "hi", "max_tokens": 100_000, "stream": True}
    with (
        DEEPSEEK.serving(script=endless, step_s=0.001, max_model_len=200_000) as (url, core),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        with client.stream("POST", path, json=body) as response:
            assert next(response.iter_bytes())
        wait_until_idle(core)
        assert len(core.aborted) == 1


def test_request_ids_come_back() -> None:
    with serving(saying("a")) as api:
        response = api.post(PATH, HI, headers={"x-request-id": "mine-7"})
        assert response.headers["x-request-id"] == response.headers["request-id"] == "mine-7"
        made = api.post(PATH, {**HI, "stream": True}).headers["x-request-id"]
        assert len(made) == 32
        refused = api.post(PATH, {}, headers={"x-request-id": "a b"})
        assert len(refused.headers["x-request-id"]) == 32


def test_the_end_token_alone_is_an_empty_message() -> None:
    with serving(lambda request: [EOS]) as api:
        whole = api.post(PATH, HI).json()
        assert whole["content"] == []
        assert whole["stop_reason"] == "end_turn"
        kinds = [event["type"] for event in events(api, HI)]
        assert kinds == ["message_start", "message_delta", "message_stop"]
