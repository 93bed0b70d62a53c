"""Stand-ins for a device: a model whose step can be captured, and a capture that plays a recorded
step again, both on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from moet.config import CacheConfig, SchedulerConfig
from moet.kernels.rows import Rows
from moet.models.base import ForwardInput, KVTensors, ModelOutput
from moet.runtime.core import EngineCore
from moet.runtime.device_runner import Placement
from moet.runtime.experts.precision import PrecisionSet
from moet.runtime.queues import CpuQueue, Moment, Work
from tests.fakes import FakeModel, NoExperts


class StepFakeModel(FakeModel):
    """A FakeModel whose step takes rows as device tensors, fill rows among them.

    Its passes have three parts: what each holds is written in the last one.
    """

    num_parts = 3

    def compute_parts(
        self,
        token_ids: Tensor,
        rows: Rows,
        logits_indices: Tensor | None,
        kv: KVTensors,
        experts: object,
    ) -> Generator[None, None, ModelOutput]:
        for _ in range(self.num_parts - 1):
            yield
        return self.compute(token_ids, rows, logits_indices, kv, experts)

    def compute(
        self,
        token_ids: Tensor,
        rows: Rows,
        logits_indices: Tensor | None,
        kv: KVTensors,
        experts: object,
    ) -> ModelOutput:
        def run(inputs: ForwardInput, there: list[int]) -> Tensor:
            return self.forward(inputs, kv, experts).logits

        return self._placed(token_ids, rows, logits_indices, run)

    def compute_draft(
        self,
        token_ids: Tensor,
        rows: Rows,
        logits_indices: Tensor | None,
        hidden_states: Tensor,
        kv: KVTensors,
        experts: object,
    ) -> ModelOutput:
        def run(inputs: ForwardInput, there: list[int]) -> Tensor:
            return self.draft(inputs, hidden_states[there], kv, experts).logits

        return self._placed(token_ids, rows, logits_indices, run)

    def _placed(
        self,
        token_ids: Tensor,
        rows: Rows,
        logits_indices: Tensor | None,
        run: Callable[[ForwardInput, list[int]], Tensor],
    ) -> ModelOutput:
        """Run on the rows that are there; the others' logits are zero."""
        parts = rows.sequences()
        there = [row for first, last in parts for row in range(first, last)]
        bounds = [0]
        for first, last in parts:
            bounds.append(bounds[-1] + last - first)
        logits = torch.zeros(len(token_ids), self.vocab_size)
        if there:
            firsts = [first for first, _ in parts]
            inputs = ForwardInput(
                token_ids=token_ids[there],
                positions=rows.positions[there],
                cu_seqlens_q=tuple(bounds),
                seq_slots=rows.seq_slots[firsts],
                page_table=rows.page_table[rows.page_rows[firsts]],
                seq_lens=tuple(rows.ends[firsts].tolist()),
                logits_indices=torch.arange(len(there)),
            )
            logits[there] = run(inputs, there)
        hidden_states = token_ids[:, None].float()
        if logits_indices is not None:
            logits = logits[logits_indices]
        return ModelOutput(logits, hidden_states)


class Tape:
    """Captures work by keeping it, and plays it as often as asked; tells `log` of each time."""

    def __init__(self, log: Callable[[str], None] = lambda event: None) -> None:
        self.log = log
        self.num_captured = 0

    def __call__(self, work: Work) -> Work:
        work()
        self.num_captured += 1

        def play() -> None:
            self.log("play")
            work()

        return play


class LoggedQueue(CpuQueue):
    """A queue that tells `log` whenever somebody waits for it."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self.log = log

    def working(self) -> AbstractContextManager[object]:
        return nullcontext()

    def moment(self) -> Moment:
        return _LoggedMoment(super().moment(), self.log)


class _LoggedMoment:
    def __init__(self, moment: Moment, log: Callable[[str], None]) -> None:
        self.moment, self.log = moment, log

    def wait(self) -> None:
        self.log("wait")

    def seconds_to(self, later: Moment) -> float:
        assert isinstance(later, _LoggedMoment)
        return self.moment.seconds_to(later.moment)


def placed_core(
    model: StepFakeModel,
    placement: Placement | None,
    *,
    num_pages: int = 256,
    kind: type[EngineCore] = EngineCore,
    precisions: PrecisionSet | None = None,
    **scheduler: Any,
) -> EngineCore:
    """A core around a model on a stand-in device; None: on none. kind: its class."""
    spec = model.kv_cache_spec()
    return kind(
        model,
        NoExperts(),
        cache=CacheConfig(
            budget_bytes=num_pages * spec.bytes_per_page,
            host_budget_bytes=256 * spec.bytes_per_page,
            snapshot_budget_bytes=64 * (model.window + model.num_spec_tokens) * 16,
        ),
        scheduler=SchedulerConfig(
            **{
                "overlap": False,
                "prefill_share": 1.0,
                "num_spec_tokens": model.num_spec_tokens,
                **scheduler,
            }
        ),
        precision="w2",
        vocab_size=model.vocab_size,
        seed=0,
        placement=placement,
        precisions=precisions,
    )
