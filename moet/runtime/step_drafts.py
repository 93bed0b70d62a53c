"""Drafting inside a captured step: what runtime/drafter.py does for sequences at temperature 0, as
tensor operations of fixed shape. Which rows hold is known on the device alone.

First the draft block runs over the step's rows that hold, with their true hidden states and the
tokens behind them; then it feeds itself, one token at a time. The row before a page border joins
its own token, and nothing is proposed from there, as the drafter says.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from moet.kernels.rows import Rows
from moet.models.base import ExpertProvider, KVTensors, ModelOutput
from moet.runtime.step_tensors import StepTensors


class StepDraftModel(Protocol):
    """A model whose draft block can be captured."""

    def compute_draft(
        self,
        token_ids: Tensor,
        rows: Rows,
        logits_indices: Tensor | None,
        streams: Tensor,
        kv: KVTensors,
        experts: ExpertProvider,
        /,
    ) -> ModelOutput:
        """DraftingModel.draft from device tensors alone, as `compute` is `forward`."""
        ...


class StepDrafts:
    """Drafts of the sequences of one StepTensors.

    proposed: [num_seqs, 1 + num_drafts] int64, how many are proposed, then the tokens.
    """

    def __init__(self, step: StepTensors, num_drafts: int) -> None:
        self.step, self.num_drafts = step, num_drafts
        device = step.sent.device
        shape = step.num_seqs, 1 + num_drafts
        self.proposed = torch.zeros(shape, dtype=torch.int64, device=device)
        self._rows = torch.arange(step.num_rows, device=device)
        self._firsts = torch.arange(step.num_seqs, device=device) * step.num_rows

    def run(
        self,
        model: StepDraftModel,
        token_ids: Tensor,
        hidden_states: Tensor,
        kv: KVTensors,
        experts: ExpertProvider,
        page_table: Tensor,
        page_size: int,
        num_token_ids: int,
    ) -> None:
        """Extend the draft block's state over the rows that hold, then propose. For a step whose
        tokens were taken greedily.

        token_ids: [T] int64, what went into the step; hidden_states: [T, ...], what came out.
        """
        step, shape = self.step, (self.step.num_seqs, self.step.num_rows)
        num_held, tokens = step.out[1:, step.num_rows], step.out[1:, : step.num_rows]
        positions, starts = step.positions.view(shape), step.starts.view(shape)[:, 0]
        ends = starts + num_held
        drafts = (step.wanted >= 0) & (num_held > 0)
        there = (self._rows < num_held[:, None]) & drafts[:, None]
        before_border = (positions + 1) % page_size == 0
        following = torch.where(before_border, token_ids.view(shape), tokens)
        slots = step.seq_slots.view(shape)

        def rows(positions: Tensor, starts: Tensor, ends: Tensor, slots: Tensor) -> Rows:
            return Rows(
                positions=positions.reshape(-1),
                starts=starts.reshape(-1),
                ends=ends.reshape(-1),
                seq_slots=slots.reshape(-1),
                page_rows=slots.reshape(-1),
                page_table=page_table,
                page_size=page_size,
                short=True,
            )

        extended = rows(
            torch.where(there, positions, -1),
            torch.where(there, starts[:, None], 0),
            torch.where(there, ends[:, None], 0),
            torch.where(there, slots, 0),
        )
        last = self._firsts + (num_held - 1).clamp(min=0)
        ids = torch.where(there, following, 0).reshape(-1)
        output = model.compute_draft(ids, extended, last, hidden_states, kv, experts)
        logits, hidden_states = output.logits, output.hidden_states[last]
        limit = torch.where(drafts & (ends % page_size != 0), step.wanted, 0)
        count = torch.zeros_like(limit)
        for n in range(self.num_drafts):
            best, token = logits[:, :num_token_ids].max(-1)
            holds = (limit > n) & (count == n) & (best < torch.inf)
            count = count + holds
            self.proposed[:, 1 + n] = token
            if n + 1 == self.num_drafts:
                break
            goes_on = holds & (limit > n + 1)
            place = torch.where(goes_on, ends + n, -1)
            start = torch.where(goes_on, place, 0)
            chained = rows(place, start, place + 1, torch.where(goes_on, slots[:, 0], 0))
            output = model.compute_draft(token, chained, None, hidden_states, kv, experts)
            logits, hidden_states = output.logits, output.hidden_states
        self.proposed[:, 0] = count
