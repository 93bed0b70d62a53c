"""What a captured step sends and brings back, in pinned memory: one place of the ring that lets the
host be a step ahead. Knows neither graphs nor models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moet.runtime.device_sampler import REPORT_WIDTH
from moet.runtime.queues import Moment, Queue
from moet.runtime.step_tensors import StepTensors


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What came back of a step, by its rows in order.

    tokens: new ones of each sequence. is_bad: its first row's logits were no numbers. reports:
    [num_tokens, REPORT_WIDTH] of each, if log-probabilities were wanted. fault: bits of the model's
    kernels, 0: none. proposals: drafts of each sequence, if the step made some.
    """

    tokens: list[list[int]]
    is_bad: list[bool]
    reports: list[Tensor] | None
    fault: int
    time_s: float
    proposals: list[list[int]] | None = None


class PendingStep(Protocol):
    """A launched step, and when it begins and ends on the device."""

    @property
    def started(self) -> Moment: ...

    @property
    def ended(self) -> Moment: ...

    def result(self) -> StepOutput:
        """Wait for the step. Must be called once, in the order of the launches."""
        ...


@dataclass(frozen=True, slots=True)
class HostTensors:
    """One place of the ring."""

    sent: Tensor
    out: Tensor
    reports: Tensor
    masks: Tensor
    proposed: Tensor

    @classmethod
    def of(
        cls, queue: Queue, num_seqs: int, num_rows: int, words: int, num_drafts: int
    ) -> HostTensors:
        num_tokens = num_seqs * num_rows
        num_sent = StepTensors.num_sent(num_seqs, num_rows)
        return cls(
            sent=queue.host_tensor(num_sent, dtype=torch.int64),
            out=queue.host_tensor((1 + num_seqs) * (num_rows + 2), dtype=torch.int64),
            reports=queue.host_tensor(num_tokens, REPORT_WIDTH, dtype=torch.int64),
            masks=queue.host_tensor(num_tokens, words, dtype=torch.int32),
            proposed=queue.host_tensor(num_seqs * (1 + num_drafts), dtype=torch.int64),
        )


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """A step whose results lie in the ring. read: told its number once they are taken."""

    read: Callable[[int], None]
    number: int
    num_rows: list[int]
    out: Tensor
    reports: Tensor | None
    proposed: Tensor | None
    started: Moment
    ended: Moment

    def result(self) -> StepOutput:
        self.ended.wait()
        values = self.out.tolist()
        width = self.out.shape[1] - 2
        tokens = [line[: line[width]] for line in values[1 : 1 + len(self.num_rows)]]
        is_bad = [line[width + 1] != 0 for line in values[1 : 1 + len(self.num_rows)]]
        reports = None
        if self.reports is not None:
            reports = [
                self.reports[i * width : i * width + len(held)].clone()
                for i, held in enumerate(tokens)
            ]
        proposals = None
        if self.proposed is not None:
            lines = self.proposed[: len(self.num_rows)].tolist()
            proposals = [line[1 : 1 + line[0]] for line in lines]
        self.read(self.number)
        time_s = self.started.seconds_to(self.ended)
        return StepOutput(tokens, is_bad, reports, values[0][0], time_s, proposals)
