"""Routed experts beside the shared one in emulation, against the separate kernels bit for bit."""

from __future__ import annotations

import pytest
import torch

from moet.errors import UnsupportedError
from moet.kernels.decode_experts import Router, choose, given
from moet.kernels.layout import ExpertRows, Mxfp4Rows, W2Rows
from moet.kernels.nvfp4_rows import Nvfp4Rows
from moet.kernels.paired_experts import fits, mix_in_pairs
from moet.kernels.stream_experts import plan, quantise
from moet.kernels.stream_gemm import StreamLinear, Workspace
from tests.kernels.emulation import Emulator
from tests.kernels.test_decode_experts import ERROR, EXPERTS, SLOTS, pool, shared_expert, step


@pytest.mark.parametrize(
    ("kind", "d", "i", "t", "weigh_output"),
    [
        (W2Rows, 416, 96, 3, True),
        (W2Rows, 64, 2048, 1, False),
        (Mxfp4Rows, 256, 64, 8, False),
    ],
)
def test_pairs_have_the_bits_of_the_separate_kernels(
    launcher: Emulator, kind: type[ExpertRows], d: int, i: int, t: int, weigh_output: bool
) -> None:
    experts, shared = pool(kind(d, i), d + i), shared_expert(d, i)
    assert fits(launcher, experts, shared)
    x, ids, weights = step(t, d)
    space, error = Workspace.allocate("cpu", 1 << 16, 64), ERROR.clone()
    codes, scale = quantise(launcher, x)
    own = shared(launcher, codes, scale, limit=10.0, error=error, workspace=space)
    expected = experts.mixture(
        launcher,
        x,
        ids,
        weights,
        SLOTS,
        limit=10.0,
        error=error,
        weigh_output=weigh_output,
        shared=own,
    )
    choice = given(launcher, ids, weights, SLOTS, d, error=error)
    for shared_ctas in (None, 1):
        found = mix_in_pairs(
            launcher,
            codes,
            scale,
            choice,
            experts,
            shared,
            limit=10.0,
            error=error,
            weigh_output=weigh_output,
            dtype=torch.float32,
            shared_ctas=shared_ctas,
        )
        assert torch.equal(found, expected)
    assert int(error) == 0


@pytest.mark.parametrize("t", [1, 8])
def test_the_list_of_choose_is_that_of_plan(launcher: Emulator, t: int) -> None:
    _, ids, weights = step(t, 64, seed=t)
    choice = given(launcher, ids, weights, SLOTS, 64, error=ERROR.clone())
    wanted = plan(launcher, ids, SLOTS, error=ERROR.clone())
    count = int(wanted.num_entries)
    assert int(choice.work.num_entries) == int(choice.num_chosen) == count
    assert torch.equal(choice.work.entries[:count], wanted.entries[:count])
    assert torch.equal(choice.work.pairs, wanted.pairs)


def test_a_fill_row_gets_the_shared_expert_alone(launcher: Emulator) -> None:
    d, i = 64, 64
    experts, shared = pool(W2Rows(d, i), 5), shared_expert(d, i)
    x, _, _ = step(3, d)
    space, error = Workspace.allocate("cpu", 1 << 16, 64), ERROR.clone()
    codes, scale = quantise(launcher, x)
    gate = torch.randn(EXPERTS, d, generator=torch.Generator().manual_seed(2)).bfloat16()
    router = Router(StreamLinear.bf16(gate), 2, 1.5)
    at = torch.tensor([4, -1, 6])
    choice = choose(launcher, x, router, SLOTS, error=error, workspace=space, positions=at)
    found = mix_in_pairs(
        launcher,
        codes,
        scale,
        choice,
        experts,
        shared,
        limit=None,
        error=error,
        dtype=torch.float32,
    )
    own = shared(launcher, codes, scale, limit=None, error=error, workspace=space).float()
    assert torch.equal(found[1], own[1])
    assert not torch.equal(found[0], own[0])
    assert int(error) == 0


def test_an_expert_without_a_slot_is_an_error(launcher: Emulator) -> None:
    experts, shared = pool(W2Rows(64, 64), 5), shared_expert(64, 64)
    x, ids, weights = step(1, 64)
    codes, scale = quantise(launcher, x)
    error = ERROR.clone()
    slots = SLOTS.clone()
    slots[ids[0, 1]] = -1
    choice = given(launcher, ids, weights, slots, 64, error=error)
    found = mix_in_pairs(launcher, codes, scale, choice, experts, shared, limit=None, error=error)
    assert int(error) == 1
    assert found.isnan().all()


def test_other_formats_are_refused(launcher: Emulator) -> None:
    experts, shared = pool(Nvfp4Rows(64, 64), 5), shared_expert(64, 64)
    x, ids, weights = step(1, 64)
    choice = given(launcher, ids, weights, SLOTS, 64, error=ERROR.clone())
    codes, scale = quantise(launcher, x)
    assert not fits(launcher, experts, shared)
    with pytest.raises(UnsupportedError, match="nvfp4"):
        mix_in_pairs(
            launcher, codes, scale, choice, experts, shared, limit=None, error=ERROR.clone()
        )
