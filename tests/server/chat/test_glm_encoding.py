"""GLM-5.2 prompts: the format written out, the checkpoint's template, and text that stays text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moet.errors import ConfigError, RequestError
from moet.models.synthetic_tokenizer import tokenizer_json as other_tokenizer_json
from moet.models.synthetic_tokenizer_glm import tokenizer_json
from moet.runtime.tokenizer import Tokenizer
from moet.server.chat.encoding import ChatOptions, EncodedPrompt
from moet.server.chat.glm import CONTROLS, TOOLS_HEAD, TOOLS_TAIL, GlmEncoding
from moet.server.chat.messages import ToolChoice, parse_messages, parse_tools
from moet.server.chat.template import ChatTemplate
from tests.server.chat.glm_template import TEMPLATE

TOKENIZER = Tokenizer(json.dumps(tokenizer_json(1024)))
BUILT_IN, TEMPLATED = GlmEncoding(TOKENIZER), GlmEncoding(TOKENIZER, TEMPLATE)
BOTH = pytest.mark.parametrize("encoding", [BUILT_IN, TEMPLATED], ids=["built_in", "template"])
STOCK = {
    "name": "stock",
    "description": "Units left",
    "parameters": {"type": "object", "properties": {"item": {"type": "string"}}},
}
OPEN = "[gMASK]<sop><|system|>Reasoning Effort: Max"


def user(text: object) -> dict[str, Any]:
    return {"role": "user", "content": text}


def encode(
    encoding: GlmEncoding, messages: list[dict[str, Any]], tools: object = None, **options: Any
) -> EncodedPrompt:
    prompt = encoding.encode(parse_messages(messages), parse_tools(tools), ChatOptions(**options))
    assert TOKENIZER.decode(prompt.token_ids, skip_special=False) == prompt.text
    return prompt


CALL = {
    "role": "assistant",
    "content": "",
    "reasoning_content": "Ask the stock tool.",
    "tool_calls": [
        {
            "id": "c1",
            "type": "function",
            "function": {"name": "stock", "arguments": '{"item": "bolt", "depth": 2}'},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": '{"left": 41}'}


@BOTH
def test_example_a_thinking_is_on_by_default(encoding: GlmEncoding) -> None:
    prompt = encode(encoding, [user("Hi")])
    assert prompt.text == f"{OPEN}<|user|>Hi<|assistant|><think>"
    assert prompt.start == "reasoning"


@BOTH
@pytest.mark.parametrize("off", [{"thinking": False}, {"reasoning_effort": "none"}])
def test_example_b_thinking_off(encoding: GlmEncoding, off: dict[str, Any]) -> None:
    system = {"role": "system", "content": "Be brief."}
    prompt = encode(encoding, [system, user("2+2?")], **off)
    expected = "[gMASK]<sop><|system|>Be brief.<|user|>2+2?<|assistant|><think></think>"
    assert prompt.text == expected
    assert prompt.start == "content"


@BOTH
@pytest.mark.parametrize(
    "tool", [STOCK, {"type": "function", "function": {**STOCK, "strict": True}}]
)
def test_example_c_a_finished_call(encoding: GlmEncoding, tool: dict[str, Any]) -> None:
    messages = [user("How many bolts?"), CALL, RESULT]
    prompt = encode(encoding, messages, [tool], reasoning_effort="high")
    assert prompt.text == (
        "[gMASK]<sop><|system|>Reasoning Effort: High<|system|>"
        + TOOLS_HEAD
        + json.dumps(STOCK)
        + TOOLS_TAIL
        + "<|user|>How many bolts?<|assistant|><think>Ask the stock tool.</think>"
        "<tool_call>stock<arg_key>item</arg_key><arg_value>bolt</arg_value><arg_key>depth</arg_key>"
        '<arg_value>2</arg_value></tool_call><|observation|><tool_response>{"left": 41}'
        "</tool_response><|assistant|><think>"
    )
    for text in ("<tool_call>", "</arg_value>", "<|observation|>"):
        assert prompt.token_ids.count(TOKENIZER.control_id(text)) == prompt.text.count(text)


@BOTH
@pytest.mark.parametrize(
    ("effort", "word"),
    [("minimal", "High"), ("low", "High"), ("medium", "High"), ("xhigh", "Max"), ("max", "Max")],
)
def test_efforts_map_to_the_two_that_exist(encoding: GlmEncoding, effort: str, word: str) -> None:
    prompt = encode(encoding, [user("Hi")], reasoning_effort=effort)
    assert f"Reasoning Effort: {word}<|user|>" in prompt.text


@BOTH
@pytest.mark.bug("P04")
def test_p04_a_tool_result_is_shown_as_text_or_as_parts(encoding: GlmEncoding) -> None:
    text = "Sunny, 22 degrees"
    ids = []
    for content in (text, [{"type": "text", "text": text}]):
        prompt = encode(encoding, [user("Weather?"), CALL, {**RESULT, "content": content}])
        assert prompt.text.count(text) == 1
        ids.append(prompt.token_ids)
    assert ids[0] == ids[1]


@BOTH
@pytest.mark.bug("P13")
def test_p13_reasoning_is_read_under_both_names(encoding: GlmEncoding) -> None:
    def render(**fields: str) -> str:
        call = {k: v for k, v in CALL.items() if k != "reasoning_content"} | fields
        return encode(encoding, [user("Hi"), call, RESULT]).text

    assert "<think>R1</think><tool_call>" in render(reasoning_content="R1")
    assert render(reasoning_content="R1") == render(reasoning="R1")
    assert render(reasoning_content="R1", reasoning="R2") == render(reasoning="R1")
    cut = render(content="<think>\nR1\n</think>\n")
    assert cut == render(reasoning="R1")


@BOTH
def test_earlier_reasoning_goes_unless_it_is_kept(encoding: GlmEncoding) -> None:
    old = {"role": "assistant", "content": " Yes. ", "reasoning": "Because."}
    messages = [user("Well?"), old, user("Sure?")]
    assert "<|assistant|><think></think>Yes.<|user|>" in encode(encoding, messages).text
    kept = encode(encoding, messages, keep_reasoning=True).text
    assert "<|assistant|><think>Because.</think>Yes.<|user|>" in kept


@BOTH
def test_results_in_a_row_share_one_header(encoding: GlmEncoding) -> None:
    second = {**RESULT, "tool_call_id": "c2", "content": "two"}
    text = encode(encoding, [user("Hi"), CALL, RESULT, second]).text
    responses = '<tool_response>{"left": 41}</tool_response><tool_response>two</tool_response>'
    assert f"<|observation|>{responses}<|assistant|>" in text
    assert text.count("<|observation|>") == 1


@BOTH
@pytest.mark.bug("P06")
def test_p06_no_tools_are_shown_when_none_may_be_called(encoding: GlmEncoding) -> None:
    choice = ToolChoice("none")
    assert encode(encoding, [user("Hi")], [STOCK], tool_choice=choice).text == (
        encode(encoding, [user("Hi")]).text
    )


@BOTH
@pytest.mark.parametrize("text", [*CONTROLS, "\ufdd00\ufdd1<|user|>", "\ufdd0"])
def test_text_cannot_spell_control_tokens(encoding: GlmEncoding, text: str) -> None:
    tool = {**STOCK, "description": text}
    result = {**RESULT, "content": text}
    plain = encode(encoding, [user("x"), CALL, {**RESULT, "content": "x"}], [STOCK])
    prompt = encode(encoding, [user(text), CALL, result], [tool])
    assert text in prompt.text
    controls = [i for i in prompt.token_ids if TOKENIZER.is_control(i)]
    assert controls == [i for i in plain.token_ids if TOKENIZER.is_control(i)]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=12), min_size=1, max_size=4))
def test_template_and_built_in_agree(texts: list[str]) -> None:
    messages: list[dict[str, Any]] = []
    for i, text in enumerate(texts):
        messages.append(user(f"{i}: {text}"))
        messages.append({"role": "assistant", "content": "ok" + text, "reasoning": text})
    messages.append(user("end"))
    built_in, templated = encode(BUILT_IN, messages), encode(TEMPLATED, messages)
    assert built_in == templated


@BOTH
@pytest.mark.bug("S19")
def test_s19_the_last_message_can_be_continued(encoding: GlmEncoding) -> None:
    last = {"role": "assistant", "content": "The answer is"}
    prompt = encode(encoding, [user("2+2?"), last], continue_final_message=True)
    assert prompt.text.endswith("<|assistant|><think></think>The answer is")
    assert prompt.start == "content"
    closed = encode(encoding, [user("2+2?"), last], add_generation_prompt=False)
    assert closed.text.endswith("The answer is")
    with pytest.raises(RequestError, match="exclude each other"):
        encode(encoding, [user("x"), last], continue_final_message=True, add_generation_prompt=True)
    with pytest.raises(RequestError, match="needs a last message of role assistant"):
        encode(encoding, [user("x")], continue_final_message=True)


@BOTH
def test_requests_that_the_format_cannot_serve(encoding: GlmEncoding) -> None:
    with pytest.raises(RequestError, match="reasoning_effort is 'huge'"):
        encode(encoding, [user("Hi")], reasoning_effort="huge")
    bad = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}
    with pytest.raises(RequestError, match=r"arguments of f are '\[1\]'"):
        encode(encoding, [user("Hi"), bad])
    with pytest.raises(RequestError, match="no reminders"):
        encode(encoding, [user("Hi"), {"role": "latest_reminder", "content": "x"}])
    with pytest.raises(RequestError, match="messages is empty"):
        encoding.encode([], [], ChatOptions())


@BOTH
def test_a_response_schema_is_stated(encoding: GlmEncoding) -> None:
    text = encode(encoding, [user("Hi")], response_schema={"type": "object"}).text
    assert '{"type": "object"}<|user|>Hi' in text


def test_templates_are_sandboxed_and_errors_name_them() -> None:
    with pytest.raises(ConfigError, match=r"chat_template\.jinja, line 1"):
        ChatTemplate("{% if %}")
    with pytest.raises(RequestError, match="refuses this conversation: no way"):
        ChatTemplate("{{ raise_exception('no way') }}").render()
    with pytest.raises(RequestError, match="unsafe"):
        ChatTemplate("{{ ''.__class__.__mro__ }}").render()
    assert ChatTemplate("{{ x | tojson }}").render(x="<é>") == '"<é>"'
    assert ChatTemplate("{{ strftime_now('%Y') }}").render().isdigit()


def test_a_tokenizer_of_another_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="no control token"):
        GlmEncoding(Tokenizer(json.dumps(other_tokenizer_json(1024))))
