"""Experts in host memory and on disk behind a pool on one GPU: what steps and prompts cost.

    python -m bench.experts [--layers N] [--fp4-layers N] [--disk-layers N] [--parts A,B] [--out F]

V4-Flash with dummy weights, cut to layers whose rows fit host memory (1.7 GiB a layer of 2-bit
rows, 3.2 of FP4). The router's popularity is set so that a pool has the stated hit rate; rate, skew
and seed stand with each figure. Every case is timed beside the same step with all experts resident
and compared with it bit for bit, and the link is measured in the same run. What fails is printed
and the rest goes on.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from bench.experts_disk import first_layers, one_read, over_a_file, start, write_rows
from bench.experts_rig import (
    GIB,
    SEED,
    TOP_K,
    CapturedStep,
    Rig,
    chunk_of,
    compare,
    link_rate,
)
from bench.experts_rows import missed, rows
from bench.gpu import milliseconds, open_gpu
from bench.gpu_model import PAGE, kernels_of, state
from bench.timeline import middle
from moet.bench.results import report, write
from moet.errors import ConfigError
from moet.kernels.device_gemm import Device
from moet.kernels.expert_cache_device import bring_on_device, fetch_on_device, resolve_on_device
from moet.models.base import ResidentProvider
from moet.runtime.experts.gpu import CachedExperts, HostSide
from moet.runtime.experts.layer_stream import LayerStream

WARM_STEPS, STEPS, SLOW_STEPS = 60, 200, 40
TOKENS_A_STEP = {1: 1.0, 3: 2.6}  # rows of a step -> tokens that it yields
LARGE_POOL, SMALL_POOL = 0.193, 0.152  # of all rows: 14 and 11 GiB of 72.6
WHOLE_MODEL = 43  # layers
START_ROWS = 1024  # of a file from which a start is timed

Results = dict[str, Any]


@dataclass
class Bench:
    """What the parts share."""

    device: Device
    layers: int
    fp4_layers: int
    disk_layers: int
    folder: Path
    rig: Rig = field(init=False)
    host: HostSide = field(init=False)
    link: float = field(init=False)
    skews: dict[tuple[int, float], float] = field(default_factory=dict)
    resident: dict[int, CapturedStep] = field(default_factory=dict)
    fp4: tuple[Rig, HostSide] | None = None
    files: dict[Path, str] = field(default_factory=dict)

    @property
    def num_file_rows(self) -> int:
        return self.disk_layers * (len(self.rig.bases) // self.layers)

    def slots(self, share: float, layers: int | None = None) -> int:
        num_experts = len(self.rig.bases) // self.layers
        return int(share * num_experts * (layers or self.layers))


def open_bench(bench: Bench) -> Results:
    begin = perf_counter()
    bench.rig = Rig(bench.device, bench.layers)
    built_s = perf_counter() - begin
    try:
        arena, found = bench.rig.to_host()
    except ConfigError as error:  # fewer layers, then, as far as memory can be pinned
        if bench.layers <= 8:
            raise
        print(error, flush=True)
        del bench.rig
        gc.collect()
        torch.cuda.empty_cache()
        bench.layers = bench.layers * 2 // 3
        bench.disk_layers = min(bench.disk_layers, bench.layers)
        bench.fp4_layers = bench.fp4_layers * 2 // 3
        return open_bench(bench)
    bench.host, bench.link = HostSide(arena=arena), link_rate(arena)
    bench.resident = {n: CapturedStep(bench.rig, bench.rig.resident, n) for n in (1, 3)}
    return {
        **found,
        "layers": bench.layers,
        "built s": round(built_s, 1),
        "link GB/s": round(bench.link / 1e9, 2),
    }


# Decoding


def timed(
    rig: Rig,
    link: float,
    experts: CachedExperts,
    step: CapturedStep,
    resident: CapturedStep,
    *,
    warm: int = WARM_STEPS,
    num_steps: int = STEPS,
) -> Results:
    """Steps with a pool and, in turn with them, the same ones with everything resident."""
    num_rows = len(step.ids)
    for _ in range(warm):
        step(rig.tokens(num_rows))
    hits, misses = experts.counts()
    times: list[float] = []
    base: list[float] = []
    for n in range(num_steps):
        tokens = rig.tokens(num_rows)
        turns = [(step, times), (resident, base)]
        for run, taken in turns if n % 2 else reversed(turns):
            taken.append(run(tokens))
    after = experts.counts()
    asked, missed = after[0] + after[1] - hits - misses, after[1] - misses
    step_ms, base_ms = sum(times) / num_steps, sum(base) / num_steps
    floor_ms = missed / num_steps * rig.form.row_bytes / link * 1e3
    layers, whole = len(experts.layers), WHOLE_MODEL / len(experts.layers)
    return {
        "slots": len(experts.tables.row_of),
        "share %": round(100 * len(experts.tables.row_of) / len(experts.bases), 1),
        "skew": round(rig.skew, 3),
        "hits %": round(100 * (1 - missed / max(1, asked)), 2),
        "step ms": round(step_ms, 3),
        "resident ms": round(base_ms, 3),
        "missed bytes / link ms": round(floor_ms, 3),
        "target ms": round(base_ms + 1.25 * floor_ms, 3),
        "within target": step_ms <= base_ms + 1.25 * floor_ms,
        "us a layer beyond resident and floor": round(
            (step_ms - base_ms - floor_ms) * 1e3 / layers, 1
        ),
        "tok/s, 43 layers": round(TOKENS_A_STEP.get(num_rows, 1.0) / (step_ms * whole) * 1e3, 1),
    }


def judged(bench: Bench, experts: CachedExperts, num_rows: int, num_steps: int = STEPS) -> Results:
    """A case of decoding: timed, then compared bit for bit."""
    rig, resident = bench.rig, bench.resident[num_rows]
    rig.device.error.zero_()
    step = CapturedStep(rig, experts, num_rows)
    found = timed(rig, bench.link, experts, step, resident, num_steps=num_steps)
    different = compare(rig, step, resident)
    return found | {
        "same bits": different.same,
        "resident twice the same": different.twice,
        **({"difference": different.what} if different.what else {}),
        "error word": int(rig.device.error),
    }


def find_skew(bench: Bench, num_rows: int, rate: float) -> float:
    """The popularity at which the large pool has this hit rate."""
    rig, low, high = bench.rig, 0.5, 4.5
    experts = rig.pool(bench.host, bench.slots(LARGE_POOL))
    step = CapturedStep(rig, experts, num_rows)
    for _ in range(6):
        rig.set_skew((low + high) / 2)
        for _ in range(40):
            step(rig.tokens(num_rows))
        hits, misses = experts.counts()
        for _ in range(25):
            step(rig.tokens(num_rows))
        after = experts.counts()
        asked = after[0] + after[1] - hits - misses
        if (after[0] - hits) / max(1, asked) < rate:
            low = rig.skew
        else:
            high = rig.skew
    return (low + high) / 2


def decode(bench: Bench) -> Results:
    """The pools of the table, one row and three, at two hit rates."""
    found: Results = {}
    for num_rows in (1, 3):
        for rate in (0.96, 0.987):
            skew = bench.skews[num_rows, rate] = find_skew(bench, num_rows, rate)
            bench.rig.set_skew(skew)
            for share in (LARGE_POOL, SMALL_POOL) if rate == 0.96 else (LARGE_POOL,):
                name = f"pool {100 * share:.1f} %, {num_rows} rows, {100 * rate:.1f} % aimed at"
                experts = bench.rig.pool(bench.host, bench.slots(share))
                found[name] = judged(bench, experts, num_rows)
                print(name, found[name], flush=True)
    return found


def uniform(bench: Bench) -> Results:
    """Routing without any favourites, and the smallest pool there is."""
    bench.rig.set_skew(0.0)
    found: Results = {}
    for name, slots in (("pool 15.2 %", bench.slots(SMALL_POOL)), ("one token's set", TOP_K)):
        experts = bench.rig.pool(bench.host, slots)
        found[f"{name}, uniform, 1 row"] = judged(bench, experts, 1, SLOW_STEPS)
        print(name, found[f"{name}, uniform, 1 row"], flush=True)
    return found


def launches(bench: Bench) -> Results:
    """Where the time of a step with a pool goes, and what its two kernels take by themselves."""
    rig = bench.rig
    rig.set_skew(bench.skews.get((1, 0.96), 2.5))
    experts = rig.pool(bench.host, bench.slots(LARGE_POOL))
    found: Results = {}
    for num_rows in (1, 3):
        for name, provider in (("pool", experts), ("resident", rig.resident)):
            step = CapturedStep(rig, provider, num_rows)
            for _ in range(30):
                step(rig.tokens(num_rows))
            count, lines = kernels_of(step.graph.replay, 16)
            layer = middle(step.graph.replay)
            found[f"{num_rows} rows, {name}"] = {"launches": count, "top": lines, "part": layer}
            print(num_rows, name, count, *lines, *layer, sep="\n", flush=True)
    ids = torch.arange(TOP_K, device="cuda").view(1, -1)
    cache, num_experts = experts.cache, experts.num_experts
    found["resolve, hits alone, us"] = repeated(
        lambda: resolve_on_device(
            cache.launcher,
            experts.tables,
            ids,
            cache.wanted,
            first_row=0,
            num_experts=num_experts,
            error=cache.error,
        )
    )
    listed = torch.zeros(TOP_K + 1, 4, dtype=torch.int32, device="cuda")
    listed[:TOP_K, 0], listed[:TOP_K, 1] = experts.tables.slot_of[ids[0]], ids[0]
    num_listed = torch.tensor([TOP_K], dtype=torch.int32, device="cuda")
    found["resolve and fetch in one launch, hits alone, us"] = repeated(
        lambda: bring_on_device(
            cache.launcher,
            cache.pool,
            experts.tables,
            cache.host,
            cache.wanted,
            ids,
            first_row=0,
            num_experts=num_experts,
            error=cache.error,
            lists=[(listed, num_listed)],
        )
    )
    for rows_wanted in (1, 2, 6):
        for ctas in (8, 16):
            cache.wanted.rows[:rows_wanted] = torch.arange(rows_wanted)
            cache.wanted.slots[:rows_wanted] = torch.arange(rows_wanted)
            cache.wanted.count.fill_(rows_wanted)
            taken_us = repeated(
                lambda n=ctas: fetch_on_device(  # type: ignore[misc]
                    cache.launcher,
                    cache.pool,
                    experts.tables,
                    cache.host,
                    cache.wanted,
                    layer=0,
                    error=cache.error,
                    num_ctas=n,
                )
            )
            rate = rows_wanted * rig.form.row_bytes / taken_us / 1e3
            found[f"fetch of {rows_wanted}, {ctas} CTAs"] = {"us": taken_us, "GB/s": round(rate, 1)}
    print({k: v for k, v in found.items() if "rows" not in k}, flush=True)
    return found


def repeated(call: Callable[[], None], times: int = 20) -> float:
    """Microseconds of one of several launches in a graph."""
    return round(1e3 * milliseconds(call, repeats=times, rounds=1), 2)


# Prompts


def prompt(
    rig: Rig, host: HostSide, link: float, *, length: int, chunk: int, resident: bool
) -> Results:
    """A prompt in chunks, every layer's experts streamed once a chunk."""
    layers = rig.layers
    pool = rig.pool(host, TOP_K)
    stream = LayerStream(rig.form, rig.bases, layers, pool.copy_rows)
    kv, tokens = state(rig.model, length // PAGE, 2), rig.tokens(length)

    def run(provider: ResidentProvider) -> tuple[float, Tensor]:
        begin, out = perf_counter(), torch.empty(0)
        for first in range(0, length, chunk):
            part = chunk_of(tokens[first : first + chunk], first)
            out = rig.model.forward(part, kv, provider).logits
        torch.cuda.synchronize()
        return perf_counter() - begin, out

    found: Results = {}
    with torch.inference_mode():
        run(stream)
        seconds, logits = run(stream)
        if resident:
            base_s, expected = run(rig.resident)
            found = {
                "resident tok/s": round(length / base_s),
                "same bits": bool(torch.equal(expected, logits)),
            }
    moved = -(-length // chunk) * rig.total_bytes
    whole = WHOLE_MODEL / len(layers)
    return found | {
        "chunk": chunk,
        "tok/s": round(length / seconds),
        "tok/s, 43 layers": round(length / seconds / whole),
        "of link rate %": round(100 * moved / seconds / link, 1),
    }


def prefill(bench: Bench) -> Results:
    bench.rig.set_skew(0.0)
    found = {
        "prompt of 32768, W2": prompt(
            bench.rig, bench.host, bench.link, length=32768, chunk=16384, resident=True
        )
    }
    print(found, flush=True)
    return found


def open_fp4(bench: Bench) -> tuple[Rig, HostSide]:
    if bench.fp4 is None:
        rig = Rig(bench.device, bench.fp4_layers, "fp4")
        arena, found = rig.to_host()
        print(f"FP4 rows of {bench.fp4_layers} layers", found, flush=True)
        bench.fp4 = rig, HostSide(arena=arena)
    return bench.fp4


def fp4_prefill(bench: Bench) -> Results:
    rig, host = open_fp4(bench)
    rig.set_skew(0.0)
    found = {
        f"prompt of 32768, FP4, {bench.fp4_layers} layers": prompt(
            rig, host, bench.link, length=32768, chunk=16384, resident=True
        )
    }
    print(found, flush=True)
    return found


# Policies


def policies(bench: Bench) -> Results:
    """`fp4` with rows in host memory, and `gate` with a quarter of the rows below tau: what a step
    costs on average, each against the resident step of its first pass."""
    rig, host = open_fp4(bench)
    rig.set_skew(bench.skews.get((1, 0.96), 2.5))
    layers, num_experts = rig.layers, len(rig.bases) // bench.fp4_layers
    experts = rig.pool(host, int(LARGE_POOL * len(rig.bases)))
    again = CapturedStep(rig, experts, 1)
    own = CapturedStep(rig, rig.resident, 1)
    found: Results = {"fp4, pool 19.3 %, 1 row": timed(rig, bench.link, experts, again, own)}
    different = compare(rig, again, own)
    found["fp4, pool 19.3 %, 1 row"]["same bits"] = different.same
    first = CapturedStep(rig, w2_of(bench, layers), 1)
    slots = bench.slots(LARGE_POOL, bench.fp4_layers)
    pool = bench.rig.pool(bench.host, slots, layers)
    cached = CapturedStep(rig, pool, 1)
    chances = []
    for _ in range(WARM_STEPS):
        cached(rig.tokens(1))
        chances.append(float(torch.softmax(cached.logits, -1).max()))
    tau = sorted(chances)[len(chances) // 4]
    before, before_fp4, fired, total_ms, base_ms = (
        pool.counts()[1],
        experts.counts()[1],
        0,
        0.0,
        0.0,
    )
    for _ in range(2 * STEPS):
        tokens = rig.tokens(1)
        total_ms += cached(tokens)
        if float(torch.softmax(cached.logits, -1).max()) <= tau:
            fired += 1
            total_ms += again(tokens)
        base_ms += first(tokens)
    missed = (pool.counts()[1] - before) * pool.form.row_bytes
    missed += (experts.counts()[1] - before_fp4) * rig.form.row_bytes
    floor_ms = missed / bench.link * 1e3 / (2 * STEPS)
    step_ms, base_ms = total_ms / (2 * STEPS), base_ms / (2 * STEPS)
    found["gate, a quarter below tau, 1 row"] = {
        "layers": len(layers),
        "experts of a layer": num_experts,
        "fired %": round(100 * fired / (2 * STEPS), 1),
        "step ms": round(step_ms, 3),
        "resident ms": round(base_ms, 3),
        "missed bytes / link ms": round(floor_ms, 3),
        "target ms": round(1.6 * base_ms + 1.25 * floor_ms, 3),
        "within target": step_ms <= 1.6 * base_ms + 1.25 * floor_ms,
    }
    print(found, flush=True)
    return found


def w2_of(bench: Bench, layers: list[int]) -> ResidentProvider:
    """The 2-bit rows of the first layers, resident."""
    assert layers == bench.rig.layers[: len(layers)]
    return bench.rig.resident


# Rows in a file


def kept_rows(bench: Bench, folder: Path) -> Path:
    """A file of the rows of the layers that are tried over a file."""
    path = folder / "moet-bench-rows.w2"
    if path not in bench.files:
        seconds = write_rows(bench.host.arena, path, bench.num_file_rows)
        size = bench.num_file_rows * bench.rig.form.row_bytes / GIB
        bench.files[path] = f"{size:.2f} GiB written in {seconds:.1f} s"
        print(path, bench.files[path], flush=True)
    return path


def from_file(bench: Bench) -> Results:
    path = kept_rows(bench, bench.folder)
    found = start(bench.rig, path, min(bench.num_file_rows, START_ROWS))
    print(found, flush=True)
    return {"start from a file in the page cache": found}


def over_disk(bench: Bench) -> Results:
    path = kept_rows(bench, bench.folder)
    found: Results = {
        "one row read alone, ms": one_read(path, bench.rig.form.row_bytes, bench.num_file_rows)
    }
    print(found, flush=True)
    small = first_layers(bench.rig, bench.disk_layers)
    found |= over_a_file(small, bench.host, path, LARGE_POOL)
    return found


PARTS: dict[str, Callable[[Bench], Results]] = {
    "open": open_bench,
    "decode": decode,
    "disk": over_disk,
    "prefill": prefill,
    "uniform": uniform,
    "fp4": fp4_prefill,
    "policies": policies,
    "start": from_file,
    "launches": launches,
}


def file_of(results: Results, bench: Bench, commit: str) -> Results:
    """The result file so far."""
    opened, made = results.get("open", {}), rows(results)
    more = {
        "model": f"deepseek-v4-flash, first {bench.layers} of 43 layers, w2, dummy weights of seed "
        f"{SEED}, experts made popular by the skew that each row states (moet/models/dummy.py)",
        "link_gb_per_s": opened.get("link GB/s"),
        "filled_and_pinned_gib_per_s": opened.get("filled and pinned GiB/s"),
        "faults": {name: text for name, text in results.items() if isinstance(text, str)},
        "missed": missed(made),
        "kernels": {
            name: case["top"]
            for name, case in results.get("launches", {}).items()
            if isinstance(case, dict) and "top" in case
        },
    }
    command = " ".join(["python -m bench.experts", *sys.argv[1:]])
    content = report(command, made, hardware=torch.cuda.get_device_name(), more=more)
    return content | ({} if commit == "unknown" else {"commit": commit})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--fp4-layers", type=int, default=10)
    parser.add_argument("--disk-layers", type=int, default=8)
    parser.add_argument("--folder", type=Path, default=Path("/tmp"), help="for a file of rows")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--seconds", type=float, default=250.0, help="after which no part begins")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    device = open_gpu()
    results: Results = {}
    bench = Bench(device, args.layers, args.fp4_layers, args.disk_layers, args.folder)
    out = args.out or Path(os.environ.get("OUT", ".")) / "experts.json"
    started = perf_counter()
    for part in dict.fromkeys(["open", *args.parts.split(",")]):
        begin = perf_counter()
        if begin - started > args.seconds:
            results[f"{part} LEFT OUT"] = f"{args.seconds:g} s are over"
            continue
        try:
            results[part] = PARTS[part](bench)
        except Exception:
            results[f"{part} FAILED"] = traceback.format_exc()
            print(traceback.format_exc(), flush=True)
        print(f"-- {part}: {perf_counter() - begin:.1f} s", flush=True)
        gc.collect()
        with suppress(RuntimeError):  # a device that is lost has said so above
            torch.cuda.empty_cache()
        write(out, file_of(results, bench, args.commit))
    for path in bench.files:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
