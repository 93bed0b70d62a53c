"""`moet bench serve`: load on an OpenAI endpoint, and the latencies that its clients see.

Arrivals are a Poisson process (or gamma, by burstiness); fields of the result are named as in
vLLM's `bench serve`.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from moet.bench.client import Measured, measure
from moet.bench.prompts import Api, Prompt, conversations, random_prompts
from moet.bench.results import Row
from moet.errors import ConfigError, MoetError

METRICS: Mapping[str, str] = {
    "ttft": "time to first token",
    "tpot": "time per output token, first excluded",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}
TIMEOUT_S = 6 * 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """request_rate: requests per second, inf: all at once. burstiness: 1 is a Poisson process, less
    is burstier. max_concurrency: requests under way at most; None: no limit."""

    base_url: str
    api: Api = "completions"
    model: str | None = None
    api_key: str | None = None
    num_prompts: int = 100
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    dataset_path: Path | None = None
    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    num_warmups: int = 1
    ignore_eos: bool = True
    temperature: float | None = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        limits = {
            "--num-prompts": self.num_prompts >= 1,
            "--request-rate": self.request_rate > 0,
            "--burstiness": self.burstiness > 0,
            "--max-concurrency": self.max_concurrency is None or self.max_concurrency >= 1,
            "--random-input-len": self.input_len >= 1,
            "--random-output-len": self.output_len >= 1,
        }
        for flag, holds in limits.items():
            if not holds:
                raise ConfigError(f"{flag} must be positive")
        if not 0 <= self.range_ratio < 1:
            raise ConfigError(f"--random-range-ratio is {self.range_ratio}; it must be in [0, 1)")


@dataclass(slots=True)
class Traffic:
    """What a run saw. most_open: requests under way at once."""

    answers: list[Measured]
    duration_s: float
    most_open: int


async def run(options: ServeOptions) -> dict[str, Any]:
    """Put the load on the server. Returns vLLM's fields; MoetError if nothing was answered."""
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        base_url=options.base_url, headers=headers, timeout=TIMEOUT_S, limits=limits
    ) as client:
        model = options.model or await _first_model(client)
        options = replace(options, model=model)
        prompts = await _prompts(client, options)
        for prompt in prompts[: options.num_warmups]:
            answer = await measure(client, options.api, _body(options, prompt))
            if answer.error:
                raise MoetError(f"the first request failed: {answer.error}")
        # What a warm-up asked may be in the prefix cache, so it is asked no more.
        traffic = await _drive(client, options, prompts[options.num_warmups :])
    return summary(options, traffic)


async def _first_model(client: httpx.AsyncClient) -> str:
    try:
        response = await client.get("/v1/models")
        response.raise_for_status()
        name: str = response.json()["data"][0]["id"]
    except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
        address = str(client.base_url).rstrip("/")
        raise MoetError(f"{address}/v1/models does not answer: {error}") from error
    return name


async def _prompts(client: httpx.AsyncClient, options: ServeOptions) -> list[Prompt]:
    num_prompts = options.num_prompts + options.num_warmups
    if options.dataset_path is not None:
        return conversations(
            options.dataset_path,
            options.api,
            num_prompts=num_prompts,
            output_len=options.output_len,
        )
    assert options.model is not None
    return await random_prompts(
        client,
        options.api,
        options.model,
        num_prompts=num_prompts,
        input_len=options.input_len,
        output_len=options.output_len,
        range_ratio=options.range_ratio,
        seed=options.seed,
    )


def _body(options: ServeOptions, prompt: Prompt) -> dict[str, Any]:
    body: dict[str, Any] = {"model": options.model, **prompt.body, "max_tokens": prompt.max_tokens}
    if options.ignore_eos:
        body["ignore_eos"] = True
    if options.temperature is not None:
        body["temperature"] = options.temperature
    return body


async def _drive(
    client: httpx.AsyncClient, options: ServeOptions, prompts: Sequence[Prompt]
) -> Traffic:
    places = asyncio.Semaphore(options.max_concurrency) if options.max_concurrency else None
    num_open = most_open = 0

    async def one(prompt: Prompt) -> Measured:
        nonlocal num_open, most_open
        async with places or nullcontext():
            num_open += 1
            most_open = max(most_open, num_open)
            try:
                return await measure(client, options.api, _body(options, prompt))
            finally:
                num_open -= 1

    started_s = perf_counter()
    tasks = [asyncio.create_task(one(p)) async for p in arrivals(options, prompts)]
    answers = await asyncio.gather(*tasks)
    return Traffic(answers, perf_counter() - started_s, most_open)


async def arrivals(options: ServeOptions, prompts: Sequence[Prompt]) -> AsyncIterator[Prompt]:
    """Prompts at their times. Delays add up from the start, so that a late one delays no other."""
    due_s, started_s = 0.0, perf_counter()
    for prompt, gap_s in zip(prompts, gaps_s(options, len(prompts)), strict=True):
        due_s += gap_s
        wait_s = started_s + due_s - perf_counter()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        yield prompt


def gaps_s(options: ServeOptions, num_requests: int) -> list[float]:
    """Times between arrivals, gamma-distributed with mean 1 / request_rate; the first is 0."""
    if math.isinf(options.request_rate):
        return [0.0] * num_requests
    draw = random.Random(options.seed)
    scale = 1.0 / (options.request_rate * options.burstiness)
    gaps = [draw.gammavariate(options.burstiness, scale) for _ in range(num_requests)]
    return [0.0, *gaps[1:]] if gaps else []


# Results


def summary(options: ServeOptions, traffic: Traffic) -> dict[str, Any]:
    """vLLM's fields. Raises MoetError with the first error if nothing was answered."""
    good = [answer for answer in traffic.answers if not answer.error]
    errors = [answer.error for answer in traffic.answers if answer.error]
    if not good:
        raise MoetError(f"none of {len(errors)} requests was answered: {errors[0]}")
    duration = traffic.duration_s
    input_tokens = sum(answer.input_tokens for answer in good)
    output_tokens = sum(answer.output_tokens for answer in good)
    times: dict[str, list[float]] = {
        "ttft": [answer.ttft_s for answer in good],
        "tpot": [answer.tpot_s for answer in good if answer.output_tokens > 1],
        "itl": [gap for answer in good for gap in answer.itls_s],
        "e2el": [answer.latency_s for answer in good],
    }
    rate = options.request_rate
    fields: dict[str, Any] = {
        "backend": "openai" if options.api == "completions" else "openai-chat",
        "model_id": options.model,
        "num_prompts": options.num_prompts,
        "request_rate": "inf" if math.isinf(rate) else rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
        "duration": duration,
        "completed": len(good),
        "failed": len(errors),
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(good) / duration,
        "output_throughput": output_tokens / duration,
        "total_token_throughput": (input_tokens + output_tokens) / duration,
        "max_concurrent_requests": traffic.most_open,
    }
    for name, values in times.items():
        fields.update(_statistics(name, values))
    return {
        **fields,
        "input_lens": [answer.input_tokens for answer in good],
        "output_lens": [answer.output_tokens for answer in good],
        "ttfts": times["ttft"],
        "itls": [answer.itls_s for answer in good],
        "errors": errors,
    }


def _statistics(name: str, values_s: Sequence[float]) -> dict[str, float]:
    values = sorted(1000 * value for value in values_s) or [0.0]
    return {
        f"mean_{name}_ms": statistics.fmean(values),
        f"median_{name}_ms": statistics.median(values),
        f"std_{name}_ms": statistics.pstdev(values),
        f"p99_{name}_ms": percentile(values, 99),
    }


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of ascending values, with a line between neighbours."""
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def rows(fields: Mapping[str, Any]) -> list[Row]:
    """The figures that one compares, as rows of a result file."""
    found = [
        Row(case=name, value=round(fields[name], 3), unit=unit, better="higher")
        for name, unit in (
            ("request_throughput", "requests/s"),
            ("output_throughput", "tokens/s"),
            ("total_token_throughput", "tokens/s"),
        )
    ]
    for metric in METRICS:
        for kind in ("mean", "median", "p99"):
            name = f"{kind}_{metric}_ms"
            found.append(Row(case=name, value=round(fields[name], 3), unit="ms", better="lower"))
    return found


def show(fields: Mapping[str, Any], console: Console) -> None:
    """Print totals and latencies."""
    rate = fields["request_rate"]
    title = f"{fields['model_id']}: {fields['completed']} requests, rate {rate}/s"
    totals = Table("what", "value", title=title, show_header=False)
    for name in ("completed", "failed", "total_input_tokens", "total_output_tokens"):
        totals.add_row(name, f"{fields[name]:,}")
    for name in ("duration", "request_throughput", "output_throughput", "total_token_throughput"):
        totals.add_row(name, f"{fields[name]:,.2f}")
    totals.add_row("max_concurrent_requests", str(fields["max_concurrent_requests"]))
    latencies = Table("ms", "mean", "median", "p99")
    for metric, meaning in METRICS.items():
        figures = (f"{fields[f'{kind}_{metric}_ms']:.2f}" for kind in ("mean", "median", "p99"))
        latencies.add_row(f"{metric.upper()}, {meaning}", *figures)
    console.print(totals, latencies)
    for error in fields["errors"][:3]:
        console.print(f"failed: {error}", markup=False)
