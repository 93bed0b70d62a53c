"""Decode steps and prompts on a device with nothing around them: no scheduler, no requests.

The sequences' first page is a prompt of random tokens that really ran; the rest of a context is
copies of that page, since what a step costs does not depend on what its entries hold. Newest tokens
stay on the device, as in the engine.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from moet.bench.rig import Shape
from moet.models.base import ExpertProvider
from moet.runtime.chunk_runner import ChunkRunner
from moet.runtime.chunks import Chunk
from moet.runtime.device_runner import DeviceModel, Placement
from moet.runtime.device_sampler import Kind
from moet.runtime.graph_runner import GraphRunner
from moet.runtime.kv_cache import KVCache
from moet.runtime.sampler import SamplerState
from moet.runtime.step_ring import PendingStep
from moet.runtime.step_shapes import bucket_sizes
from moet.runtime.step_tensors import StepRow
from moet.types import SamplingParams

SPARE_TOKENS = 512  # behind a context, for the steps that are timed
WARM_STEPS = 3


@dataclass(frozen=True, slots=True)
class StepTimes:
    """step_ms: median from a step's first to its last kernel; gap_us: median between two steps;
    host_us: median of the host's time to launch one. period_ms: all steps by their number."""

    step_ms: float
    gap_us: float
    host_us: float
    period_ms: float


class DeviceRig:
    """Sequence 0 may be longer than the others.

    longest, others: tokens of context that sequence 0 and each of the others have room for.
    num_drafts: of steps that draft; the model was built for as many.
    """

    def __init__(
        self,
        model: DeviceModel,
        experts: ExpertProvider,
        placement: Placement,
        *,
        num_seqs: int,
        num_rows: int,
        longest: int,
        others: int,
        num_drafts: int = 0,
    ) -> None:
        spec = model.kv_cache_spec()
        self.model, self.placement, self.page_size = model, placement, spec.page_size
        self.queue = placement.queue
        device = self.queue.device
        spare = SPARE_TOKENS + num_drafts
        self._pages = _pages([longest + spare, *[others + spare] * (num_seqs - 1)], spec.page_size)
        self.kv = KVCache(
            spec,
            num_pages=sum(map(len, self._pages)),
            num_seq_slots=num_seqs,
            num_host_blocks=0,
            num_snapshots=0,
            device=str(device),
        )
        table = _table(self._pages).to(device)
        self.sampler = SamplerState(num_seqs, model.vocab_size, device)
        state = self.sampler.tensors()
        self._draw = random.Random(0)
        for slot in range(num_seqs):
            self.sampler.admit(slot, SamplingParams(temperature=0.0), [1], [], [], seed=slot)
        self.graphs = GraphRunner(
            model,
            experts,
            self.kv.tensors,
            state,
            table,
            page_size=spec.page_size,
            buckets=bucket_sizes(num_seqs),
            rows_per_seq=range(1, num_rows + 1),
            queue=self.queue,
            capture=placement.capture,
            fault=placement.fault,
            arch=placement.arch,
            draft_model=model if num_drafts else None,
            num_drafts=num_drafts,
        )
        self.chunks = ChunkRunner(
            model,
            experts,
            self.kv.tensors,
            state,
            table,
            page_size=spec.page_size,
            max_short=num_rows,
            queue=self.queue,
            fault=placement.fault,
            arch=placement.arch,
        )
        self.queue.settle()  # all of this was launched outside of the queue

    def fill(self) -> None:
        """Run a page of prompt for every sequence, and copy it over the rest of its context."""
        for slot, pages in enumerate(self._pages):
            tokens = self._tokens(self.page_size)
            output = self.chunks.launch([Chunk(slot, 0, tokens, Kind.GREEDY)]).result()
            check(output.fault, output.is_bad)
            with self.queue.working():
                for group in self.kv.spec.groups:
                    if group.kind == "paged":
                        tensor = self.kv.tensors[group.name]
                        tensor[:, pages[0] : pages[-1] + 1] = tensor[:, pages[0]].unsqueeze(1)

    def time_steps(
        self,
        shape: Shape,
        num_steps: int,
        *,
        num_to_draft: int = -1,
        kind: Kind = Kind.GREEDY,
    ) -> StepTimes:
        """Time decode steps, each launched while the one before it runs.

        num_to_draft: tokens that they also propose for the next one; -1: the draft block is left
        out. kind: what their sequences ask for.
        """
        slots = range(shape.num_seqs)
        reach = shape.context + SPARE_TOKENS
        self.graphs.prepare(shape.num_seqs, shape.num_rows, reach, num_to_draft, kind)
        given = [self._tokens(shape.num_rows) for _ in slots]
        pending: deque[PendingStep] = deque()
        done: list[PendingStep] = []
        launches_s = []
        for n in range(WARM_STEPS + num_steps):
            start = shape.context + n * shape.num_rows
            rows = [
                StepRow(
                    slot,
                    start,
                    None if shape.num_rows == 1 and num_to_draft < 0 else given[slot],
                    kind,
                    num_to_draft=num_to_draft,
                )
                for slot in slots
            ]
            began_s = perf_counter()
            pending.append(self.graphs.launch(rows))
            launches_s.append(perf_counter() - began_s)
            if len(pending) > 1:
                done.append(_read(pending.popleft()))
        done += [_read(step) for step in pending]
        timed = done[WARM_STEPS:]
        gaps_s = [a.ended.seconds_to(b.started) for a, b in pairwise(timed)]
        total_s = timed[0].started.seconds_to(timed[-1].ended)
        return StepTimes(
            step_ms=1e3 * median(step.started.seconds_to(step.ended) for step in timed),
            gap_us=1e6 * median(gaps_s) if gaps_s else 0.0,
            host_us=1e6 * median(launches_s[WARM_STEPS:]),
            period_ms=1e3 * total_s / len(timed),
        )

    def time_prompt(self, num_tokens: int, chunk_tokens: int) -> float:
        """Seconds that sequence 0's prompt takes, all chunks queued at once."""
        tokens = self._tokens(num_tokens)
        pending = []
        for start in range(0, num_tokens, chunk_tokens):
            part = tokens[start : start + chunk_tokens]
            kind = Kind.GREEDY if start + len(part) == num_tokens else None
            pending.append(self.chunks.launch([Chunk(0, start, part, kind)]))
        for each in pending:
            output = each.result()
            check(output.fault, output.is_bad)
        return pending[0].started.seconds_to(pending[-1].ended)

    def replay(self, shape: Shape, *, num_to_draft: int = -1, kind: Kind = Kind.GREEDY) -> None:
        """One step like those that were timed, and wait for it."""
        given = None if shape.num_rows == 1 and num_to_draft < 0 else [1] * shape.num_rows
        rows = [
            StepRow(slot, shape.context, given, kind, num_to_draft=num_to_draft)
            for slot in range(shape.num_seqs)
        ]
        self.graphs.launch(rows).result()

    def step_work(self, shape: Shape) -> Callable[[], None]:
        """The model's part of a step of a shape that was timed, launched piece by piece."""
        graphs = self.graphs
        key = graphs.shape_for(shape.num_seqs, shape.num_rows, shape.context + SPARE_TOKENS)
        step = graphs.step_of(key)

        def work() -> None:
            with self.queue.working(), torch.inference_mode():
                rows = step.rows(graphs.page_table[:, : key.num_pages], self.page_size)
                tokens = step.tokens(graphs.state)
                self.model.compute(tokens, rows, None, graphs.kv, graphs.experts)
                self.queue.moment().wait()

        return work

    def _tokens(self, num: int) -> list[int]:
        return [self._draw.randrange(self.model.vocab_size) for _ in range(num)]


def _pages(lengths: Sequence[int], page_size: int) -> list[range]:
    """Pages of sequences that have room for so many tokens, one behind the other."""
    borders = accumulate((-(-tokens // page_size) for tokens in lengths), initial=0)
    return [range(first, last) for first, last in pairwise(borders)]


def _table(pages: Sequence[Sequence[int]]) -> Tensor:
    """[sequences, most pages] int64; -1 behind the last of a sequence."""
    rows = [torch.tensor(own) for own in pages]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)


def _read(step: PendingStep) -> PendingStep:
    output = step.result()
    check(output.fault, output.is_bad)
    return step


def check(fault: int, is_bad: Sequence[bool]) -> None:
    """Raise RuntimeError for a step that was not what it should be: its time means nothing."""
    if fault:
        raise RuntimeError(f"the kernels reported fault {fault:#x}")
    if any(is_bad):
        raise RuntimeError(f"logits of {sum(is_bad)} of {len(is_bad)} rows are not numbers")
