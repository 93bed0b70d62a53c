"""Products with packed weights, in emulation: which kernel runs changes the time and no bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moet.errors import UnsupportedError
from moet.kernels import device_gemm
from moet.kernels.device_gemm import Device, PackedGroups, PackedMatrix, multiply, multiply_groups
from moet.kernels.gemm import grouped_linear_fp8, linear, linear_fp8, linear_fp8_fp32, linear_fp32
from moet.kernels.projections import multiply_both
from moet.kernels.quant import Activations
from moet.kernels.stream_experts import quantise
from tests.kernels.emulation import Emulator

STREAM_ROWS = 19  # few enough for the emulation to pass


@pytest.fixture
def device(launcher: Emulator, monkeypatch: pytest.MonkeyPatch) -> Device:
    monkeypatch.setattr(device_gemm, "STREAM_ROWS", STREAM_ROWS)
    return Device.around(launcher, f"sm{launcher.sm}a", "cpu")


def fp8(*shape: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    weight = torch.randn(*shape, generator=rng).to(torch.float8_e4m3fn)
    blocks = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    return weight, 2.0 ** torch.randint(-6, -2, blocks, generator=rng).float()


def values(weight: Tensor, scale: Tensor) -> Tensor:
    wide = scale.repeat_interleave(128, -2).repeat_interleave(128, -1)
    return weight.float() * wide[..., : weight.shape[-2], : weight.shape[-1]]


def rows(count: int, width: int) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(count)).bfloat16()


def close(found: Tensor, wanted: Tensor, tolerance: float) -> bool:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm()) < tolerance


@pytest.mark.parametrize("count", [1, 9, 17, STREAM_ROWS + 2])
def test_fp8_products_are_the_reference_op(device: Device, count: int) -> None:
    weight, scale = fp8(256, 416)
    packed = PackedMatrix.pack(weight, scale, device)
    x = rows(count, 416)
    found = multiply(x, packed)
    assert close(found, linear_fp8(x, values(weight, scale)), linear_fp8.tolerance)
    assert int(device.error) == 0
    assert int(device.counters.abs().sum()) == 0


def test_a_row_is_the_same_in_any_batch_and_from_codes(device: Device) -> None:
    packed = PackedMatrix.pack(*fp8(192, 1024), device)
    x = rows(STREAM_ROWS + 5, 1024)
    alone = torch.cat([multiply(row, packed) for row in x.split(1)])
    assert torch.equal(multiply(x[:12], packed), alone[:12])
    assert torch.equal(multiply(x[:18], packed), alone[:18])
    assert torch.equal(multiply(x, packed), alone)
    codes, scale = quantise(device.launcher, x[:12])
    assert torch.equal(multiply(Activations(None, codes, scale), packed), alone[:12])


@pytest.mark.parametrize("count", [1, 11, 17])
def test_two_products_at_once_have_the_bits_of_each_alone(device: Device, count: int) -> None:
    quantised = PackedMatrix.pack(*fp8(192, 1024), device)
    weight = torch.randn(72, 1024, generator=torch.Generator().manual_seed(2)).bfloat16()
    plain = PackedMatrix.pack(weight, None, device)
    x = rows(count, 1024)
    first, second = multiply_both(x, quantised, plain)
    assert torch.equal(first, multiply(x, quantised))
    assert torch.equal(second, multiply(x, plain, output="f32"))
    assert int(device.counters.abs().sum()) == int(device.error) == 0


@pytest.mark.parametrize("count", [0, 2, 11, 18, STREAM_ROWS + 1])
def test_bf16_products_are_the_reference_ops(device: Device, count: int) -> None:
    weight = torch.randn(72, 192, generator=torch.Generator().manual_seed(2)).bfloat16()
    packed = PackedMatrix.pack(weight, None, device)
    x = rows(count, 192)
    exact = multiply(x, packed, output="f32")
    assert exact.dtype == torch.float32
    assert exact.shape == (count, 72)
    if count:
        assert close(exact, linear_fp32(x, weight.float()), linear_fp32.tolerance * 8)
        assert close(multiply(x, packed), linear(x, weight.float()), linear.tolerance)
        assert torch.equal(
            multiply(x, packed, output="f32")[-1:], multiply(x[-1:], packed, output="f32")
        )


@pytest.mark.parametrize("count", [1, 9, 18, STREAM_ROWS + 2])
def test_groups_are_the_reference_op_and_rows_keep_to_themselves(
    device: Device, count: int
) -> None:
    weight, scale = fp8(3, 128, 256)
    packed = PackedGroups.pack(weight, scale, device)
    x = rows(count * 3, 256).view(count, 3, 256)
    found = multiply_groups(x, packed)
    assert close(found, grouped_linear_fp8(x, values(weight, scale)), grouped_linear_fp8.tolerance)
    for token in (0, count - 1):
        assert torch.equal(multiply_groups(x[token : token + 1], packed)[0], found[token])
    assert int(device.error) == 0


def test_groups_take_codes(device: Device) -> None:
    packed = PackedGroups.pack(*fp8(2, 128, 512), device)
    x = rows(2 * 5, 512)
    codes, scale = quantise(device.launcher, x)
    wanted = multiply_groups(x.view(5, 2, 512), packed)
    assert torch.equal(multiply_groups(Activations(None, codes, scale), packed), wanted)
    assert int(device.counters.abs().sum()) == int(device.error) == 0


@pytest.mark.parametrize(("count", "quantised"), [(9, True), (17, False)])
def test_a_head_is_read_in_tiles(
    device: Device, monkeypatch: pytest.MonkeyPatch, count: int, quantised: bool
) -> None:
    monkeypatch.setattr(device_gemm, "WIDE_OUTPUTS", 64)
    scale = torch.ones(1, 2) if quantised else None
    weight = torch.randn(128, 192, generator=torch.Generator().manual_seed(6)).bfloat16()
    weight = weight.to(torch.float8_e4m3fn) if quantised else weight
    packed = PackedMatrix.pack(weight, scale, device)
    x = rows(count, 192)
    if quantised:
        wanted = linear_fp8_fp32(x, weight.float())
        found = linear_fp8_fp32.bind(arch=device.arch, num_in=192)(x, packed)
        assert close(found, wanted, linear_fp8_fp32.tolerance)
    alone = torch.cat([multiply(row, packed, output="f32") for row in x.split(1)])
    assert torch.equal(multiply(x, packed, output="f32"), alone)


def test_matrices_of_one_input_are_joined(device: Device) -> None:
    parts = [PackedMatrix.pack(*fp8(n, 256, seed=n), device) for n in (128, 64)]
    x = rows(2, 256)
    wanted = torch.cat([multiply(x, part) for part in parts], 1)
    assert torch.equal(multiply(x, PackedMatrix.joined(parts)), wanted)
    with pytest.raises(UnsupportedError, match="64 rows has others behind it"):
        PackedMatrix.joined(parts[::-1])
