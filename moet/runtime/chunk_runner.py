"""Steps that no graph was captured for: chunks of prompts, launched piece by piece.

Nothing here waits for the device: the rows' numbers are sent from pinned memory, sampled rows go
through the same tensor operations as those of captured steps, and results are read later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moet.kernels.rows import Rows
from moet.models.base import ExpertProvider, KVTensors
from moet.runtime.device_sampler import Kind
from moet.runtime.graph_runner import StepModel
from moet.runtime.queues import Moment, Queue, to_queue
from moet.runtime.slot_tensors import SlotTensors
from moet.runtime.step_ring import StepOutput
from moet.runtime.step_tensors import StepRow, StepTensors, fill


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one sequence from position `start` on. sampled: its last row, if it makes a token;
    only that row's kind and masks count."""

    slot: int
    start: int
    token_ids: Sequence[int]
    kind: Kind | None = None  # None: no token is made
    masks: Tensor | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


class ChunkRunner:
    """Runs chunks of several sequences in one pass. Holds no state of its own.

    max_short: rows of a sequence that its rings hold beside what these rows need.
    """

    def __init__(
        self,
        model: StepModel,
        experts: ExpertProvider,
        kv: KVTensors,
        state: SlotTensors,
        page_table: Tensor,
        *,
        page_size: int,
        max_short: int,
        queue: Queue,
        fault: Tensor | None = None,
        arch: str = "reference",
    ) -> None:
        self.model, self.experts, self.kv, self.state = model, experts, kv, state
        self.page_table, self.page_size, self.max_short = page_table, page_size, max_short
        self.queue, self.fault, self.arch = queue, fault, arch

    def launch(self, chunks: Sequence[Chunk]) -> PendingChunks:
        """Queue one pass over chunks (at least one) of distinct sequences."""
        sampled = [chunk for chunk in chunks if chunk.kind is not None]
        with self.queue.working(), torch.inference_mode():
            started = self.queue.moment()
            token_ids, rows = self._rows(chunks)
            ends = np.cumsum([len(chunk.token_ids) for chunk in chunks])
            wanted = [end - 1 for end, c in zip(ends, chunks, strict=True) if c.kind is not None]
            indices = self._send(np.array(wanted, dtype=np.int64))
            output = self.model.compute(token_ids, rows, indices, self.kv, self.experts)
            step = self._finish(sampled, output.logits)
            out = self.queue.host_tensor(*step.out.shape, dtype=torch.int64)
            out.copy_(step.out, non_blocking=True)
            reports = None
            if any(chunk.kind == Kind.FULL for chunk in sampled):
                reports = self.queue.host_tensor(*step.reports.shape, dtype=torch.int64)
                reports.copy_(step.reports, non_blocking=True)
            ended = self.queue.moment()
        return PendingChunks(len(sampled), out, reports, started, ended)

    def _rows(self, chunks: Sequence[Chunk]) -> tuple[Tensor, Rows]:
        sizes = [len(chunk.token_ids) for chunk in chunks]
        values = np.empty((5, sum(sizes)), dtype=np.int64)
        first = 0
        for chunk, size in zip(chunks, sizes, strict=True):
            part = values[:, first : first + size]
            part[0], part[1] = chunk.token_ids, np.arange(chunk.start, chunk.end)
            part[2], part[3], part[4] = chunk.start, chunk.end, chunk.slot
            first += size
        token_ids, positions, starts, ends, slots = self._send(values).unbind(0)
        num_pages = -(-max(chunk.end for chunk in chunks) // self.page_size)
        rows = Rows(
            positions=positions,
            starts=starts,
            ends=ends,
            seq_slots=slots,
            page_rows=slots,
            page_table=self.page_table[:, :num_pages],
            page_size=self.page_size,
            short=max(sizes) <= self.max_short,
        )
        return token_ids, rows

    def _finish(self, sampled: Sequence[Chunk], logits: Tensor) -> StepTensors:
        step = StepTensors(len(sampled), 1, self.queue.device, arch=self.arch)
        if not sampled:
            if self.fault is not None:
                step.out[0, :1] = self.fault.to(torch.int64)
                self.fault.zero_()
            return step
        rows = [
            StepRow(chunk.slot, chunk.end - 1, chunk.token_ids[-1:], chunk.kind or Kind.GREEDY)
            for chunk in sampled
        ]
        sent = self.queue.host_tensor(len(step.sent), dtype=torch.int64)
        fill(sent, rows, (len(sampled), 1), self.state.num_slots)
        step.sent.copy_(sent, non_blocking=True)
        given = [chunk.masks for chunk in sampled if chunk.masks is not None]
        masks = None
        if given:
            everything = torch.full((len(sampled), given[0].shape[-1]), -1, dtype=torch.int32)
            for i, chunk in enumerate(sampled):
                if chunk.masks is not None:
                    everything[i] = chunk.masks[0]
            masks = to_queue(everything, self.queue)
        kind = max(row.kind for row in rows)
        step.finish(self.state, logits, masks, self.fault, kind)
        return step

    def _send(self, values: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> Tensor:
        return to_queue(torch.from_numpy(values), self.queue)


@dataclass(frozen=True, slots=True)
class PendingChunks:
    """A launched pass; its results are those of the chunks that make a token, in order."""

    num_sampled: int
    out: Tensor
    reports: Tensor | None
    started: Moment
    ended: Moment

    def result(self) -> StepOutput:
        """Wait for the pass."""
        self.ended.wait()
        values = self.out.tolist()
        time_s = self.started.seconds_to(self.ended)
        lines = values[1 : 1 + self.num_sampled]
        reports = None if self.reports is None else list(self.reports.unsqueeze(1).unbind(0))
        return StepOutput(
            [line[:1] for line in lines],
            [line[2] != 0 for line in lines],
            reports,
            values[0][0],
            time_s,
        )
