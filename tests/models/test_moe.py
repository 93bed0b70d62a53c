"""Providers of experts: resident ones, and packed ones that are unpacked on first use."""

import torch
from torch import Tensor

from moet.kernels.moe import ExpertTable, expert_mixture
from moet.models.moe import UnpackedExperts

DIM, INTER, NUM_EXPERTS = 24, 8, 6


class HalfRows:
    """A packed format for the test: fp16 matrices one after the other. Counts its work."""

    name = "half"
    row_bytes = 6 * DIM * INTER

    def __init__(self) -> None:
        self.num_unpacked = 0

    def unpack(self, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.num_unpacked += 1
        w1, w3, w2 = row.view(torch.float16).float().chunk(3)
        return w1.view(INTER, DIM), w3.view(INTER, DIM), w2.view(DIM, INTER)


class Packed:
    """Experts in slots that move on every call, as a cache would move them."""

    def __init__(self) -> None:
        self.format = HalfRows()
        self.content = torch.randn(NUM_EXPERTS, 3 * DIM * INTER).half().view(torch.uint8)

    def resolve(self, layer_idx: int, expert_ids: Tensor) -> ExpertTable:
        slots = torch.randperm(NUM_EXPERTS)
        rows = torch.empty_like(self.content)
        rows[slots] = self.content
        return ExpertTable(self.format, rows, slots)


def mixture(x: Tensor, ids: Tensor, table: ExpertTable) -> Tensor:
    weights = torch.full(ids.shape, 0.5)
    return expert_mixture(x, ids, weights, table, limit=10.0, round_activations=False)


def test_unpacked_experts_give_the_same_bits() -> None:
    packed = Packed()
    unpacked = UnpackedExperts(packed)
    for ids in (torch.tensor([[0, 3]]), torch.tensor([[3, 5], [1, 0]]), torch.tensor([[4, 2]])):
        x = torch.randn(len(ids), DIM)
        expected = mixture(x, ids, packed.resolve(0, ids))
        assert torch.equal(mixture(x, ids, unpacked.resolve(0, ids)), expected)


def test_an_expert_is_unpacked_once_per_layer() -> None:
    packed = Packed()
    unpacked = UnpackedExperts(packed)
    ids = torch.tensor([[0, 3]])
    for _ in range(3):
        with torch.inference_mode():
            unpacked.resolve(0, ids)
        unpacked.resolve(1, ids)
    assert packed.format.num_unpacked == 2 * (2 + 1)  # and one to learn the shape
    assert unpacked.resolve(0, ids).slot_of.tolist() == [0, -1, -1, 3, -1, -1]


def test_no_rows_need_no_experts() -> None:
    packed = Packed()
    UnpackedExperts(packed).resolve(0, torch.zeros(0, 2, dtype=torch.int64))
    assert packed.format.num_unpacked == 0
