"""GLM-5.2's chat over HTTP, from the openai SDK: a streamed tool call, its result, and the end."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from moet.models.synthetic_tokenizer_glm import END_TOKENS, special_token_ids, tokenizer_json
from moet.runtime.engine import Engine
from moet.runtime.host import ThreadHost
from moet.runtime.text_side import TextSide
from moet.runtime.tokenizer import Tokenizer
from moet.types import Request
from tests.scripted import ScriptedCore
from tests.server.chat.glm_template import TEMPLATE
from tests.server.serving import MODEL, listening

VOCAB = 1024
ENDS = tuple(special_token_ids(VOCAB)[text] for text in END_TOKENS)
TOKENIZER = Tokenizer(json.dumps(tokenizer_json(VOCAB)), ENDS)
STOCK = {
    "type": "function",
    "function": {
        "name": "stock",
        "parameters": {
            "type": "object",
            "properties": {"item": {"type": "string"}, "depth": {"type": "integer"}},
        },
    },
}
CALL = (
    "Ask the stock tool.<tool_call>stock<arg_key>item</arg_key><arg_value>bolt</arg_value>"
    "<arg_key>depth</arg_key><arg_value>2</arg_value></tool_call><|observation|>"
)
ANSWER = "It says 41.</think>There are 41 bolts.<|user|>"


def script(request: Request) -> list[int]:
    """Call a tool until the prompt has a result of one."""
    prompt = TOKENIZER.decode(request.prompt_token_ids, skip_special=False)
    if "port" in prompt:
        return TOKENIZER.encode("The port is 8080.<|user|>", allow_special=True)
    said = ANSWER if "<tool_response>" in prompt else CALL
    return TOKENIZER.encode(said, allow_special=True)


def engine_over(core: ScriptedCore, template: str | None) -> Any:
    text = TextSide(TOKENIZER, {"model_type": "glm_moe_dsa"}, chat_template=template)
    return lambda on_death: Engine.over(
        ThreadHost(lambda progress: core), lambda: text, model=MODEL, on_death=on_death
    )


def streamed(client: openai.OpenAI, messages: list[Any], **options: Any) -> dict[str, Any]:
    """The message that a stream's deltas make, and why it ended."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": ""}
    calls: dict[int, dict[str, Any]] = {}
    reason = None
    stream = client.chat.completions.create(
        model=MODEL, messages=messages, tools=[STOCK], stream=True, **options
    )
    for chunk in stream:
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
            message["content"] += choice.delta.content or ""
            message["reasoning_content"] += getattr(choice.delta, "reasoning_content", "") or ""
            for part in choice.delta.tool_calls or []:
                call = calls.setdefault(part.index, {"id": part.id, "name": "", "arguments": ""})
                call["name"] += part.function.name or ""
                call["arguments"] += part.function.arguments or ""
    return {"message": message, "calls": list(calls.values()), "finish_reason": reason}


@pytest.mark.parametrize("template", [None, TEMPLATE], ids=["built_in", "template"])
def test_a_streamed_tool_call_and_its_answer(template: str | None) -> None:
    core = ScriptedCore(script, vocab_size=VOCAB)
    with listening(engine_over(core, template)) as (url, _):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        history: list[Any] = [{"role": "user", "content": "How many bolts?"}]
        first = streamed(client, history)
        assert first["finish_reason"] == "tool_calls"
        assert first["message"]["reasoning_content"] == "Ask the stock tool."
        assert first["message"]["content"] == ""
        (call,) = first["calls"]
        assert call["name"] == "stock"
        assert json.loads(call["arguments"]) == {"item": "bolt", "depth": 2}
        function = {"name": call["name"], "arguments": call["arguments"]}
        request = {"id": call["id"], "type": "function", "function": function}
        history.append(first["message"] | {"tool_calls": [request]})
        history.append({"role": "tool", "tool_call_id": call["id"], "content": '{"left": 41}'})
        second = streamed(client, history)
        assert second["finish_reason"] == "stop"
        assert second["message"]["content"] == "There are 41 bolts."
        assert second["message"]["reasoning_content"] == "It says 41."
        whole = client.chat.completions.create(model=MODEL, messages=history, tools=[STOCK])
        assert whole.choices[0].message.content == "There are 41 bolts."
    prompts = [TOKENIZER.decode(r.prompt_token_ids, skip_special=False) for r in core.submitted]
    assert prompts[1].startswith(prompts[0])  # what was generated is a prefix of what follows
    assert prompts[1].endswith(
        '<|observation|><tool_response>{"left": 41}</tool_response><|assistant|><think>'
    )
    assert prompts[1] == prompts[2]


@pytest.mark.bug("P11")
@pytest.mark.bug("P12")
def test_p11_p12_an_answer_without_thinking_and_thinking_that_was_cut() -> None:
    core = ScriptedCore(script, vocab_size=VOCAB)
    messages: list[Any] = [{"role": "user", "content": "Which port?"}]
    with listening(engine_over(core, None)) as (url, _):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        for tools in ([STOCK], openai.NOT_GIVEN):
            create = client.chat.completions.create
            choice = create(model=MODEL, messages=messages, tools=tools).choices[0]  # type: ignore[call-overload]
            assert choice.message.content == "The port is 8080."
            assert choice.finish_reason == "stop"
        assert "The port is 8080." in streamed(client, messages)["message"]["content"]
        cut = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=3)
        assert cut.choices[0].finish_reason == "length"
        assert not cut.choices[0].message.content
        assert cut.usage is not None
        assert cut.usage.completion_tokens_details is not None
        assert cut.usage.completion_tokens_details.reasoning_tokens == 3
        assert streamed(client, messages, max_tokens=3)["message"]["content"] == ""
