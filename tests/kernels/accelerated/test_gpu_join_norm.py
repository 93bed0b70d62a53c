"""Residual and norm on a GPU at the released width and at small ones: the reference, and the same
bits however many rows there are and whoever sums what joins."""

import pytest
import torch

from moet.kernels.comm import added
from moet.kernels.cubin import device_arch
from moet.kernels.device_gemm import Device
from moet.kernels.join_norm import NormWeight
from moet.kernels.mixture import Mixture
from moet.kernels.norm import add_rms_norm
from moet.kernels.quant import fp8_qdq
from moet.kernels.stream_experts import combine
from tests.kernels.accelerated.conftest import INTERPRETED
from tests.kernels.accelerated.world import assert_close

DIM, MOST, EPS = 6144, 300, 1e-5
DIMS = [128, 1024, DIM]  # the smaller ones are no cluster's

pytestmark = pytest.mark.skipif(INTERPRETED, reason="emulation tests them on a CPU")


@pytest.mark.parametrize("dim", DIMS)
def test_rows_have_the_same_bits_in_any_company(device: torch.device, dim: int) -> None:
    gpu = Device.open(device_arch(device), device)
    draw = torch.Generator(device).manual_seed(3)
    x, y = (torch.randn(MOST, dim, device=device, generator=draw).bfloat16() for _ in "xy")
    weight = torch.randn(dim, device=device, generator=draw)
    run = add_rms_norm.bind(arch=gpu.arch, dim=dim)
    total, normed = run(x, y, NormWeight(weight, gpu), eps=EPS)
    want_total, want = add_rms_norm(x, y, weight, eps=EPS)
    assert torch.equal(total, want_total)
    assert_close(normed.plain(), want.plain(), add_rms_norm.tolerance)
    for n in (1, 3, 8, 32, 33, 256):
        few_total, few = run(x[:n], y[:n], NormWeight(weight, gpu), eps=EPS)
        assert torch.equal(few_total, total[:n]), n
        assert torch.equal(few.plain(), normed.plain()[:n]), n
        assert torch.equal(few.decoded(), fp8_qdq(few.plain().float(), block=128)), n


@pytest.mark.parametrize("dim", DIMS)
def test_a_mixture_joins(device: torch.device, dim: int) -> None:
    gpu = Device.open(device_arch(device), device)
    draw = torch.Generator(device).manual_seed(4)
    x, shared = (torch.randn(3, dim, device=device, generator=draw).bfloat16() for _ in "xy")
    parts = torch.randn(24, dim, device=device, generator=draw).bfloat16()
    weights = torch.rand(3, 8, device=device, generator=draw)
    ids = torch.arange(8, device=device).repeat(3, 1)
    ids[1] = -1
    facts = {"top_k": 8, "weights": weights, "shared": shared, "dtype": torch.bfloat16}
    mixture = Mixture(
        parts, shared, weights, ids,
        lambda: combine(gpu.launcher, parts, **facts, expert_ids=ids),  # type: ignore[arg-type]
    )  # fmt: skip
    weight = NormWeight(torch.randn(dim, device=device, generator=draw), gpu)
    run = add_rms_norm.bind(arch=gpu.arch, dim=dim)
    found, want = (run(x, joins, weight, eps=EPS) for joins in (mixture, added(mixture)))
    assert torch.equal(found[0], want[0])
    assert torch.equal(found[1].plain(), want[1].plain())
