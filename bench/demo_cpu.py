"""What a stranger sees: `make serve`, then the openai SDK asks a question, a sum, for a tool call
and for a story. Writes results/demo_cpu.json.

    python -m bench.demo_cpu            the `moet` of this environment, the flags of `make serve`
    python -m bench.demo_cpu --fresh    `make serve` in a copy of the tree without an environment

Rates are of one stream at a time, from an answer's first token to its last, prompts left out. The
processor time of a token, in which load hardly shows, is of the whole server.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import psutil

from moet.bench import results

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "demo_cpu.json"
RATE_TARGET = 20.0  # tokens a second
START_TIMEOUT_S, FRESH_TIMEOUT_S = 120.0, 1800.0
ROUNDS = 3  # of all questions; the best one counts
WEATHER = {
    "name": "get_weather",
    "description": "Get the current weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "Name of the city"}},
        "required": ["city"],
    },
}

_OSLO = {"city": "Oslo"}


@dataclass(frozen=True, slots=True)
class Ask:
    """A question, the fields of its request, and whether an answer is a sensible one."""

    name: str
    text: str
    fields: dict[str, Any]
    is_sensible: Callable[[dict[str, str]], bool]


ASKS = (
    Ask(
        "question",
        "What is the capital of France?",
        {"reasoning_effort": "none"},
        lambda said: "Paris" in said["content"] and not said["reasoning"],
    ),
    Ask(
        "sum with reasoning",
        "What is 47 + 85?",
        {},
        lambda said: "132" in said["content"] and "7 + 5 = 12" in said["reasoning"],
    ),
    Ask(
        "tool call",
        "How is the weather in Oslo today?",
        {"reasoning_effort": "none", "tools": [{"type": "function", "function": WEATHER}]},
        lambda said: said["name"] == "get_weather" and _parsed(said["arguments"]) == _OSLO,
    ),
    Ask(
        "story",
        "Tell me a short story about a fox.",
        {"reasoning_effort": "none"},
        lambda said: "fox" in said["content"] and said["content"].count(".") > 2,
    ),
)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


@contextmanager
def served(model: str, fresh: bool) -> Iterator[tuple[str, float]]:
    """The URL of a server, and the seconds until it answered; it ends with the context."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as scratch:
        folder, environment = ROOT, dict(os.environ)
        command = [sys.executable, "-m", "moet", "serve", model, "--spec-tokens", "3"]
        command += ["--port", str(port)]
        if fresh:
            folder = Path(scratch)
            files = subprocess.run(
                ["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True
            ).stdout
            subprocess.run(["tar", "x", "-C", scratch], input=files, check=True)
            command = ["make", "serve", f"MODEL={model}", f"ARGS=--port {port}"]
            environment.pop("VIRTUAL_ENV", None)
        began = time.monotonic()
        server = subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True)
        try:
            url = f"http://127.0.0.1:{port}"
            _await(url, server, FRESH_TIMEOUT_S if fresh else START_TIMEOUT_S)
            yield url, time.monotonic() - began
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(30)


def _await(url: str, server: subprocess.Popen[bytes], timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if server.poll() is not None:
            raise SystemExit(f"the server ended with {server.returncode} before it answered")
        try:
            if httpx.get(f"{url}/ready", timeout=2).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise SystemExit(f"the server does not answer after {timeout_s:g} s")


def answer(client: openai.OpenAI, model: str, ask: Ask) -> tuple[dict[str, str], int, float]:
    """What was said, its tokens, and the seconds from the first one to the last."""
    said = {"reasoning": "", "content": "", "name": "", "arguments": ""}
    num_tokens, first, last = 0, 0.0, 0.0
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": ask.text}],
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        **ask.fields,
    )
    for chunk in stream:
        if chunk.usage is not None:
            num_tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            last = time.perf_counter()
            first = first or last
            said["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            said["content"] += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                assert call.function is not None
                said["name"] += call.function.name or ""
                said["arguments"] += call.function.arguments or ""
    return said, num_tokens, last - first


def _processor_s() -> float:
    """Of everything that this process has started."""
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return sum(each.user + each.system for each in times)


def _row(
    case: str,
    value: float,
    unit: str,
    better: Literal["lower", "higher"],
    target: float | None = None,
    note: str = "",
) -> results.Row:
    value = round(value, 2)
    return results.Row(case=case, value=value, unit=unit, better=better, target=target, note=note)


def measure(url: str, model: str) -> tuple[list[results.Row], list[dict[str, Any]]]:
    """Rows and the conversations themselves."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    told: list[dict[str, Any]] = []
    rates, costs = [], []
    for _ in range(ROUNDS):
        told, num_tokens, seconds, before = [], 0, 0.0, _processor_s()
        for ask in ASKS:
            said, count, took = answer(client, model, ask)
            sensible = ask.is_sensible(said)
            told.append({"asked": ask.text, "sensible": sensible, "tokens": count, **said})
            num_tokens, seconds = num_tokens + count - 1, seconds + took
        rates.append(num_tokens / seconds)
        costs.append(1000 * (_processor_s() - before) / num_tokens)
    share = sum(bool(each["sensible"]) for each in told) / len(told)
    rate, note = max(rates), f"one stream, load {os.getloadavg()[0]:.1f}"
    cost = f"{model}, processor time, prompts included"
    rows = [
        _row(f"{model}, sensible answers", share, "share", "higher", 1.0),
        _row(f"{model}, decoding", rate, "tokens/s", "higher", RATE_TARGET, note),
        _row(cost, min(costs), "ms a token", "lower"),
    ]
    return rows, told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="demo,demo-glm")
    parser.add_argument("--fresh", action="store_true", help="make serve in a copy of the tree")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows, conversations = [], {}
    for model in args.models.split(","):
        with served(model, args.fresh) as (url, start_s):
            found, conversations[model] = measure(url, model)
        start = f"{model}, {'make serve, environment included' if args.fresh else 'start'}"
        rows += [*found, _row(start, start_s, "s", "lower")]
    command = "python -m bench.demo_cpu" + (" --fresh" if args.fresh else "")
    more = {"conversations": conversations}
    report = results.report(command, rows, hardware=results.this_machine(), more=more)
    results.write(args.out, report)
    for row in rows:
        print(f"{row.case}: {row.value} {row.unit} {row.note}")


if __name__ == "__main__":
    main()
