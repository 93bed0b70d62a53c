"""Carries out a Batch on a device: decoding rows by graphs, prompts by chunks, and whatever neither
can do by the eager runner. Decides nothing about requests.

`launch` queues a batch and returns; its results are read later, so that the next batch can be
queued meanwhile. Parts of one batch belong to different sequences, so their order does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor

from moet.models.base import DraftingModel, ExpertProvider, Model
from moet.runtime.batch import Batch, Row, StepResult
from moet.runtime.chunk_runner import Chunk, ChunkRunner, PendingChunks
from moet.runtime.device_sampler import Kind, kind_of, read_report
from moet.runtime.graph_runner import GraphRunner, StepModel, bucket_sizes
from moet.runtime.kv_cache import KVCache
from moet.runtime.model_runner import NAN_MESSAGE, ModelRunner, fail
from moet.runtime.queues import Capture, Queue
from moet.runtime.sampler import Proposal, SamplerState
from moet.runtime.step_drafts import StepDraftModel
from moet.runtime.step_ring import PendingStep, StepOutput
from moet.runtime.step_tensors import StepRow
from moet.types import Request


class DeviceModel(Model, StepModel, StepDraftModel, Protocol):
    """A model for both ways. Its draft block is there if it was built for drafts."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where steps run and how they are captured. fault: [1] int32 that kernels set, or None. arch:
    of the ops around the model."""

    queue: Queue
    capture: Capture
    fault: Tensor | None = None
    arch: str = "reference"


class DeviceRunner:
    """One model with its state on a device. Batches are launched and read in order.

    The experts must serve any step: a provider that raises CapacityError fails it, since a pass
    that stopped midway has written over rings.
    """

    def __init__(
        self,
        model: DeviceModel,
        experts: ExpertProvider,
        kv: KVCache,
        sampler: SamplerState,
        placement: Placement,
        *,
        num_seq_slots: int,
        max_pages_per_seq: int,
        max_rows_per_seq: int,
        draft_model: DraftingModel | None = None,
        progress: Callable[[float], None] = lambda done: None,
    ) -> None:
        """max_rows_per_seq: of a decoding sequence, one and its drafts."""
        self.queue = placement.queue
        self.eager = ModelRunner(
            model,
            experts,
            kv,
            sampler,
            num_seq_slots=num_seq_slots,
            max_pages_per_seq=max_pages_per_seq,
            draft_model=draft_model,
        )
        self._drafts = draft_model is not None
        state, table, page_size = sampler.tensors(), self.eager.page_table, kv.spec.page_size
        self._chunks = ChunkRunner(
            model,
            experts,
            kv.tensors,
            state,
            table,
            page_size=page_size,
            max_short=max_rows_per_seq,
            queue=self.queue,
            fault=placement.fault,
            arch=placement.arch,
        )
        self.graphs = GraphRunner(
            model,
            experts,
            kv.tensors,
            state,
            table,
            page_size=page_size,
            buckets=bucket_sizes(num_seq_slots),
            rows_per_seq=sorted({1, max_rows_per_seq}),
            queue=self.queue,
            capture=placement.capture,
            fault=placement.fault,
            arch=placement.arch,
            draft_model=None if draft_model is None else model,
            num_drafts=max_rows_per_seq - 1,
        )
        self.queue.settle()  # what is set up so far was launched elsewhere
        self.graphs.capture_all(progress)

    @property
    def sampler(self) -> SamplerState:
        return self.eager.sampler

    def run(self, batch: Batch) -> StepResult:
        """Carry out a batch and wait for it."""
        return self.launch(batch).result()

    @torch.inference_mode()
    def launch(self, batch: Batch) -> PendingBatch:
        """Queue a batch. A fault of one row's set-up is that row's; one of the step is all's.

        Never raises for a fault of the work: it is in the result's errors.
        """
        result = StepResult()
        pending = PendingBatch(batch.rows, result)
        with self.queue.working():
            self.eager.commands(batch.commands)
            decoding, chunks, others = self._parts(batch, self.eager.sound_rows(batch.rows, result))
            try:
                for part in self._by_drafts(batch, decoding):
                    rows = [batch.rows[i] for i in part]
                    step = self.graphs.launch([_step_row(row) for row in rows])
                    pending.steps.append((part, step))
                    self.eager.save_snapshots(rows)
            except Exception as error:
                fail(result, decoding, error)
            try:
                if chunks:
                    pending.chunks = self._chunks.launch([_chunk(batch.rows[i]) for i in chunks])
                    pending.chunked = chunks
                    self.eager.save_snapshots([batch.rows[i] for i in chunks])
            except Exception as error:
                fail(result, chunks, error)
            if others:
                started_s = perf_counter()
                self.eager.run_rows(batch.rows, others, result)
                result.device_s = perf_counter() - started_s
        return pending

    def _parts(self, batch: Batch, indices: list[int]) -> tuple[list[int], list[int], list[int]]:
        """Places of the rows that a graph, a chunk pass and the eager runner take.

        With drafts the eager runner takes prompts, whose draft rows it knows to write, and drafting
        steps that a snapshot is kept of in between.
        """
        decoding: list[int] = []
        chunks: list[int] = []
        others: list[int] = []
        for i in indices:
            row = batch.rows[i]
            decodes = i < batch.num_decoding and row.num_samples == row.num_tokens
            fits = not self._drafts or (decodes and (row.snapshot is None or not _drafts(row)))
            if not fits or row.first_logprob >= 0 or _is_drawn(row):
                others.append(i)
            elif decodes:
                decoding.append(i)
            elif row.token_ids is not None and not row.num_drafts:
                chunks.append(i)
            else:
                others.append(i)
        return decoding, chunks, others

    def _by_drafts(self, batch: Batch, indices: list[int]) -> list[list[int]]:
        """Rows that draft and those that do not, as graphs do one or the other."""
        drafting = [i for i in indices if _drafts(batch.rows[i])]
        others = [i for i in indices if not _drafts(batch.rows[i])]
        return [part for part in (drafting, others) if part]

    def may_draft(self, request: Request) -> bool:
        """Whether a request's steps can draft: so far those at temperature 0 that ask for nothing
        else, as others would have to leave the graphs for it."""
        return kind_of(request.params, masked=request.grammar is not None) == Kind.GREEDY

    def check(self) -> None:
        """Raise AssertionError if a result was never read, or captured tensors have moved."""
        self.graphs.check()


@dataclass(slots=True)
class PendingBatch:
    """A launched batch; `result` waits for it."""

    rows: list[Row]
    made: StepResult
    steps: list[tuple[list[int], PendingStep]] = field(default_factory=list)
    chunked: Sequence[int] = ()
    chunks: PendingChunks | None = None

    def result(self) -> StepResult:
        """What the batch made. To be called once, in the order of the launches."""
        for indices, step in self.steps:
            self._take(indices, step.result())
        if self.chunks is not None:
            sampled = [i for i in self.chunked if self.rows[i].sample]
            output = self.chunks.result()
            self._take(sampled, output)
            if output.fault:
                self._fault(self.chunked, output.fault)
        return self.made

    def _take(self, indices: Sequence[int], output: StepOutput) -> None:
        made = self.made
        made.device_s += output.time_s
        if output.fault:
            self._fault(indices, output.fault)
            return
        for n, index in enumerate(indices):
            made.tokens[index] = output.tokens[n]
            if output.is_bad[n]:
                made.errors[index] = NAN_MESSAGE
                made.num_corrupted += 1
            if output.proposals is not None and output.proposals[n]:
                made.proposals[index] = tuple(Proposal(t, None) for t in output.proposals[n])
            top_n = self.rows[index].seq.request.params.logprobs
            if top_n is not None and output.reports is not None:
                made.logprobs[index] = [
                    read_report(report, token_id, top_n)
                    for report, token_id in zip(output.reports[n], output.tokens[n], strict=True)
                ]

    def _fault(self, indices: Sequence[int], fault: int) -> None:
        message = f"the step failed: the device's kernels reported fault {fault:#x}"
        self.made.errors.update(dict.fromkeys(indices, message))
        self.made.failed = True


def _is_drawn(row: Row) -> bool:
    """Whether drafts of the row were drawn, so that verifying takes their distributions."""
    return any(proposal.probs is not None for proposal in row.proposals)


def _drafts(row: Row) -> bool:
    return row.seq.num_spec_tokens > 0


def _step_row(row: Row) -> StepRow:
    kind = kind_of(row.seq.request.params, masked=row.masks is not None)
    num_to_draft = row.num_to_draft if row.seq.num_spec_tokens else -1
    return StepRow(row.slot, row.start, row.token_ids, kind, row.masks, num_to_draft)


def _chunk(row: Row) -> Chunk:
    assert row.token_ids is not None
    params = row.seq.request.params
    kind = kind_of(params, masked=row.masks is not None) if row.sample else None
    return Chunk(row.slot, row.start, row.token_ids, kind, row.masks)
