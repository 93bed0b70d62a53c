"""`moet bench serve`: against a server that answers by script, over a socket."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moet.bench.client import Measured
from moet.bench.prompts import conversations
from moet.bench.serve import ServeOptions, Traffic, gaps_s, percentile, rows, run, summary
from moet.cli import main
from moet.errors import ConfigError, MoetError
from moet.types import Request
from tests.scripted import ScriptedCore
from tests.server.serving import listening, scripted_engine
from tests.texts import ids

WORDS = ids("one two three four five six seven eight")
VLLM_FIELDS = [
    *("duration", "completed", "failed", "total_input_tokens", "total_output_tokens"),
    *("request_throughput", "output_throughput", "total_token_throughput"),
    *("request_rate", "burstiness", "max_concurrency", "model_id", "num_prompts"),
    *(f"{kind}_{m}_ms" for kind in ("mean", "median", "std", "p99")
      for m in ("ttft", "tpot", "itl", "e2el")),
    *("input_lens", "output_lens", "ttfts", "itls", "errors"),
]  # fmt: skip


def answer(request: Request) -> list[int]:
    return (WORDS * 100)[: request.params.max_tokens]


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, ScriptedCore]]:
    core = ScriptedCore(answer, step_s=0.001)
    with listening(scripted_engine(core)) as (url, _):
        yield url, core


def bench(url: str, **options: Any) -> dict[str, Any]:
    return asyncio.run(run(ServeOptions(base_url=url, **options)))


def test_random_prompts_have_the_stated_lengths(server: tuple[str, ScriptedCore]) -> None:
    url, core = server
    before = len(core.submitted)
    fields = bench(url, num_prompts=6, input_len=20, output_len=5, num_warmups=2)
    asked = core.submitted[before:]
    assert fields["input_lens"] == [20] * 6
    assert fields["output_lens"] == [5] * 6
    assert [len(request.prompt_token_ids) for request in asked] == [20] * 8
    assert len({tuple(request.prompt_token_ids) for request in asked}) == 8
    assert (fields["total_input_tokens"], fields["total_output_tokens"]) == (120, 30)
    assert (fields["completed"], fields["failed"]) == (6, 0)


def test_fields_are_named_as_vllm_names_them(server: tuple[str, ScriptedCore]) -> None:
    fields = bench(server[0], num_prompts=3, input_len=8, output_len=4)
    assert [name for name in VLLM_FIELDS if name not in fields] == []
    for metric in ("ttft", "tpot", "itl", "e2el"):
        low, high = fields[f"median_{metric}_ms"], fields[f"p99_{metric}_ms"]
        assert 0 < low <= high
    assert all(ttft > 0 for ttft in fields["ttfts"])
    assert fields["mean_ttft_ms"] < fields["mean_e2el_ms"]


def test_concurrency_is_kept(server: tuple[str, ScriptedCore]) -> None:
    options: dict[str, Any] = {"num_prompts": 12, "input_len": 4, "output_len": 8}
    assert bench(server[0], max_concurrency=3, **options)["max_concurrent_requests"] == 3
    assert bench(server[0], **options)["max_concurrent_requests"] == 12


def test_chat_conversations_of_a_file(
    server: tuple[str, ScriptedCore], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = [
        {"messages": [{"role": "user", "content": "one two"}]},
        {
            "conversations": [
                {"from": "human", "value": "three"},
                {"from": "gpt", "value": "four"},
                {"from": "human", "value": "five"},
                {"from": "gpt", "value": "six"},
            ]
        },
        {"prompt": "seven"},
    ]
    path = tmp_path / "talk.jsonl"
    path.write_text("\n".join(json.dumps(entry) for entry in entries))
    prompts = conversations(path, "chat", num_prompts=4, output_len=3)
    contents = [[m["content"] for m in prompt.body["messages"]] for prompt in prompts]
    assert contents == [["one two"], ["three", "four", "five"], ["seven"], ["one two"]]
    output = tmp_path / "out" / "serve.json"
    words = ["bench", "serve", "--base-url", server[0], "--num-prompts", "3", "--backend", "chat"]
    words += ["--dataset-path", str(path), "--random-output-len", "6", "--output", str(output)]
    assert main(words) == 0
    assert "TTFT" in capsys.readouterr().out
    written = json.loads(output.read_text())
    assert {"hardware", "commit", "command", "date", "rows"} <= set(written)
    assert written["command"] == f"moet {' '.join(words)}"
    assert written["completed"] == 3
    names = {row["case"] for row in written["rows"]}
    assert {"output_throughput", "p99_itl_ms", "median_ttft_ms"} <= names


@pytest.mark.parametrize(
    "text", ["[]", '{"turns": []}', '["hello"]', "not json", '{"messages":[]}']
)
def test_files_that_hold_no_conversation(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"--dataset-path|bad\.json"):
        conversations(path, "chat", num_prompts=1, output_len=1)
    with pytest.raises(ConfigError, match="--dataset-path"):
        conversations(tmp_path / "absent", "chat", num_prompts=1, output_len=1)


def test_a_server_that_refuses_is_an_error_with_its_words(
    server: tuple[str, ScriptedCore],
) -> None:
    with pytest.raises(MoetError, match=r"first request failed: HTTP 4\d\d"):
        bench(server[0], num_prompts=2, input_len=5000, output_len=4)
    with pytest.raises(MoetError, match="v1/models does not answer"):
        bench("http://127.0.0.1:9", num_prompts=1)


def test_a_rate_is_a_poisson_process() -> None:
    options = ServeOptions(base_url="", request_rate=50.0)
    gaps = gaps_s(options, 4001)
    assert gaps[0] == 0.0
    mean = sum(gaps) / 4000
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps[1:]) / 4000)
    assert mean == pytest.approx(1 / 50, rel=0.06)
    assert deviation == pytest.approx(mean, rel=0.1)
    assert gaps == gaps_s(options, 4001)
    assert gaps_s(ServeOptions(base_url=""), 3) == [0.0, 0.0, 0.0]
    calm = gaps_s(ServeOptions(base_url="", request_rate=50.0, burstiness=1e6), 100)
    assert max(calm[1:]) == pytest.approx(1 / 50, rel=0.02)


def test_arrivals_wait_for_their_times(server: tuple[str, ScriptedCore]) -> None:
    options: dict[str, Any] = {"num_prompts": 5, "input_len": 4, "output_len": 2, "num_warmups": 0}
    due = sum(gaps_s(ServeOptions(base_url="", request_rate=40.0, **options), 5))
    started = time.perf_counter()
    fields = bench(server[0], request_rate=40.0, **options)
    assert fields["duration"] >= due
    assert time.perf_counter() - started >= due


def test_latencies_of_a_known_run() -> None:
    answers = [
        Measured(10, 3, ttft_s=0.1, itls_s=[0.02, 0.04], latency_s=0.16),
        Measured(20, 1, ttft_s=0.3, latency_s=0.3),
        Measured(error="HTTP 500: no"),
    ]
    fields = summary(ServeOptions(base_url="", num_prompts=3), Traffic(answers, 2.0, 3))
    assert (fields["completed"], fields["failed"], fields["errors"]) == (2, 1, ["HTTP 500: no"])
    assert fields["request_throughput"] == 1.0
    assert fields["output_throughput"] == 2.0
    assert fields["total_token_throughput"] == 17.0
    assert fields["mean_ttft_ms"] == pytest.approx(200)
    assert fields["mean_tpot_ms"] == pytest.approx(30)  # of the answer with more than one token
    assert fields["median_itl_ms"] == pytest.approx(30)
    assert fields["p99_itl_ms"] == pytest.approx(39.8)
    assert fields["mean_e2el_ms"] == pytest.approx(230)
    assert {row.better for row in rows(fields)} == {"lower", "higher"}
    with pytest.raises(MoetError, match="none of 1 requests was answered: gone"):
        summary(ServeOptions(base_url=""), Traffic([Measured(error="gone")], 1.0, 1))


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_percentiles_are_within_the_values(values: list[float]) -> None:
    ordered = sorted(values)
    assert percentile(ordered, 0) == ordered[0]
    assert percentile(ordered, 100) == ordered[-1]
    assert ordered[0] <= percentile(ordered, 50) <= percentile(ordered, 99) <= ordered[-1]


def test_a_broken_stream_is_a_failure_not_a_figure() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        body = b'data: {"choices":[{"text":"a"}]}\n\n'
        if "error" in json.loads(request.content)["prompt"]:
            body += b'data: {"error": {"message": "boom"}}\n\ndata: [DONE]\n\n'
        return httpx.Response(200, content=body)

    async def ask(prompt: str) -> Measured:
        from moet.bench.client import measure

        transport = httpx.MockTransport(handler)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await measure(client, "completions", {"prompt": prompt})

    assert "without [DONE]" in asyncio.run(ask("cut")).error
    assert "boom" in asyncio.run(ask("error")).error


@pytest.mark.parametrize(
    ("option", "flag"),
    [
        ({"num_prompts": 0}, "--num-prompts"),
        ({"request_rate": 0.0}, "--request-rate"),
        ({"max_concurrency": 0}, "--max-concurrency"),
        ({"range_ratio": 1.0}, "--random-range-ratio"),
    ],
)
def test_options_that_make_no_sense(option: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        ServeOptions(base_url="", **option)
