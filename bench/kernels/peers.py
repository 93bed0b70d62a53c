"""The same shapes elsewhere, in the same run: torch's products, the field's fused MoE in Triton.

flashinfer's fused MoE is not among them. Its prebuilt cubins (flashinfer-cubin 0.6.13) are for
sm_100 and later; for sm_90 it compiles at first use, from 154 generated CUDA files and 28 others,
of which the first took 146 s of a core: hours of one, or a quarter of an hour of 32.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from bench.kernels import triton_moe
from bench.kernels.rig import DEVICE, Bench


def torch_products(bench: Bench) -> None:
    """bf16 products, dense and grouped, and the scaled fp8 product."""
    d, i, active = 4096, 2048, 6
    weights = torch.randn(48, 2 * i, d, device=DEVICE).bfloat16()
    x = torch.randn(active, d, device=DEVICE).bfloat16()
    offsets = torch.arange(1, active + 1, dtype=torch.int32, device=DEVICE)
    groups = [weights[first : first + active] for first in range(0, 48, active)]
    us = bench.time_us([partial(torch._grouped_mm, x, g.mT, offs=offsets) for g in groups])
    num_bytes = active * 4 * i * d
    bench.streamed("torch grouped mm, bf16", f"{active} x {2 * i}x{d}", us, num_bytes, 0.0)
    a = torch.randn(8192, 8192, device=DEVICE).bfloat16()
    b = torch.randn(4096, 8192, device=DEVICE).bfloat16()
    us = bench.time_us([lambda: a @ b.T] * 2)
    bench.computed("torch mm, bf16", "8192 x 4096x8192", us, 2.0 * 8192 * 4096 * 8192, 0.0)
    f8 = [x.to(torch.float8_e4m3fn) for x in (a, b)]
    one = torch.ones((), device=DEVICE)

    def scaled() -> Tensor:
        return torch._scaled_mm(f8[0], f8[1].T, one, one, out_dtype=torch.bfloat16)

    us = bench.time_us([scaled] * 2)
    bench.computed("torch scaled mm, fp8", "8192 x 4096x8192", us, 2.0 * 8192 * 4096 * 8192, 0.0)


def torch_grouped_prefill(bench: Bench) -> None:
    """bf16 grouped product of 8,192 tokens, top 6, over 64 of the 256 experts' weights' bytes."""
    d, n, experts = 4096, 4096, 64
    rows = 8192 * 6 // 4
    weights = torch.randn(experts, n, d, device=DEVICE).bfloat16()
    x = torch.randn(rows, d, device=DEVICE).bfloat16()
    offsets = torch.arange(1, experts + 1, dtype=torch.int32, device=DEVICE) * (rows // experts)
    us = bench.time_us([partial(torch._grouped_mm, x, weights.mT, offs=offsets)] * 2)
    shape = f"{experts} experts of {rows // experts} rows, {n}x{d}"
    bench.computed("torch grouped mm, bf16 prefill", shape, us, 2.0 * rows * n * d, 0.0)


def fused_moe(bench: Bench, tokens: int, n: int, k: int, divisor: int, configs: list[dict]) -> None:  # type: ignore[type-arg]
    """The best of some configurations of the Triton kernel, fp8 block-128. Few tokens: against
    bytes, over several sets of experts; many: against arithmetic."""
    experts = 256
    weight = torch.randint(0, 0x60, (experts, n, k), dtype=torch.uint8, device=DEVICE)
    weight = weight.view(torch.float8_e4m3fn)
    weight_scale = torch.full((experts, n // 128, k // 128), 2.0**-8, device=DEVICE)
    inputs = tokens if divisor > 1 else tokens * 6
    x = torch.randn(inputs, k, device=DEVICE).to(torch.float8_e4m3fn)
    x_scale = torch.ones(inputs, k // 128, device=DEVICE)
    best, chosen, active = float("inf"), "", 0.0
    for config in configs:
        calls = []
        for _ in range(8 if tokens < 64 else 1):
            ids = torch.rand(tokens, experts, device=DEVICE).argsort(1)[:, :6]
            aligned = triton_moe.align(ids, experts, config["rows"])
            active = float(ids.unique().numel())
            calls.append(
                partial(
                    triton_moe.grouped, x, x_scale, weight, weight_scale, aligned,
                    pairs=tokens * 6, divisor=divisor, **config,
                )
            )  # fmt: skip
        us = bench.time_us(calls)
        if us < best:
            best, chosen = us, str(config)
    shape = f"T={tokens} {n}x{k}"
    if tokens < 64:
        bench.streamed("Triton fused MoE, fp8", shape, best, active * n * k, 0.0)
    else:
        bench.computed("Triton fused MoE, fp8", shape, best, 2.0 * tokens * 6 * n * k, 0.0)
    bench.rows[-1]["note"] += f", best of {len(configs)}: {chosen}"


def measure(bench: Bench) -> None:
    """All rows of this part."""
    bench.attempt(torch_products)
    bench.attempt(torch_grouped_prefill)
    few = [{"rows": 16, "GROUP": 1, "num_warps": 4, "num_stages": s} for s in (3, 5)]
    many = [
        {"rows": r, "GROUP": 8, "num_warps": w, "num_stages": s}
        for r, w, s in ((64, 4, 4), (128, 8, 3), (128, 4, 3))
    ]
    for n, k, divisor in ((4096, 4096, 6), (4096, 2048, 1)):
        for tokens in (1, 3):
            bench.attempt(fused_moe, tokens, n, k, divisor, few)
        bench.attempt(fused_moe, 8192, n, k, divisor, many)
