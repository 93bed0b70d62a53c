"""Steps with a pool of experts beside the same ones with everything resident. For bench.experts."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench.experts_parts import (
    LARGE_POOL,
    SLOW_STEPS,
    SMALL_POOL,
    STEPS,
    TOKENS_A_STEP,
    WARM_STEPS,
    WHOLE_MODEL,
    Bench,
    Results,
)
from bench.experts_rig import (
    TOP_K,
    CapturedStep,
    Rig,
    compare,
)
from bench.gpu import milliseconds
from bench.gpu_model import kernels_of
from bench.timeline import middle
from moet.kernels.expert_cache_device import bring_on_device, fetch_on_device, resolve_on_device
from moet.runtime.experts.gpu import CachedExperts


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
    alone = kernels_alone(rig, experts)
    print(alone, flush=True)
    return found | alone


def kernels_alone(rig: Rig, experts: CachedExperts) -> Results:
    """The kernels that bring experts, by themselves."""
    found: Results = {}
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
    return found


def repeated(call: Callable[[], None], times: int = 20) -> float:
    """Microseconds of one of several launches in a graph."""
    return round(1e3 * milliseconds(call, repeats=times, rounds=1), 2)
