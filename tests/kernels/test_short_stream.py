"""Short kernels give the bits of the streams that they stand in for, in emulation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from moet.kernels import short_stream
from moet.kernels.device_gemm import Device, PackedGroups, PackedMatrix, multiply, multiply_groups
from moet.kernels.projections import multiply_both
from moet.kernels.quant import Activations
from moet.kernels.stream_experts import quantise
from tests.kernels.emulation import Emulator
from tests.kernels.test_device_gemm import fp8, rows


@pytest.fixture
def device(launcher: Emulator) -> Device:
    return Device.around(launcher, f"sm{launcher.sm}a", "cpu")


@pytest.fixture
def ran(launcher: Emulator, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that run."""
    names: list[str] = []
    launch = Emulator.launch

    def listed(self: Emulator, name: str, **how: object) -> None:
        names.append(name)
        launch(self, name, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(Emulator, "launch", listed)
    return names


@pytest.fixture
def streamed() -> Iterator[pytest.MonkeyPatch]:
    """Until it is undone, no rows are few enough for a short kernel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(short_stream, "MAX_ROWS", 0)
        yield patch


@pytest.mark.parametrize(("n", "k", "count"), [(64, 2048, 1), (128, 4096, 8)])
def test_products(
    device: Device, ran: list[str], streamed: pytest.MonkeyPatch, n: int, k: int, count: int
) -> None:
    packed = PackedMatrix.pack(*fp8(n, k), device)
    x = rows(count, k)
    coded = Activations(None, *quantise(device.launcher, x))
    wanted = multiply(x, packed)
    streamed.undo()
    ran.clear()
    assert torch.equal(multiply(x, packed), wanted)
    assert torch.equal(multiply(coded, packed), wanted)
    assert ran == ["short_fp8_quant_bf16", "short_fp8_bf16"]
    assert int(device.error) == 0


def test_whole_products(device: Device, ran: list[str], streamed: pytest.MonkeyPatch) -> None:
    """CTAs of one tile and of more."""
    packed = PackedMatrix.pack(*fp8(7 * 64, 1024), device)
    coded = Activations(None, *quantise(device.launcher, rows(5, 1024)))
    wanted = multiply(coded, packed)
    streamed.undo()
    ran.clear()
    assert torch.equal(multiply(coded, packed), wanted)
    assert ran == ["short_fp8_bf16_whole"]


@pytest.mark.parametrize(("slices", "name"), [(2, "short_fp8_bf16"), (1, "short_fp8_bf16_whole")])
def test_groups(
    device: Device,
    ran: list[str],
    streamed: pytest.MonkeyPatch,
    monkeypatch: pytest.MonkeyPatch,
    slices: int,
    name: str,
) -> None:
    packed = PackedGroups.pack(*fp8(2, 128, 2048), device)
    monkeypatch.setattr(PackedGroups, "slices", lambda _: slices)
    coded = Activations(None, *quantise(device.launcher, rows(2 * 5, 2048)))
    wanted = multiply_groups(coded, packed)
    streamed.undo()
    ran.clear()
    assert torch.equal(multiply_groups(coded, packed), wanted)
    assert ran == [name]
    assert int(device.error) == 0


@pytest.mark.parametrize("count", [1, 8])
def test_pairs(
    launcher: Emulator, ran: list[str], streamed: pytest.MonkeyPatch, count: int
) -> None:
    """One of them by CTAs of two tiles, since six CTAs fit at once."""
    launcher = replace(launcher, num_sms=3 if launcher.sm == 90 else 6)
    device = Device.around(launcher, f"sm{launcher.sm}a", "cpu")
    quantised = PackedMatrix.pack(*fp8(128, 1024), device)
    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(2)).bfloat16()
    plain = PackedMatrix.pack(weight, None, device)
    values = rows(count, 1024)
    x = Activations(values, *quantise(device.launcher, values))
    wanted = multiply_both(x, quantised, plain)
    streamed.undo()
    ran.clear()
    found = multiply_both(x, quantised, plain)
    assert all(map(torch.equal, found, wanted))
    assert ran == ["short_pair"]
    assert int(device.counters.abs().sum()) == int(device.error) == 0


def test_what_a_layer_multiplies_is_shared_evenly() -> None:
    """A layer with an index on 132 SMs; without; and what does not fit."""
    fp8_part = (24, 8, 32768)
    assert short_stream.runs_of_tiles(264, fp8_part, (41, 4, 131072)) == (12, 41)
    assert short_stream.runs_of_tiles(264, fp8_part, (16, 16, 32768)) == (13, 10)
    assert short_stream.runs_of_tiles(20, fp8_part, (41, 4, 131072)) is None


@pytest.mark.parametrize(("n", "k"), [(72, 2048), (64, 1920), (64, 256)])
def test_shapes_without_a_short_kernel(device: Device, n: int, k: int) -> None:
    packed = PackedMatrix.pack(*fp8(n, k), device).stored
    assert (
        short_stream.multiply(device.launcher, packed, rows(1, k), None, error=device.error) is None
    )
