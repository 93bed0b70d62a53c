"""The hyper-connection kernels in emulation: their references, and whatever kernel does a row."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moet.kernels import device_streams
from moet.kernels.device_gemm import Device
from moet.kernels.device_streams import MixMatrix
from moet.kernels.hyper_connection import Logits, Site, balanced, hc_enter, hc_head_norm, hc_pass
from moet.kernels.layout import to_mma_order
from moet.kernels.mixture import Mixture
from moet.kernels.quant import Activations, fp8_encode
from tests.kernels import emulation
from tests.kernels.emulation import Emulator

DIM = 256
FACTS = {"mult": 4, "placed": True}
Made = Tensor | Activations | Logits


@pytest.fixture(scope="module", params=[90, 120])
def launcher(request: pytest.FixtureRequest) -> Emulator:
    """Of these kernels alone, which compile in a moment."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    return emulation.build(("hyper_connection",), request.param, num_sms=3)


@pytest.fixture
def device(launcher: Emulator) -> Device:
    return Device.around(launcher, f"sm{launcher.sm}a", "cpu")


def site(outs: int, dim: int = DIM) -> Site:
    fn, base = torch.randn(outs, 4 * dim) * 0.05, torch.randn(outs)
    scale = torch.rand(3 if outs > 4 else 1) + 0.5
    return Site(fn, base, scale, torch.randn(dim), 1e-6, 1e-6, 20 if outs > 4 else 0)


def on(device: Device, site: Site) -> Site:
    assert isinstance(site.fn, Tensor)
    return replace(site, fn=MixMatrix(site.fn, device))


def step(num_rows: int, dim: int = DIM) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, streams, post, mix."""
    y = torch.randn(num_rows, dim).bfloat16()
    streams = torch.randn(num_rows, 4, dim).bfloat16()
    return y, streams, torch.rand(num_rows, 4) * 2, torch.rand(num_rows, 4, 4).softmax(-1)


def close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    scale = expected.float().abs().amax()
    assert (found.float() - expected.float()).abs().amax() <= tolerance * scale


def assert_coded(x: Tensor | Activations) -> Tensor:
    """The values, whose codes must be theirs."""
    assert isinstance(x, Activations)
    assert x.codes is not None
    assert x.scale is not None
    codes, exponents = fp8_encode(x.plain().float(), block=128)
    assert torch.equal(x.codes, to_mma_order(codes.view(torch.uint8)))
    assert torch.equal(x.scale, torch.exp2(exponents.float() - 127))
    return x.plain()


@pytest.mark.parametrize("num_rows", [0, 1, 4, 5])
@pytest.mark.parametrize("dim", [DIM, 1152])
def test_a_pass_is_its_reference(num_rows: int, dim: int, device: Device) -> None:
    weights, before = site(24, dim), step(num_rows, dim)
    run = hc_pass.bind(arch=device.arch, dim=dim, **FACTS)
    streams, x, post, mix = run(*before, on(device, weights))
    expected = hc_pass(*before, weights)
    if num_rows == 0:
        assert streams.shape == (0, 4, dim)
        return
    assert isinstance(expected[1], Tensor)
    close(streams, expected[0], 2**-8)
    close(assert_coded(x), expected[1], hc_pass.tolerance)
    close(post, expected[2], 1e-3)  # of streams that may round the other way
    close(balanced(mix), balanced(expected[3]), 1e-3)
    assert (device.counters == 0).all()


def test_entry_and_head_are_their_references(device: Device) -> None:
    weights, (_, streams, _, _) = site(24), step(3)
    enter = hc_enter.bind(arch=device.arch, dim=DIM, **FACTS)
    found = enter(streams, on(device, weights))
    expected = hc_enter(streams, weights)
    assert isinstance(expected[0], Tensor)
    close(assert_coded(found[0]), expected[0], hc_enter.tolerance)
    for a, b in zip(found[1:], expected[1:], strict=True):
        close(a, b, 1e-5)
    weights = site(4)
    head = hc_head_norm.bind(arch=device.arch, dim=DIM, **FACTS)
    x = head(streams, on(device, weights))
    close(x, hc_head_norm(streams, weights), hc_head_norm.tolerance)


def test_a_row_has_the_same_bits_in_any_company(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone in one launch, among a few, and in tiles whose last one ends within a pass."""
    placed, (y, streams, post, mix) = on(device, site(24)), step(109)
    run = hc_pass.bind(arch=device.arch, dim=DIM, **FACTS)
    enter = hc_enter.bind(arch=device.arch, dim=DIM, **FACTS)
    made = []
    for border in (128, 8):
        monkeypatch.setattr(device_streams, "TILED_ROWS", border)
        made.append((run(y, streams, post, mix, placed), enter(streams, placed)))
    (few, entered), (many, entered_tiled) = made
    assert_same_bits(entered_tiled, entered)
    for row in (0, 53, 108):
        own = slice(row, row + 1)
        alone = run(y[own], streams[own], post[own], mix[own], placed)
        for whole in (few, many):
            assert_same_bits(alone, whole, own)


@pytest.mark.parametrize("weigh", [False, True])
def test_a_mixture_is_summed_on_its_way_in(device: Device, weigh: bool) -> None:
    placed, (_, streams, post, mix) = on(device, site(24)), step(3)
    draw = torch.Generator().manual_seed(5)
    parts = torch.randn(3, 6, DIM, generator=draw).bfloat16()
    shared = torch.randn(3, DIM, generator=draw).bfloat16()
    factors = torch.rand(3, 6, generator=draw) if weigh else None
    ids = torch.arange(18).view(3, 6)
    ids[1, 0] = -1  # a row without parts
    total = torch.zeros(3, DIM)
    for k in range(6):
        total += parts[:, k].float() * (1 if factors is None else factors[:, k : k + 1])
    total[1] = 0
    y = (total + shared.float()).bfloat16()
    mixture = Mixture(parts.view(18, DIM), shared, factors, ids, lambda: y)
    run = hc_pass.bind(arch=device.arch, dim=DIM, **FACTS)
    found, wanted = (run(given, streams, post, mix, placed) for given in (mixture, y))
    assert_same_bits(found, wanted)
    assert (device.counters == 0).all()


def test_a_mixture_of_many_rows_is_summed_by_tiles(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a CTA has room for the parts; by its maker elsewhere."""
    monkeypatch.setattr(device_streams, "TILED_ROWS", 8)
    placed, (_, streams, post, mix) = on(device, site(24)), step(109)
    draw = torch.Generator().manual_seed(5)
    parts = torch.randn(109, 5, DIM, generator=draw).bfloat16()
    shared = torch.randn(109, DIM, generator=draw).bfloat16()
    ids = torch.arange(5 * 109).view(109, 5)
    ids[3, 0] = -1  # a row without parts
    total = torch.zeros(109, DIM)
    for k in range(5):
        total += parts[:, k].float()
    total[3] = 0
    y = (total + shared.float()).bfloat16()
    asked = []

    def add() -> Tensor:
        asked.append(y)
        return y

    mixture = Mixture(parts.view(-1, DIM), shared, None, ids, add)
    run = hc_pass.bind(arch=device.arch, dim=DIM, **FACTS)
    found, wanted = (run(given, streams, post, mix, placed) for given in (mixture, y))
    assert_same_bits(found, wanted)
    assert bool(asked) == (device.arch != "sm90a")


def assert_same_bits(
    found: Sequence[Made], wanted: Sequence[Made], rows: slice = slice(None)
) -> None:
    """rows: those of `wanted` that were found."""
    for a, b in zip(map(tensors, found), map(tensors, wanted), strict=True):
        assert all(torch.equal(one, other[rows]) for one, other in zip(a, b, strict=True))


def tensors(x: Made) -> list[Tensor]:
    if not isinstance(x, Activations):
        return [balanced(x)]
    assert x.codes is not None
    assert x.scale is not None
    return [x.plain(), x.codes, x.scale]


@pytest.mark.parametrize(("num_rows", "dim"), [(1, 2176), (3, 1152), (8, 2176)])
def test_rows_that_are_told_have_the_bits_of_a_grid(
    device: Device, num_rows: int, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind experts and then behind attention, whose pass finds the first one's logits. Of 2,176
    channels the last thread that finishes has a second group, of 1,152 half a warp has none."""
    placed, (y, streams, post, mix) = on(device, site(24, dim)), step(8, dim)
    draw = torch.Generator().manual_seed(5)
    parts = torch.randn(8, 2, dim, generator=draw).bfloat16()
    factors = torch.rand(8, 2, generator=draw)
    ids = torch.arange(16).view(8, 2)
    ids[2, 0] = -1
    total = parts[:, 0].float() * factors[:, :1] + parts[:, 1].float() * factors[:, 1:]
    total[2] = 0
    summed = (total + y.float()).bfloat16()
    run = hc_pass.bind(arch=device.arch, dim=dim, **FACTS)

    def passes(rows: slice, most: int) -> tuple[Sequence[Made], Sequence[Made]]:
        monkeypatch.setattr(device_streams, "TELL_ROWS", most)
        of_rows = parts[rows].flatten(0, 1)
        given = Mixture(of_rows, y[rows], factors[rows], ids[rows], lambda: summed[rows])
        first = run(given, streams[rows], post[rows], mix[rows], placed)
        return first, run(y[rows], first[0], first[2], first[3], placed)

    few = slice(num_rows)
    told, of_grid = passes(few, num_rows), passes(slice(max(2, num_rows)), 0)
    assert isinstance(told[0][3], Logits)
    for found, wanted in zip(told, of_grid, strict=True):
        assert_same_bits(found, wanted, few)
    assert (device.counters == 0).all()


def test_many_rows_come_without_codes(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_streams, "CODED_ROWS", 2)
    run = hc_pass.bind(arch=device.arch, dim=DIM, **FACTS)
    x = run(*step(5), on(device, site(24)))[1]
    assert isinstance(x, Activations)
    assert x.codes is None
