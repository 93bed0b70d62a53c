"""Router scores, choice and weights; the mixture over experts read through slots."""

import pytest
import torch
from torch import Tensor

from moet.kernels.moe import (
    ExpertTable,
    F32Experts,
    expert_mixture,
    expert_weights,
    route_by_bias,
    route_by_token,
    sqrt_softplus,
    swiglu,
)

DIM, INTER, EXPERTS = 24, 8, 20


def matrices() -> list[tuple[Tensor, Tensor, Tensor]]:
    return [
        (torch.randn(INTER, DIM), torch.randn(INTER, DIM), torch.randn(DIM, INTER))
        for _ in range(EXPERTS)
    ]


def table(experts: list[tuple[Tensor, Tensor, Tensor]], slots: Tensor) -> ExpertTable:
    form = F32Experts(DIM, INTER)
    rows = torch.full((int(slots.max()) + 1, form.row_bytes), 255, dtype=torch.uint8)
    for expert_id, slot in enumerate(slots.tolist()):
        if slot >= 0:
            rows[slot] = form.pack(*experts[expert_id])
    return ExpertTable(form, rows, slots)


def mixture(x: Tensor, ids: Tensor, weights: Tensor, t: ExpertTable, limit: float = 10) -> Tensor:
    return expert_mixture(x, ids, weights, t, limit=limit, round_activations=False)


def test_scores_are_the_root_of_softplus() -> None:
    x = torch.tensor([[-100.0, -20.0, -1.0, 0.0, 1.0, 20.0, 1e4]])
    expected = torch.nn.functional.softplus(x.double()).sqrt().float()
    torch.testing.assert_close(sqrt_softplus(x), expected)
    assert sqrt_softplus(torch.tensor([[-1e4]])).item() == 0


def test_bias_chooses_and_ties_go_to_the_lowest_id() -> None:
    scores, bias = torch.tensor([[1.0, 2.0, 2.0, 0.0]]), torch.tensor([0.0, 0.0, 0.0, 2.0])
    assert route_by_bias(scores, bias, top_k=3).tolist() == [[1, 2, 3]]


def test_weights_are_unbiased_and_sum_to_the_factor() -> None:
    scores = torch.rand(5, EXPERTS)
    ids = torch.stack([torch.randperm(EXPERTS)[:3] for _ in range(5)])
    weights = expert_weights(scores, ids, scaling_factor=1.5)
    torch.testing.assert_close(weights.sum(1), torch.full((5,), 1.5))
    torch.testing.assert_close(
        weights[:, 0] / weights[:, 1], (s := scores.gather(1, ids))[:, 0] / s[:, 1]
    )
    assert expert_weights(scores * 0, ids, scaling_factor=1.5).abs().max() == 0


def test_hash_table_is_read_by_token_id() -> None:
    experts = torch.randint(0, EXPERTS, (257, 3))
    assert torch.equal(route_by_token(torch.tensor([256, 0]), experts), experts[[256, 0]])


def test_swiglu_bounds_the_gate_from_above_only() -> None:
    gate, up = torch.tensor([[50.0, -50.0, 2.0, 2.0]]), torch.tensor([[1.0, 1.0, 50.0, -50.0]])
    silu = torch.nn.functional.silu
    expected = [silu(torch.tensor(10.0)), silu(torch.tensor(-50.0)), 10 * silu(gate[0, 2])]
    got = swiglu(gate, up, limit=10.0)[0]
    torch.testing.assert_close(got[:3], torch.stack(expected))
    assert got[3] == -got[2]
    assert swiglu(torch.tensor([[-1e4]]), torch.ones(1, 1), limit=10.0).item() == 0


@pytest.mark.parametrize("num_rows", [0, 1, 3, 17])
def test_mixture_sums_weighted_experts(num_rows: int) -> None:
    experts = matrices()
    ids = torch.randint(0, EXPERTS - 2, (num_rows, 1)) + torch.arange(3)
    x, weights = torch.randn(num_rows, DIM), torch.rand(num_rows, 3)
    expected = torch.zeros(num_rows, DIM)
    for row in range(num_rows):
        for k in range(3):
            w1, w3, w2 = experts[int(ids[row, k])]
            hidden = swiglu((w1 @ x[row])[None], (w3 @ x[row])[None], limit=10)
            expected[row] += weights[row, k] * (w2 @ hidden[0])
    got = mixture(x, ids, weights, table(experts, torch.arange(EXPERTS)))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_slots_and_batch_mates_do_not_show() -> None:
    experts = matrices()
    ids = torch.stack([torch.randperm(EXPERTS)[:4] for _ in range(33)])
    x, weights = torch.randn(33, DIM), torch.rand(33, 4)
    whole = mixture(x, ids, weights, table(experts, torch.arange(EXPERTS)))
    elsewhere = table(experts, torch.randperm(EXPERTS + 5)[:EXPERTS])
    for size in (1, 3, 17):
        parts = zip(*(torch.split(t, size) for t in (x, ids, weights)), strict=True)
        got = torch.cat([mixture(*part, elsewhere) for part in parts])
        assert torch.equal(got, whole)


def test_rounded_activations_make_a_difference() -> None:
    experts = table(matrices(), torch.arange(EXPERTS))
    x, ids, weights = torch.randn(2, DIM), torch.tensor([[1, 2], [3, 1]]), torch.rand(2, 2)
    exact = mixture(x, ids, weights, experts)
    rounded = expert_mixture(x, ids, weights, experts, limit=10, round_activations=True)
    assert not torch.equal(exact, rounded)
    assert (exact - rounded).norm() / exact.norm() < 0.2


def test_absent_expert_is_refused() -> None:
    slots = torch.arange(EXPERTS)
    slots[7] = -1
    with pytest.raises(AssertionError, match="expert 7"):
        mixture(
            torch.randn(1, DIM), torch.tensor([[7]]), torch.ones(1, 1), table(matrices(), slots)
        )
