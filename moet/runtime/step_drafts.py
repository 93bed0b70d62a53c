"""Drafting inside a step: what runtime/drafter.py does, as tensor operations of fixed shape. Which
rows hold is known on the device alone.

First the draft block runs over the step's rows that hold, with their true hidden states and the
tokens behind them (`extend`); then a token is taken from its logits (`take`) and fed back, one
position further (`chain`), in turn. Each is a piece of work of its own, so that a step drafts as
many as it wants by as many pieces. The row before a page border joins its own token, and nothing is
proposed from there, as the drafter says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moet.kernels.rows import Rows
from moet.models.base import ExpertProvider, KVTensors, ModelOutput
from moet.runtime.device_sampler import Kind, propose
from moet.runtime.slot_tensors import SlotTensors
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


class DraftTensors:
    """What is proposed for num_seqs sequences, and what the next proposal comes from.

    proposed: [num_seqs, 1 + num_drafts] int64, how many are proposed, then the tokens. ends:
    position behind the rows that hold; slots: of the sequence; sampler_slots: where its sampling
    state is, the last slot of all for none; limits: tokens to propose: [num_seqs] int64 each.
    logits: [num_seqs, vocab_size] fp32. hidden_states: [num_seqs, ...], made when first given.
    """

    def __init__(
        self, num_seqs: int, num_drafts: int, vocab_size: int, device: torch.device
    ) -> None:
        shape = num_seqs, 1 + num_drafts
        self.proposed = torch.zeros(shape, dtype=torch.int64, device=device)
        self.given = torch.zeros(4, num_seqs, dtype=torch.int64, device=device)
        self.ends, self.slots, self.sampler_slots, self.limits = self.given.unbind(0)
        self.logits = torch.zeros(num_seqs, vocab_size, device=device)
        self.hidden_states: Tensor | None = None

    def clear(self) -> None:
        """Propose nothing, for nobody."""
        self.given.zero_()
        self.proposed.zero_()

    def goes_on_from(self, logits: Tensor, hidden_states: Tensor) -> None:
        """Take over an output of the draft block, of the first sequences: a row for each."""
        if self.hidden_states is None:
            shape = len(self.logits), *hidden_states.shape[1:]
            self.hidden_states = hidden_states.new_zeros(shape)
        self.logits[: len(logits)].copy_(logits)
        self.hidden_states[: len(logits)].copy_(hidden_states)


@dataclass(frozen=True, slots=True)
class StepDrafter:
    """A draft block at work in steps. Holds no state of sequences but `probs`.

    probs: [num_slots + 1, num_drafts, num_token_ids] fp32, by sequence slot what its drafts were
    drawn from. page_table: [num_slots, pages] int64.
    """

    model: StepDraftModel
    experts: ExpertProvider
    kv: KVTensors
    state: SlotTensors
    page_table: Tensor
    page_size: int
    probs: Tensor

    @property
    def num_drafts(self) -> int:
        return self.probs.shape[1]

    def extend(
        self,
        step: StepTensors,
        hidden_states: Tensor,
        drafts: DraftTensors,
        num_pages: int,
        *,
        proposes: bool,
    ) -> None:
        """Bring the draft block's state up to a step's rows that hold. For steps that are sampled.

        hidden_states: [T, ...], what came out of the step. proposes: tokens are to be taken next.
        """
        shape = step.num_seqs, step.num_rows
        num_held, tokens = step.out[1:, step.num_rows], step.out[1:, : step.num_rows]
        positions, starts = step.positions.view(shape), step.starts.view(shape)[:, 0]
        slots, rows = step.seq_slots.view(shape), torch.arange(step.num_rows, device=tokens.device)
        ends = starts + num_held
        has_drafts = (step.wanted >= 0) & (num_held > 0)
        there = (rows < num_held[:, None]) & has_drafts[:, None]
        before_border = (positions + 1) % self.page_size == 0
        following = torch.where(before_border, step.token_ids.view(shape), tokens)
        extended = self._rows(
            torch.where(there, positions, -1),
            torch.where(there, starts[:, None], 0),
            torch.where(there, ends[:, None], 0),
            torch.where(there, slots, 0),
            num_pages,
        )
        drafts.ends.copy_(ends)
        drafts.slots.copy_(slots[:, 0])
        drafts.sampler_slots.copy_(step.sampler_slots)
        may_propose = has_drafts & (ends % self.page_size != 0)
        drafts.limits.copy_(torch.where(may_propose, step.wanted, 0))
        firsts = torch.arange(step.num_seqs, device=tokens.device) * step.num_rows
        last = firsts + (num_held - 1).clamp(min=0)
        ids = torch.where(there, following, 0).reshape(-1)
        wanted = last if proposes else last[:0]
        output = self.model.compute_draft(
            ids, extended, wanted, hidden_states, self.kv, self.experts
        )
        drafts.proposed[:, 0] = 0
        if proposes:
            drafts.goes_on_from(output.logits, output.hidden_states[last])

    def take(self, drafts: DraftTensors, n: int, kind: Kind) -> None:
        """Propose token n of each sequence that has come so far. kind: GREEDY, PLAIN or RANKED."""
        count, state = drafts.proposed[:, 0], self.state
        if kind == Kind.GREEDY:
            best, token_ids = drafts.logits[:, : state.num_token_ids].max(-1)
            holds = (drafts.limits > n) & (count == n) & (best < torch.inf)
        else:
            slots = drafts.sampler_slots
            token_ids, is_good, probs = propose(state, drafts.logits, slots, drafts.ends + n, kind)
            holds = (drafts.limits > n) & (count == n) & is_good
            slots = torch.where(holds, slots, state.num_slots)
            self.probs[:, n].index_copy_(0, slots, probs)
        drafts.proposed[:, 1 + n] = token_ids
        count += holds

    def chain(self, drafts: DraftTensors, n: int, num_pages: int) -> None:
        """Feed token n back, where another is wanted behind it."""
        assert drafts.hidden_states is not None
        goes_on = (drafts.proposed[:, 0] == n + 1) & (drafts.limits > n + 1)
        places = torch.where(goes_on, drafts.ends + n, -1)
        starts = torch.where(goes_on, places, 0)
        rows = self._rows(
            places, starts, places + 1, torch.where(goes_on, drafts.slots, 0), num_pages
        )
        output = self.model.compute_draft(
            drafts.proposed[:, 1 + n], rows, None, drafts.hidden_states, self.kv, self.experts
        )
        drafts.goes_on_from(output.logits, output.hidden_states)

    def _rows(
        self, positions: Tensor, starts: Tensor, ends: Tensor, slots: Tensor, num_pages: int
    ) -> Rows:
        slots = slots.reshape(-1)
        return Rows(
            positions=positions.reshape(-1),
            starts=starts.reshape(-1),
            ends=ends.reshape(-1),
            seq_slots=slots,
            page_rows=slots,
            page_table=self.page_table[:, :num_pages],
            page_size=self.page_size,
            short=True,
        )
