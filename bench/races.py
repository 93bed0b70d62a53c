"""Whether prefill GEMMs give the same bits every time on a GPU, and how fast: builds side by side.

    python -m bench.races [--cubins FOLDER ...] [--launches N] [--out FILE]

Every column block of every token has a scale of its own, so that one read too late shows. A case is
launched again and again, and what differs from its first result is counted on the device.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.gpu import milliseconds, open_gpu
from bench.kernels.prefill import EXPERTS, TOP_K, routed
from bench.kernels.rig import DEVICE, random_pool
from moet.kernels import prefill_gemm, stream_experts
from moet.kernels.cubin import Kernels
from moet.kernels.layout import W2Rows
from moet.kernels.stream_experts import ExpertPool
from moet.kernels.stream_gemm import StreamLinear

TOKENS = (300, 1000, 2048, 4096)  # of a storm's launches
TIMED = (300, 512, 1024, 2048, 8192)
LONGEST = TIMED[-1]
DENSE = ((1536, 4096), (32768, 1024), (4096, 8192))
Call = Callable[[], Tensor]


def scaled_rows(rows: int, columns: int) -> Tensor:
    """Random bf16 rows whose blocks of 128 columns have exponents of their own."""
    x = torch.randn(rows, columns // 128, 128, device=DEVICE)
    powers = 2.0 ** torch.randint(-4, 5, (rows, columns // 128, 1), device=DEVICE)
    return (x * powers).view(rows, columns).bfloat16()


def of_experts(
    kernels: Kernels, pool: ExpertPool, error: Tensor, tokens: int, few: bool = False
) -> dict[str, Call]:
    """Both products of a layer's experts. Seeded: every build gets the same rows. few: of tiles."""
    torch.manual_seed(tokens)
    ids, slot_of = routed(tokens, 0.5), torch.arange(EXPERTS, device=DEVICE)
    rows = prefill_gemm.FEW_ROWS if few else prefill_gemm.tile_rows(kernels)
    work = prefill_gemm.plan_chunk(kernels, ids, slot_of, rows)
    x, h = scaled_rows(tokens, 4096), scaled_rows(tokens * TOP_K, 2048)
    x_tiles = prefill_gemm.make_tiles(kernels, x, work=work, top_k=TOP_K, rows=rows)
    h_tiles = prefill_gemm.make_tiles(kernels, h, work=work, rows=rows)
    up = partial(prefill_gemm.gate_up, kernels, pool, x_tiles, work, pair_weight=None, limit=10.0)
    down = partial(prefill_gemm.down, kernels, pool, h_tiles, work)
    return {
        f"w13 of {tokens} tokens": partial(up, error=error),
        f"w2 of {tokens} tokens": partial(down, error=error),
    }


def by_streams(kernels: Kernels, pool: ExpertPool, error: Tensor, tokens: int) -> dict[str, Call]:
    """The same products by the streaming kernels, which may be faster for experts of few rows."""
    torch.manual_seed(tokens)
    ids, slot_of = routed(tokens, 0.5), torch.arange(EXPERTS, device=DEVICE)
    work = stream_experts.plan(kernels, ids, slot_of, error=error)
    x, h = scaled_rows(tokens, 4096), scaled_rows(tokens * TOP_K, 2048)
    codes, scale = stream_experts.quantise(kernels, x)
    up = partial(pool.gate_up, kernels, codes, scale, work, top_k=TOP_K)
    down = partial(pool.down, kernels, h, work)
    return {
        f"w13 of {tokens} tokens": partial(up, pair_weight=None, limit=10.0, error=error),
        f"w2 of {tokens} tokens": partial(down, error=error),
    }


def of_dense(kernels: Kernels, error: Tensor, rows: int, n: int, k: int) -> dict[str, Call]:
    """A product with fp8 weights."""
    torch.manual_seed(n)
    plane = torch.randint(0, 0x60, (n, k), dtype=torch.uint8, device=DEVICE)
    scale = torch.full((n // 128, k // 128), 2.0**-8, device=DEVICE)
    weight = StreamLinear("fp8", plane, scale, n, k)
    tiles = prefill_gemm.make_tiles(kernels, scaled_rows(rows, k))
    call = partial(prefill_gemm.linear, kernels, weight, tiles, rows, error=error)
    return {f"fp8 {rows} x {n}x{k}": call}


def storm(call: Call, wanted: Tensor, launches: int) -> int:
    """How many of so many launches gave other bits."""
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(launches):
        wrong += (call() != wanted).any()
    return int(wrong)


def first_result(call: Call) -> Tensor:
    """What most of three launches give."""
    a, b, c = call(), call(), call()
    return a if torch.equal(a, b) or torch.equal(a, c) else b


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cubins", type=Path, nargs="*", default=[], help="beside the bound ones")
    parser.add_argument("--launches", type=int, default=1000, help="of a case")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = open_gpu()
    torch.manual_seed(0)
    pool = random_pool(W2Rows(4096, 2048), EXPERTS)
    results: dict[str, Any] = {"hardware": torch.cuda.get_device_name()}
    kept: dict[str, Tensor] = {}
    forms = [("bound", Kernels(DEVICE), False)]
    forms += [(root.name, Kernels(DEVICE, root), False) for root in args.cubins]
    forms.append(("bound, narrow tiles", forms[0][1], True))
    for form, kernels, few in forms:
        calls: dict[str, Call] = {}
        if not few:
            calls |= of_dense(kernels, device.error, 1000, 4096, 8192)
        for tokens in TOKENS:
            calls |= of_experts(kernels, pool, device.error, tokens, few)
        found: dict[str, Any] = {"other bits than bound": 0, "wrong": {}}
        for name, call in calls.items():
            made = first_result(call)
            found["wrong"][name] = storm(call, made, args.launches)
            found["other bits than bound"] += not torch.equal(made, kept.setdefault(name, made))
        calls = {}
        for tokens in TIMED:
            calls |= of_experts(kernels, pool, device.error, tokens, few)
        for n, k in () if few else DENSE:
            calls |= of_dense(kernels, device.error, LONGEST, n, k)
        if not few:
            x = scaled_rows(LONGEST, 4096)
            calls["tiles of 8192 x 4096"] = lambda x=x, k=kernels: (
                prefill_gemm.make_tiles(k, x).data
            )
        found["us"] = {
            name: round(1e3 * milliseconds(call, repeats=4, rounds=5), 1)
            for name, call in calls.items()
        }
        results[form] = found
        print(form, json.dumps(found), flush=True)
    streamed: dict[str, Any] = {}
    for tokens in (300, 512):
        for name, call in by_streams(forms[0][1], pool, device.error, tokens).items():
            us = round(1e3 * milliseconds(call, repeats=4, rounds=5), 1)
            same = torch.equal(call(), kept[name]) if name in kept else None
            streamed[name] = us, same
    results["streams: us, same bits"] = streamed
    print("streams: us, same bits", json.dumps(streamed), flush=True)
    results["error"] = int(device.error)
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
