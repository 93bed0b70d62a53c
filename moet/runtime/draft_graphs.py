"""Drafting in captured pieces: which there are, and those that a step wants. What each of them does
is step_drafts.py's; steps and prompts share those behind the first."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from moet.runtime.device_sampler import Kind
from moet.runtime.queues import Work
from moet.runtime.step_drafts import DraftTensors, StepDrafter
from moet.runtime.step_shapes import Shapes
from moet.runtime.step_tensors import StepRow, StepTensors
from moet.runtime.works import Works

KINDS = (Kind.GREEDY, Kind.PLAIN, Kind.RANKED)  # of proposals; FULL asks for no more than RANKED


class DraftGraphs:
    """Pieces of one drafter, by numbers of sequences and reach of the page table. shapes: of the
    steps that they belong to."""

    def __init__(self, drafter: StepDrafter, works: Works, shapes: Shapes, vocab_size: int) -> None:
        self.drafter, self.shapes = drafter, shapes
        self._works = works
        most_seqs, _, _ = shapes.most()
        self._logits = torch.zeros(most_seqs, vocab_size, device=works.queue.device)
        self._tensors: dict[int, DraftTensors] = {}

    @property
    def num_drafts(self) -> int:
        return self.drafter.num_drafts

    def tensors(self, num_seqs: int) -> DraftTensors:
        """Those that the pieces for so many sequences read and write."""
        if num_seqs not in self._tensors:
            with self._works.queue.working():
                self._tensors[num_seqs] = DraftTensors(self.num_drafts, self._logits[:num_seqs])
        return self._tensors[num_seqs]

    def extension(
        self, step: StepTensors, hidden_states: Tensor, num_pages: int, *, proposes: bool
    ) -> Work:
        """The draft block over a step's rows. hidden_states: [T, ...], always the same place."""
        tensors = self.tensors(step.num_seqs)
        work = partial(
            self.drafter.extend, step, hidden_states, tensors, num_pages, proposes=proposes
        )
        key = "extend", step.num_seqs, step.num_rows, num_pages, proposes
        return self._works.ready(key, work, step.clear)

    def proposals(self, num_seqs: int, num_pages: int, num_to_draft: int, kind: Kind) -> list[Work]:
        """Taking so many tokens, behind an extension that proposes."""
        drafts, works = self.tensors(num_seqs), []
        for n in range(num_to_draft):
            if n > 0:
                key = "chain", num_seqs, num_pages, n
                chain = partial(self.drafter.chain, drafts, n - 1, num_pages)
                works.append(self._works.ready(key, chain, drafts.clear))
            take = partial(self.drafter.take, drafts, n, kind)
            works.append(self._works.ready(("take", num_seqs, n, kind), take, drafts.clear))
        return works


def num_wanted(rows: Sequence[StepRow]) -> int:
    """Tokens that a step proposes at most; -1 if none of its sequences drafts at all."""
    return max(row.num_to_draft for row in rows)


def kind_of_proposals(rows: Sequence[StepRow]) -> Kind:
    """The least kind that serves all that are drafted for."""
    kinds = [row.kind for row in rows if row.num_to_draft > 0]
    return min(max(kinds, default=Kind.GREEDY), Kind.RANKED)
