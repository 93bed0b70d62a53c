"""The hyper-connection kernels on a GPU at the released width: their reference, and the same bits
however many rows there are."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moet.kernels import device_streams
from moet.kernels.cubin import device_arch
from moet.kernels.device_gemm import Device
from moet.kernels.device_streams import MixMatrix
from moet.kernels.hyper_connection import Logits, Site, balanced, hc_enter, hc_head_norm, hc_pass
from moet.kernels.mixture import Mixture
from moet.kernels.quant import Activations, plain_values
from moet.kernels.stream_experts import combine
from tests.kernels.accelerated.conftest import INTERPRETED
from tests.kernels.accelerated.world import assert_close

DIM, MOST = 4096, 700

pytestmark = pytest.mark.skipif(INTERPRETED, reason="emulation tests them on a CPU")


@pytest.fixture
def gpu(device: torch.device) -> Device:
    return Device.open(device_arch(device), device)


def site(outs: int, device: torch.device) -> Site:
    fn = torch.randn(outs, 4 * DIM, device=device) * 0.02
    base, weight = torch.randn(outs, device=device), torch.randn(DIM, device=device)
    scale = torch.ones(3 if outs > 4 else 1, device=device) * 0.8
    return Site(fn, base, scale, weight, 1e-6, 1e-6, 20 if outs > 4 else 0)


def on(gpu: Device, site: Site) -> Site:
    assert isinstance(site.fn, Tensor)
    return replace(site, fn=MixMatrix(site.fn, gpu))


def values(x: Tensor | Activations | Logits) -> Tensor:
    return balanced(x) if isinstance(x, Logits) else plain_values(x)


def test_passes_of_any_size_have_the_same_rows(gpu: Device, device: torch.device) -> None:
    given = site(24, device)
    y = torch.randn(MOST, DIM, device=device).bfloat16()
    streams = torch.randn(MOST, 4, DIM, device=device).bfloat16()
    post, mix = torch.rand(MOST, 4, device=device), torch.rand(MOST, 4, 4, device=device) / 4
    run = hc_pass.bind(arch=gpu.arch, mult=4, dim=DIM, placed=True)
    want = hc_pass(y, streams, post, mix, given)
    whole = run(y, streams, post, mix, on(gpu, given))
    for a, b in zip(whole, want, strict=True):
        assert_close(values(a), values(b), hc_pass.tolerance)
    for n in (1, 3, 4, 5, 33, 64, 65, 300):
        part = slice(MOST - n, MOST)
        before = y[part], streams[part], post[part], mix[part]
        found = run(*before, on(gpu, given))
        for a, b in zip(found, whole, strict=True):
            assert torch.equal(values(a), values(b)[part]), n
    assert (gpu.counters == 0).all()


def test_a_chunks_mixture_has_the_bits_of_its_sum(gpu: Device, device: torch.device) -> None:
    placed, ids = on(gpu, site(24, device)), torch.arange(MOST * 6, device=device).view(MOST, 6)
    parts = torch.randn(MOST * 6, DIM, device=device).bfloat16()
    shared = torch.randn(MOST, DIM, device=device).bfloat16()
    y = combine(gpu.launcher, parts, top_k=6, shared=shared, dtype=torch.bfloat16)
    streams = torch.randn(MOST, 4, DIM, device=device).bfloat16()
    post, mix = torch.rand(MOST, 4, device=device), torch.rand(MOST, 4, 4, device=device) / 4
    run = hc_pass.bind(arch=gpu.arch, mult=4, dim=DIM, placed=True)
    mixture = Mixture(parts, shared, None, ids, lambda: y)
    found, want = (run(given, streams, post, mix, placed) for given in (mixture, y))
    for a, b in zip(found, want, strict=True):
        assert torch.equal(values(a), values(b))


def test_entry_and_head_are_their_references(gpu: Device, device: torch.device) -> None:
    streams = torch.randn(5, 4, DIM, device=device).bfloat16()
    given = site(24, device)
    enter = hc_enter.bind(arch=gpu.arch, mult=4, dim=DIM, placed=True)
    found = enter(streams, on(gpu, given))
    want = hc_enter(streams, given)
    for a, b in zip(found, want, strict=True):
        assert_close(values(a), values(b), hc_enter.tolerance)
    given = site(4, device)
    head = hc_head_norm.bind(arch=gpu.arch, mult=4, dim=DIM, placed=True)
    want_x = hc_head_norm(streams, given)
    assert_close(head(streams, on(gpu, given)), want_x, hc_head_norm.tolerance)


def test_forms_of_few_rows_have_the_same_bits(
    gpu: Device, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a grid, told, and alone; each time a pass and one that finds what it left."""
    num_rows = 4
    placed = on(gpu, site(24, device))
    parts = torch.randn(num_rows * 6, DIM, device=device).bfloat16()
    shared = torch.randn(num_rows, DIM, device=device).bfloat16()
    ids = torch.arange(num_rows * 6, device=device).view(num_rows, 6)
    y = combine(gpu.launcher, parts, top_k=6, shared=shared, dtype=torch.bfloat16, expert_ids=ids)
    streams = torch.randn(num_rows, 4, DIM, device=device).bfloat16()
    post, mix = torch.rand(num_rows, 4, device=device), torch.rand(num_rows, 4, 4, device=device)
    run = hc_pass.bind(arch=gpu.arch, mult=4, dim=DIM, placed=True)

    def passes(given: Tensor | Mixture, rows: slice) -> list[Tensor]:
        first = run(given, streams[rows], post[rows], mix[rows], placed)
        torch.zeros(1, device=device)  # a pass reads what is two launches old ahead of its wait
        second = run(given, first[0], first[2], first[3], placed)
        return [values(x) for x in (*first, *second)]

    with monkeypatch.context() as without:
        without.setattr(device_streams, "TELL_ROWS", 0)
        want = passes(y, slice(num_rows))
    for rows in (slice(num_rows), slice(1, 3), slice(1), slice(3, 4)):
        of_rows = parts.view(num_rows, 6, DIM)[rows].flatten(0, 1)
        for given in (y[rows], Mixture(of_rows, shared[rows], None, ids[rows], lambda: y)) * 50:
            for a, b in zip(passes(given, rows), want, strict=True):
                assert torch.equal(a, b[rows])
    assert (gpu.counters == 0).all()
