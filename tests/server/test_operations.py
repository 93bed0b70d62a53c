"""What a server does around its answers: times, limits, counts, records, traces, and no leaks."""

from __future__ import annotations

import json
import logging
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from moet.cli import parser
from moet.config import ServerConfig
from moet.errors import ConfigError, EngineDeadError
from moet.runtime.engine import Engine
from moet.runtime.host import ThreadHost
from moet.runtime.metrics import ExpertStats, LayerTier, TierStats
from moet.runtime.output import Output
from moet.server import tracing
from moet.server.app import create_app
from moet.server.operations import Clock
from moet.server.run import Service
from moet.types import TokenEvent
from tests.scripted import ScriptedCore, endless, faulty
from tests.server.serving import (
    MODEL,
    events_of,
    listening,
    saying,
    scripted_engine,
    serving,
)
from tests.texts import text_side

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
HELLO = [{"role": "user", "content": "hello"}]


def test_timings_come_on_demand_alone() -> None:
    with serving(saying("abc")) as api:
        body = {"prompt": "hello", "max_tokens": 9}
        assert "timings" not in api.post(COMPLETIONS, body).json()
        timings = api.post(COMPLETIONS, {**body, "timings": True}).json()["timings"]
        assert (timings["prompt_n"], timings["cache_n"], timings["predicted_n"]) == (3, 2, 4)
        assert timings["prompt_ms"] > 0
        assert timings["predicted_ms"] >= 0
        chunks = api.chunks(COMPLETIONS, {**body, "timings": True})
        assert chunks[-1]["timings"]["predicted_n"] == 4
        assert all("timings" not in chunk for chunk in chunks[:-1])
        options = {"timings": True, "stream_options": {"include_usage": True}}
        last = api.chunks(CHAT, {"messages": HELLO, **options})[-1]
        assert last["usage"]["completion_tokens"] == last["timings"]["predicted_n"]


def test_timings_count_drafts_of_all_answers() -> None:
    clock = Clock(5)
    assert "draft_n" not in clock.timings()
    for index, tried, held in ((0, 3, 1), (1, 2, 2), (0, 9, 4), (0, 12, 6)):  # sums so far
        clock.see(
            Output(
                index=index,
                pieces=[],
                token_ids=[1],
                num_draft_tokens=tried,
                num_accepted_tokens=held,
            )
        )
    timings = clock.timings()
    assert (timings["draft_n"], timings["draft_n_accepted"]) == (14, 8)
    assert timings["draft_n_by_position"] == [4, 4, 3, 1, 1, 1]
    assert timings["draft_n_accepted_by_position"] == [4, 3, 1, 0, 0, 0]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES, RESPONSES])
def test_drafts_and_precision_are_asked_for_by_the_same_names_everywhere(path: str) -> None:
    body: dict[str, Any] = {"max_tokens": 3, "messages": HELLO}
    body |= {"prompt": "hello"} if path == COMPLETIONS else {}
    body |= {"input": "hello"} if path == RESPONSES else {}
    with serving(saying("a")) as api:
        for asked in ({"spec_tokens": 0, "precision": "w2"}, {"spec_tokens": 3}, {}):
            assert api.post(path, {**body, **asked}).status_code == 200
            params = api.core.submitted[-1].params
            assert params.spec_tokens == asked.get("spec_tokens")
            assert params.precision == asked.get("precision")
        num_before = len(api.core.submitted)
        for wrong in ({"spec_tokens": 99}, {"spec_tokens": -1}, {"precision": "fp1"}):
            [name] = wrong
            answer = api.post(path, {**body, **wrong})
            assert answer.status_code == 400
            assert answer.json()["error"]["message"].startswith(name)
        assert len(api.core.submitted) == num_before


def test_a_finished_answer_is_logged_with_the_callers_id(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "moet.server.exchange"), serving(saying("a")) as api:
        headers = {"X-Request-Id": "job-7"}
        whole = api.post(CHAT, {"messages": HELLO}, headers=headers).json()
        api.post(MESSAGES, {"messages": HELLO, "max_tokens": 3, "stream": True})
    first, second = caplog.messages
    assert first.startswith(f"finished {whole['id']} request=job-7: ")
    assert re.match(r"finished msg_\w+ request=[0-9a-f]{32}: ", second)


def test_the_books_of_a_tiered_store_are_told_by_format() -> None:
    layers = [
        LayerTier(layer=i, num_hits=5, num_misses=2, num_streamed=1, num_bytes=300, stall_s=0.25)
        for i in range(2)
    ]
    tier = TierStats(
        format="w2", row_bytes=100, num_rows=64, num_slots=8, num_static=2, num_resident=7,
        num_host_places=32, num_host_rows=30, num_host_hits=3, num_disk_reads=1,
        num_disk_errors=0, disk_wait_s=0.5, layers=layers,
    )  # fmt: skip
    stats = ExpertStats(layers=[], tiers=[tier], num_gate_rows=9, num_gated_rows=4)
    with serving(saying("a")) as api:
        api.core.expert_stats = lambda: stats
        lines = api.get("/metrics").text.splitlines()
    told = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    for name, value in (
        ("expert_cache_slots", 8), ("expert_cache_hits_total", 10),
        ("expert_cache_misses_total", 4), ("expert_cache_fetch_bytes_total", 600),
        ("expert_cache_stall_seconds_total", 0.5), ("host_planes_bytes", 3200),
        ("expert_disk_reads_total", 1),
    ):  # fmt: skip
        [found] = [v for k, v in told.items() if k.startswith(f"moet:{name}{{") and "w2" in k]
        assert float(found) == value, name
    assert float(told['moet:gate_checked_total{model_name="scripted"}']) == 9
    assert float(told['moet:gate_fired_total{model_name="scripted"}']) == 4


def test_the_time_that_loading_took_is_told() -> None:
    with serving(saying("a")) as api:
        lines = api.get("/metrics").text.splitlines()
        [told] = [line for line in lines if line.startswith("moet:startup_time_seconds{")]
        assert float(told.split()[-1]) == pytest.approx(sum(api.engine.load_times_s.values()))
        assert set(api.engine.load_times_s) == {"start"}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES])
def test_an_answer_that_takes_too_long_ends_with_an_error(path: str) -> None:
    config = ServerConfig(request_timeout_s=0.05)
    body: dict[str, Any] = {"max_tokens": 4000, "messages": HELLO}
    if path == COMPLETIONS:
        body = {"max_tokens": 4000, "prompt": "hello"}
    with serving(endless, config, step_s=0.001) as api:
        response = api.post(path, body)
        assert response.status_code == 504
        assert "--request-timeout" in response.json()["error"]["message"]
        streamed = api.post(path, {**body, "stream": True})
        assert streamed.text.count("--request-timeout") == 1
        assert 'moet:request_timeouts_total{model_name="scripted"} 2.0' in api.get("/metrics").text
        while api.core.open:
            time.sleep(0.005)
        assert len(api.core.aborted) == 2


def test_web_pages_may_call_only_if_they_are_named() -> None:
    origin = {"Origin": "https://ui.example"}
    ask = {**origin, "Access-Control-Request-Method": "POST"}
    with serving() as api:
        assert "access-control-allow-origin" not in api.get("/v1/models", headers=origin).headers
    config = ServerConfig(allowed_origins=("https://ui.example",), api_keys=("k",))
    with serving(config=config) as api:
        preflight = api.request("OPTIONS", CHAT, headers=ask)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://ui.example"
        refused = api.get("/v1/models", headers=origin)
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://ui.example"
        other = api.get("/health", headers={"Origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers


def test_no_log_line_holds_a_prompt_an_answer_or_a_key(caplog: pytest.LogCaptureFixture) -> None:
    secret, key = "Xylophon", "moet-key-0815"
    config = ServerConfig(api_keys=(key,))
    headers = {"Authorization": f"Bearer {key}"}
    system = f"{secret} system"
    chat = {"messages": [{"role": "user", "content": secret}], "max_tokens": 99}
    tool = {"type": "function", "function": {"name": "f", "description": secret}}
    bodies: list[tuple[str, dict[str, Any]]] = [
        (CHAT, chat),
        (CHAT, {**chat, "stream": True, "tools": [tool]}),
        (CHAT, {**chat, "unknown_field": secret, "stop": secret}),
        (CHAT, {**chat, "temperature": secret}),
        (CHAT, {"messages": [{"role": secret, "content": secret}]}),
        (COMPLETIONS, {"prompt": secret, "model": secret}),
        (COMPLETIONS, {"prompt": secret * 9999}),
        (COMPLETIONS, {"prompt": secret, "response_format": {"type": secret}}),
        (MESSAGES, {**chat, "system": system, "model": MODEL}),
        ("/v1/responses", {"input": secret, "instructions": system}),
        ("/tokenize", {"prompt": secret}),
    ]
    with caplog.at_level(logging.DEBUG), serving(config=config) as api:
        for path, body in bodies:
            api.post(path, body, headers=headers)
            api.post(path, body, headers={"x-api-key": key + "-wrong-" + secret})
        api.request("POST", CHAT, content=secret.encode(), headers=headers)
        api.request("POST", CHAT, content=secret.encode(), headers={"content-type": secret})
    with (
        caplog.at_level(logging.DEBUG),
        pytest.raises(EngineDeadError),  # from the look at the books at the end
        serving(faulty, config) as api,
    ):
        assert api.post(COMPLETIONS, {"prompt": secret}, headers=headers).status_code >= 500
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("moet")]
    assert any("finished" in line for line in lines)
    for record in caplog.records:
        text = logging.Formatter().format(record)
        if record.name.startswith(("moet", "uvicorn", "fastapi", "starlette")):
            assert secret not in text, text
            assert key not in text, text


def test_raw_outputs_are_written_only_if_asked_for(tmp_path: Path) -> None:
    folder = tmp_path / "raw"
    answer = "thought</think>say <oops"
    with serving(saying(answer)) as api:
        api.post(CHAT, {"messages": HELLO})
    assert not folder.exists()
    with serving(saying(answer), ServerConfig(raw_log_folder=folder)) as api:
        whole = api.post(CHAT, {"messages": HELLO, "n": 2}).json()
        api.post(COMPLETIONS, {"prompt": "x", "request_id": "../../a b", "max_tokens": 50})
        api.chunks(CHAT, {"messages": HELLO, "max_tokens": 3})
    files = {path.name: json.loads(path.read_text()) for path in folder.iterdir()}
    assert len(files) == 3
    written = files[whole["id"] + ".json"]
    assert [choice["text"] for choice in written["choices"]] == [answer, answer]
    assert written["choices"][0]["finish_reason"] == "stop"
    assert any(name.startswith("cmpl-.._.._a_b") for name in files)
    cut = [c for f in files.values() for c in f["choices"] if c["finish_reason"] == "length"]
    assert [len(choice["token_ids"]) for choice in cut] == [3]
    assert "hello" not in json.dumps(files)


def test_a_raw_log_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    engine = Engine.over(ThreadHost(lambda progress: ScriptedCore()), text_side, model=MODEL)
    with engine, pytest.raises(ConfigError, match="--log-raw-output"):
        create_app(engine, ServerConfig(raw_log_folder=tmp_path / "file" / "folder"))


def test_malformed_calls_are_counted() -> None:
    broken = '</think>\n\n<|DSML|tool_calls>\n<|DSML|invoke name="f">\n<|DSML|parameter'
    broken = broken.replace("|", "\uff5c")
    tool = {"type": "function", "function": {"name": "f"}}
    with serving(saying(broken)) as api:
        api.post(CHAT, {"messages": HELLO})
        text = api.get("/metrics").text
        assert 'moet:tool_call_parser_invocations_total{model_name="scripted"} 1.0' in text
        assert 'moet:tool_call_parser_failures_total{model_name="scripted"} 0.0' in text
        api.post(CHAT, {"messages": HELLO, "tools": [tool]})
        server = api.get("/live").json()["server"]
        assert server["num_parsed"] == 2
        assert server["num_malformed"] >= 1


def test_the_experts_and_the_live_state_are_told() -> None:
    with serving() as api:
        [first, second] = api.get("/moe/stats").json()["layers"]
        assert (first["layer"], second["rows"]) == (0, [1, 5, 0, 1])
        assert first["resident"] == [True, True, False, True]
        live = api.get("/live").json()
        assert (live["state"], live["models"], live["late_step"]) == ("ready", [MODEL], None)
        assert live["stats"]["num_running"] == 0
        later = api.get("/live").json()
        assert later["time"] > live["time"]


class HangingCore(ScriptedCore):
    """Its steps wait to be let go."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()

    def step(self) -> list[TokenEvent]:
        self.let_go.wait(60)
        return super().step()

    def info(self) -> Any:
        return msgspec.structs.replace(super().info(), step_timeout_s=0.02)


def test_a_step_that_hangs_makes_the_server_unhealthy() -> None:
    core = HangingCore()
    with (
        listening(scripted_engine(core)) as (url, _),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        body = {"prompt": "abc", "max_tokens": 5}
        asked = threading.Thread(target=client.post, args=(COMPLETIONS,), kwargs={"json": body})
        asked.start()
        while client.get("/health").status_code == 200:
            time.sleep(0.005)
        error = client.get("/health").json()["error"]
        assert (error["code"], "1 scripts" in error["message"]) == ("late_step", True)
        assert client.get("/metrics").status_code == 503  # and does not hang
        assert "1 scripts" in client.get("/live").json()["late_step"]
        core.let_go.set()
        asked.join(60)
        while client.get("/health").status_code != 200:
            time.sleep(0.005)


def test_a_slow_reader_does_not_hold_the_step_loop() -> None:
    core = ScriptedCore(endless)
    body = {"prompt": "a", "max_tokens": 3000, "stream": True}
    with (
        listening(scripted_engine(core)) as (url, _),
        httpx.Client(base_url=url, timeout=60) as client,
        client.stream("POST", COMPLETIONS, json=body) as unread,
    ):
        assert unread.status_code == 200
        while core.open:  # all of it is made while nobody reads
            time.sleep(0.005)
        assert client.post(COMPLETIONS, json={"prompt": "b", "max_tokens": 2}).json()
        assert len(events_of(unread.read().decode())) == 3000


def test_a_span_tells_counts_and_times_and_no_text() -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="moet[otel] is not installed")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with serving(saying("abc"), ServerConfig(request_timeout_s=0.2), step_s=0.001) as api:
        api.app.state.operations.tracer = tracing.OtelTracer(provider)
        answer = api.post(COMPLETIONS, {"prompt": "hello"}).json()
        api.core.script = endless
        assert api.post(COMPLETIONS, {"prompt": "x", "max_tokens": 4000}).status_code == 504
    good, late = exporter.get_finished_spans()
    assert good.attributes["gen_ai.request.id"] == answer["id"]
    assert good.attributes["gen_ai.usage.input_tokens"] == 5
    assert good.attributes["gen_ai.usage.output_tokens"] == 4
    assert good.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert good.attributes["gen_ai.latency.time_to_first_token"] > 0
    assert late.status.description == "HttpError"
    assert "hello" not in good.to_json()


def test_opentelemetry_is_not_imported_unless_asked_for() -> None:
    code = (
        "import sys, moet.server.app, moet.server.tracing as t; assert t.make_tracer(None); "
        "names = [m for m in sys.modules if m.startswith('opentelemetry.')]; "
        "assert not [m for m in names if m.split('.')[1] in ('sdk', 'exporter')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"moet\[otel\]"):
        tracing.make_tracer("http://127.0.0.1:4318/v1/traces")


def test_the_page_is_open_and_complete_and_everything_else_needs_the_key() -> None:
    with serving(config=ServerConfig(api_keys=("k",))) as api:
        index = api.get("/")
        assert index.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in index.headers["content-security-policy"]
        for name in ("page.js", "api.js", "live.js", "heat.js", "chat.js", "page.css"):
            assert api.get(f"/static/{name}").status_code == 200
        assert "http://" not in index.text
        assert "https://" not in index.text
        for name in ("../app.py", "page.py", "..%2fapp.py", ""):
            assert api.get(f"/static/{name}").status_code in (401, 404)
        assert api.get("/live").status_code == 401
        assert api.get("/moe/stats").status_code == 401


@pytest.mark.parametrize(
    ("given", "origins"),
    [
        ('["https://a", "https://b:3"]', ("https://a", "https://b:3")),
        ("https://a, https://b:3", ("https://a", "https://b:3")),
        ("*", ("*",)),
    ],
)
def test_origins_are_listed_as_vllm_or_by_commas(given: str, origins: tuple[str, ...]) -> None:
    args = parser().parse_args(["serve", "--allowed-origins", given])
    assert args.allowed_origins == origins


@pytest.mark.parametrize("given", ["[1]", "[", '["a'])
def test_origins_that_are_no_list_are_refused(given: str) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["serve", "--allowed-origins", given])


@pytest.mark.parametrize("limit", [0.0, -1.0])
def test_a_limit_of_no_time_is_refused(limit: float) -> None:
    with pytest.raises(ConfigError, match="--request-timeout"):
        ServerConfig(request_timeout_s=limit)


def test_a_port_in_use_is_said_before_an_engine_is_made() -> None:
    made: list[object] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: .* another"):
            Service(made.append, ServerConfig(port=port))  # type: ignore[arg-type]
    assert not made
