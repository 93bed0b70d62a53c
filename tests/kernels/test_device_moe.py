"""The layer of experts as one op, in emulation: its reference, and however it is launched."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moet.kernels import device_gemm
from moet.kernels.device_gemm import Beside, Device, PackedMatrix
from moet.kernels.layout import W2Rows
from moet.kernels.moe import ExpertTable
from moet.kernels.moe_layer import RouterWeights, SharedWeights, moe
from moet.kernels.quant import Activations
from moet.kernels.stream_experts import SharedExpert, quantise
from tests.kernels.emulation import Emulator
from tests.kernels.test_device_gemm import fp8, rows, values
from tests.kernels.test_stream_gemm import pool

EXPERTS, TOP_K, DIM, INTER, VOCAB = 6, 2, 256, 128, 40
STREAM_ROWS = 11
POLICY = {"limit": 10.0, "round_activations": True, "weigh_output": False, "num_slices": 1}


@pytest.fixture
def device(launcher: Emulator, monkeypatch: pytest.MonkeyPatch) -> Device:
    monkeypatch.setattr(device_gemm, "STREAM_ROWS", STREAM_ROWS)
    return Device.around(launcher, f"sm{launcher.sm}a", "cpu")


class Layer:
    """One layer's weights, for the reference and packed."""

    def __init__(self, device: Device, *, hashed: bool) -> None:
        rng = torch.Generator().manual_seed(4)
        experts, _ = pool(W2Rows(DIM, INTER), EXPERTS, 7)
        slot_of = torch.tensor([3, 0, 5, 1, 4, 2])
        turned = torch.empty_like(experts.rows)
        turned[slot_of] = experts.rows
        self.table = ExpertTable(experts.format, turned, slot_of, experts.bases)
        gate = torch.randn(EXPERTS, DIM, generator=rng).div(16).bfloat16()
        table = torch.randint(0, EXPERTS - 1, (VOCAB, 1), generator=rng)
        self.router = RouterWeights(
            gate.float(),
            None if hashed else torch.rand(EXPERTS, generator=rng),
            torch.cat([table, table + 1], 1) if hashed else None,
            TOP_K,
            1.5,
            sigmoid=False,
        )
        up, down = fp8(2 * INTER, DIM, seed=8), fp8(DIM, INTER, seed=9)
        self.shared = SharedWeights(values(*up), values(*down), quantised=True)
        self.packed_router = replace(self.router, weight=PackedMatrix.pack(gate, None, device))
        packed = [PackedMatrix.pack(*matrix, device).stored for matrix in (up, down)]
        self.packed_shared = SharedWeights(None, None, True, SharedExpert.joined(*packed))

    def reference(self, x: Tensor, ids: Tensor, positions: Tensor) -> Tensor:
        return moe(x, ids, positions, self.router, self.table, self.shared, **POLICY)

    def on(self, device: Device, x: Tensor | Activations, ids: Tensor, at: Tensor) -> Tensor:
        bound = moe.bind(arch=device.arch)
        return bound(x, ids, at, self.packed_router, self.table, self.packed_shared, **POLICY)


def moved(layer: Layer, device: Device) -> Layer:
    assert isinstance(layer.packed_router.weight, PackedMatrix)
    weight = replace(layer.packed_router.weight, device=device)
    layer.packed_router = replace(layer.packed_router, weight=weight)
    return layer


def paired(layer: Layer, device: Device) -> tuple[Layer, Device]:
    """The same where routed experts of few rows run beside the shared one."""
    other = replace(device, paired_rows=8)
    return moved(layer, other), other


@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize("count", [1, 3, STREAM_ROWS + 2])
def test_the_layer_is_its_reference(device: Device, hashed: bool, count: int) -> None:
    layer = Layer(device, hashed=hashed)
    x, positions = rows(count, DIM), torch.arange(count)
    ids = torch.arange(count) * 3 % VOCAB
    wanted, found = layer.reference(x, ids, positions), layer.on(device, x, ids, positions)
    assert float((found.float() - wanted.float()).norm() / wanted.float().norm()) < moe.tolerance
    assert int(device.error) == 0


@pytest.mark.parametrize("hashed", [False, True])
def test_rows_have_the_same_bits_however_they_are_launched(device: Device, hashed: bool) -> None:
    layer = Layer(device, hashed=hashed)
    x, positions = rows(STREAM_ROWS + 2, DIM), torch.arange(STREAM_ROWS + 2)
    ids = positions * 5 % VOCAB
    tiled = layer.on(device, x, ids, positions)
    assert torch.equal(layer.on(device, x[:3], ids[:3], positions[:3]), tiled[:3])
    codes = Activations(x[:3], *quantise(device.launcher, x[:3]))
    assert torch.equal(layer.on(device, codes, ids[:3], positions[:3]), tiled[:3])
    forked = replace(device, beside=Beside.open(device.torch_device))
    found = moved(layer, forked).on(forked, x[:3], ids[:3], positions[:3])
    assert torch.equal(found, tiled[:3])
    layer, quick = paired(layer, device)
    for few in (x[:3], codes):
        assert torch.equal(layer.on(quick, few, ids[:3], positions[:3]), tiled[:3])
    assert int(device.error) == 0


@pytest.mark.parametrize("quick", [False, True])
def test_fill_rows_read_no_expert_of_their_own(device: Device, quick: bool) -> None:
    layer = Layer(device, hashed=True)
    if quick:
        layer, device = paired(layer, device)
    x, positions = rows(3, DIM), torch.tensor([7, -1, -1])
    ids = torch.tensor([9, 0, 0])
    alone = layer.on(device, x[:1], ids[:1], positions[:1])
    routed = set(layer.router.table[9].tolist()) if layer.router.table is not None else set()
    absent = layer.table.slot_of.clone()
    absent[[e for e in range(EXPERTS) if e not in routed]] = -1
    layer.table = replace(layer.table, slot_of=absent)
    filled = layer.on(device, x, ids, positions)
    assert torch.equal(filled[0], alone[0])
    assert filled.isfinite().all()
    assert int(device.error) == 0


@pytest.mark.parametrize("quick", [False, True])
def test_an_expert_without_a_slot_sets_the_error_word(device: Device, quick: bool) -> None:
    layer = Layer(device, hashed=True)
    if quick:
        layer, device = paired(layer, device)
    layer.table = replace(layer.table, slot_of=torch.full((EXPERTS,), -1))
    layer.on(device, rows(1, DIM), torch.tensor([9]), torch.tensor([0]))
    assert int(device.error) != 0
