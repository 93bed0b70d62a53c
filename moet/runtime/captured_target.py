"""Passes of a model over few rows of each sequence, captured, for whoever reads the logits before
it decides what comes next: rows that a policy judges, or computes with experts of another format.

Larger passes, those of prompts, are launched piece by piece. Knows no requests and no policies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from moet.kernels.rows import Rows
from moet.models.base import ExpertProvider, ForwardInput, KVTensors, ModelOutput
from moet.runtime.graph_runner import StepModel
from moet.runtime.queues import Capture, Queue, Work

FILL = -1  # the position of a row that is only there to fill a bucket


class TargetModel(StepModel, Protocol):
    """A model whose step can be captured, and that runs on a step's input, too."""

    def forward(
        self, inputs: ForwardInput, kv: KVTensors, experts: ExpertProvider
    ) -> ModelOutput: ...


@dataclass(slots=True)
class _Graph:
    work: Work
    output: ModelOutput


class CapturedTarget:
    """Callable as a Target of runtime/experts/precision.py, from one thread, inside of the queue.

    providers: the experts whose passes are captured. buckets: numbers of sequences, ascending;
    rows_per_seq likewise. max_pages: of a sequence.
    """

    def __init__(
        self,
        model: TargetModel,
        kv: KVTensors,
        providers: Sequence[ExpertProvider],
        *,
        page_size: int,
        max_pages: int,
        buckets: Sequence[int],
        rows_per_seq: Sequence[int],
        queue: Queue,
        capture: Capture,
    ) -> None:
        self._model, self._kv, self._providers = model, kv, list(providers)
        self._page_size, self._queue, self._capture = page_size, queue, capture
        self._buckets, self._rows_per_seq = tuple(buckets), tuple(rows_per_seq)
        shape = self._buckets[-1], max_pages
        num_rows = self._buckets[-1] * self._rows_per_seq[-1]
        with torch.inference_mode(False):  # to stay writable by any pass
            self._page_table = torch.zeros(shape, dtype=torch.int64, device=queue.device)
            # token ids, positions, starts, ends, seq_slots, page_rows
            self._sent = torch.zeros(6, num_rows, dtype=torch.int64, device=queue.device)
        self._graphs: dict[tuple[int, int, int], _Graph] = {}

    def capture_all(self) -> None:
        """Capture every shape, the largest first."""
        with self._queue.working():
            for num_seqs in reversed(self._buckets):
                for num_rows in reversed(self._rows_per_seq):
                    for number in range(len(self._providers)):
                        self._captured(num_seqs, num_rows, number)

    def capture_again(self) -> None:
        """The same anew, for experts that have moved."""
        self._graphs.clear()
        self.capture_all()

    def __call__(self, inputs: ForwardInput, experts: ExpertProvider) -> ModelOutput:
        """Run a pass. What it returns stays as it is."""
        offsets = inputs.cu_seqlens_q
        sizes = [end - first for first, end in pairwise(offsets)]
        num_seqs = next((each for each in self._buckets if each >= len(sizes)), None)
        num_rows = next((each for each in self._rows_per_seq if each >= max(sizes)), None)
        number = next((n for n, each in enumerate(self._providers) if each is experts), None)
        if num_seqs is None or num_rows is None or number is None:
            return self._model.forward(inputs, self._kv, experts)
        graph = self._captured(num_seqs, num_rows, number)
        places = [n * num_rows + i for n, size in enumerate(sizes) for i in range(size)]
        at = torch.tensor(places, device=self._queue.device)
        self._send(inputs, sizes, at, num_seqs * num_rows)
        graph.work()
        output = graph.output
        wanted = at[inputs.logits_indices.to(at.device)]
        return ModelOutput(output.logits[wanted], output.hidden_states[at])

    def _send(self, inputs: ForwardInput, sizes: list[int], at: Tensor, count: int) -> None:
        """Write a pass's rows at their places, and fill rows at the others."""
        starts = [end - size for end, size in zip(inputs.seq_lens, sizes, strict=True)]
        per_row = [
            [start, end, n]
            for n, (start, end, size) in enumerate(zip(starts, inputs.seq_lens, sizes, strict=True))
            for _ in range(size)
        ]
        starts_ends_seqs = torch.tensor(per_row).t().to(at.device)
        sent = self._sent[:, :count]
        sent.zero_()
        sent[1] = FILL
        sent[0, at], sent[1, at] = inputs.token_ids.to(at.device), inputs.positions.to(at.device)
        sent[2:4, at] = starts_ends_seqs[:2]
        sent[4, at] = inputs.seq_slots.to(at.device)[starts_ends_seqs[2]]
        sent[5, at] = starts_ends_seqs[2]
        num_seqs, num_pages = inputs.page_table.shape
        self._page_table[:num_seqs, :num_pages] = inputs.page_table

    def _captured(self, num_seqs: int, num_rows: int, number: int) -> _Graph:
        key = num_seqs, num_rows, number
        if key in self._graphs:
            return self._graphs[key]
        sent = self._sent[:, : num_seqs * num_rows]
        sent.zero_()
        sent[1] = FILL
        token_ids, positions, starts, ends, slots, page_rows = sent.unbind(0)
        rows = Rows(
            positions=positions,
            starts=starts,
            ends=ends,
            seq_slots=slots,
            page_rows=page_rows,
            page_table=self._page_table,
            page_size=self._page_size,
            short=True,
        )

        def run() -> None:
            with torch.inference_mode():
                output = self._model.compute(
                    token_ids, rows, None, self._kv, self._providers[number]
                )
            graph.output = output

        graph = _Graph(run, ModelOutput(sent, sent))
        graph.work = self._capture(run)
        self._graphs[key] = graph
        return graph
