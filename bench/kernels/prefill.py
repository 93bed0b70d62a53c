"""Prefill: routed experts and dense products of a chunk of 8,192 tokens, and what is around."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from bench.kernels.rig import DEVICE, Bench, random_pool
from moet.kernels import prefill_gemm
from moet.kernels.layout import ExpertRows, Mxfp4Rows, W2Rows
from moet.kernels.nvfp4_rows import Nvfp4Rows
from moet.kernels.stream_experts import codec_of, combine
from moet.kernels.stream_gemm import StreamLinear

EXPERTS, TOP_K = 256, 6


def routed(tokens: int, skew: float) -> Tensor:
    """[tokens, TOP_K] distinct experts for each token, drawn with weights rank ** -skew."""
    ranks = torch.arange(1, EXPERTS + 1, device=DEVICE).float()
    noise = -torch.rand(tokens, EXPERTS, device=DEVICE).log().neg().log()
    return (noise - skew * ranks.log()).topk(TOP_K, 1).indices.contiguous()


def experts(
    bench: Bench,
    format: ExpertRows,
    tokens: int,
    target: float,
    *,
    cut: int = 0,
    skew: float = 0.0,
) -> None:
    """The two products of a layer and the whole of it. cut: rows of a tile, the most by default.
    skew: of the experts' popularity, see `routed`."""
    d, i = format.hidden_size, format.moe_intermediate_size
    kernels, error = bench.kernels, bench.error
    pool, ids = random_pool(format, EXPERTS), routed(tokens, skew)
    slot_of = torch.arange(EXPERTS, device=DEVICE)
    rows = cut or prefill_gemm.entry_rows(kernels, codec_of(format))
    work = prefill_gemm.plan_rows(ids, slot_of, rows)
    x = torch.randn(tokens, d, device=DEVICE).bfloat16()
    weights = torch.rand(tokens, TOP_K, device=DEVICE)
    h = torch.randn(tokens * TOP_K, i, device=DEVICE).bfloat16()
    parts = torch.randn(tokens * TOP_K, d, device=DEVICE).bfloat16()
    x_tiles = prefill_gemm.make_tiles(kernels, x, work=work, top_k=TOP_K)
    h_tiles = prefill_gemm.make_tiles(kernels, h, work=work)

    def gate_up() -> Tensor:
        return prefill_gemm.gate_up(
            kernels, pool, x_tiles, work, pair_weight=weights, limit=10.0, error=error
        )

    def down() -> Tensor:
        return prefill_gemm.down(kernels, pool, h_tiles, work, error=error)

    def whole() -> Tensor:
        return prefill_gemm.mixture(
            kernels, pool, x, ids, weights, slot_of, limit=10.0, error=error
        )

    flops = 2.0 * tokens * TOP_K * d * i
    shape = f"{tokens} tokens {d}x{i}"
    shape += (f" tiles of {cut}" if cut else "") + (f" skew {skew}" if skew else "")
    name = f"prefill {format.name}"
    up_us, down_us = bench.time_us([gate_up] * 2), bench.time_us([down] * 2)
    bench.computed(f"{name} w13", shape, up_us, 2 * flops, target)
    bench.computed(f"{name} w2", shape, down_us, flops, target)
    if cut:
        return
    layer_us = bench.time_us([whole] * 2)  # sorting, tiles and the sum included
    bench.computed(f"{name} layer", shape, layer_us, 3 * flops, target)
    around: dict[str, Callable[[], object]] = {
        "plan": partial(prefill_gemm.plan_rows, ids, slot_of, rows),
        "x tiles": partial(prefill_gemm.make_tiles, kernels, x, work=work, top_k=TOP_K),
        "h tiles": partial(prefill_gemm.make_tiles, kernels, h, work=work),
        "combine": partial(combine, kernels, parts, top_k=TOP_K),
    }
    if format.name == "w2" and not skew:
        for part, call in around.items():
            us = bench.time_us([call] * 2)
            bench.add(f"prefill {part}, {shape}", us, "us", "lower", None, 0.0)


def dense(bench: Bench, codec: str, t: int, n: int, k: int, target: float) -> None:
    """One dense product."""
    if codec == "fp8":
        plane = torch.randint(0, 0x60, (n, k), dtype=torch.uint8, device=DEVICE)
        scale = torch.full((n // 128, k // 128), 2.0**-8, device=DEVICE)
        weight = StreamLinear("fp8", plane, scale, n, k)
    else:
        plane = torch.randn(n, k, device=DEVICE).bfloat16()
        weight = StreamLinear("bf16", plane, None, n, k)
    x = torch.randn(t, k, device=DEVICE).bfloat16()
    tiles = prefill_gemm.make_tiles(bench.kernels, x, fp8=codec == "fp8")
    call = partial(prefill_gemm.linear, bench.kernels, weight, tiles, t, error=bench.error)
    us = bench.time_us([call] * 2)
    bench.computed(f"prefill {codec} dense", f"{t} x {n}x{k}", us, 2.0 * t * n * k, target)


def measure(bench: Bench) -> None:
    """All rows of this part."""
    bench.attempt(experts, W2Rows(4096, 2048), 8192, 500.0)
    bench.attempt(experts, W2Rows(4096, 2048), 8192, 0.0, skew=0.5)
    bench.attempt(experts, W2Rows(4096, 2048), 2048, 0.0)
    for cut in (96, 64):
        bench.attempt(experts, W2Rows(4096, 2048), 8192, 0.0, cut=cut)
    bench.attempt(experts, Mxfp4Rows(4096, 2048), 8192, 0.0)
    bench.attempt(experts, W2Rows(6144, 2048), 8192, 0.0)
    bench.attempt(experts, Nvfp4Rows(6144, 2048), 8192, 0.0)
    bench.attempt(dense, "fp8", 8192, 4096, 8192, 600.0)
    bench.attempt(dense, "fp8", 8192, 32768, 1024, 0.0)
    bench.attempt(dense, "bf16", 8192, 4096, 4096, 0.0)
