"""The kernels on a GPU: against float64 over the models' shapes, bit for bit among themselves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bench.kernels.rig import random_pool
from bench.races import of_experts, storm
from moet.kernels import prefill_gemm
from moet.kernels.cubin import Kernels
from moet.kernels.layout import ExpertRows, Mxfp4Rows, W2Rows
from moet.kernels.stream_experts import ExpertPool, combine, plan, quantise, route
from moet.kernels.stream_gemm import StreamLinear, Workspace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
EXPERTS = 4
SHAPES = [(4096, 2048), (6144, 2048), (4096, 512), (6144, 1024), (1024, 96)]


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return Kernels(torch.device("cuda"))


@pytest.fixture
def error() -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device="cuda")


def make_pool(format: ExpertRows) -> tuple[ExpertPool, list[list[Tensor]]]:
    """Random experts, and their w1, w3, w2 in float64 on the device."""
    d, i = format.hidden_size, format.moe_intermediate_size

    def matrix(n: int, k: int) -> tuple[Tensor, Tensor]:
        codes = torch.randint(0, len(format.levels), (n, k), dtype=torch.uint8)
        return codes, torch.randint(108, 120, (n, k // 32), dtype=torch.uint8)

    rows = [format.pack(matrix(i, d), matrix(i, d), matrix(d, i)) for _ in range(EXPERTS)]
    bases = torch.stack([format.row_base(row) for row in rows]).cuda()
    values = [[w.double().cuda() for w in format.unpack(row)] for row in rows]
    return ExpertPool(format, torch.stack(rows).cuda(), bases), values


def dequantise(q: Tensor, scale: Tensor) -> Tensor:
    """e4m3 bytes in MMA order and their scales -> float64."""
    words = q.view(*q.shape[:-1], -1, 2, 4, 4).transpose(-3, -2).reshape(q.shape)
    values = words.view(torch.float8_e4m3fn).double()
    return values * scale.double().repeat_interleave(128, 1)[:, : q.shape[1]]


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def poison(*shape: int) -> None:
    """Leave NaN where the allocator will put the next tensor of this size."""
    for dtype in (torch.bfloat16, torch.float32):
        del_me = torch.full(shape, float("nan"), dtype=dtype, device="cuda")
        del del_me


def routed(t: int, top_k: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, EXPERTS, (t, top_k), device="cuda")
    return ids, torch.rand(t, top_k, device="cuda")


@pytest.mark.parametrize(("d", "i"), SHAPES)
@pytest.mark.parametrize("kind", [W2Rows, Mxfp4Rows])
def test_mixture_at_every_size(
    kernels: Kernels, error: Tensor, kind: type[ExpertRows], d: int, i: int
) -> None:
    pool, values = make_pool(kind(d, i))
    slot_of = torch.arange(EXPERTS, device="cuda")
    for t in (0, 1, 3, 8, 9, 64, 96, 192):
        x, (ids, weights) = torch.randn(t, d, device="cuda").bfloat16(), routed(t, 2)
        limit = float(d) ** 0.5 * 2.0**-8
        work = plan(kernels, ids, slot_of, error=error)
        q, scale = quantise(kernels, x)
        poison(2 * t, i)
        h = pool.gate_up(
            kernels, q, scale, work, top_k=2, pair_weight=weights, limit=limit, error=error
        )
        poison(2 * t, d)
        y = pool.down(kernels, h, work, error=error)
        if t == 0:
            continue
        exact, h_exact = dequantise(q, scale), dequantise(*quantise(kernels, h))
        for pair in range(0, 2 * t, max(1, t // 8)):
            w1, w3, w2 = values[int(ids.flatten()[pair])]
            gate = (w1 @ exact[pair // 2]).clamp(max=limit)
            up = (w3 @ exact[pair // 2]).clamp(-limit, limit)
            expected = torch.nn.functional.silu(gate) * up * weights.flatten()[pair]
            assert relative(h[pair], expected) < 2**-6
            assert relative(y[pair], w2 @ h_exact[pair]) < 2**-8
        out = combine(kernels, y, top_k=2)
        whole = pool.mixture(kernels, x, ids, weights, slot_of, limit=limit, error=error)
        assert torch.equal(out, whole)
        for _ in range(2):
            again = pool.mixture(kernels, x, ids, weights, slot_of, limit=limit, error=error)
            assert torch.equal(out, again)
        some = slice(0, min(t, 3))
        few = pool.mixture(
            kernels, x[some], ids[some], weights[some], slot_of, limit=limit, error=error
        )
        assert torch.equal(few, out[some])
        prefilled = prefill_gemm.mixture(
            kernels, pool, x, ids, weights, slot_of, limit=limit, error=error
        )
        assert torch.equal(prefilled, out)
    assert int(error) == 0


@pytest.mark.parametrize(
    ("n", "k"),
    [
        (32768, 1024),
        (4096, 8192),
        (1024, 4096),
        (512, 4096),
        (4096, 12288),
        (24, 16384),
        (64, 4096),
    ],
)
def test_fp8_linear_at_every_size(kernels: Kernels, error: Tensor, n: int, k: int) -> None:
    weight = torch.randn(n, k).to(torch.float8_e4m3fn)
    scale = 2.0 ** torch.randint(-3, 3, (-(-n // 128), k // 128)).float()
    linear = StreamLinear.fp8(weight, scale).to("cuda")
    full = scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1).double().cuda()
    exact_weight = weight.double().cuda() * full
    space = Workspace.allocate("cuda", 64 * 192 * n, 8192)
    for t in (0, 1, 3, 8, 9, 96, 192):
        x = torch.randn(t, k, device="cuda").bfloat16()
        q, x_scale = quantise(kernels, x)
        poison(t, n)
        y = linear(kernels, q, x_scale, error=error, workspace=space)
        if t == 0:
            continue
        assert relative(y, dequantise(q, x_scale) @ exact_weight.T) < 2**-8
        assert torch.equal(linear(kernels, x, None, error=error, workspace=space), y)
        wide = linear(kernels, q, x_scale, error=error, workspace=space, rows=16)
        assert torch.equal(wide, y)
        one = linear(kernels, q[-1:], x_scale[-1:], error=error, workspace=space)
        assert torch.equal(one[0], y[-1])
        poison(t, n)
        tiles = prefill_gemm.make_tiles(kernels, x)
        assert torch.equal(prefill_gemm.linear(kernels, linear, tiles, t, error=error), y)
    assert int(error) == 0
    assert not space.counters.any()


@pytest.mark.parametrize(("n", "k"), [(256, 4096), (129280, 1024), (64, 4096), (24, 16384)])
def test_bf16_linear_at_every_size(kernels: Kernels, error: Tensor, n: int, k: int) -> None:
    weight = torch.randn(n, k).bfloat16()
    linear, exact_weight = StreamLinear.bf16(weight).to("cuda"), weight.double().cuda()
    space = Workspace.allocate("cuda", 64 * 96 * n, 32768)
    for t in (1, 3, 9, 96):
        x = torch.randn(t, k, device="cuda").bfloat16()
        poison(t, n)
        y = linear(kernels, x, None, error=error, workspace=space)
        assert relative(y, x.double() @ exact_weight.T) < 2**-8
        one = linear(kernels, x[:1], None, error=error, workspace=space)
        assert torch.equal(one[0], y[0])
        tiles = prefill_gemm.make_tiles(kernels, x, fp8=False)
        assert torch.equal(prefill_gemm.linear(kernels, linear, tiles, t, error=error), y)


def test_prefill_has_the_same_bits_every_time(kernels: Kernels, error: Tensor) -> None:
    pool = random_pool(W2Rows(4096, 2048), 256)
    for call in of_experts(kernels, pool, error, 1500).values():
        made = [call() for _ in range(3)]
        assert torch.equal(made[0], made[1])
        assert torch.equal(made[0], made[2])
        assert storm(call, made[0], 1000) == 0


def test_route_chooses_as_a_stable_sort(kernels: Kernels) -> None:
    logits, bias = torch.randn(64, 256, device="cuda"), torch.randn(256, device="cuda")
    ids, weights = route(kernels, logits, top_k=6, scaling_factor=1.5, bias=bias)
    scores = torch.nn.functional.softplus(logits.double()).sqrt()
    expected = torch.sort(scores + bias, descending=True, stable=True).indices[:, :6]
    assert (ids == expected).double().mean() > 0.99  # scores of equal rank differ in the last bit
    assert torch.allclose(weights.sum(1), torch.full((64,), 1.5, device="cuda"))


def test_an_id_out_of_range_and_a_lost_slot_are_reported(kernels: Kernels, error: Tensor) -> None:
    pool, _ = make_pool(W2Rows(256, 64))
    slot_of = torch.tensor([0, 1, -1, 3], device="cuda")
    ids = torch.tensor([[0, 1], [2, 0], [9, 0]], device="cuda")
    x, weights = torch.randn(3, 256, device="cuda").bfloat16(), torch.ones(3, 2, device="cuda")
    out = pool.mixture(kernels, x, ids, weights, slot_of, limit=None, error=error)
    assert out[0].isfinite().all()
    assert out[1:].isnan().all()
    assert int(error) & 1


def test_a_captured_graph_replays_the_same_bits(kernels: Kernels, error: Tensor) -> None:
    pool, _ = make_pool(W2Rows(1024, 512))
    slot_of = torch.arange(EXPERTS, device="cuda")
    x, (ids, weights) = torch.randn(3, 1024, device="cuda").bfloat16(), routed(3, 2)

    def step() -> Tensor:
        return pool.mixture(kernels, x, ids, weights, slot_of, limit=10.0, error=error)

    eager = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, eager)
