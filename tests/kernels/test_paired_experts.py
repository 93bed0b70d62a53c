"""Routed experts beside the shared one in emulation, against the separate kernels bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moet.kernels.decode_experts import Router, choose, given
from moet.kernels.layout import ExpertRows, Mxfp4Rows, W2Rows
from moet.kernels.nvfp4_rows import Nvfp4Rows
from moet.kernels.paired_experts import Begun, begin, fits, mix_on_read
from moet.kernels.stream_experts import ExpertPool, SharedExpert, plan, quantise
from moet.kernels.stream_gemm import StreamLinear, Workspace
from tests.kernels.emulation import Emulator
from tests.kernels.test_decode_experts import ERROR, EXPERTS, SLOTS, pool, shared_expert, step


class Step:
    """A step of t tokens over EXPERTS experts, two each."""

    def __init__(self, launcher: Emulator, d: int, i: int, t: int) -> None:
        self.launcher, self.shared = launcher, shared_expert(d, i)
        self.x, _, _ = step(t, d)
        self.codes, self.scale = quantise(launcher, self.x)
        gate = torch.randn(EXPERTS, d, generator=torch.Generator().manual_seed(2)).bfloat16()
        self.router = Router(StreamLinear.bf16(gate), 2, 1.5)
        self.space, self.error = Workspace.allocate("cpu", 1 << 16, 64), ERROR.clone()

    def begin(self, slots: Tensor = SLOTS, positions: Tensor | None = None) -> Begun:
        return begin(
            self.launcher,
            self.x,
            self.codes,
            self.scale,
            self.router,
            slots,
            self.shared,
            limit=10.0,
            error=self.error,
            workspace=self.space,
            positions=positions,
        )

    def mix(
        self,
        begun: Begun,
        experts: ExpertPool,
        *,
        weigh_output: bool = False,
        shared_ctas: int | None = None,
    ) -> Tensor:
        return mix_on_read(
            self.launcher,
            self.codes,
            self.scale,
            begun,
            experts,
            self.shared,
            limit=10.0,
            error=self.error,
            weigh_output=weigh_output,
            dtype=torch.float32,
            shared_ctas=shared_ctas,
        ).add()

    def own(self) -> Tensor:
        options = {"limit": 10.0, "error": self.error, "workspace": self.space}
        return self.shared(self.launcher, self.codes, self.scale, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "d", "i", "t", "weigh_output"),
    [
        (W2Rows, 416, 96, 3, True),
        (W2Rows, 64, 2048, 1, False),
        (W2Rows, 64, 64, 5, False),
        (Mxfp4Rows, 256, 64, 8, False),
        (Nvfp4Rows, 256, 64, 3, False),
    ],
)
def test_pairs_have_the_bits_of_the_separate_kernels(
    launcher: Emulator,
    kind: type[ExpertRows],
    d: int,
    i: int,
    t: int,
    weigh_output: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names, launch = set(), Emulator.launch

    def named(self: Emulator, name: str, **how: Any) -> None:
        names.add(name)
        launch(self, name, **how)

    monkeypatch.setattr(Emulator, "launch", named)
    experts, made = pool(kind(d, i), d + i), Step(launcher, d, i, t)
    assert fits(launcher, experts, made.shared)
    begun = made.begin()
    options = {"error": made.error, "workspace": made.space}
    alone = choose(launcher, made.x, made.router, SLOTS, **options)  # type: ignore[arg-type]
    assert torch.equal(begun.choice.expert_ids, alone.expert_ids)
    assert torch.equal(begun.choice.weights, alone.weights)
    expected = experts.mixture(
        launcher,
        made.x,
        alone.expert_ids,
        alone.weights,
        SLOTS,
        limit=10.0,
        error=made.error,
        weigh_output=weigh_output,
        shared=made.own(),
    )
    for shared_ctas in (None, 1):
        found = made.mix(begun, experts, weigh_output=weigh_output, shared_ctas=shared_ctas)
        assert torch.equal(found, expected)
    assert int(made.error) == 0
    few = kind is W2Rows and t <= 4
    assert ("pair_w2_listed" in names) == few
    # where the shared memory holds three CTAs of down
    assert ("stream_w2_n8_quant_bf16_listed" in names) == (few and launcher.sm == 90)


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
    made = Step(launcher, 64, 64, 3)
    begun = made.begin(positions=torch.tensor([4, -1, 6]))
    found, own = made.mix(begun, pool(W2Rows(64, 64), 5)), made.own().float()
    assert torch.equal(found[1], own[1])
    assert not torch.equal(found[0], own[0])
    assert int(made.error) == 0


def test_an_expert_without_a_slot_is_an_error(launcher: Emulator) -> None:
    made = Step(launcher, 64, 64, 1)
    begun = made.begin(slots=torch.full_like(SLOTS, -1))
    assert made.mix(begun, pool(W2Rows(64, 64), 5)).isnan().all()
    assert int(made.error) == 1


def test_whole_models_fit_the_shared_memory_of_either_architecture(launcher: Emulator) -> None:
    """Their shared experts stream; where it is small, not beside the routed ones."""
    for d in (4096, 6144):
        planes = torch.empty(2, 2048, d, dtype=torch.uint8, device="meta")
        down = StreamLinear("fp8", planes[0].T, None, d, 2048, 1)
        shared = SharedExpert(planes, torch.empty(2, 16, d // 128), down, 2048)
        codes = torch.empty(0, d, dtype=torch.uint8)
        options = {"limit": None, "error": ERROR, "workspace": None}
        shared(launcher, codes, torch.empty(0, d // 128), **options)  # type: ignore[arg-type]
        experts = ExpertPool(W2Rows(d, 2048), torch.empty(0), torch.empty(0))
        assert fits(launcher, experts, shared) == (launcher.sm == 90 or d == 4096)
