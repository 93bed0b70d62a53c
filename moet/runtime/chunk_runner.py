"""Steps that no graph was captured for: chunks of prompts, launched piece by piece.

Nothing here waits for the device: the rows' numbers are sent from pinned memory, sampled rows go
through the same tensor operations as those of captured steps, and results are read later.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moet.kernels.moe import ExpertTable
from moet.models.base import ExpertProvider, KVTensors, ResidentProvider, finished
from moet.runtime.chunk_drafts import ChunkDrafts
from moet.runtime.chunks import Chunk, Placed, last_rows
from moet.runtime.device_sampler import Kind
from moet.runtime.draft_graphs import DraftGraphs
from moet.runtime.graph_runner import StepModel
from moet.runtime.queues import Moment, Queue, to_queue
from moet.runtime.slot_tensors import SlotTensors
from moet.runtime.step_ring import StepOutput
from moet.runtime.step_tensors import StepRow, StepTensors, fill

WARM_ROWS, WARM_MANY_ROWS = 32, 512  # streams of weights, and tiles that share them
WARM_PARTS = 4  # layers of each kind are among the first ones


class ChunkRunner:
    """Runs chunks of several sequences in one pass. Holds no state of its own.

    max_short: rows of a sequence that its rings hold beside what these rows need. drafts: of the
    captured steps, if there is a draft block. Raises ConfigError if rings have no such room.
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
        drafts: DraftGraphs | None = None,
    ) -> None:
        model.kv_cache_spec().require_room(max_short)
        self.model, self.experts, self.kv, self.state = model, experts, kv, state
        self.queue, self.fault, self.arch = queue, fault, arch
        self._placed = Placed(queue, page_table, page_size, max_short)
        self._drafts = None if drafts is None else ChunkDrafts(drafts, self._placed)

    def launch(
        self, chunks: Sequence[Chunk], settled: Callable[[], None] = lambda: None
    ) -> PendingChunks:
        """Queue one pass over chunks (at least one) of distinct sequences.

        settled: called when all is queued but the proposals, whose rows are written over others'.
        """
        with self.queue.working(), torch.inference_mode():
            return finished(self.parts(chunks, settled))

    def parts(
        self, chunks: Sequence[Chunk], settled: Callable[[], None] = lambda: None
    ) -> Generator[None, None, PendingChunks]:
        """`launch` in as many parts as the model has; steps that name none of these sequences may
        be queued between them. To be carried on where queue and inference mode are set."""
        sampled = [chunk for chunk in chunks if chunk.kind is not None]
        started = self.queue.moment()
        token_ids, rows = self._placed.rows(chunks)
        indices = self._placed.send(last_rows(chunks, sampled))
        output = yield from self.model.compute_parts(
            token_ids, rows, indices, self.kv, self.experts
        )
        step = self._finish(sampled, output.logits)
        drafts, proposing = self._drafts, list[Chunk]()
        if drafts is not None:
            made = step.out[1:, 0]
            proposing = drafts.extend(chunks, rows, output.hidden_states, made)
        settled()
        proposed = None
        if drafts is not None and proposing:
            proposed = self._bring_back(drafts.propose(proposing))
        out = self._bring_back(step.out)
        reports = None
        if any(chunk.told for chunk in sampled):
            step.report(self.state, output.logits)
            reports = self._bring_back(step.reports)
        ended = self.queue.moment()
        places = [proposing.index(c) if c in proposing else None for c in sampled]
        return PendingChunks(places, out, reports, proposed, started, ended)

    def warm_up(self) -> None:
        """Have the kernels made and loaded that passes need, so that no token waits for a compiler.

        Takes rows that are there only to fill through the first layers: nothing is written.
        """
        if self.model.num_parts <= WARM_PARTS:
            return
        widths = self._placed.widths()
        with self.queue.working(), torch.inference_mode():
            for width in widths:
                self._run_ahead(WARM_ROWS, width)
            self._run_ahead(WARM_MANY_ROWS, widths[-1])
            if self.fault is not None:
                self.fault.zero_()
        self.queue.settle()

    def _run_ahead(self, num_rows: int, width: int) -> None:
        token_ids, rows = self._placed.rows([Chunk(0, 0, [0] * num_rows)])
        nowhere = torch.full_like(rows.positions, -1)
        rows = replace(
            rows, positions=nowhere, page_table=self._placed.page_table[:, :width], short=False
        )
        experts = self.experts
        if isinstance(experts, ResidentProvider):
            experts = _AsForOneRow(experts)
        parts = self.model.compute_parts(token_ids, rows, None, self.kv, experts)
        for _ in range(WARM_PARTS):
            next(parts)

    def _bring_back(self, values: Tensor) -> Tensor:
        host = self.queue.host_tensor(*values.shape, dtype=torch.int64)
        return host.copy_(values, non_blocking=True)

    def _finish(self, sampled: Sequence[Chunk], logits: Tensor) -> StepTensors:
        no_slot = self.state.num_slots
        step = StepTensors(len(sampled), 1, self.queue.device, no_slot=no_slot, arch=self.arch)
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


@dataclass(frozen=True, slots=True)
class _AsForOneRow:
    """A ResidentProvider that brings no whole layers, however many rows ask."""

    experts: ResidentProvider

    def resident(self, layer_idx: int, num_rows: int = 1) -> ExpertTable:
        return self.experts.resident(layer_idx, 1)

    def resolve(self, layer_idx: int, expert_ids: Tensor) -> ExpertTable:
        return self.experts.resolve(layer_idx, expert_ids)


@dataclass(frozen=True, slots=True)
class PendingChunks:
    """A launched pass; its results are those of the chunks that make a token, in order.

    places: of each of these among the rows of `proposed`, None for those that propose nothing.
    """

    places: Sequence[int | None]
    out: Tensor
    reports: Tensor | None
    proposed: Tensor | None
    started: Moment
    ended: Moment

    def result(self) -> StepOutput:
        """Wait for the pass."""
        self.ended.wait()
        values = self.out.tolist()
        time_s = self.started.seconds_to(self.ended)
        lines = values[1 : 1 + len(self.places)]
        reports = None if self.reports is None else list(self.reports.unsqueeze(1).unbind(0))
        proposals = None
        if self.proposed is not None:
            made = [line[1 : 1 + line[0]] for line in self.proposed.tolist()]
            proposals = [[] if place is None else made[place] for place in self.places]
        return StepOutput(
            [line[:1] for line in lines],
            [line[2] != 0 for line in lines],
            reports,
            values[0][0],
            time_s,
            proposals,
        )
