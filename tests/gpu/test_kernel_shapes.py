"""Every shape of both models and of their shards: against float64, and prefill against decode.

`-k fast` runs a subset of the formats and shapes in seconds.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moet.kernels import decode_experts, prefill_gemm
from moet.kernels.cubin import Kernels
from moet.kernels.layout import ExpertRows, Mxfp4Rows, W2Rows
from moet.kernels.nvfp4_rows import Nvfp4Rows
from moet.kernels.stream_experts import ExpertPool, SharedExpert, combine, quantise
from moet.kernels.stream_gemm import StreamLinear, Workspace, num_stages, rows_at_once

EXPERTS = 4  # the third gets no row
SIZES = (0, 1, 3, 8, 9, 64, 96, 192)
# hidden_size and the share of moe_intermediate_size of one, two and four ranks.
SHARDS = [(4096, 512), (4096, 1024), (4096, 2048), (6144, 512), (6144, 1024), (6144, 2048)]
FORMATS: list[type[ExpertRows]] = [W2Rows, Mxfp4Rows, Nvfp4Rows]
# N and K of the models' dense products, their halves and quarters among them.
FP8 = [
    (512, 4096),
    (1024, 4096),
    (2048, 4096),
    (4096, 2048),
    (4096, 512),
    (32768, 1024),
    (8192, 1024),
    (4096, 8192),
    (4096, 2048),
    (8192, 4096),
    (2048, 6144),
    (576, 6144),
    (16384, 2048),
    (6144, 16384),
    (6144, 4096),
    (12288, 6144),
    (6144, 12288),
    (6144, 3072),
]
BF16 = [(24, 16384), (64, 4096), (256, 4096), (256, 6144), (32, 6144), (32320, 4096), (1024, 4096)]


def named(shape: tuple[int, ...], fast: bool) -> object:
    return pytest.param(*shape, id="x".join(map(str, shape)) + ("-fast" if fast else ""))


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return Kernels(torch.device("cuda"))


@pytest.fixture
def error() -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device="cuda")


def relative(found: Tensor, expected: Tensor) -> float:
    """NaN, which no bound passes, where anything was left unwritten."""
    return float((found.double() - expected).norm() / expected.norm())


def poison(*shape: int) -> None:
    """Leave NaN where the allocator will put the next tensor of this size."""
    for dtype in (torch.bfloat16, torch.float32):
        left = torch.full(shape, float("nan"), dtype=dtype, device="cuda")
        del left


def rounded(kernels: Kernels, x: Tensor) -> Tensor:
    """What e4m3 per 128 columns leaves of x, float64."""
    q, scale = quantise(kernels, x)
    words = q.view(*q.shape[:-1], -1, 2, 4, 4).transpose(-3, -2).reshape(q.shape)
    values = words.view(torch.float8_e4m3fn).double()
    return values * scale.double().repeat_interleave(128, 1)[:, : x.shape[1]]


def make_pool(format: ExpertRows) -> tuple[ExpertPool, list[list[Tensor]]]:
    """Random experts, and their w1, w3, w2 in float64 on the device."""
    d, i, block = format.hidden_size, format.moe_intermediate_size, format.scale_block
    low, high = (40, 72) if isinstance(format, Nvfp4Rows) else (108, 120)

    def matrix(n: int, k: int) -> tuple[Tensor, Tensor]:
        codes = torch.randint(0, len(format.levels), (n, k), dtype=torch.uint8)
        return codes, torch.randint(low, high, (n, k // block), dtype=torch.uint8)

    rows = []
    for _ in range(EXPERTS):
        matrices = matrix(i, d), matrix(i, d), matrix(d, i)
        if isinstance(format, Nvfp4Rows):
            rows.append(format.pack_scaled(*matrices, torch.rand(3) * 2**-5 + 2**-6))
        else:
            rows.append(format.pack(*matrices))
    bases = torch.stack([format.row_base(row) for row in rows]).cuda()
    values = [[w.cuda().double() for w in format.unpack(row)] for row in rows]
    return ExpertPool(format, torch.stack(rows).cuda(), bases), values


def routed(t: int) -> tuple[Tensor, Tensor]:
    """Two of the experts 0, 1 and 3 for each token, the first ones far more often."""
    ids = torch.tensor([[0, 1], [0, 3], [1, 0], [0, 1], [0, 1]], device="cuda")
    ids = ids[torch.arange(t, device="cuda") % 5].contiguous()
    return ids, torch.rand(t, 2, device="cuda")


@pytest.mark.parametrize(("d", "i"), [named(x, x[1] == 512) for x in SHARDS])
@pytest.mark.parametrize("kind", FORMATS)
def test_experts(kernels: Kernels, error: Tensor, kind: type[ExpertRows], d: int, i: int) -> None:
    pool, values = make_pool(kind(d, i))
    slot_of = torch.arange(EXPERTS, device="cuda")
    limit = float(d) ** 0.5
    for t in SIZES:
        x, (ids, weights) = torch.randn(t, d, device="cuda").bfloat16(), routed(t)
        rows = prefill_gemm.entry_rows(kernels, "nvfp4" if kind is Nvfp4Rows else "w2")
        work = prefill_gemm.plan_rows(ids, slot_of, rows)
        tiles = prefill_gemm.make_tiles(kernels, x, work=work, top_k=2)
        poison(2 * t, i)
        h = prefill_gemm.gate_up(
            kernels, pool, tiles, work, pair_weight=weights, limit=limit, error=error
        )
        h_tiles = prefill_gemm.make_tiles(kernels, h, work=work)
        poison(2 * t, d)
        y = prefill_gemm.down(kernels, pool, h_tiles, work, error=error)
        if t == 0:
            continue
        exact, h_exact = rounded(kernels, x), rounded(kernels, h)
        for pair in range(0, 2 * t, max(1, t // 8)):
            w1, w3, w2 = values[int(ids.flatten()[pair])]
            gate = (w1 @ exact[pair // 2]).clamp(max=limit)
            up = (w3 @ exact[pair // 2]).clamp(-limit, limit)
            expected = torch.nn.functional.silu(gate) * up * weights.flatten()[pair]
            assert relative(h[pair], expected) < 2**-6, (t, pair)
            assert relative(y[pair], w2 @ h_exact[pair]) < 2**-8, (t, pair)
        assert h.isfinite().all()
        assert y.isfinite().all()
        whole = [
            prefill_gemm.mixture(kernels, pool, x, ids, weights, slot_of, limit=limit, error=error)
            for _ in range(3)
        ]
        assert torch.equal(whole[0], combine(kernels, y, top_k=2))
        assert torch.equal(whole[0], whole[1])
        assert torch.equal(whole[0], whole[2])
        check_decode(kernels, pool, x, ids, weights, whole[0], limit=limit, error=error)
    assert int(error) == 0


def check_decode(
    kernels: Kernels,
    pool: ExpertPool,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    expected: Tensor,
    *,
    limit: float,
    error: Tensor,
) -> None:
    """Decode gives the bits of prefill, whoever else is in the step."""
    slot_of = torch.arange(EXPERTS, device="cuda")
    for most in (8, 4):
        decoded = pool.mixture(
            kernels, x, ids, weights, slot_of, limit=limit, error=error, rows=most
        )
        assert torch.equal(decoded, expected), f"entries of {most} rows"
    for rows in (slice(0, 1), slice(0, 3), slice(max(0, len(x) - 8), len(x))):
        some = x[rows].contiguous()
        choice = decode_experts.given(
            kernels, ids[rows], weights[rows], slot_of, x.shape[1], error=error
        )
        found = decode_experts.mix(
            kernels, some, choice, pool, limit=limit, error=error, output="f32"
        )
        assert torch.equal(found, expected[rows])


@pytest.mark.parametrize(("n", "k"), [named(x, x in FP8[:3]) for x in dict.fromkeys(FP8)])
def test_fp8_products(kernels: Kernels, error: Tensor, n: int, k: int) -> None:
    weight = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn)
    scale = 2.0 ** torch.randint(-3, 3, (-(-n // 128), -(-k // 128))).float()
    linear = StreamLinear.fp8(weight.cpu(), scale).to("cuda")
    full = scale.cuda().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    exact_weight = weight.double() * full
    check_products(kernels, error, linear, exact_weight, 2**-8)


@pytest.mark.parametrize(("n", "k"), [named(x, x[0] in (24, 256)) for x in BF16])
def test_bf16_products(kernels: Kernels, error: Tensor, n: int, k: int) -> None:
    weight = torch.randn(n, k).bfloat16()
    linear = StreamLinear.bf16(weight).to("cuda")
    check_products(kernels, error, linear, weight.cuda().double(), 2**-8)


def check_products(
    kernels: Kernels, error: Tensor, linear: StreamLinear, exact_weight: Tensor, bound: float
) -> None:
    """One dense weight at every size, prefilled and streamed, in both output types."""
    n, k = exact_weight.shape
    fp8 = linear.codec == "fp8"
    space = Workspace.allocate("cuda", 64 * 192 * n, 1 << 16)
    for t in SIZES:
        x = torch.randn(t, k, device="cuda").bfloat16()
        tiles = prefill_gemm.make_tiles(kernels, x, fp8=fp8)
        poison(t, n)
        y = prefill_gemm.linear(kernels, linear, tiles, t, error=error)
        poison(t, n)
        wide = prefill_gemm.linear(kernels, linear, tiles, t, error=error, output="f32")
        if t == 0:
            continue
        exact = rounded(kernels, x) if fp8 else x.double()
        assert relative(y, exact @ exact_weight.T) < bound, t
        assert torch.equal(wide.bfloat16(), y)
        for _ in range(2):
            again = prefill_gemm.linear(kernels, linear, tiles, t, error=error)
            assert torch.equal(again, y)
        operand, scale = quantise(kernels, x) if fp8 else (x, None)
        stages = num_stages(linear.codec, linear.chunks, 1, linear.slices(kernels))
        for rows in {8, rows_at_once(kernels, linear.codec, "bf16", t, stages)}:
            streamed = linear(kernels, operand, scale, error=error, workspace=space, rows=rows)
            assert torch.equal(streamed, y), rows
        for rows in {8, rows_at_once(kernels, linear.codec, "f32", t, stages)}:
            options: dict[str, Any] = {"workspace": space, "output": "f32", "rows": rows}
            floats = linear(kernels, operand, scale, error=error, **options)
            assert torch.equal(floats, wide), rows
    assert int(error) == 0


@pytest.mark.parametrize(("d", "i"), [named((4096, 512), True), named((6144, 2048), False)])
def test_shared_expert(kernels: Kernels, error: Tensor, d: int, i: int) -> None:
    def dense(n: int, k: int) -> tuple[Tensor, Tensor]:
        weight = torch.randn(n, k).to(torch.float8_e4m3fn)
        return weight, torch.full((-(-n // 128), -(-k // 128)), 2.0**-6)

    expert = SharedExpert.fp8(dense(i, d), dense(i, d), dense(d, i)).to("cuda")
    space = Workspace.allocate("cuda", 1 << 22, 1 << 16)
    for t in (1, 9, 192):
        x = torch.randn(t, d, device="cuda").bfloat16()
        q, scale = quantise(kernels, x)
        streamed = expert(kernels, q, scale, limit=10.0, error=error, workspace=space)
        tiles = prefill_gemm.make_tiles(kernels, x)
        poison(t, d)
        found = prefill_gemm.shared_expert(kernels, expert, tiles, t, limit=10.0, error=error)
        assert found.isfinite().all()
        assert torch.equal(found, streamed)
    assert int(error) == 0
