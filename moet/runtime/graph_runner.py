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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor

from moet.errors import ConfigError
from moet.kernels.rows import Rows
from moet.models.base import ExpertProvider, KVTensors, ModelOutput
from moet.runtime.device_sampler import Kind
from moet.runtime.grammar import num_words
from moet.runtime.queues import Capture, Queue, Work
from moet.runtime.slot_tensors import SlotTensors
from moet.runtime.step_drafts import StepDraftModel, StepDrafts
from moet.runtime.step_ring import HostTensors, PendingStep, ReplayedStep
from moet.runtime.step_tensors import StepRow, StepTensors, fill

logger = logging.getLogger(__name__)

RING_STEPS = 6  # of batches: one being read, one running, one being made, two graphs each
REACH_FACTOR = 8  # between the widths of page tables that have graphs of their own
MIN_REACH_PAGES = 16
SLOW_CAPTURE_S = 1.0  # kernels are compiled when they are first met


class StepModel(Protocol):
    """A model whose step can be captured."""

    vocab_size: int

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


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """What a graph was captured for: so many sequences of so many rows, over so many pages each.

    drafts: whether it proposes tokens for the next step.
    """

    num_seqs: int
    num_rows: int
    num_pages: int
    drafts: bool = False


class GraphRunner:
    """Replays decode steps. One thread launches, and results are read in order.

    buckets: numbers of sequences, ascending; rows_per_seq likewise. fault: [1] int32 that kernels
    set, or None. page_table: [num_slots, max_pages] int64 on the device, by sequence slot.
    draft_model: the same model, if it was built for num_drafts drafts.
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
        self._draft_model, self.num_drafts = draft_model, num_drafts
        self.model, self.experts, self.kv, self.state = model, experts, kv, state
        self.page_table, self.page_size, self.fault = page_table, page_size, fault
        self.queue, self.arch = queue, arch
        self.buckets, self.rows_per_seq = tuple(buckets), tuple(rows_per_seq)
        self.reaches = reaches(page_table.shape[1])
        self._capture = capture
        most = self.buckets[-1] * self.rows_per_seq[-1]
        words = num_words(model.vocab_size)
        device = queue.device
        self._logits = torch.zeros(most, model.vocab_size, device=device)
        self._masks = torch.full((most, words), -1, dtype=torch.int32, device=device)
        self._has_masks = False
        self._steps: dict[tuple[int, int], StepTensors] = {}
        self._drafts: dict[tuple[int, int], StepDrafts] = {}
        self._forward: dict[Shape, Work] = {}
        self._finish: dict[tuple[int, int, Kind], Work] = {}
        self._is_sealed = False
        self._ring = [
            HostTensors.of(queue, self.buckets[-1], self.rows_per_seq[-1], words, num_drafts)
            for _ in range(RING_STEPS)
        ]
        self._num_launched = self._num_read = 0
        self._places: dict[str, int] = {}

    def capture_all(self, progress: Callable[[float], None] = lambda done: None) -> None:
        """Capture every graph; afterwards nothing may grow, and no other shape is served."""
        shapes = [
            Shape(num_seqs, num_rows, num_pages, drafts)
            for num_pages in reversed(self.reaches)
            for num_seqs in reversed(self.buckets)
            for num_rows in reversed(self.rows_per_seq)
            for drafts in ([False] if self._draft_model is None else [False, True])
        ]
        started_s = perf_counter()
        for n, shape in enumerate(shapes):
            before_s = perf_counter()
            self.capture(shape)
            taken_s = perf_counter() - before_s
            level = logging.INFO if taken_s > SLOW_CAPTURE_S else logging.DEBUG
            logger.log(level, "captured a step shape=%s time=%.1fs", shape, taken_s)
            progress((n + 1) / len(shapes))
        self._is_sealed = True
        self._places = self._addresses()
        logger.info("captured steps shapes=%d time=%.1fs", len(shapes), perf_counter() - started_s)

    def capture(self, shape: Shape, kinds: Sequence[Kind] = tuple(Kind)) -> None:
        """Capture the graphs of one shape."""
        key = shape.num_seqs, shape.num_rows
        with self.queue.working(), torch.inference_mode():
            if key not in self._steps:
                self._steps[key] = StepTensors(*key, self.queue.device, arch=self.arch)
            self._clear(self._steps[key])
            step, num_tokens = self._steps[key], shape.num_seqs * shape.num_rows
            logits, masks = self._logits[:num_tokens], self._masks[:num_tokens]
            table = self.page_table[:, : shape.num_pages]
            drafts = None
            if shape.drafts:
                if key not in self._drafts:
                    self._drafts[key] = StepDrafts(step, self.num_drafts)
                drafts = self._drafts[key]

            def forward() -> None:
                rows = step.rows(table, self.page_size)
                tokens = step.tokens(self.state)
                output = self.model.compute(tokens, rows, None, self.kv, self.experts)
                step.finish(self.state, output.logits, None, self.fault, Kind.GREEDY)
                if drafts is None:
                    logits.copy_(output.logits)
                else:
                    self._propose(drafts, tokens, output.hidden_states, table)

            self._forward[shape] = self._capture(forward)
            for kind in () if shape.drafts else kinds:
                if kind != Kind.GREEDY and (*key, kind) not in self._finish:
                    finish = partial(step.finish, self.state, logits, masks, None, kind)
                    self._finish[*key, kind] = self._capture(finish)

    def _propose(
        self, drafts: StepDrafts, token_ids: Tensor, hidden_states: Tensor, page_table: Tensor
    ) -> None:
        assert self._draft_model is not None
        drafts.run(
            self._draft_model,
            token_ids,
            hidden_states,
            self.kv,
            self.experts,
            page_table,
            self.page_size,
            self.state.num_token_ids,
        )

    def shape_for(
        self, num_seqs: int, num_rows: int, num_tokens: int, *, drafts: bool = False
    ) -> Shape:
        """The least captured shape that a step fits.

        num_rows: most of any sequence; num_tokens: longest sequence after the step.
        Raises ConfigError if there is none.
        """
        num_pages = -(-num_tokens // self.page_size)
        found = [
            next((each for each in sizes if each >= needed), None)
            for sizes, needed in (
                (self.buckets, num_seqs),
                (self.rows_per_seq, num_rows),
                (self.reaches, num_pages),
            )
        ]
        if None in found:
            raise ConfigError(
                f"a step of {num_seqs} sequences with {num_rows} rows and {num_pages} pages fits "
                f"none of the graphs: at most {self.buckets[-1]} sequences, "
                f"{self.rows_per_seq[-1]} rows and {self.reaches[-1]} pages"
            )
        seqs, rows, pages = (each for each in found if each is not None)
        return Shape(seqs, rows, pages, drafts)

    def launch(self, rows: Sequence[StepRow]) -> PendingStep:
        """Queue one step of distinct sequences, at least one, and return at once.

        If one of them drafts, all must be of Kind.GREEDY. Raises ConfigError for a shape that no
        graph was captured for.
        """
        assert self._num_launched - self._num_read < RING_STEPS, "a result was never read"
        drafts = any(row.num_to_draft >= 0 for row in rows)
        shape = self.shape_for(
            len(rows),
            max(row.num_tokens for row in rows),
            max(row.start + row.num_tokens for row in rows) + drafts * self.num_drafts,
            drafts=drafts,
        )
        if shape not in self._forward:
            if self._is_sealed:
                raise ConfigError(f"no graph was captured for {shape}")
            self.capture(shape)
        key = shape.num_seqs, shape.num_rows
        step = self._steps[key]
        kind = max(row.kind for row in rows)
        assert kind == Kind.GREEDY or not drafts
        host = self._ring[self._num_launched % RING_STEPS]
        sent = host.sent[: step.sent.numel()]
        fill(sent, rows, key, self.state.num_slots)
        with self.queue.working(), torch.inference_mode():
            started = self.queue.moment()
            step.sent.copy_(sent, non_blocking=True)
            self._forward[shape]()
            if kind != Kind.GREEDY:
                self._send_masks(rows, shape.num_rows, host, kind)
                self._finish[*key, kind]()
            out = host.out[: step.out.numel()].view(step.out.shape)
            out.copy_(step.out, non_blocking=True)
            reports = None
            if kind == Kind.FULL:
                reports = host.reports[: len(step.reports)]
                reports.copy_(step.reports, non_blocking=True)
            proposed = None
            if drafts:
                made = self._drafts[key].proposed
                proposed = host.proposed[: made.numel()].view(made.shape)
                proposed.copy_(made, non_blocking=True)
            ended = self.queue.moment()
        num_rows = [row.num_tokens for row in rows]
        self._num_launched += 1
        return ReplayedStep(
            self.read, self._num_launched - 1, num_rows, out, reports, proposed, started, ended
        )

    def step_of(self, shape: Shape) -> StepTensors:
        """The tensors that a shape's graph reads and writes."""
        return self._steps[shape.num_seqs, shape.num_rows]

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

    def _clear(self, step: StepTensors) -> None:
        """Fill rows alone, so that the first run of a graph touches nothing."""
        sent = torch.zeros(step.sent.shape, dtype=torch.int64)
        fill(sent, [], (step.num_seqs, step.num_rows), self.state.num_slots)
        step.sent.copy_(sent)

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


def reaches(max_pages: int) -> tuple[int, ...]:
    """Widths of page tables that get graphs of their own, ascending; the last one is max_pages.

    What a step's kernels launch grows with the width, though its result does not.
    """
    widths, width = [], MIN_REACH_PAGES
    while width < max_pages:
        widths.append(width)
        width *= REACH_FACTOR
    return (*widths, max_pages)


def bucket_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Numbers of sequences that get graphs of their own: powers of two and what lies halfway."""
    sizes = {1, max_num_seqs}
    for exponent in range(1, max_num_seqs.bit_length()):
        sizes |= {2**exponent, 3 * 2 ** (exponent - 1)}
    return tuple(sorted(size for size in sizes if size <= max_num_seqs))
