"""Whatever is sent, the server says what is wrong: no fault, no hang, no long or leaking answer."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest
import schemathesis
import schemathesis.core
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moet.config import ServerConfig
from moet.runtime.engine import Engine
from moet.runtime.host import ThreadHost
from moet.server.app import BODIES, create_app
from tests.fakes import FakeModel, make_core
from tests.scripted import ScriptedCore
from tests.server.serving import MODEL, Caller, saying, serving
from tests.texts import byte_tokenizer, text_side

MAX_ERROR_BYTES = 16_384
TAIL = "tail-of-a-long-value"
FUZZ = settings(
    max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)


@pytest.fixture(scope="module")
def real_api() -> Iterator[Caller]:
    """The application over the real core, so that odd parameters reach the sampler."""
    vocab_size = byte_tokenizer().vocab_size
    core = make_core(FakeModel(vocab_size=vocab_size, max_position_embeddings=512), num_pages=512)
    engine = Engine.over(ThreadHost(lambda progress: core), text_side, model=MODEL)
    engine.wait_until_ready(60)
    config = ServerConfig(request_timeout_s=20.0)
    with engine:
        yield Caller(create_app(engine, config), ScriptedCore(), engine)
        assert engine.num_open == 0
        assert engine.stats().num_used_pages == 0


OPERATIONS = [("POST", path) for path in sorted(BODIES)]
OPERATIONS += [("GET", path) for path in ("/v1/models/{name}", "/static/{name}", "/live", "/ready")]


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_no_request_of_the_own_description_is_a_fault(
    method: str, path: str, real_api: Caller
) -> None:
    described = schemathesis.openapi.from_dict(real_api.get("/openapi.json").json())

    @FUZZ
    @given(described[path][method].as_strategy())
    def send(case: schemathesis.Case) -> None:
        options = {} if isinstance(case.body, schemathesis.core.NotSet) else {"json": case.body}
        try:
            json.dumps(options)
        except (TypeError, ValueError):
            return  # it is no JSON, and the test's client refuses it
        response = real_api.request(method, case.formatted_path, **options)
        assert response.status_code < 500, response.text
        if response.status_code >= 400:
            assert len(response.content) < MAX_ERROR_BYTES
            assert response.json()["error"]["message"]
            assert "Traceback" not in response.text

    send()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@pytest.mark.parametrize("path", sorted(BODIES))
def test_wrong_values_in_right_fields_are_told_apart_from_faults(
    path: str, real_api: Caller
) -> None:
    fields = sorted(BODIES[path].__struct_fields__)
    right = {
        "messages": [{"role": "user", "content": "x"}],
        "prompt": "x",
        "input": "x",
        "tokens": [1],
        "max_tokens": 2,
    }
    base = {name: right[name] for name in fields if name in right}

    @settings(FUZZ, max_examples=25)
    @given(st.dictionaries(st.sampled_from(fields), JSON, max_size=3))
    def send(wrong: dict[str, object]) -> None:
        body = json.dumps({**base, **wrong})
        headers = {"content-type": "application/json"}
        response = real_api.request("POST", path, content=body, headers=headers)
        assert response.status_code < 500, (wrong, response.text)
        assert response.status_code == 200 or len(response.content) < MAX_ERROR_BYTES

    send()


def wide(item: object) -> dict[str, object]:
    """A value 10,000 times in every field that takes lists."""
    many = [item] * 10_000
    names = ("messages", "tools", "prompt", "input", "tokens", "stop", "stop_token_ids", "system")
    return {**dict.fromkeys(names, many), "max_tokens": 1}


@pytest.mark.parametrize("path", sorted(BODIES))
@pytest.mark.parametrize(
    "item",
    [
        {"role": "nobody" * 10 + TAIL, "content": TAIL},
        {"role": "user", "content": [{"type": "part" * 20 + TAIL}] * 3},
        {"type": "function", "function": {"name": "f" * 60 + TAIL, "parameters": 5}},
        "text" * 20 + TAIL,
        [],
        None,
    ],
    ids=["role", "part", "tool", "text", "list", "null"],
)
def test_ten_thousand_wrong_items_are_answered_soon_and_briefly(path: str, item: object) -> None:
    with serving(saying("x"), max_model_len=1 << 20) as api:
        began = time.process_time()  # of all threads; not what other processes take
        response = api.post(path, wide(item))
        assert time.process_time() - began < 2.0
        assert response.status_code < 500
        if response.status_code >= 400:
            assert len(response.content) < MAX_ERROR_BYTES
            assert TAIL not in response.text  # the first value may be shown, cut short


def test_deep_nesting_is_no_fault() -> None:
    deep = "[" * 5000 + "]" * 5000
    with serving(max_model_len=1 << 20) as api:
        for field in ("messages", "tools", "response_format", "x"):
            body = f'{{"prompt": "x", "{field}": {deep}}}'
            response = api.request(
                "POST",
                "/v1/chat/completions",
                content=body,
                headers={"content-type": "application/json"},
            )
            assert response.status_code == 400
            assert len(response.content) < MAX_ERROR_BYTES
        nested: object = "x"
        for _ in range(400):  # what a parser takes, and whatever reads it again need not
            nested = {"properties": {"a": nested}}
        schema = {"type": "function", "function": {"name": "f", "parameters": nested}}
        call = {"id": "c", "function": {"name": "f", "arguments": nested}}
        as_text = {"id": "c", "function": {"name": "f", "arguments": "[" * 100_000}}
        for status, body in (
            (400, {"messages": [{"role": "user", "content": "x"}], "tools": [schema]}),
            (400, {"messages": [{"role": "assistant", "tool_calls": [call]}]}),
            (200, {"messages": [{"role": "assistant", "tool_calls": [as_text]}], "max_tokens": 1}),
        ):
            assert api.post("/v1/chat/completions", body).status_code == status
