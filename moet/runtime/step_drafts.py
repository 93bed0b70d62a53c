"""Drafting inside a step: what runtime/drafter.py does, as tensor operations of fixed shape. Which
rows hold is known on the device alone.

First the draft block runs over the step's rows that hold, with their true hidden states and the
tokens behind them (`extend`); then a token is taken from its logits (`take`) and fed back, one
position further (`chain`), in turn. Each is a piece of work of its own, so that a step drafts as
many as it wants by as many pieces. The row before a page border joins its own token, and nothing is
proposed from there, as the drafter says.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from moet.kernels.drafts import Parts, chained_rows, settled_rows, take_likeliest
from moet.kernels.rows import Rows
from moet.kernels.sampling import SamplingOps
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
    logits: [num_seqs, vocab_size] fp32, which may be shared: they mean nothing after a step.
    hidden_states: [num_seqs, ...], made when first given.
    """

    def __init__(self, num_drafts: int, logits: Tensor) -> None:
        num_seqs, device = len(logits), logits.device
        shape = num_seqs, 1 + num_drafts
        self.proposed = torch.zeros(shape, dtype=torch.int64, device=device)
        self.given = torch.zeros(4, num_seqs, dtype=torch.int64, device=device)
        self.ends, self.slots, self.sampler_slots, self.limits = self.given.unbind(0)
        self.logits = logits
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


class StepDrafter:
    """A draft block at work in steps. Holds no state of sequences but `probs`.

    probs: [num_slots + 1, num_drafts, num_token_ids] fp32, by sequence slot what its drafts were
    drawn from. page_table: [num_slots, pages] int64. arch: of the ops around the block.
    """

    def __init__(
        self,
        model: StepDraftModel,
        experts: ExpertProvider,
        kv: KVTensors,
        state: SlotTensors,
        page_table: Tensor,
        page_size: int,
        probs: Tensor,
        *,
        arch: str = "reference",
    ) -> None:
        self.model, self.experts, self.kv, self.state = model, experts, kv, state
        self.page_table, self.page_size, self.probs = page_table, page_size, probs
        self._settled = settled_rows.bind(arch=arch)
        self._chained = chained_rows.bind(arch=arch)
        self._take_likeliest = take_likeliest.bind(arch=arch)
        self._ops = SamplingOps.bind(arch)

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
        parts, last = self._settled(
            step.by_row,
            step.out,
            step.sampler_slots,
            step.wanted,
            drafts.given,
            drafts.proposed,
            page_size=self.page_size,
        )
        wanted = last if proposes else last[:0]
        output = self._compute(parts, num_pages, wanted, hidden_states)
        if proposes:
            drafts.goes_on_from(output.logits, output.hidden_states[last])

    def take(self, drafts: DraftTensors, n: int, kind: Kind) -> None:
        """Propose token n of each sequence that has come so far. kind: GREEDY, PLAIN or RANKED."""
        state = self.state
        if kind == Kind.GREEDY:
            self._take_likeliest(
                drafts.logits,
                drafts.limits,
                drafts.proposed,
                number=n,
                num_token_ids=state.num_token_ids,
            )
            return
        count, slots = drafts.proposed[:, 0], drafts.sampler_slots
        token_ids, is_good, probs = propose(
            state, drafts.logits, slots, drafts.ends + n, kind, self._ops
        )
        holds = (drafts.limits > n) & (count == n) & is_good
        self.probs[:, n].index_copy_(0, torch.where(holds, slots, state.num_slots), probs)
        drafts.proposed[:, 1 + n] = token_ids
        count += holds

    def chain(self, drafts: DraftTensors, n: int, num_pages: int) -> None:
        """Feed token n back, where another is wanted behind it."""
        assert drafts.hidden_states is not None
        parts = self._chained(drafts.given, drafts.proposed, number=n)
        output = self._compute(parts, num_pages, None, drafts.hidden_states)
        drafts.goes_on_from(output.logits, output.hidden_states)

    def _compute(
        self, parts: Parts, num_pages: int, logits_indices: Tensor | None, hidden_states: Tensor
    ) -> ModelOutput:
        token_ids, positions, starts, ends, slots = parts
        rows = Rows(
            positions=positions,
            starts=starts,
            ends=ends,
            seq_slots=slots,
            page_rows=slots,
            page_table=self.page_table[:, :num_pages],
            page_size=self.page_size,
            short=True,
        )
        return self.model.compute_draft(
            token_ids, rows, logits_indices, hidden_states, self.kv, self.experts
        )
