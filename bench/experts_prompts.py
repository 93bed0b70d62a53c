"""Prompts whose experts are streamed by layer, and policies of precision. For bench.experts."""

from __future__ import annotations

from time import perf_counter

import torch
from torch import Tensor

from bench.experts_decode import timed
from bench.experts_parts import (
    LARGE_POOL,
    STEPS,
    WARM_STEPS,
    WHOLE_MODEL,
    Bench,
    Results,
)
from bench.experts_rig import (
    TOP_K,
    CapturedStep,
    Rig,
    chunk_of,
    compare,
)
from bench.gpu_model import PAGE, state
from moet.models.base import ResidentProvider
from moet.runtime.experts.gpu import HostSide
from moet.runtime.experts.layer_stream import LayerStream


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
