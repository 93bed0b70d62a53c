"""Every spelling of thinking, effort and budget, on every endpoint, and the server's defaults."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moet.config import ServerConfig
from moet.errors import ConfigError, RequestError
from moet.server.reasoning import (
    BUDGET,
    EFFORT,
    EFFORTS,
    FORGET,
    SWITCH,
    Reasoning,
    ReasoningDefaults,
    read_reasoning,
    seal,
    unseal,
)
from tests.scripted import ScriptedCore
from tests.server.serving import listening, saying, serving
from tests.server.test_app import error_of
from tests.server.test_chat import prompt_of
from tests.server.test_glm_chat import TOKENIZER, VOCAB, engine_over

NONE = ReasoningDefaults()
CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def nested(path: str, value: object) -> dict[str, Any]:
    """{"a": {"b": value}} for "a.b"."""
    name, _, inner = path.partition(".")
    return {name: {inner: value} if inner else value}


def switch(path: str, on: bool) -> dict[str, Any]:
    return nested(path, ("disabled", "enabled")[on] if path == "thinking.type" else on)


@pytest.mark.parametrize("path", EFFORT)
@pytest.mark.parametrize("effort", EFFORTS)
def test_an_effort_means_the_same_in_every_place(path: str, effort: str) -> None:
    wanted = read_reasoning(nested(path, effort), NONE)
    assert wanted == Reasoning(thinking=effort != "none", effort=effort)


@pytest.mark.parametrize("path", SWITCH)
@pytest.mark.parametrize("on", [True, False])
def test_a_switch_means_the_same_in_every_place(path: str, on: bool) -> None:
    assert read_reasoning(switch(path, on), NONE).thinking is on


@pytest.mark.parametrize("path", BUDGET)
def test_a_budget_means_the_same_in_every_place(path: str) -> None:
    assert read_reasoning(nested(path, 7), NONE).max_tokens == 7
    less, more = ReasoningDefaults(max_tokens=5), ReasoningDefaults(max_tokens=9)
    assert read_reasoning(nested(path, 7), less).max_tokens == 5
    assert read_reasoning(nested(path, 7), more).max_tokens == 7
    assert read_reasoning({}, less).max_tokens == 5


@pytest.mark.parametrize("path", FORGET)
def test_forgetting_is_the_opposite_of_keeping(path: str) -> None:
    assert read_reasoning(nested(path, False), NONE).keep is True
    assert read_reasoning(nested(path, True), NONE).keep is False


@pytest.mark.parametrize(
    "fields",
    [
        {"include_reasoning": False},
        {"reasoning": {"exclude": True}},
        {"thinking": {"type": "adaptive", "display": "omitted"}},
    ],
)
def test_reasoning_can_be_hidden(fields: dict[str, Any]) -> None:
    assert read_reasoning(fields, NONE).hidden


@pytest.mark.parametrize(
    ("defaults", "fields", "thinking", "effort"),
    [
        ({"effort": "none"}, {}, None, "none"),
        ({"effort": "none"}, {"reasoning_effort": "high"}, True, "high"),
        ({"effort": "none"}, {"thinking": {"type": "enabled"}}, True, "none"),
        ({"effort": "max"}, {}, None, "max"),
        ({"effort": "max"}, {"reasoning": {"effort": "low"}}, True, "low"),
        ({"effort": "max"}, {"enable_thinking": False}, False, "max"),
        ({"template_kwargs": {"enable_thinking": False}}, {}, False, None),
        ({"template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "low"}, True, "low"),
        ({"template_kwargs": {"thinking": False}}, {"enable_thinking": True}, True, None),
        ({"template_kwargs": {"thinking": False}}, {"thinking": {"type": "adaptive"}}, None, None),
        ({"template_kwargs": {"reasoning_effort": "max"}}, {}, None, "max"),
    ],
    ids=map(str, range(11)),
)
def test_a_request_overrules_the_servers_defaults(
    defaults: dict[str, Any], fields: dict[str, Any], thinking: bool | None, effort: str | None
) -> None:
    wanted = read_reasoning(fields, ReasoningDefaults(**defaults))
    assert (wanted.thinking, wanted.effort) == (thinking, effort)


@given(
    st.lists(st.tuples(st.sampled_from(SWITCH), st.booleans()), min_size=1, max_size=3),
    st.one_of(st.none(), st.sampled_from(EFFORTS)),
)
def test_the_first_place_wins_and_a_switch_beats_an_effort(
    given_switches: list[tuple[str, bool]], effort: str | None
) -> None:
    fields: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    for path, on in given_switches:
        for name, value in switch(path, on).items():
            old = fields.get(name)
            fields[name] = {**old, **value} if isinstance(old, dict) else value
    latest = dict(given_switches)
    first = next(path for path in SWITCH if path in latest)
    assert read_reasoning(fields, NONE).thinking is latest[first]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning_effort": "colossal"}, "reasoning_effort"),
        ({"reasoning": {"effort": 5}}, "reasoning.effort"),
        ({"reasoning": "high"}, "reasoning"),
        ({"thinking": True}, "thinking"),
        ({"thinking": {"type": []}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "display": "loud"}}, "thinking.display"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"thinking_token_budget": True}, "thinking_token_budget"),
        ({"chat_template_kwargs": {"enable_thinking": "no"}},
         "chat_template_kwargs.enable_thinking"),
        ({"enable_thinking": True, "chat_template_kwargs": {"thinking": 1}},
         "chat_template_kwargs.thinking"),
    ],
    ids=map(str, range(10)),
)  # fmt: skip
def test_wrong_values_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_reasoning(fields, NONE)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "wrong",
    [
        {"effort": "colossal"},
        {"template_kwargs": {"enable_thinking": "no"}},
        {"template_kwargs": {"enable_thinkin": True}},
    ],
)
def test_wrong_flags_are_refused_at_the_start(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ReasoningDefaults(**wrong)


@given(st.text())
def test_sealed_reasoning_opens_to_what_it_was(text: str) -> None:
    text = text.encode("utf-8", "replace").decode()
    assert unseal(seal(text)) == text


@pytest.mark.parametrize("alien", [None, 5, "", "gAAAA", "moet1:%", "moet1:/w=="])
def test_what_others_sealed_stays_shut(alien: object) -> None:
    assert unseal(alien) is None


@pytest.mark.bug("S14")
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_s14_spellings_make_one_prompt_on_every_endpoint(path: str) -> None:
    body = {**HI, "input": "hi", "max_tokens": 9}
    spellings: dict[str, list[dict[str, Any]]] = {
        "off": [
            {"reasoning_effort": "none"},
            {"reasoning": {"effort": "none"}},
            {"thinking": {"type": "disabled"}},
            {"enable_thinking": False},
            {"chat_template_kwargs": {"thinking": False}},
            {"chat_template_kwargs": {"enable_thinking": False}},
        ],
        "max": [
            {"reasoning_effort": "max"},
            {"reasoning": {"effort": "max"}},
            {"chat_template_kwargs": {"reasoning_effort": "max"}},
        ],
    }
    if path == "/v1/messages":
        spellings["off"] = [{}, *spellings["off"][2:3], *spellings["off"][4:]]
        spellings["max"] = [{"output_config": {"effort": "max"}}, spellings["max"][2]]
    with serving(saying("a")) as api:
        prompts = {}
        for name, fields in spellings.items():
            seen = set()
            for each in fields:
                assert api.post(path, {**body, **each}).status_code == 200
                seen.add(prompt_of(api.core))
            [prompts[name]] = seen
        assert prompts["off"].endswith("</think>")
        assert "Reasoning Effort" not in prompts["off"]
        assert prompts["max"].endswith("<think>")
        assert "Reasoning Effort" in prompts["max"]


def test_the_servers_flags_reach_every_endpoint() -> None:
    config = ServerConfig(default_chat_template_kwargs={"thinking": False}, max_thinking_tokens=3)
    with serving(saying("a"), config) as api:
        for path in (CHAT, "/v1/messages", "/v1/responses"):
            api.post(path, {**HI, "input": "hi", "max_tokens": 9})
            assert prompt_of(api.core).endswith("</think>")
            assert api.core.submitted[-1].params.thinking is not None
            count = len(api.core.submitted)
            assert count
        error = error_of(api.post(CHAT, {**HI, "enable_thinking": "no"}), 400)
        assert error["param"] == "enable_thinking"


def test_glm_knows_the_same_spellings() -> None:
    said = TOKENIZER.encode("a<|user|>", allow_special=True)
    core = ScriptedCore(lambda request: said, vocab_size=VOCAB)
    with (
        listening(engine_over(core, None)) as (url, _),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        for fields, end, effort in (
            ({"reasoning": {"effort": "none"}}, "<think></think>", None),
            ({"enable_thinking": False}, "<think></think>", None),
            ({"reasoning": {"effort": "low"}}, "<think>", "High"),
            ({"reasoning_effort": "max"}, "<think>", "Max"),
        ):
            for path in (CHAT, "/v1/responses"):
                body = {**HI, "input": "hi", **fields}
                assert client.post(path, json=body).status_code == 200
                prompt = TOKENIZER.decode(core.submitted[-1].prompt_token_ids, skip_special=False)
                assert prompt.endswith(f"<|assistant|>{end}")
                assert ("Reasoning Effort" in prompt) == (effort is not None)
                assert effort is None or f"Reasoning Effort: {effort}" in prompt


@pytest.mark.parametrize("said", ["</think>a", "\n</think>a", "  \n\n</think>a"])
def test_no_empty_reasoning_is_shown(said: str) -> None:
    """U27: some clients fail on it."""
    with serving(saying(said)) as api:
        message = api.post(CHAT, HI).json()["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == (None, "a")
        deltas = [chunk["choices"][0]["delta"] for chunk in api.chunks(CHAT, HI)]
        assert not any("reasoning" in delta for delta in deltas)
        output = api.post("/v1/responses", {"input": "hi"}).json()["output"]
        assert [item["type"] for item in output] == ["message"]
        think = {"thinking": {"type": "adaptive"}, "max_tokens": 50}
        content = api.post("/v1/messages", {**HI, **think}).json()["content"]
        assert [block["type"] for block in content] == ["text"]
