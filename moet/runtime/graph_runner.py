"""Decode steps as captured graphs: one per number of sequences, rows per sequence and reach of the
page table, replayed over tensors whose places are fixed.

The host sends one small block per step and reads one back, through rings of pinned memory, so that
it may be a step ahead: `launch` returns before the step has begun, and a step's newest tokens are
read by the next one on the device. All graphs are captured before the first step; what was not
captured is refused, as the device may have no memory left for it. With `uncaptured` the same
work is launched piece by piece. Knows nothing of requests and batches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from functools import partial
from itertools import product
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor

from moet.kernels.rows import Rows
from moet.models.base import ExpertProvider, KVCacheSpec, KVTensors, ModelOutput
from moet.runtime.device_sampler import Kind
from moet.runtime.draft_graphs import KINDS, DraftGraphs, kind_of_proposals, num_wanted
from moet.runtime.grammar import num_words
from moet.runtime.queues import Capture, Queue, Work
from moet.runtime.slot_tensors import SlotTensors
from moet.runtime.step_drafts import StepDrafter, StepDraftModel
from moet.runtime.step_ring import HostTensors, PendingStep, ReplayedStep
from moet.runtime.step_shapes import Shape, Shapes, reaches
from moet.runtime.step_tensors import StepRow, StepTensors, fill
from moet.runtime.works import Works

logger = logging.getLogger(__name__)

RING_STEPS = 6  # of batches: one being read, one running, one being made, two graphs each
SLOW_CAPTURE_S = 1.0  # kernels are compiled when they are first met


class StepModel(Protocol):
    """A model whose step can be captured, and whose long passes stop between num_parts parts."""

    vocab_size: int

    @property
    def num_parts(self) -> int: ...

    def kv_cache_spec(self) -> KVCacheSpec: ...

    def compute(
        self,
        token_ids: Tensor,
        rows: Rows,
        logits_indices: Tensor | None,
        kv: KVTensors,
        experts: ExpertProvider,
    ) -> ModelOutput:
        """Run a step from device tensors alone, without a host decision if rows.short.

        token_ids: [T] int64. logits_indices: [n] int64, the rows whose logits are wanted; None:
        all of them.
        """
        ...

    def compute_parts(
        self,
        token_ids: Tensor,
        rows: Rows,
        logits_indices: Tensor | None,
        kv: KVTensors,
        experts: ExpertProvider,
    ) -> Generator[None, None, ModelOutput]:
        """`compute`, which stops between its parts; other steps may be run there."""
        ...


class GraphRunner:
    """Replays decode steps. One thread launches, and results are read in order.

    buckets: numbers of sequences, ascending; rows_per_seq likewise. fault: [1] int32 that kernels
    set, or None. page_table: [num_slots, max_pages] int64 on the device, by sequence slot.
    draft_model: the same model, if it was built for num_drafts drafts.

    Raises ConfigError if the model's rings have no room for so many rows.
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
        buckets: Sequence[int],
        rows_per_seq: Sequence[int],
        queue: Queue,
        capture: Capture,
        fault: Tensor | None = None,
        arch: str = "reference",
        draft_model: StepDraftModel | None = None,
        num_drafts: int = 0,
    ) -> None:
        model.kv_cache_spec().require_room(max(rows_per_seq))
        self.model, self.experts, self.kv, self.state = model, experts, kv, state
        self.page_table, self.page_size, self.fault = page_table, page_size, fault
        self.queue, self.arch = queue, arch
        self.shapes = Shapes(tuple(buckets), tuple(rows_per_seq), reaches(page_table.shape[1]))
        self._works = Works(queue, capture)
        most_seqs, most_rows, _ = self.shapes.most()
        most = most_seqs * most_rows
        words = num_words(model.vocab_size)
        device = queue.device
        self.drafts: DraftGraphs | None = None
        if draft_model is not None:
            shape = state.num_slots + 1, num_drafts, state.num_token_ids
            probs = torch.zeros(shape, device=device)
            drafter = StepDrafter(
                draft_model, experts, kv, state, page_table, page_size, probs, arch=arch
            )
            self.drafts = DraftGraphs(drafter, self._works, self.shapes, model.vocab_size)
        self._logits = torch.zeros(most, model.vocab_size, device=device)
        self._hidden_states: Tensor | None = None  # for drafts
        self._masks = torch.full((most, words), -1, dtype=torch.int32, device=device)
        self._has_masks = False
        self._steps: dict[tuple[int, int], StepTensors] = {}
        self._ring = [
            HostTensors.of(queue, most_seqs, most_rows, words, num_drafts)
            for _ in range(RING_STEPS)
        ]
        self._num_launched = self._num_read = 0
        self._places: dict[str, int] = {}

    def capture_all(self, progress: Callable[[float], None] = lambda done: None) -> None:
        """Capture every graph; afterwards nothing may grow, and no other shape is served."""
        shapes = self.shapes.all()
        started_s = perf_counter()
        for n, shape in enumerate(shapes):
            before_s = perf_counter()
            self.capture(shape)
            taken_s = perf_counter() - before_s
            level = logging.INFO if taken_s > SLOW_CAPTURE_S else logging.DEBUG
            logger.log(level, "captured a step shape=%s time=%.1fs", shape, taken_s)
            progress((n + 1) / len(shapes))
        self._works.seal()
        self._places = self._addresses()
        taken_s = perf_counter() - started_s
        logger.info("captured graphs=%d time=%.1fs", len(self._works), taken_s)

    def capture_again(self) -> None:
        """Capture every graph anew, for experts that have moved. Steps in flight must be over."""
        self._works.forget()
        self.capture_all()

    def capture(self, shape: Shape) -> None:
        """Capture the graphs of one shape."""
        for kind in Kind:
            self._step_works(shape, kind, told=True)
        if self.drafts is not None:
            for num_to_draft, kind in product((0, self.drafts.num_drafts), KINDS):
                self._draft_works(shape, num_to_draft, kind)

    def prepare(
        self, num_seqs: int, num_rows: int, num_tokens: int, num_to_draft: int, kind: Kind
    ) -> None:
        """Capture what steps like this need, and nothing else. num_to_draft: -1 for no drafts."""
        shape = self.shape_for(num_seqs, num_rows, num_tokens + max(num_to_draft, 0))
        self._step_works(shape, kind, told=False)
        if num_to_draft >= 0:
            self._draft_works(shape, num_to_draft, min(kind, Kind.RANKED))

    def _step_works(self, shape: Shape, kind: Kind, *, told: bool) -> list[Work]:
        """The model's step, what is sampled from it, and log-probabilities if they are wanted."""
        step = self.step_of(shape)
        num_tokens = shape.num_seqs * shape.num_rows
        logits, masks = self._logits[:num_tokens], self._masks[:num_tokens]
        forward = partial(self._forward, step, shape, logits)
        works = [self._works.ready(shape, forward, step.clear)]
        if kind != Kind.GREEDY:
            probs = None if self.drafts is None else self.drafts.drafter.probs
            finish = partial(step.finish, self.state, logits, masks, None, kind, probs)
            key = kind.name, shape.num_seqs, shape.num_rows
            works.append(self._works.ready(key, finish, step.clear))
        if told:
            report = partial(step.report, self.state, logits)
            key = "report", shape.num_seqs, shape.num_rows
            works.append(self._works.ready(key, report, step.clear))
        return works

    def _forward(self, step: StepTensors, shape: Shape, logits: Tensor) -> None:
        rows = step.rows(self.page_table[:, : shape.num_pages], self.page_size)
        tokens = step.tokens(self.state)
        output = self.model.compute(tokens, rows, None, self.kv, self.experts)
        step.finish(self.state, output.logits, None, self.fault, Kind.GREEDY)
        logits.copy_(output.logits)
        if self.drafts is not None:
            if self._hidden_states is None:
                places = len(self._logits), *output.hidden_states.shape[1:]
                self._hidden_states = output.hidden_states.new_zeros(places)
            self._hidden_states[: len(logits)].copy_(output.hidden_states)

    def _draft_works(self, shape: Shape, num_to_draft: int, kind: Kind) -> tuple[Work, list[Work]]:
        """What follows a step that drafts: its rows are settled, then tokens proposed."""
        assert self.drafts is not None
        assert self._hidden_states is not None, "a step was captured before"
        hidden_states = self._hidden_states[: shape.num_seqs * shape.num_rows]
        extend = self.drafts.extension(
            self.step_of(shape), hidden_states, shape.num_pages, proposes=num_to_draft > 0
        )
        works = self.drafts.proposals(shape.num_seqs, shape.num_pages, num_to_draft, kind)
        return extend, works

    def shape_for(self, num_seqs: int, num_rows: int, num_tokens: int) -> Shape:
        """As Shapes.least."""
        return self.shapes.least(num_seqs, num_rows, -(-num_tokens // self.page_size))

    def launch(
        self, rows: Sequence[StepRow], settled: Callable[[], None] = lambda: None
    ) -> PendingStep:
        """Queue one step of distinct sequences, at least one, and return at once.

        settled: called when all is queued but the proposals, whose rows are written over others'.
        Raises ConfigError for a shape that no graph was captured for.
        """
        assert self._num_launched - self._num_read < RING_STEPS, "a result was never read"
        num_to_draft = num_wanted(rows)
        shape = self.shape_for(
            len(rows),
            max(row.num_tokens for row in rows),
            max(row.start + row.num_tokens + max(row.num_to_draft, 0) for row in rows),
        )
        kind = max(row.kind for row in rows)
        told = any(row.told for row in rows)
        works = self._step_works(shape, kind, told=told)
        proposing: list[Work] = []
        if num_to_draft >= 0:
            extend, proposing = self._draft_works(shape, num_to_draft, kind_of_proposals(rows))
            works.append(extend)
        step = self.step_of(shape)
        host = self._ring[self._num_launched % RING_STEPS]
        sent = host.sent[: step.sent.numel()]
        fill(sent, rows, (shape.num_seqs, shape.num_rows), self.state.num_slots)
        with self.queue.working(), torch.inference_mode():
            started = self.queue.moment()
            step.sent.copy_(sent, non_blocking=True)
            if kind != Kind.GREEDY:
                self._send_masks(rows, shape.num_rows, host, kind)
            for work in works:
                work()
            settled()
            for work in proposing:
                work()
            out, reports, proposed = self._bring_back(step, host, told, num_to_draft)
            ended = self.queue.moment()
        num_rows = [row.num_tokens for row in rows]
        self._num_launched += 1
        return ReplayedStep(
            self.read, self._num_launched - 1, num_rows, out, reports, proposed, started, ended
        )

    def _bring_back(
        self, step: StepTensors, host: HostTensors, told: bool, num_to_draft: int
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Queue the copies of a step's tokens, reports and proposals, if it has these."""
        out = host.out[: step.out.numel()].view(step.out.shape)
        out.copy_(step.out, non_blocking=True)
        reports = proposed = None
        if told:
            reports = host.reports[: len(step.reports)]
            reports.copy_(step.reports, non_blocking=True)
        if num_to_draft >= 0:
            assert self.drafts is not None
            made = self.drafts.tensors(step.num_seqs).proposed
            proposed = host.proposed[: made.numel()].view(made.shape)
            proposed.copy_(made, non_blocking=True)
        return out, reports, proposed

    def step_of(self, shape: Shape) -> StepTensors:
        """The tensors that a shape's graphs read and write."""
        key = shape.num_seqs, shape.num_rows
        if key not in self._steps:
            device, no_slot = self.queue.device, self.state.num_slots
            with self.queue.working():
                self._steps[key] = StepTensors(*key, device, no_slot=no_slot, arch=self.arch)
        return self._steps[key]

    def read(self, number: int) -> None:
        """A step's results have been taken out of the ring."""
        assert number == self._num_read, "results are read in the order of the launches"
        self._num_read += 1

    def check(self) -> None:
        """Raise AssertionError if a tensor that graphs point to has moved, or a step is unread."""
        assert self._num_launched == self._num_read, "a result was never read"
        if self._places:
            assert self._places == self._addresses(), "a captured tensor has moved"

    def _addresses(self) -> dict[str, int]:
        fixed = {f"kv.{name}": tensor for name, tensor in self.kv.items()}
        fixed |= {"page_table": self.page_table, "last_token": self.state.last_token}
        fixed |= {"counts": self.state.output_counts, "seed": self.state.seed}
        return {name: tensor.data_ptr() for name, tensor in fixed.items()}

    def _send_masks(
        self, rows: Sequence[StepRow], num_rows: int, host: HostTensors, kind: Kind
    ) -> None:
        wanted = kind == Kind.FULL and any(row.masks is not None for row in rows)
        if not wanted and not self._has_masks:
            return
        self._has_masks = wanted
        if not wanted:
            self._masks.fill_(-1)
            return
        num_tokens = len(rows) * num_rows
        host.masks[:num_tokens] = -1
        for i, row in enumerate(rows):
            if row.masks is not None:
                host.masks[i * num_rows : i * num_rows + row.num_tokens] = row.masks
        self._masks[:num_tokens].copy_(host.masks[:num_tokens], non_blocking=True)
