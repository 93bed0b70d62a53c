"""/v1/responses: the openai SDK against a live server of either format, and the wire in place."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from moet.config import ServerConfig
from moet.runtime.engine import Engine
from moet.runtime.host import ThreadHost
from moet.server.app import create_app
from moet.server.custom_tools import CustomInput, arguments_of
from tests.scripted import FAULT, ScriptedCore
from tests.server.sdk import FORMATS, Format
from tests.server.serving import MODEL, Caller, saying, serving
from tests.server.test_app import error_of
from tests.server.test_chat import CALL, LS, prompt_of
from tests.texts import ids, text_side

PATH = "/v1/responses"
HI: dict[str, Any] = {"input": "hi"}
SCHEMA = {
    "type": "object",
    "properties": {"item": {"type": "string"}, "depth": {"type": "integer"}},
}
STOCK: Any = {"type": "function", "name": "stock", "description": "counts",
              "parameters": SCHEMA, "strict": False}  # fmt: skip
LIST: Any = {"type": "function", **LS["function"]}
EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)


def events(api: Caller, body: dict[str, Any]) -> list[dict[str, Any]]:
    """A stream's events: named by type, numbered, and each as the SDK's types have it."""
    response = api.post(PATH, {**body, "stream": True})
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = []
    for frame in response.text.split("\n\n")[:-1]:
        name, _, data = frame.partition("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
        EVENT.validate_python(found[-1], strict=False)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def whole(api: Caller, body: dict[str, Any]) -> dict[str, Any]:
    """An answer in one body, as the SDK's types have it, and as its stream tells it."""
    response = api.post(PATH, body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    Response.model_validate(answer, strict=False)
    streamed = events(api, body)[-1]["response"]
    assert [_told(item) for item in streamed["output"]] == [_told(i) for i in answer["output"]]
    assert streamed["usage"] == answer["usage"]
    assert streamed["status"] == answer["status"]
    return answer


def _told(item: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name not in ("id", "call_id")}


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.model_type)
def test_the_sdk_calls_a_tool_and_reads_the_answer(form: Format) -> None:
    with form.serving() as (url, core):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        history: list[Any] = [{"role": "user", "content": "How many bolts?"}]
        asked: Any = {"model": MODEL, "tools": [STOCK], "instructions": "Count.", "store": False}
        with client.responses.stream(input=history, **asked) as stream:
            first = stream.get_final_response()
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
        reasoning, message, call = first.output
        assert reasoning.type == "reasoning"
        assert reasoning.content is not None
        assert reasoning.content[0].text == "Ask."
        assert message.type == "message"
        assert first.output_text == "Wait."
        assert call.type == "function_call"
        assert (call.name, json.loads(call.arguments)) == ("stock", {"item": "bolt", "depth": 2})
        history += [item.to_dict() for item in first.output]
        output = '{"left": 41}'
        history.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
        last = client.responses.create(input=history, **asked)
        assert last.output_text == "There are 41."
        assert last.status == "completed"
        assert last.usage is not None
        assert last.usage.input_tokens_details.cached_tokens > 0
        assert 0 < last.usage.output_tokens_details.reasoning_tokens < last.usage.output_tokens
        counted = client.responses.input_tokens.count(
            input=history, model=MODEL, tools=[STOCK], instructions="Count."
        )
        assert counted.input_tokens == last.usage.input_tokens
    prompts = form.prompts(core)
    assert prompts[1].startswith(prompts[0] + "Ask.</think>Wait.")  # what was said is a prefix
    assert output in prompts[1]


@pytest.mark.bug("S04")
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.model_type)
def test_s04_a_call_of_a_namespaces_tool_comes_back_by_both_names(form: Format) -> None:
    inner = {name: value for name, value in STOCK.items() if name != "strict"}
    tools: Any = [
        {"type": "namespace", "name": "mcp", "description": "of the shop", "tools": [inner]},
        {**STOCK, "name": "other"},
    ]
    with form.serving() as (url, core):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        asked: Any = {"model": MODEL, "tools": tools, "reasoning": {"effort": "none"}}
        history: list[Any] = [{"role": "user", "content": "How many bolts?"}]
        with client.responses.stream(input=history, **asked) as stream:
            first = stream.get_final_response()
        for answer in (first, client.responses.create(input=history, **asked)):
            call = answer.output[-1]
            assert call.type == "function_call"
            assert (call.namespace, call.name) == ("mcp", "stock")
        history.append(first.output[-1].to_dict())
        named: Any = {"type": "function", "name": "stock", "namespace": "mcp"}
        client.responses.create(input=history, tool_choice=named, **asked)
    *_, prompt = form.prompts(core)
    assert prompt.count("mcp__stock") == 2  # as declared, and as called
    assert core.submitted[-1].grammar is not None


@pytest.mark.bug("S05")
def test_s05_tools_that_are_no_functions_are_skipped_with_a_notice(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tools = [
        {"type": "web_search"},
        {"type": "image_generation"},
        {"type": "local_shell"},
        LIST,
    ]
    with serving(saying(CALL)) as api, caplog.at_level("INFO", "moet.server.responses_input"):
        answer = whole(api, {**HI, "tools": tools})
        assert [item["name"] for item in answer["output"] if item["type"] == "function_call"]
        assert "web_search" not in prompt_of(api.core)
        assert "web_search" in caplog.text
        assert whole(api, {**HI, "tools": tools[:3]})["status"] == "completed"


LINES = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
PATCH: Any = {"type": "custom", "name": "apply_patch", "description": "edits", "format": LINES}
TEXT = '*** Begin Patch\n"quoted" \\ \té 😀\n*** End Patch'
PATCH_CALL = (
    'why</think>ok\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="{name}">\n'
    f'<｜DSML｜parameter name="input" string="true">{TEXT}</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)


@pytest.mark.parametrize("namespace", [None, "edit"])
def test_a_custom_tool_gets_plain_text_and_streams_it(namespace: str | None) -> None:
    name = "apply_patch" if namespace is None else "edit__apply_patch"
    tools: Any = [PATCH, LIST]
    if namespace is not None:
        about = {"name": namespace, "description": "of files"}
        tools = [{"type": "namespace", **about, "tools": [PATCH]}, LIST]
    with serving(saying(PATCH_CALL.format(name=name))) as api:
        asked = {**HI, "tools": tools}
        item = whole(api, asked)["output"][-1]
        assert (item["type"], item["name"]) == ("custom_tool_call", "apply_patch")
        assert (item["input"], item.get("namespace")) == (TEXT, namespace)
        assert "start: /.+/" in prompt_of(api.core)
        kind = "response.custom_tool_call_input"
        found = events(api, asked)
        deltas = [event["delta"] for event in found if event["type"] == f"{kind}.delta"]
        assert "".join(deltas) == TEXT
        assert len(deltas) > len(TEXT) / 2  # as it comes, and not at its end
        [done] = [event for event in found if event["type"] == f"{kind}.done"]
        assert done["input"] == TEXT
        output = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "Done!"}
        history = [{"role": "user", "content": "hi"}, item, output]
        assert api.post(PATH, {"input": history, "tools": tools}).status_code == 200
        prompt = prompt_of(api.core)
        assert TEXT in prompt
        assert f'invoke name="{name}"' in prompt
        assert "Done!" in prompt


def test_a_custom_tool_can_be_the_one_that_has_to_be_called() -> None:
    allowed = {"type": "allowed_tools", "mode": "required",
               "tools": [{"type": "custom", "name": "apply_patch"}]}  # fmt: skip
    with serving(saying(PATCH_CALL.format(name="apply_patch"))) as api:
        for choice in ({"type": "custom", "name": "apply_patch"}, allowed):
            asked = {**HI, "tools": [PATCH, LIST], "tool_choice": choice}
            assert whole(api, asked)["output"][-1]["input"] == TEXT
            assert api.core.submitted[-1].grammar is not None
        assert '"ls"' not in prompt_of(api.core)


def test_a_custom_call_of_another_shape_loses_nothing() -> None:
    said = CALL.replace('"ls"', '"apply_patch"')
    with serving(saying(said)) as api:
        item = whole(api, {**HI, "tools": [PATCH]})["output"][-1]
        assert json.loads(item["input"]) == {"path": "/y"}


@given(st.text(), st.lists(st.integers(1, 9), max_size=20))
def test_an_input_grows_to_what_it_is_however_it_is_cut(text: str, cuts: list[int]) -> None:
    arguments, grown, taken = arguments_of(text), CustomInput(), []
    for cut in [*cuts, len(arguments)]:
        part, arguments = arguments[:cut], arguments[cut:]
        taken.append(grown.add(part))
        assert text.startswith("".join(taken))
    taken.append(grown.rest())
    assert "".join(taken) == grown.text == text


def test_log_probabilities_are_those_of_the_text() -> None:
    with serving(saying(CALL)) as api:
        for fields, num_top in (
            ({"top_logprobs": 1}, 1),
            ({"include": ["message.output_text.logprobs"]}, 1),  # the core always has two
        ):
            asked = {**HI, "tools": [LIST], **fields}
            answer = whole(api, asked)
            [part] = answer["output"][1]["content"]
            assert [entry["token"] for entry in part["logprobs"]] == list("ok")
            for entry in part["logprobs"]:
                assert entry["logprob"] == -0.25
                assert len(entry["top_logprobs"]) == num_top
            found = events(api, asked)
            kind = "response.output_text"
            streamed = [e["logprobs"] for e in found if e["type"] == f"{kind}.delta"]
            assert [entry for entries in streamed for entry in entries] == part["logprobs"]
            [done] = [event for event in found if event["type"] == f"{kind}.done"]
            assert done["logprobs"] == part["logprobs"]
        assert answer["top_logprobs"] == 0
        plain = whole(api, {**HI, "tools": [LIST]})
        assert plain["output"][1]["content"][0]["logprobs"] == []


@pytest.mark.bug("S11")
def test_s11_a_schema_is_enforced_as_it_is_on_chat() -> None:
    schema = {"type": "object", "properties": {"answer": {"type": "string"}}}
    form = {"type": "json_schema", "name": "a", "schema": schema, "strict": True}
    with serving(saying('why</think>{"answer": "17"}')) as api:
        answer = whole(api, {**HI, "text": {"format": form}})
        assert answer["output"][-1]["content"][0]["text"] == '{"answer": "17"}'
        mine = api.core.submitted[-1]
        api.post("/v1/chat/completions", {
            "messages": [{"role": "user", "content": "hi"}],
            "response_format": {"type": "json_schema", "json_schema": form},
        })  # fmt: skip
        theirs = api.core.submitted[-1]
        assert mine.grammar is not None
        assert theirs.grammar is not None
        assert mine.grammar.text == theirs.grammar.text
        assert mine.grammar.after_token_id == theirs.grammar.after_token_id == ids("</think>")[0]
        assert mine.prompt_token_ids == theirs.prompt_token_ids
        assert whole(api, {**HI, "text": {"format": {"type": "json_object"}}})
        assert api.core.submitted[-1].grammar is not None
        assert whole(api, {**HI, "text": {"format": {"type": "text"}}})
        assert api.core.submitted[-1].grammar is None


def test_the_events_of_a_stream_in_their_order() -> None:
    with serving(saying(CALL)) as api:
        found = events(api, {**HI, "tools": [LIST], "parallel_tool_calls": False})
        kinds = [event["type"].removeprefix("response.") for event in found]
        merged = [kind for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]]
        assert merged == [
            "created", "in_progress",
            "output_item.added", "content_part.added", "reasoning_text.delta",
            "reasoning_text.done", "content_part.done", "output_item.done",
            "output_item.added", "content_part.added", "output_text.delta",
            "output_text.done", "content_part.done", "output_item.done",
            "output_item.added", "function_call_arguments.delta",
            "function_call_arguments.done", "output_item.done",
            "completed",
        ]  # fmt: skip
        joined: dict[int, str] = {}
        for event in found:
            if event["type"].endswith(".delta"):
                assert event["delta"]
                index = event["output_index"]
                joined[index] = joined.get(index, "") + event["delta"]
        assert list(joined.values()) == ["why", "ok", '{"path": "/x 2>&1"}']
        output = found[-1]["response"]["output"]
        done = [event["item"] for event in found if event["type"].endswith("output_item.done")]
        assert done == output
        assert found[0]["response"]["status"] == "in_progress"


def test_an_answer_that_is_cut_is_incomplete() -> None:
    with serving(saying("why</think>answer")) as api:
        answer = whole(api, {**HI, "max_output_tokens": 6})
        assert answer["status"] == "incomplete"
        assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
        assert [item["status"] for item in answer["output"]] == ["completed", "incomplete"]
        assert events(api, {**HI, "max_output_tokens": 6})[-1]["type"] == "response.incomplete"


@pytest.mark.bug("P11")
def test_an_answer_without_thinking_is_a_message() -> None:
    with serving(saying("The port is 8080.")) as api:
        answer = api.post(PATH, HI).json()
        assert [item["type"] for item in answer["output"]] == ["message"]
        assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == 0
        types = [item["type"] for item in events(api, HI)[-1]["response"]["output"]]
        assert types == ["reasoning", "message"]


@pytest.mark.bug("P12")
def test_thinking_that_is_cut_stays_thinking() -> None:
    with serving(saying("1. Look at the request")) as api:
        answer = whole(api, {**HI, "max_output_tokens": 5})
        assert [item["type"] for item in answer["output"]] == ["reasoning"]
        assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == 5


def test_reasoning_comes_back_in_every_form_it_was_given() -> None:
    with serving(saying("secret</think>a")) as api:
        sealed = ["reasoning.encrypted_content"]
        prompts = set()
        for fields in (
            {},
            {"reasoning": {"summary": "auto"}},
            {"include": sealed},
            {"include": sealed, "reasoning": {"summary": "detailed"}},
        ):
            answer = whole(api, {**HI, **fields})
            item = answer["output"][0]
            texts = item["summary"] if "reasoning" in fields else item["content"]
            assert texts[0]["text"] == "secret"
            assert bool(item["encrypted_content"]) == ("include" in fields)
            if "include" in fields:  # some clients give back nothing else
                item = {**item, "content": None, "summary": []}
            history = [
                {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                item,
                *answer["output"][1:],
                {"role": "user", "content": "more"},
            ]
            keep = {"chat_template_kwargs": {"drop_thinking": False}}
            api.post(PATH, {"input": history, **keep})
            prompts.add(prompt_of(api.core))
        [prompt] = prompts
        assert "secret</think>a" in prompt


def test_items_make_the_prompt_that_chat_messages_make() -> None:
    function = {"name": "ls", "arguments": '{"path": "/"}'}
    with serving(saying("a")) as api:
        for output in ("out", [{"type": "input_text", "text": "out"}]):
            api.post(PATH, {
                "instructions": "S",
                "tools": [LIST],
                "input": [
                    {"role": "developer", "content": "D"},
                    {"type": "message", "role": "user", "content": "hi"},
                    {"type": "reasoning", "id": "r", "summary": [],
                     "content": [{"type": "reasoning_text", "text": "R1"}]},
                    {"type": "message", "role": "assistant", "id": "m", "status": "completed",
                     "content": [{"type": "output_text", "text": "T1", "annotations": []}]},
                    {"type": "function_call", "call_id": "c1", **function},
                    {"type": "function_call", "call_id": "c2", **function},
                    {"type": "web_search_call", "id": "w", "status": "completed"},
                    {"type": "function_call_output", "call_id": "c1", "output": output},
                    {"type": "function_call_output", "call_id": "c2", "output": output},
                ],
            })  # fmt: skip
            mine = prompt_of(api.core)
            calls = [{"id": i, "type": "function", "function": function} for i in ("c1", "c2")]
            api.post("/v1/chat/completions", {
                "tools": [LS],
                "messages": [
                    {"role": "system", "content": "S"},
                    {"role": "developer", "content": "D"},
                    {"role": "user", "content": "hi"},
                    {"role": "assistant", "content": "T1", "reasoning": "R1", "tool_calls": calls},
                    {"role": "tool", "tool_call_id": "c1", "content": "out"},
                    {"role": "tool", "tool_call_id": "c2", "content": "out"},
                ],
            })  # fmt: skip
            assert mine == prompt_of(api.core)
            assert "R1" in mine


@pytest.mark.parametrize(
    ("choice", "tools_shown", "has_grammar"),
    [
        ("auto", True, False),
        ("none", False, False),
        ("required", True, True),
        ({"type": "function", "name": "ls"}, True, True),
        ({"type": "allowed_tools", "mode": "auto",
          "tools": [{"type": "function", "name": "ls"}]}, True, False),
        ({"type": "allowed_tools", "mode": "required",
          "tools": [{"type": "function", "name": "ls"}, {"type": "web_search"}]}, True, True),
        ({"type": "allowed_tools", "mode": "auto", "tools": []}, False, False),
    ],
    ids=["auto", "none", "required", "named", "allowed", "allowed_required", "none_allowed"],
)  # fmt: skip
def test_tool_choices(choice: Any, tools_shown: bool, has_grammar: bool) -> None:
    with serving(saying(CALL)) as api:
        answer = whole(api, {**HI, "tools": [LIST], "tool_choice": choice})
        assert ('"ls"' in prompt_of(api.core)) == tools_shown
        assert (api.core.submitted[-1].grammar is not None) == has_grammar
        assert answer["tool_choice"] == choice
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
        assert bool(calls) == tools_shown


def test_what_was_asked_is_echoed_and_storing_is_never_promised() -> None:
    with serving(saying("why</think>a")) as api:
        asked = {"temperature": 0.5, "top_p": 0.9, "metadata": {"k": "v"}, "user": "u"}
        answer = whole(api, {**HI, **asked, "store": True, "instructions": "S"})
        assert {name: answer[name] for name in asked} == asked
        assert (answer["store"], answer["instructions"]) == (False, "S")
        assert api.get(f"{PATH}/{answer['id']}").status_code == 404


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"top_logprobs": -1}, "top_logprobs"),
        ({"top_logprobs": 99}, "top_logprobs"),
        ({"tools": [{"type": "custom", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"type": "custom", "name": "a", "format": {"type": "xml"}}]},
         "tools[0].format"),
        ({"tools": [{"type": "custom", "name": "a",
          "format": {"type": "grammar", "syntax": "gbnf", "definition": ""}}]},
         "tools[0].format.syntax"),
        ({"truncation": "auto"}, "truncation"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"type": "web_search_call", "id": "w"}]}, "input"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input[0].content[0]"),
        ({"input": [{"type": "item_reference", "id": "m"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]},
         "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"tools": 5}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools"),
        ({"tools": [LIST, LIST]}, "tools[1].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"reasoning": {"effort": "colossal"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "epic"}}, "reasoning.summary"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
    ],
    ids=map(str, range(33)),
)  # fmt: skip
def test_wrong_fields_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with serving(saying("a")) as api:
        for stream in ({}, {"stream": True}):
            error = error_of(api.post(PATH, {**HI, **stream, **fields}), 400)
            assert error["param"] == param
        assert not api.core.submitted


def test_an_input_over_the_window_is_named_in_openai_terms() -> None:
    with serving(max_model_len=50) as api:
        error = error_of(api.post(PATH, {"input": "x" * 60}), 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "input")


def test_a_fault_in_the_middle_of_a_stream_is_a_failed_response() -> None:
    core = ScriptedCore(lambda request: [*ids("ab"), FAULT])
    with Engine.over(ThreadHost(lambda progress: core), text_side, model=MODEL) as engine:
        engine.wait_until_ready(60)
        found = events(Caller(create_app(engine, ServerConfig()), core, engine), HI)
        assert found[-1]["type"] == "response.failed"
        assert found[-1]["response"]["error"]["code"] == "server_error"
        assert [event["type"] for event in found].count("response.failed") == 1
