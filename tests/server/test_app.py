"""Everything around generation: state, keys, errors, bodies that cannot be served."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from typing import Any

import pytest

from moet import __version__
from moet.config import ServerConfig
from moet.runtime.engine import Engine
from moet.runtime.host import ThreadHost
from moet.runtime.tokenizer import Tokenizer
from moet.server.app import create_app
from tests.scripted import FAULT, ScriptedCore
from tests.server.serving import MODEL, Caller, saying, serving
from tests.texts import ids, text_side

COMPLETIONS = "/v1/completions"
HUGE = "x" * 100_000


def error_of(response: Any, status: int) -> dict[str, Any]:
    """The error object of a response, whose form is checked."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert len(response.content) < 16384
    body = response.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in body["error"]["message"]
    error: dict[str, Any] = body["error"]
    return error


def test_state_routes() -> None:
    with serving() as api:
        assert api.get("/health").json() == {"status": "ok"}
        assert api.get("/ready").json()["status"] == "ready"
        for path in ("/health", "/ready"):
            assert api.request("HEAD", path).status_code == 200
        assert api.get("/version").json() == {"version": __version__}
        [card] = api.get("/v1/models").json()["data"]
        assert (card["id"], card["max_model_len"]) == (MODEL, 4096)
        assert api.get(f"/v1/models/{MODEL}").json() == card
        error = error_of(api.get("/v1/models/other"), 404)
        assert error["code"] == "model_not_found"
        assert api.get("/server_info").json()["engine"]["vocab_size"] == 1000


def test_metrics_carry_the_names_that_dashboards_know() -> None:
    with serving() as api:
        text = api.get("/metrics").text
        for tail in (
            "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
            "prefix_cache_queries_total", "prefix_cache_hits_total", "prompt_tokens_total",
            "generation_tokens_total", "prompt_tokens_cached_total", "num_preemptions_total",
            "request_success_total", "time_to_first_token_seconds_bucket",
            "inter_token_latency_seconds_sum", "e2e_request_latency_seconds_count",
            "request_queue_time_seconds_count", "request_prefill_time_seconds_count",
            "request_decode_time_seconds_count", "iteration_tokens_total_count",
            "admission_rejections_total", "corrupted_requests_total", "cache_config_info",
            "gate_checked_total", "gate_fired_total", "startup_time_seconds",
            "weight_load_duration_seconds",
        ):  # fmt: skip
            assert f"moet:{tail}{{" in text, tail


def test_text_becomes_tokens_and_tokens_text() -> None:
    with serving() as api:
        body = api.post("/tokenize", {"prompt": "né<think>"}).json()
        assert body["tokens"] == ids("né<think>")
        assert body["count"] == 4
        assert api.post("/detokenize", {"tokens": body["tokens"]}).json() == {"prompt": "né<think>"}
        plain = api.post("/tokenize", {"prompt": "<think>", "allow_special": False}).json()
        assert plain["count"] == len("<think>")
        assert error_of(api.post("/detokenize", {"tokens": [10**6]}), 400)["param"] == "tokens"


def test_unknown_routes_and_methods_have_error_objects() -> None:
    with serving() as api:
        assert error_of(api.get("/v1/nothing"), 404)["code"] == "unknown_route"
        assert "embeddings" in error_of(api.post("/v1/embeddings", {}), 404)["message"]
        assert error_of(api.get(COMPLETIONS), 405)["code"] == "method_not_allowed"
        for path in ("/completions", "/v1/v1/completions"):
            message = error_of(api.post(path, {}), 404)["message"]
            assert message.endswith("you may mean /v1/completions")
        assert api.request("HEAD", "/").status_code == 200


def test_keys_are_asked_for_everywhere_but_at_the_probes() -> None:
    config = ServerConfig(api_keys=("first", "second"))
    with serving(config=config) as api:
        for path in ("/health", "/ready", "/metrics"):
            assert api.get(path).status_code == 200
        body = {"prompt": "p"}
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "first"},
            {"x-api-key": ""},
        ):
            error = error_of(api.post(COMPLETIONS, body, headers=headers), 401)
            assert error["code"] == "invalid_api_key"
            assert error_of(api.get("/v1/nothing", headers=headers), 401)
        for headers in (
            {"Authorization": "Bearer first"},
            {"Authorization": "bearer second"},
            {"x-api-key": "second"},
        ):
            assert api.post(COMPLETIONS, body, headers=headers).status_code == 200


def test_prompts_keys_and_answers_stay_out_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with serving(saying("answerword"), config=ServerConfig(api_keys=("keyword",))) as api:
        headers = {"x-api-key": "keyword"}
        api.post(COMPLETIONS, {"prompt": "promptword", "odd": "oddvalue"}, headers=headers)
        api.post(COMPLETIONS, {"prompt": "promptword"}, headers={"x-api-key": "guessword"})
        api.post(COMPLETIONS, {"prompt": ["promptword", 1]}, headers=headers)
        for word in ("promptword", "answerword", "keyword", "guessword", "oddvalue"):
            assert word not in caplog.text
        assert "'odd'" in caplog.text


def test_an_unknown_field_passes_and_is_mentioned_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with serving(saying("a")) as api:
        for _ in range(3):
            assert api.post(COMPLETIONS, {"prompt": "p", "zebra": 1}).status_code == 200
    assert caplog.text.count("zebra") == 1


@pytest.mark.bug("P19")
@pytest.mark.parametrize(
    "content",
    [b'{"model":"m","messages":[,]}', b"", b"  ", b"[]", b'"hi"', b"[" * 5_000_000, b"\xff{}",
     b'{"prompt": "\xe9"}', b'{"prompt": NaN}', b"null", b'{"a":' * 3000 + b"1" + b"}" * 3000],
    ids=range(11),
)  # fmt: skip
def test_p19_a_broken_body_is_a_400_with_an_error_object(content: bytes) -> None:
    with serving() as api:
        headers = {"content-type": "application/json"}
        for path in (COMPLETIONS, "/tokenize"):
            error_of(api.request("POST", path, content=content, headers=headers), 400)
        assert not api.core.submitted


@pytest.mark.bug("P20")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fragment", "param"),
    [
        (r'"prompt": "cut \ud83d"', "prompt"),
        (r'"prompt": ["fine", "cut \ud83d"]', "prompt[1]"),
        (r'"prompt": "p", "stop": ["\udc00"]', "stop[0]"),
        (r'"prompt": "p", "x": {"\ud83d": 1}', "x"),
    ],
)
def test_p20_half_a_character_is_a_400_that_names_the_field(
    fragment: str, param: str, stream: bool
) -> None:
    with serving() as api:
        content = f'{{"stream": {json.dumps(stream)}, {fragment}}}'
        headers = {"content-type": "application/json"}
        response = api.request("POST", COMPLETIONS, content=content, headers=headers)
        assert error_of(response, 400)["param"] == param
        whole = '{"prompt": "\\ud83d\\ude00", "max_tokens": 4}'
        response = api.request("POST", COMPLETIONS, content=whole, headers=headers)
        assert response.json()["choices"][0]["text"] == "😀"


@pytest.mark.bug("S03")
def test_s03_a_body_without_json_type_is_a_415() -> None:
    with serving() as api:
        for headers in ({}, {"content-type": "text/plain"}):
            response = api.request("POST", COMPLETIONS, content=b"{}", headers=headers)
            assert error_of(response, 415)["code"] == "bad_media_type"
        headers = {"content-type": "application/json; charset=utf-8"}
        zipped = {**headers, "content-encoding": "gzip"}
        response = api.request("POST", COMPLETIONS, content=b"{}", headers=zipped)
        assert error_of(response, 415)["code"] == "bad_content_encoding"
        response = api.request("POST", COMPLETIONS, content=b'{"prompt": "p"}', headers=headers)
        assert response.status_code == 200


def test_a_body_over_the_limit_is_a_413_declared_or_not() -> None:
    with serving(config=ServerConfig(max_body_bytes=1000)) as api:
        headers = {"content-type": "application/json"}

        async def undeclared() -> Any:
            for _ in range(100):
                yield b" " * 100

        for content in (b" " * 1001, undeclared()):
            response = api.request("POST", COMPLETIONS, content=content, headers=headers)
            assert "1000 bytes" in error_of(response, 413)["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": 5}, "prompt"),
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [5, 1000]}, "prompt"),
        ({"prompt": ["p"] * 10_000}, "prompt"),
        ({"prompt": [["p"]] * 10_000}, "prompt"),
        ({"prompt": "p", "max_tokens": "5"}, "max_tokens"),
        ({"prompt": "p", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "p", "temperature": True}, "temperature"),
        ({"prompt": "p", "temperature": -0.5}, "temperature"),
        ({"prompt": "p", "n": 0}, "n"),
        ({"prompt": "p", "n": 10**30}, "n"),
        ({"prompt": "p", "n": 100_000}, "n"),
        ({"prompt": ["p"] * 100, "n": 100}, "n"),
        ({"prompt": "p", "stop": ["x"] * 10_000}, "stop"),
        ({"prompt": "p", "stop": ["ok", 5]}, "stop[1]"),
        ({"prompt": "p", "stop": ""}, "stop"),
        ({"prompt": "p", "stream": "yes"}, "stream"),
        ({"prompt": "p", "logprobs": 10**6}, "logprobs"),
        ({"prompt": "p", "best_of": 2}, "best_of"),
        ({"prompt": "p", "guided_json": {"type": "object"}}, "guided_json"),
        ({"prompt": ["p"], "suffix": "end"}, "suffix"),
        ({"prompt": "p", "cache_salt": 5}, "cache_salt"),
        ({"prompt": "p", "request_id": "x" * 1000}, "request_id"),
    ],
    ids=map(str, range(27)),
)
def test_wrong_fields_are_refused_by_name_and_cost_nothing(
    fields: dict[str, Any], param: str
) -> None:
    with serving() as api:
        for stream in ({}, {"stream": True}):
            response = api.post(COMPLETIONS, {**stream, **fields})
            error = error_of(response, 400)
            assert error["param"] == param
            assert "Expected" not in error["message"]  # a checker's words, which name its own types
        assert not api.core.submitted
        assert api.post(COMPLETIONS, {"prompt": "ok"}).json()["choices"][0]["text"] == "ok"


def test_stream_options_belong_to_streams() -> None:
    with serving() as api:
        body = {"prompt": "p", "stream_options": {"include_usage": True}}
        assert error_of(api.post(COMPLETIONS, body), 400)["param"] == "stream_options"


@pytest.mark.bug("P18")
@pytest.mark.parametrize("bias", [{"99999999": 5}, {"AI": -100}, {"5": 1e9}, {"-1": 1}])
def test_p18_a_bias_that_cannot_be_applied_hurts_nobody(bias: dict[str, float]) -> None:
    with serving() as api:
        error = error_of(api.post(COMPLETIONS, {"prompt": "p", "logit_bias": bias}), 400)
        assert error["param"] == "logit_bias"
        assert api.post(COMPLETIONS, {"prompt": "ok"}).json()["choices"][0]["text"] == "ok"


def test_errors_do_not_echo_input() -> None:
    secret = "pineapple" * 3000
    with serving() as api:
        for fields in (
            {"stop": {secret: 1}},
            {"model": secret},
            {"logit_bias": {secret: 1}},
            {"n": secret},
        ):
            body: dict[str, Any] = {"prompt": "p", **fields}
            response = api.post(COMPLETIONS, body)
            assert response.status_code in (400, 404)
            assert "pineapple" not in response.text
            assert len(response.content) < 1000


def test_a_prompt_over_the_window_is_named_in_openai_terms() -> None:
    with serving(max_model_len=10) as api:
        error = error_of(api.post(COMPLETIONS, {"prompt": "x" * 10}), 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
        body = {"prompt": "x" * 8, "max_tokens": 1000}
        assert api.post(COMPLETIONS, body).json()["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (COMPLETIONS, {"prompt": HUGE}, "prompt"),
        ("/tokenize", {"prompt": HUGE}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": HUGE}]}, "messages"),
        ("/v1/responses", {"input": HUGE}, "input"),
        ("/v1/responses/input_tokens", {"input": HUGE}, "input"),
    ],
)
def test_a_text_that_no_window_holds_is_refused_unread(
    path: str, body: dict[str, object], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten megabytes took a processor for half a minute before they were refused."""
    with serving() as api:
        monkeypatch.setattr(Tokenizer, "_flush", None)
        error = error_of(api.post(path, body), 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", field)
        assert re.match(r"prompt is too long: \d+ tokens > \d+ maximum", error["message"])


def test_an_unknown_model_is_a_404_and_names_are_configured() -> None:
    with serving(config=ServerConfig(served_model_names=("one", "two"))) as api:
        assert error_of(api.post(COMPLETIONS, {"prompt": "p", "model": MODEL}), 404)
        assert api.post(COMPLETIONS, {"prompt": "p", "model": "two"}).json()["model"] == "two"
        assert [card["id"] for card in api.get("/v1/models").json()["data"]] == ["one", "two"]


def test_a_full_queue_is_a_429_with_a_time() -> None:
    with serving(max_open=0) as api:
        response = api.post(COMPLETIONS, {"prompt": "p", "stream": True})
        assert error_of(response, 429)["code"] == "rate_limit_exceeded"
        assert int(response.headers["retry-after"]) >= 1


def test_loading_is_live_but_not_ready() -> None:
    go = threading.Event()

    def build(progress: Any) -> ScriptedCore:
        progress("weights", 0.25)
        go.wait(60)
        return ScriptedCore()

    engine = Engine.over(ThreadHost(build), text_side)
    api = Caller(create_app(engine, ServerConfig()), ScriptedCore(), engine)
    assert api.get("/health").status_code == 200
    while (ready := api.get("/ready")).json()["progress"] == 0:
        time.sleep(0.01)
    assert ready.status_code == 503
    assert ready.json() == {"status": "loading", "stage": "weights", "progress": 0.25}
    response = api.post(COMPLETIONS, {"prompt": "p"})
    assert error_of(response, 503)["code"] == "service_unavailable"
    assert "retry-after" in response.headers
    go.set()
    engine.wait_until_ready(60)
    assert api.post(COMPLETIONS, {"prompt": "p"}).status_code == 200
    engine.close()


def test_a_dead_engine_is_a_503_everywhere_and_ends_streams_with_one_error() -> None:
    core = ScriptedCore(lambda request: [*ids("ab"), FAULT])
    engine = Engine.over(ThreadHost(lambda progress: core), text_side)
    engine.wait_until_ready(60)
    api = Caller(create_app(engine, ServerConfig()), core, engine)
    *text, last = api.chunks(COMPLETIONS, {"prompt": "p"})
    assert "".join(chunk["choices"][0]["text"] for chunk in text) == "ab"
    assert list(last) == ["error"]
    assert last["error"]["code"] == "engine_dead"
    assert error_of(api.get("/health"), 503)["code"] == "engine_dead"
    assert error_of(api.post(COMPLETIONS, {"prompt": "p"}), 503)["code"] == "engine_dead"
    assert api.get("/ready").json()["status"] == "dead"
    engine.close()


def test_draining_refuses_new_work_only() -> None:
    with serving() as api:
        api.app.state.traffic.drain()
        response = api.post(COMPLETIONS, {"prompt": "p"})
        assert "shutting down" in error_of(response, 503)["message"]
        assert api.get("/health").status_code == 200
        assert api.get("/ready").json()["status"] == "draining"
        assert api.get("/v1/models").status_code == 200
