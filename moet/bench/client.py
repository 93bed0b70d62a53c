"""One streamed request to an OpenAI endpoint, with the time of each increment."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import httpx

from moet.bench.prompts import Api

PATHS: Mapping[Api, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(slots=True)
class Measured:
    """Times in seconds. ttft_s: to the first text or reasoning. itls_s: between increments after
    it. latency_s: to the last one. error: why there is no answer."""

    input_tokens: int = 0
    output_tokens: int = 0
    ttft_s: float = 0.0
    itls_s: list[float] = field(default_factory=list)
    latency_s: float = 0.0
    started_s: float = 0.0
    error: str = ""

    @property
    def tpot_s(self) -> float:
        """Mean time of a token after the first. Needs two tokens."""
        return (self.latency_s - self.ttft_s) / (self.output_tokens - 1)


async def measure(client: httpx.AsyncClient, api: Api, body: Mapping[str, Any]) -> Measured:
    """Send a request and read its stream to the end. Never raises for what the server does."""
    measured = Measured(started_s=perf_counter())
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    try:
        async with client.stream("POST", PATHS[api], json=asked) as response:
            if response.is_error:
                text = (await response.aread()).decode(errors="replace")
                measured.error = f"HTTP {response.status_code}: {text[:300]}"
                return measured
            await _read(response, api, measured)
    except httpx.HTTPError as error:
        measured.error = f"{type(error).__name__}: {error}"
    return measured


async def _read(response: httpx.Response, api: Api, measured: Measured) -> None:
    last_s = measured.started_s
    num_increments = 0
    ended = False
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        now_s = perf_counter()
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            ended = True
            break
        chunk = json.loads(data)
        if chunk.get("error"):
            measured.error = str(chunk["error"])[:300]
            return
        usage = chunk.get("usage") or {}
        measured.input_tokens = usage.get("prompt_tokens", measured.input_tokens)
        measured.output_tokens = usage.get("completion_tokens", measured.output_tokens)
        if not any(_has_text(choice, api) for choice in chunk.get("choices") or []):
            continue
        if num_increments == 0:
            measured.ttft_s = now_s - measured.started_s
        else:
            measured.itls_s.append(now_s - last_s)
        num_increments += 1
        last_s = now_s
    measured.latency_s = last_s - measured.started_s
    if not ended:
        measured.error = "the stream ended without [DONE]"
    elif num_increments == 0:
        measured.error = "the answer has no text"
    measured.output_tokens = measured.output_tokens or num_increments


def _has_text(choice: Mapping[str, Any], api: Api) -> bool:
    if api == "completions":
        return bool(choice.get("text"))
    delta = choice.get("delta") or {}
    names = ("content", "reasoning", "reasoning_content", "tool_calls")
    return any(delta.get(name) for name in names)
