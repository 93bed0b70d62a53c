"""Carries out a Batch on a device: decoding rows by graphs, prompts by chunks, and whatever neither
can do by the eager runner. Decides nothing about requests.

`launch` queues a batch and returns; its results are read later, so that the next batch can be
queued meanwhile. Parts of one batch belong to different sequences, so their order does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor

from moet.models.base import DraftingModel, ExpertProvider, Model, finished
from moet.runtime.batch import Batch, Row, StepResult
from moet.runtime.captured_target import CapturedTarget
from moet.runtime.chunk_runner import ChunkRunner, PendingChunks
from moet.runtime.chunks import Chunk
from moet.runtime.device_sampler import kind_of, read_report
from moet.runtime.divided_pass import DividedPass
from moet.runtime.drawn_drafts import DrawnDrafts
from moet.runtime.experts.precision import PrecisionSet
from moet.runtime.graph_runner import GraphRunner, StepModel
from moet.runtime.kv_cache import KVCache
from moet.runtime.model_runner import NAN_MESSAGE, ModelRunner, fail
from moet.runtime.queues import Capture, Moment, Queue
from moet.runtime.sampler import Proposal, SamplerState
from moet.runtime.step_drafts import StepDraftModel
from moet.runtime.step_ring import PendingStep, StepOutput
from moet.runtime.step_shapes import bucket_sizes, row_counts
from moet.runtime.step_tensors import StepRow


class DeviceModel(Model, StepModel, StepDraftModel, Protocol):
    """A model for both ways. Its draft block is there if it was built for drafts."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where steps run and how they are captured. fault: [1] int32 that kernels set, or None. arch:
    of the ops around the model. explain: says more of the last faults, or None."""

    queue: Queue
    capture: Capture
    fault: Tensor | None = None
    arch: str = "reference"
    explain: Callable[[], str | None] | None = None


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
        precisions: PrecisionSet | None = None,
        progress: Callable[[float], None] = lambda done: None,
    ) -> None:
        """max_rows_per_seq: of a decoding sequence, one and its drafts. precisions: who computes
        which row, `experts` those that decode by the default policy; None: experts do."""
        self.queue, self._fault = placement.queue, placement.fault
        self._explain = placement.explain
        self._precisions = precisions or PrecisionSet.single(experts)
        of_prompts = self._precisions.of_prompt(self._precisions.default)
        unusual = self._precisions.unusual()
        self._target = CapturedTarget(
            model,
            kv.tensors,
            unusual,
            page_size=kv.spec.page_size,
            max_pages=max_pages_per_seq,
            buckets=sorted({1, min(4, num_seq_slots), num_seq_slots}),
            rows_per_seq=sorted({1, max_rows_per_seq}),
            queue=self.queue,
            capture=placement.capture,
        )
        self.eager = ModelRunner(
            model,
            experts,
            kv,
            sampler,
            num_seq_slots=num_seq_slots,
            max_pages_per_seq=max_pages_per_seq,
            draft_model=draft_model,
            precisions=precisions,
            target=self._target,
        )
        state, table, page_size = sampler.tensors(), self.eager.page_table, kv.spec.page_size
        self.graphs = GraphRunner(
            model,
            experts,
            kv.tensors,
            state,
            table,
            page_size=page_size,
            buckets=bucket_sizes(num_seq_slots),
            rows_per_seq=row_counts(max_rows_per_seq),
            queue=self.queue,
            capture=placement.capture,
            fault=placement.fault,
            arch=placement.arch,
            draft_model=None if draft_model is None else model,
            num_drafts=max_rows_per_seq - 1,
        )
        self._chunks = ChunkRunner(
            model,
            self._precisions.providers[of_prompts],
            kv.tensors,
            state,
            table,
            page_size=page_size,
            max_short=max_rows_per_seq,
            queue=self.queue,
            fault=placement.fault,
            arch=placement.arch,
            drafts=self.graphs.drafts,
        )
        self._pass: DividedPass | None = None
        self.num_parts = model.num_parts
        drafts = self.graphs.drafts
        self._drawn = None if drafts is None else DrawnDrafts(drafts.drafter.probs)
        self.queue.settle()  # what is set up so far was launched elsewhere
        self.graphs.capture_all(progress)
        self._target.capture_all()
        if self.queue.device.type == "cuda":  # a CPU has nothing to make
            self._chunks.warm_up()

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
        pending = PendingBatch(batch.rows, result, self._explain)
        with self.queue.working():
            if self._pass is not None and batch.num_parts and self._pass.is_touched(batch.commands):
                self._pass.finish()  # which may draw drafts for who is about to leave
            if self._drawn is not None:
                self._drawn.follow(batch.commands)
            self.eager.commands(batch.commands)
            decoding, chunks, others = self._parts(batch, self.eager.sound_rows(batch.rows, result))
            try:
                if decoding:
                    rows = [batch.rows[i] for i in decoding]
                    pending.decoded = decoding
                    pending.step = self._launch_step(rows)
            except Exception as error:
                fail(result, decoding, error)
            try:
                if chunks:
                    pending.chunked = chunks
                    pending.chunks = finished(self._chunk_parts([batch.rows[i] for i in chunks]))
            except Exception as error:
                fail(result, chunks, error)
            if batch.begins:
                self._begin_pass(batch.begins)
            self._go_on(batch, pending)
            if others:
                started_s = perf_counter()
                self.eager.run_rows(self._told(batch.rows, others), others, result)
                self._take_fault(others, result)
                result.device_s = perf_counter() - started_s
            self._tell_of_faults(result)
        return pending

    def _tell_of_faults(self, result: StepResult) -> None:
        """What has failed here and now, though its rows hear of it when results are due."""
        if result.failed:
            self.eager.on_fault(next(iter(result.errors.values())))
        if self._pass is not None and self._pass.error is not None:
            self.eager.on_fault(f"a part of a pass failed: {self._pass.error}")

    def _chunk_parts(self, rows: list[Row]) -> Generator[None, None, PendingChunks]:
        chunks = [_chunk(row) for row in rows]
        return self._chunks.parts(chunks, partial(self.eager.save_snapshots, rows))

    def _begin_pass(self, rows: list[Row]) -> None:
        """Rows that could not be set up stay out of it; their results say why."""
        assert self._pass is None
        sound = [i for i, row in enumerate(rows) if row.seq.fault is None]
        there = [rows[i] for i in sound]
        self._pass = DividedPass(
            self._chunk_parts(there),
            slots=[row.slot for row in there],
            indices=sound,
            queue=self.queue,
            fault=self._fault,
        )

    def _go_on(self, batch: Batch, pending: PendingBatch) -> None:
        """Carry out what a batch has of a divided pass."""
        divided = self._pass
        if divided is None:
            return
        if not batch.ends_pass:
            if batch.num_parts:
                pending.part = divided.advance(batch.num_parts)
            return
        self._pass = None
        if not batch.num_parts or not divided.indices:
            return
        divided.finish()
        pending.chunked = [batch.num_decoding + i for i in divided.indices]
        pending.chunks = divided.made
        if divided.error is not None:
            fail(pending.made, list(pending.chunked), divided.error)

    def _launch_step(self, rows: list[Row]) -> PendingStep:
        if self._drawn is not None:
            for row in rows:
                self._drawn.bring(row.slot, row.proposals)
        steps = [_step_row(row) for row in rows]
        return self.graphs.launch(steps, partial(self.eager.save_snapshots, rows))

    def _told(self, rows: list[Row], others: list[int]) -> list[Row]:
        """Rows, of which the eager runner takes `others`: a graph or a chunk may have made their
        drafts."""
        told = list(rows)
        if self._drawn is not None:
            for i in others:
                told[i] = self._drawn.told(rows[i], self.sampler.vocab_size)
        return told

    def _parts(self, batch: Batch, indices: list[int]) -> tuple[list[int], list[int], list[int]]:
        """Places of the rows that a graph, a chunk pass and the eager runner take: the last one
        those of prompts whose log-probabilities are wanted, and of policies that no graph has."""
        decoding: list[int] = []
        chunks: list[int] = []
        others: list[int] = []
        for i in indices:
            if batch.ends_pass and i >= batch.num_decoding:
                continue
            row = batch.rows[i]
            all_sample = i < batch.num_decoding and row.num_samples == row.num_tokens
            is_step = row.num_drafts or all_sample
            if row.first_logprob >= 0:
                others.append(i)
            elif is_step and self._is_usual(row):
                decoding.append(i)
            elif not is_step and row.token_ids is not None and self._is_read(row):
                chunks.append(i)
            else:
                others.append(i)
        return decoding, chunks, others

    def _is_usual(self, row: Row) -> bool:
        """Whether graphs have the experts that the policy of a generated row names."""
        policy = self._precisions.policy(row.seq.request.params.precision)
        return self._precisions.is_usual(policy, of_prompt=False)

    def _is_read(self, row: Row) -> bool:
        """Whether chunks have a row's experts: those of prompts, whatever the row is."""
        precisions = self._precisions
        policy = precisions.policy(row.seq.request.params.precision)
        there = precisions.of_prompt(precisions.default)
        if row.start < row.seq.prompt_len:
            return precisions.of_prompt(policy) == there
        return policy != "gate" and precisions.of_rows(policy) == there

    def is_divisible(self, row: Row) -> bool:
        """Whether a row of a prompt may be part of a divided pass: chunks have to take it."""
        known = row.token_ids is not None and not row.num_drafts and row.first_logprob < 0
        return known and self._is_read(row)

    def _take_fault(self, indices: list[int], result: StepResult) -> None:
        """What kernels have reported of passes that are over."""
        fault = 0 if self._fault is None else int(self._fault)
        if fault and self._fault is not None:
            self._fault.zero_()
            told = fault_message(fault, self._explain)
            result.errors.update(dict.fromkeys(indices, told))
            result.failed = True

    def settle(self) -> None:
        """Wait for all that is queued; results of steps may still be read."""
        self.queue.settle()

    def capture_again(self) -> None:
        """Make all captured steps anew, for experts that have moved; behind `settle`."""
        self.graphs.capture_again()
        self._target.capture_again()

    def check(self) -> None:
        """Raise AssertionError if a result was never read, or captured tensors have moved."""
        self.graphs.check()


@dataclass(slots=True)
class PendingBatch:
    """A launched batch; `result` waits for it."""

    rows: list[Row]
    made: StepResult
    explain: Callable[[], str | None] | None = None
    decoded: Sequence[int] = ()
    step: PendingStep | None = None
    chunked: Sequence[int] = ()
    chunks: PendingChunks | None = None
    part: tuple[Moment, Moment] | None = None  # of a divided pass: when it begins and ends

    def result(self) -> StepResult:
        """What the batch made. To be called once, in the order of the launches."""
        if self.step is not None:
            self._take(self.decoded, self.step.result())
        if self.part is not None:
            started, ended = self.part
            ended.wait()
            self.made.device_s += started.seconds_to(ended)
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
        message = fault_message(fault, self.explain)
        self.made.errors.update(dict.fromkeys(indices, message))
        self.made.failed = True


def fault_message(fault: int, explain: Callable[[], str | None] | None) -> str:
    """What is told of a step whose kernels set these bits."""
    why = None if explain is None else explain()
    told = f"the step failed: the device's kernels reported fault {fault:#x}"
    return told if why is None else f"{told}: {why}"


def _step_row(row: Row) -> StepRow:
    kind = kind_of(row.seq.request.params, masked=row.masks is not None)
    num_to_draft = row.num_to_draft if row.seq.num_spec_tokens else -1
    told = row.seq.request.params.logprobs is not None
    return StepRow(row.slot, row.start, row.token_ids, kind, row.masks, num_to_draft, told)


def _chunk(row: Row) -> Chunk:
    assert row.token_ids is not None
    params = row.seq.request.params
    kind = kind_of(params, masked=row.masks is not None) if row.sample else None
    # As the drafter says: of prompts every row, of what is generated those of who drafts.
    seen = row.start < row.seq.prompt_len or row.seq.num_spec_tokens > 0
    num_to_draft = row.num_to_draft if seen else -1
    told = params.logprobs is not None
    return Chunk(
        row.slot, row.start, row.token_ids, kind, row.masks, row.next_token, num_to_draft, told
    )
