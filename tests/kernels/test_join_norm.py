"""The kernels of residual and norm in emulation: their reference, by whatever kernel has a row."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor

from moet.kernels import join_norm
from moet.kernels.comm import CTAS, PeerLinks, RankPart, window_bytes
from moet.kernels.device_gemm import Device
from moet.kernels.gemm import tree_sum
from moet.kernels.join_norm import NormWeight
from moet.kernels.layout import to_mma_order
from moet.kernels.mixture import Mixture
from moet.kernels.norm import add_rms_norm
from moet.kernels.quant import Activations, fp8_encode
from tests.kernels import emulation
from tests.kernels.emulation import Emulator
from tests.kernels.forks import in_ranks

DIM, EPS, MAX_BYTES = 1280, 1e-5, 1 << 14


@pytest.fixture(scope="module")
def launcher() -> Emulator:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    return emulation.build(("join_norm",), 90, num_sms=3)


def placed(launcher: Emulator, weight: Tensor) -> NormWeight:
    return NormWeight(weight, Device.around(launcher, "sm90a", "cpu"))


def mixture(num_rows: int, seed: int, dim: int = DIM) -> Mixture:
    """Of eight choices; the last row has none."""
    draw = torch.Generator().manual_seed(seed)
    parts = torch.randn(num_rows, 8, dim, generator=draw).bfloat16()
    shared = torch.randn(num_rows, dim, generator=draw).bfloat16()
    weights = torch.rand(num_rows, 8, generator=draw)
    ids = torch.arange(8).repeat(num_rows, 1)
    ids[-1] = -1
    total = parts[:, 0].float() * weights[:, :1]
    for k in range(1, 8):
        total = total + parts[:, k].float() * weights[:, k : k + 1]
    total[-1] = 0
    y = (total + shared.float()).bfloat16()
    return Mixture(parts.view(-1, dim), shared, weights, ids, lambda: y)


def require_equal(found: tuple[Tensor, Activations], want: tuple[Tensor, Activations]) -> None:
    """Bit for bit."""
    for a, b in ((found[0], want[0]), (found[1].plain(), want[1].plain())):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("num_rows", "dim"), [(0, DIM), (1, DIM), (3, DIM), (2, 128), (2, 1024)])
def test_residual_and_norm(
    num_rows: int, dim: int, launcher: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever joins, in a cluster and in a CTA, coded or not."""
    weight = torch.randn(dim)
    run = add_rms_norm.bind(arch="sm90a", dim=dim)
    x = torch.randn(num_rows, dim).bfloat16()
    y: list[Tensor | Mixture | None] = [torch.randn(num_rows, dim).bfloat16(), None]
    for joins in y + ([mixture(num_rows, 3, dim)] if num_rows else []):
        total, normed = run(x, joins, placed(launcher, weight), eps=EPS)
        want_total, want = add_rms_norm(x, joins, weight, eps=EPS)
        assert torch.equal(total, want_total)
        off = (normed.plain().float() - want.plain().float()).abs()
        assert (off <= add_rms_norm.tolerance * want.plain().float().abs() + 1e-6).all()
        codes, exponents = fp8_encode(normed.plain().float(), block=128)
        assert normed.codes is not None
        assert normed.scale is not None
        assert torch.equal(normed.codes, to_mma_order(codes.view(torch.uint8)))
        assert torch.equal(normed.scale, torch.exp2(exponents.float() - 127))
        with monkeypatch.context() as patch:
            patch.setattr(join_norm, "FEW_ROWS", 0)
            patch.setattr(join_norm, "CODED_ROWS", 0)
            many = run(x, joins, placed(launcher, weight), eps=EPS)
        require_equal(many, (total, normed))
        assert num_rows == 0 or many[1].codes is None


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_parts_are_summed_on_their_way_in(launcher: Emulator, ranks: int) -> None:
    """Steps of one, three and two rows, of a tensor's parts and of mixtures' parts: the bits of a
    norm behind the sum, on every rank."""
    weight, steps = torch.randn(DIM), (1, 3, 2)
    windows = [
        torch.zeros(window_bytes(MAX_BYTES, ranks), dtype=torch.uint8).share_memory_()
        for _ in range(ranks)
    ]
    addresses = tuple(window.data_ptr() for window in windows)
    run = add_rms_norm.bind(arch="sm90a", dim=DIM)
    x = [torch.randn(n, DIM).bfloat16() for n in steps]
    plain = [[torch.randn(n, DIM).bfloat16() for n in steps] for _ in range(ranks)]
    found = torch.zeros(ranks, 4 * sum(steps) * DIM).share_memory_()

    def work(rank: int) -> None:
        to = placed(launcher, weight)
        numbers = torch.zeros(CTAS, dtype=torch.int32), to.device.error
        limit_ns = torch.full((1,), 20_000_000_000)
        links = PeerLinks(launcher, addresses, rank, MAX_BYTES, *numbers, limit_ns)
        made = []
        for i, n in enumerate(steps):
            for part in (plain[rank][i], mixture(n, 10 * i + rank)):
                total, normed = run(x[i], RankPart(part, links, lambda y: y), to, eps=EPS)
                made += [total.float().flatten(), normed.plain().float().flatten()]
        found[rank] = torch.cat(made)
        assert int(to.device.error) == 0

    in_ranks(ranks, work)
    want = []
    for i, n in enumerate(steps):
        for parts in ([each[i] for each in plain],
                      [mixture(n, 10 * i + rank).add() for rank in range(ranks)]):  # fmt: skip
            y = tree_sum([part.float() for part in parts]).bfloat16()
            total, normed = run(x[i], y, placed(launcher, weight), eps=EPS)
            want += [total.float().flatten(), normed.plain().float().flatten()]
    for mine in found:
        assert torch.equal(mine, torch.cat(want))
