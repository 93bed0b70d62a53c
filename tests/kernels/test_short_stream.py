"""Short kernels give the bits of the streams that they stand in for, in emulation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

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


def shortly(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """way: by which slices are summed, the end of a kernel's name. One of them is rehearsed."""
    sites = frozenset({"groups", "inputs", "codes", "pairs"})
    monkeypatch.setattr(short_stream, "SITES", sites)
    if way == "_handed":
        monkeypatch.setattr(short_stream, "REHEARSED", sites)
    if way:
        monkeypatch.setattr(short_stream, {"_cluster": "CLUSTERS", "_handed": "HANDED"}[way], sites)


@pytest.mark.parametrize("way", ["", "_cluster", "_handed"])
@pytest.mark.parametrize(("n", "k", "count"), [(64, 2048, 1), (128, 4096, 3), (128, 4096, 8)])
def test_products(
    device: Device,
    ran: list[str],
    monkeypatch: pytest.MonkeyPatch,
    n: int,
    k: int,
    count: int,
    way: str,
) -> None:
    packed = PackedMatrix.pack(*fp8(n, k), device)
    x = rows(count, k)
    coded = Activations(None, *quantise(device.launcher, x))
    wanted = multiply(x, packed)
    assert torch.equal(multiply(coded, packed), wanted)
    shortly(monkeypatch, way)
    ran.clear()
    assert torch.equal(multiply(x, packed), wanted)
    assert torch.equal(multiply(coded, packed), wanted)
    assert ran == [f"short_fp8_quant_bf16{way}", f"short_fp8_bf16{way}"]
    assert int(device.counters.abs().sum()) == int(device.error) == 0


@pytest.mark.parametrize("count", [1, 5])
def test_whole_products(
    device: Device, ran: list[str], monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """CTAs of one tile and of two."""
    packed = PackedMatrix.pack(*fp8(7 * 64, 1024), device)
    coded = Activations(None, *quantise(device.launcher, rows(count, 1024)))
    wanted = multiply(coded, packed)
    monkeypatch.setattr(short_stream, "SITES", frozenset({"wholes"}))
    monkeypatch.setattr(short_stream, "REHEARSED", frozenset({"wholes"}))
    ran.clear()
    assert torch.equal(multiply(coded, packed), wanted)
    assert ran == ["short_fp8_bf16_whole"]


@pytest.mark.parametrize(("count", "way"), [(1, "_cluster"), (5, ""), (2, "_handed")])
def test_groups(
    device: Device,
    ran: list[str],
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    way: str,
) -> None:
    packed = PackedGroups.pack(*fp8(2, 128, 2048), device)
    monkeypatch.setattr(PackedGroups, "slices", lambda _: 2)
    coded = Activations(None, *quantise(device.launcher, rows(2 * count, 2048)))
    wanted = multiply_groups(coded, packed)
    shortly(monkeypatch, way)
    ran.clear()
    assert torch.equal(multiply_groups(coded, packed), wanted)
    assert ran == [f"short_fp8_bf16{way}"]
    assert int(device.counters.abs().sum()) == int(device.error) == 0


@pytest.mark.parametrize(("count", "way"), [(1, ""), (3, "_handed"), (8, "")])
def test_pairs(
    device: Device, ran: list[str], monkeypatch: pytest.MonkeyPatch, count: int, way: str
) -> None:
    """One of them by CTAs of two tiles."""
    quantised = PackedMatrix.pack(*fp8(128, 1024), device)
    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(2)).bfloat16()
    plain = PackedMatrix.pack(weight, None, device)
    values = rows(count, 1024)
    x = Activations(values, *quantise(device.launcher, values))
    wanted = multiply_both(x, quantised, plain)
    shortly(monkeypatch, way)
    ran.clear()
    found = multiply_both(x, quantised, plain)
    assert all(map(torch.equal, found, wanted))
    assert ran == [f"short_pair{way}"]
    assert int(device.counters.abs().sum()) == int(device.error) == 0


def test_what_a_layer_multiplies_is_shared_evenly() -> None:
    """A layer with an index on 132 SMs; without; and what does not fit."""
    fp8_part = (24, 8, 32768)
    assert short_stream.runs_of_tiles(264, fp8_part, (41, 4, 131072)) == (12, 41)
    assert short_stream.runs_of_tiles(264, fp8_part, (16, 16, 32768)) == (13, 10)
    assert short_stream.runs_of_tiles(20, fp8_part, (41, 4, 131072)) is None


def test_shapes_without_a_short_kernel(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    shortly(monkeypatch, "")
    found: list[Tensor | None] = []
    for n, k in ((72, 2048), (64, 1920), (64, 256)):
        packed = PackedMatrix.pack(*fp8(n, k), device).stored
        space = device.workspace(8, 4096)
        assert space is not None
        x, error = rows(1, k), device.error
        found.append(
            short_stream.multiply(device.launcher, packed, x, None, error=error, workspace=space)
        )
    assert found == [None, None, None]
