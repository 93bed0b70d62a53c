"""Many streaming conversations with tools at once: is any call lost, any page leaked, memory flat?

`python bench/load.py --minutes 10` writes results/load.json. A model that replays scripts runs in
the real core, in a process of its own; the real server stands before it, in another; the clients
are here. Every conversation asks for a call, checks that reasoning, name and arguments are what the
script says, sends a result back, and checks the answer; some leave in the middle.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import socket
import time
from array import array
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import numpy as np
import psutil
import torch

from moet.bench import results
from moet.config import CacheConfig, SchedulerConfig, ServerConfig
from moet.models.base import ForwardInput, KVCacheSpec, KVGroup, KVTensors, ModelOutput
from moet.runtime.core import EngineCore
from moet.runtime.engine import Engine
from moet.runtime.host import Progress
from moet.runtime.process import ProcessHost
from moet.server.run import Service
from tests.fakes import NoExperts
from tests.texts import EOS, byte_tokenizer, ids, text_side

RESULTS = Path(__file__).parent / "results" / "load.json"
NUM_CONVERSATIONS = 64
NUM_DEMO_LANES = 8  # it computes on the CPU
PAGE_SIZE = 64
VOCAB_SIZE = 300
NUM_PAGES = 1600  # less than all conversations want at their longest, so that some are moved
MAX_MODEL_LEN = 16_384
TURNS = 6  # of a conversation: calls, results and answers
LEAVES = 0.02  # share of answers whose reader goes away in the middle
MAX_STEPS = 1 << 20  # whose times are kept
TAG_TOKENS = 64  # before the answer, in which its number stands
SAMPLE_S = 5.0
TOOL = {
    "type": "function",
    "function": {
        "name": "write_file",
        "description": "Write a file.",
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "content": {"type": "string"},
                "mode": {"type": "integer"},
                "tags": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["path", "content"],
        },
    },
}
WORDS = (
    "naïve", "x < y", "</b>", "日本語", '"quoted"', "back\\slash", "tab\t", "{}", "🙂", "a\nb",
)  # fmt: skip
FAILURES = (
    "refused",
    "failed",
    "unfinished_streams",
    "wrong_reasoning",
    "wrong_content",
    "invented_calls",
    "wrong_finish_reasons",
    "lost_calls",
    "malformed_calls",
)


# What is said


def case(number: int) -> dict[str, Any]:
    """The script of a number: what the model says, and what a client must make of it."""
    rng = random.Random(number)
    words = rng.choices(WORDS, k=rng.randint(2, 12))
    reasoning = f"case {number}: " + " ".join(rng.choices(["think", "so", "hm", "…"], k=6))
    if number % 2:  # the answer to a result
        return {
            "reasoning": reasoning,
            "content": f"done {number}: {' '.join(words)}",
            "call": None,
        }
    arguments = {
        "path": f"/src/{number}.txt",
        "content": "\n".join(words),
        "mode": rng.randint(0, 777),
        "tags": words[:2],
    }
    return {"reasoning": reasoning, "content": f"I write {number}.", "call": arguments}


def spoken(number: int) -> list[int]:
    """The tokens of a script."""
    said = case(number)
    text = f"{said['reasoning']}</think>{said['content']}"
    if said["call"] is not None:
        text += '\n\n<|DSML|tool_calls>\n<|DSML|invoke name="write_file">\n'
        for name, value in said["call"].items():
            kind = "true" if isinstance(value, str) else "false"
            shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            text += f'<|DSML|parameter name="{name}" string="{kind}">{shown}</|DSML|parameter>\n'
        text += "</|DSML|invoke>\n</|DSML|tool_calls>"
    return [*ids(text.replace("|DSML|", "\uff5cDSML\uff5c")), EOS]


class ReplayModel:
    """Says `spoken(n)` after a prompt that ends in `#n.` and the opening of an answer.

    Keeps every token in pages and the script's number and place in a ring, so that lost or moved
    state shows as a wrong answer.
    """

    vocab_size = VOCAB_SIZE
    max_position_embeddings = MAX_MODEL_LEN

    def __init__(self) -> None:
        self._think = byte_tokenizer().control_id("<think>")
        self._scripts: dict[int, list[int]] = {}

    def kv_cache_spec(self) -> KVCacheSpec:
        tokens = KVGroup("tokens", "paged", (0,), PAGE_SIZE, PAGE_SIZE * 8)
        return KVCacheSpec(PAGE_SIZE, (tokens, KVGroup("script", "ring", (0,), 1, 16, True)))

    def forward(self, inputs: ForwardInput, kv: KVTensors, experts: object) -> ModelOutput:
        tokens = kv["tokens"].numpy().view(np.int64)[0]
        rings = kv["script"].numpy().view(np.int64)[0]
        ids_, positions = inputs.token_ids.numpy(), inputs.positions.numpy()
        borders = np.asarray(inputs.cu_seqlens_q)
        owner = np.repeat(np.arange(len(borders) - 1), np.diff(borders))
        table, slots = inputs.page_table.numpy(), inputs.seq_slots.numpy()
        tokens[table[owner, positions // PAGE_SIZE], positions % PAGE_SIZE] = ids_
        for row in np.flatnonzero(ids_ == self._think):
            seq, position = owner[row], int(positions[row])
            back = np.arange(max(0, position - TAG_TOKENS), position)
            tail = tokens[table[seq, back // PAGE_SIZE], back % PAGE_SIZE]
            text = byte_tokenizer().decode(tail.tolist(), skip_special=False)
            number = text.rpartition("#")[2].partition(".")[0]
            rings[slots[seq]] = int(number) if number.isdecimal() else -1, position + 1
        wanted = inputs.logits_indices.numpy()
        logits = torch.zeros(len(wanted), VOCAB_SIZE)
        for i, row in enumerate(wanted):
            number, start = (int(each) for each in rings[slots[owner[row]]])
            logits[i, self._token(number, int(positions[row]) + 1 - start)] = 50.0
        return ModelOutput(logits, logits)

    def _token(self, number: int, place: int) -> int:
        script = self._scripts.get(number)
        if script is None:
            if len(self._scripts) > 256:
                self._scripts.clear()
            script = self._scripts[number] = spoken(number) if number >= 0 else [EOS]
        return script[place] if 0 <= place < len(script) else EOS


class TimedCore(EngineCore):
    """Writes down how long its thread was busy in each step, apart from waiting for results."""

    def __init__(self, times_file: str) -> None:
        model = ReplayModel()
        spec = model.kv_cache_spec()
        super().__init__(
            model,
            NoExperts(),
            cache=CacheConfig(
                budget_bytes=NUM_PAGES * spec.bytes_per_page,
                host_budget_bytes=NUM_PAGES * spec.bytes_per_page,
                snapshot_budget_bytes=2048 * 16,
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=NUM_CONVERSATIONS, max_num_batched_tokens=4096, prefill_share=0.5
            ),
            precision="w2",
            vocab_size=VOCAB_SIZE,
            seed=0,
        )
        self._times_file = times_file
        self._times = array("Q", bytes(8 * MAX_STEPS))  # all of it now, so that memory is flat
        self._num_steps = 0

    def step(self) -> Any:
        began = time.thread_time_ns()
        try:
            return super().step()
        finally:
            self._times[self._num_steps % MAX_STEPS] = time.thread_time_ns() - began
            self._num_steps += 1

    def shutdown(self) -> None:
        Path(self._times_file).write_text(json.dumps(self._times[: self._num_steps].tolist()))
        super().shutdown()


class Build:
    """Makes the core in its process."""

    def __init__(self, times_file: str) -> None:
        self.times_file = times_file

    def __call__(self, progress: Progress) -> EngineCore:
        torch.set_num_threads(1)
        return TimedCore(self.times_file)


def serve_demo(port: int, times_file: str) -> None:
    """The server's process, with the demo model."""
    Service(
        lambda on_death: Engine("demo", own_process=True, wait=False, on_death=on_death),
        ServerConfig(port=port),
    ).run()


def serve(port: int, times_file: str) -> None:
    """The server's process."""
    service = Service(
        lambda on_death: Engine.over(
            ProcessHost(Build(times_file)), text_side, model="replay", on_death=on_death
        ),
        ServerConfig(port=port),
    )
    service.run()


# Clients


class Tally:
    """What all conversations have seen."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.first_wrong: list[str] = []
        self.ttft_s: list[float] = []

    def wrong(self, kind: str, detail: str) -> None:
        """Count something that must not happen."""
        self.counts[kind] += 1
        if len(self.first_wrong) < 10:
            self.first_wrong.append(f"{kind}: {detail[:300]}")


async def answer(
    client: httpx.AsyncClient,
    messages: list[dict[str, Any]],
    tally: Tally,
    leave: bool,
    fields: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any] | None:
    """One streamed answer put together as an agent does; None if the reader left."""
    body = {
        "messages": messages,
        "tools": [TOOL],
        "temperature": 0,
        "max_tokens": 4000,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }
    made: dict[str, Any] = {"reasoning": "", "content": "", "calls": {}, "finish": None}
    began, num_chunks = time.perf_counter(), 0
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            tally.wrong("refused", (await response.aread()).decode())
            return None
        done = False
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                done = True
                continue
            if num_chunks == 0:
                tally.ttft_s.append(time.perf_counter() - began)
            num_chunks += 1
            if leave and num_chunks > 20:
                tally.counts["left"] += 1
                return None
            chunk = json.loads(line[6:])
            if "error" in chunk:
                tally.wrong("failed", line)
                return None
            add(made, chunk)
    if not done:
        tally.wrong("unfinished_streams", str(made))
    tally.counts["completion_tokens"] += made["usage"]["completion_tokens"]
    tally.counts["prompt_tokens"] += made["usage"]["prompt_tokens"]
    tally.counts["cached_tokens"] += made["usage"]["prompt_tokens_details"]["cached_tokens"]
    return made


def add(made: dict[str, Any], chunk: dict[str, Any]) -> None:
    """Apply a chunk."""
    made["usage"] = chunk.get("usage") or made.get("usage")
    for choice in chunk["choices"]:
        delta = choice["delta"]
        made["reasoning"] += delta.get("reasoning_content") or ""
        made["content"] += delta.get("content") or ""
        made["finish"] = choice["finish_reason"] or made["finish"]
        for part in delta.get("tool_calls") or ():
            call = made["calls"].setdefault(part["index"], {"name": "", "arguments": ""})
            call["id"] = part.get("id") or call.get("id")
            call["name"] += part["function"].get("name") or ""
            call["arguments"] += part["function"]["arguments"]


def check(made: dict[str, Any], number: int, tally: Tally) -> None:
    """Compare an answer with its script."""
    expected = case(number)
    if made["reasoning"] != expected["reasoning"]:
        tally.wrong("wrong_reasoning", f"{made['reasoning']!r}, not {expected['reasoning']!r}")
    if made["content"].strip() != expected["content"].strip():
        tally.wrong("wrong_content", f"{made['content']!r}, not {expected['content']!r}")
    if expected["call"] is None:
        if made["calls"]:
            tally.wrong("invented_calls", str(made["calls"]))
        if made["finish"] != "stop":
            tally.wrong("wrong_finish_reasons", str(made["finish"]))
        return
    tally.counts["calls_expected"] += 1
    if len(made["calls"]) != 1 or made["finish"] != "tool_calls":
        tally.wrong("lost_calls", f"{number}: {made['calls']}, {made['finish']}")
        return
    call = made["calls"][0]
    with suppress(ValueError):
        if (call["name"], json.loads(call["arguments"])) == ("write_file", expected["call"]):
            tally.counts["calls_right"] += 1
            return
    tally.wrong("malformed_calls", f"{number}: {call}")


async def conversation(client: httpx.AsyncClient, lane: int, until: float, tally: Tally) -> None:
    """Conversations one after the other, until the time is up."""
    rng = random.Random(lane)
    while time.monotonic() < until:
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": "You write files. " * rng.randint(5, 40)}
        ]
        for _ in range(TURNS):
            if time.monotonic() > until:
                return
            number = 2 * rng.randrange(500_000)
            messages.append({"role": "user", "content": f"please do case #{number}."})
            for each in (number, number + 1):
                made = await answer(client, messages, tally, rng.random() < LEAVES)
                if made is None:
                    break
                check(made, each, tally)
                messages.append(said(made))
                if each == number:
                    if not made["calls"]:
                        break
                    result = f"written; go on with #{number + 1}."
                    call_id = made["calls"][0]["id"]
                    messages.append({"role": "tool", "tool_call_id": call_id, "content": result})
            else:
                continue
            break  # an agent that lost an answer begins anew
        tally.counts["conversations"] += 1


async def talk(client: httpx.AsyncClient, lane: int, until: float, tally: Tally) -> None:
    """Requests to a model of random words: whatever it says, the stream and its calls are whole."""
    rng = random.Random(lane)
    while time.monotonic() < until:
        messages = [{"role": "user", "content": f"word {rng.random()} " * rng.randint(1, 20)}]
        choice = rng.choice(["auto", "required"])
        made = await answer(
            client,
            messages,
            tally,
            rng.random() < LEAVES,
            {"max_tokens": rng.randint(4, 60), "tool_choice": choice, "temperature": 1.0},
        )
        if made is None:
            continue
        tally.counts[f"finished_{made['finish']}"] += 1
        if "DSML" in made["content"]:
            tally.wrong("wrong_content", made["content"])
        for call in made["calls"].values() if made["finish"] == "tool_calls" else ():
            tally.counts["calls"] += 1
            try:
                whole = isinstance(json.loads(call["arguments"]), dict)
            except ValueError:
                whole = False
            if not whole or call["name"] != "write_file":
                tally.wrong("malformed_calls", str(call))


def said(made: dict[str, Any]) -> dict[str, Any]:
    """The answer as a message of the next request."""
    message: dict[str, Any] = {"role": "assistant", "content": made["content"]}
    message["reasoning_content"] = made["reasoning"]
    if made["calls"]:
        message["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }
            for call in made["calls"].values()
        ]
    return message


async def watch(
    client: httpx.AsyncClient, server: psutil.Process, samples: list[dict[str, float]]
) -> None:
    """Memory and state every few seconds."""
    began = time.monotonic()
    while True:
        live = (await client.get("/live")).json()
        family = [server, *server.children(recursive=True)]
        rss = [process.memory_info().rss for process in family]
        samples.append(
            {
                "s": round(time.monotonic() - began, 1),
                "rss_mib": round(sum(rss) / 2**20, 1),
                "running": live["stats"]["num_running"],
                "used_pages": live["stats"]["num_used_pages"],
                "generation_tokens": live["stats"]["generation_tokens"],
            }
        )
        await asyncio.sleep(SAMPLE_S)


Lane = Callable[[httpx.AsyncClient, int, float, Tally], Coroutine[None, None, None]]


async def drive(
    url: str, server: psutil.Process, minutes: float, lane_of: Lane, num_lanes: int
) -> tuple[Tally, list[dict[str, float]], dict[str, Any], float]:
    """All conversations; the tally, the samples, the last state and the seconds it took."""
    tally, samples = Tally(), []
    limits = httpx.Limits(max_connections=NUM_CONVERSATIONS + 4)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        await ready(client)
        watcher = asyncio.create_task(watch(client, server, samples))
        began = time.monotonic()
        until = began + 60 * minutes
        lanes = (lane_of(client, lane, until, tally) for lane in range(num_lanes))
        await asyncio.gather(*lanes)
        took_s = time.monotonic() - began
        watcher.cancel()
        for _ in range(100):
            live: dict[str, Any] = (await client.get("/live")).json()
            if live["stats"]["num_running"] + live["stats"]["num_waiting"] == 0:
                break
            await asyncio.sleep(0.1)
    return tally, samples, live, took_s


async def ready(client: httpx.AsyncClient) -> None:
    """Return when the server takes requests."""
    for _ in range(600):
        with suppress(httpx.ConnectError):
            if (await client.get("/ready")).status_code == 200:
                return
        await asyncio.sleep(0.1)
    raise TimeoutError("the server was not ready within a minute")


def flatness(samples: list[dict[str, float]]) -> dict[str, float]:
    """Memory of the second half against the first quarter's end: what a leak would raise."""
    rss = [sample["rss_mib"] for sample in samples]
    settled = rss[len(rss) // 4 :]
    half = len(settled) // 2
    first, second = settled[:half] or rss, settled[half:] or rss
    return {
        "first_mib": rss[0],
        "settled_mib": round(sum(first) / len(first), 1),
        "late_mib": round(sum(second) / len(second), 1),
        "max_mib": max(rss),
    }


def percentiles(values: list[float], unit: float) -> dict[str, float]:
    """Median, 99th percentile and maximum, in units."""
    p50, p99 = np.percentile(values, [50, 99])
    return {
        "p50": round(p50 / unit, 3),
        "p99": round(p99 / unit, 3),
        "max": round(max(values) / unit, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument(
        "--demo", action="store_true", help="the demo model instead; its result goes beside"
    )
    args = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    num_lanes = NUM_DEMO_LANES if args.demo else NUM_CONVERSATIONS
    times_file = args.output.with_suffix(".times")
    process = multiprocessing.get_context("spawn").Process(
        target=serve_demo if args.demo else serve, args=(port, str(times_file))
    )
    process.start()
    assert process.pid is not None
    load_before = psutil.getloadavg()[0]
    try:
        url = f"http://127.0.0.1:{port}"
        tally, samples, live, took_s = asyncio.run(
            drive(
                url,
                psutil.Process(process.pid),
                args.minutes,
                talk if args.demo else conversation,
                num_lanes,
            )
        )
    finally:
        process.terminate()
        process.join(60)
    result = report(tally, samples, live, took_s, load_before)
    result["conversations_at_once"] = num_lanes
    if args.demo:
        result["what"] = "streaming requests with tools to the demo model"
        args.output = args.output.with_stem(args.output.stem + "_demo")
    else:
        step_ns = json.loads(times_file.read_text())
        times_file.unlink()
        result["host_cpu_ms_per_step"] = percentiles(step_ns, 1e6)
    command = f"python bench/load.py --minutes {args.minutes:g}{' --demo' if args.demo else ''}"
    results.write(
        args.output,
        results.report(
            command, rows(result), hardware=results.this_machine(), more={"seen": result}
        ),
    )
    print(json.dumps({k: v for k, v in result.items() if k != "samples"}, indent=2))
    if any(result["failures"].values()) or result["leaked_pages"]:
        raise SystemExit(1)


def report(
    tally: Tally,
    samples: list[dict[str, float]],
    live: dict[str, Any],
    took_s: float,
    load_before: float,
) -> dict[str, Any]:
    """What was seen, as the file has it."""
    stats = live["stats"]
    return {
        "what": "streaming conversations with tools; a replaying model, the real core and server",
        "load_average_before": round(load_before, 1),
        "minutes": round(took_s / 60, 2),
        "tokens_per_s": round(stats["generation_tokens"] / took_s, 1),
        "failures": {name: tally.counts[name] for name in FAILURES},
        "first_failures": tally.first_wrong,
        "counts": {k: v for k, v in sorted(tally.counts.items()) if k not in FAILURES},
        "time_to_first_chunk_s": percentiles(tally.ttft_s, 1.0),
        "num_steps": stats["num_steps"],
        "num_preemptions": stats["num_preemptions"],
        "leaked_pages": stats["num_used_pages"],
        "leaked_host_blocks": stats["num_used_host_blocks"],
        "parser": live["server"],
        "memory": flatness(samples),
        "samples": samples[:: max(1, len(samples) // 20)],
    }


def rows(seen: Mapping[str, Any]) -> list[results.Row]:
    """The figures that are judged, from what was seen."""
    note = f"{seen['conversations_at_once']} at once, {seen['minutes']} min"
    memory = seen["memory"]
    growth = float(memory["late_mib"] - memory["settled_mib"])
    found = [
        results.Row(
            case="tokens generated", value=float(seen["tokens_per_s"]), unit="tokens/s",
            better="higher",
            target=1000.0 if "host_cpu_ms_per_step" in seen else None, note=note,
        ),
        results.Row(
            case="lost or malformed calls and other failures", value=sum(seen["failures"].values()),
            unit="answers", better="lower", floor=0.0, target=0.0, note=note,
        ),
        results.Row(
            case="pages in use at the end", value=seen["leaked_pages"], unit="pages",
            better="lower", floor=0.0, target=0.0,
        ),
        results.Row(
            case="growth of the server's memory once settled", value=growth, unit="MiB",
            better="lower", floor=0.0,
        ),
    ]  # fmt: skip
    for name, value in seen.get("host_cpu_ms_per_step", {}).items():
        case = f"host CPU time of a step, {name}"
        found.append(results.Row(case=case, value=float(value), unit="ms", better="lower"))
    return found


if __name__ == "__main__":
    main()
