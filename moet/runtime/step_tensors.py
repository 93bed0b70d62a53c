"""The tensors of one captured step: what the host sends, what a model and a sampler read, and what
comes back. Their places are fixed; only what they hold changes. Knows no model and no graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moet.kernels.greedy import newest_tokens, take_greedy
from moet.kernels.rows import Rows
from moet.kernels.sampling import SamplingOps
from moet.runtime.device_sampler import REPORT_WIDTH, Drafted, Kind, choose, remember, report
from moet.runtime.slot_tensors import SlotTensors


@dataclass(frozen=True, slots=True)
class StepRow:
    """Rows of one sequence in a step: positions start..start+num_tokens-1, all of which sample.

    token_ids None: one row, whose token is the slot's newest on the device; not of a sequence that
    drafts. Tokens behind the first are drafts. masks: [num_tokens, words] int32, or None for no
    limits. kind: what the sequence's parameters ask for. told: log-probabilities are wanted.
    num_to_draft: tokens to propose for its
    next step; -1: it does not draft at all.
    """

    slot: int
    start: int
    token_ids: Sequence[int] | None
    kind: Kind = Kind.GREEDY
    masks: Tensor | None = None
    num_to_draft: int = -1
    told: bool = False

    @property
    def num_tokens(self) -> int:
        return 1 if self.token_ids is None else len(self.token_ids)


class StepTensors:
    """A step of num_seqs sequences with num_rows rows each; rows that are not there are fill rows.

    token_ids: [T] int64, -1 for the newest token of the slot. positions, starts, ends, seq_slots:
    [T] int64 as in kernels/rows.py, together by_row. sampler_slots: [num_seqs] int64, where a
    sequence's sampling state is; the last slot of all for none. counts: [num_seqs] int64, rows that
    are there. wanted: [num_seqs] int64, drafts that a sequence's next step asks for, -1 if it never
    does. no_slot: where sampling state is of nobody.
    out: [1 + num_seqs, num_rows + 2] int64; first a fault word, then by sequence the tokens, how
    many of them hold, and whether the first row's logits were no numbers. reports: [T, columns].
    """

    def __init__(
        self,
        num_seqs: int,
        num_rows: int,
        device: torch.device,
        *,
        no_slot: int,
        arch: str = "reference",
    ) -> None:
        self.num_seqs, self.num_rows, self._no_slot = num_seqs, num_rows, no_slot
        self._newest = newest_tokens.bind(arch=arch)
        self._take_greedy = take_greedy.bind(arch=arch)
        self._ops = SamplingOps.bind(arch)
        self.sent = torch.zeros(self.num_sent(num_seqs, num_rows), dtype=torch.int64, device=device)
        num_tokens = num_seqs * num_rows
        self.by_row = self.sent[: 5 * num_tokens].view(5, num_tokens)
        self.token_ids, self.positions, self.starts, self.ends, self.seq_slots = self.by_row
        by_seq = self.sent[5 * num_tokens :].view(3, num_seqs).unbind(0)
        self.sampler_slots, self.counts, self.wanted = by_seq
        self.out = torch.zeros(1 + num_seqs, num_rows + 2, dtype=torch.int64, device=device)
        self.reports = torch.zeros(num_tokens, REPORT_WIDTH, dtype=torch.int64, device=device)

    @staticmethod
    def num_sent(num_seqs: int, num_rows: int) -> int:
        """Length of what the host sends."""
        return 5 * num_seqs * num_rows + 3 * num_seqs

    def clear(self) -> None:
        """Fill rows alone, so that a run touches nothing."""
        sent = torch.zeros(self.sent.shape, dtype=torch.int64)
        fill(sent, [], (self.num_seqs, self.num_rows), self._no_slot)
        self.sent.copy_(sent)

    def rows(self, page_table: Tensor, page_size: int) -> Rows:
        """For the model. page_table: [num_slots, pages] int64, by sequence slot."""
        return Rows(
            positions=self.positions,
            starts=self.starts,
            ends=self.ends,
            seq_slots=self.seq_slots,
            page_rows=self.seq_slots,
            page_table=page_table,
            page_size=page_size,
            short=True,
        )

    def tokens(self, state: SlotTensors) -> Tensor:
        """[T] int64, those that only the device knows filled in."""
        return self._newest(self.token_ids, self.seq_slots, state.last_token)

    def finish(
        self,
        state: SlotTensors,
        logits: Tensor,
        masks: Tensor | None,
        fault: Tensor | None,
        kind: Kind,
        draft_probs: Tensor | None = None,
    ) -> None:
        """Sample every sequence's rows in order, as long as its drafts hold, and write `out`.

        logits: [T, vocab_size] fp32. masks: [T, words] int32 for Kind.FULL. fault: [1] int32 of
        the model's kernels, taken and cleared. draft_probs: [num_slots + 1, drafts, num_token_ids]
        fp32, what the drafts above temperature 0 were drawn from; for kinds above GREEDY.
        """
        if kind == Kind.GREEDY:
            self._take_greedy(
                logits,
                self.token_ids,
                self.counts,
                self.sampler_slots,
                state.last_token,
                fault,
                self.out,
                num_token_ids=state.num_token_ids,
            )
            return
        out, num_rows = self.out, self.num_rows
        if fault is not None:
            out[0, :1] = fault.to(torch.int64)
            fault.zero_()
        shape = self.num_seqs, num_rows
        slots = self.sampler_slots[:, None].expand(shape).reshape(-1)
        drafts = self.token_ids.view(shape)
        drawn = choose(
            state,
            logits,
            slots,
            self.positions,
            masks if kind == Kind.FULL else None,
            kind,
            None if draft_probs is None or num_rows == 1 else self._drafted(slots, draft_probs),
            self._ahead() if num_rows > 1 else None,
            self._ops,
        )
        tokens, is_bad = drawn.token_ids.view(shape), drawn.is_bad.view(shape)
        holds = self.counts > 0
        num_held = torch.zeros_like(self.counts)
        for depth in range(num_rows):
            if depth > 0:  # a bad row is met again, as the next step's first, if it comes to that
                holds = holds & (self.counts > depth) & (drafts[:, depth] == tokens[:, depth - 1])
                holds = holds & ~is_bad[:, depth]
            taken = torch.where(holds, self.sampler_slots, state.num_slots)
            remember(state, taken, tokens[:, depth], kind)
            num_held = num_held + holds
        out[1:, :num_rows] = tokens
        out[1:, num_rows] = num_held
        out[1:, num_rows + 1] = is_bad[:, 0]

    def report(self, state: SlotTensors, logits: Tensor) -> None:
        """Write `reports` of a step that is sampled. logits: [T, vocab_size] fp32."""
        tokens = self.out[1:, : self.num_rows].reshape(-1)
        self.reports.copy_(report(state, logits, tokens))

    def _drafted(self, slots: Tensor, draft_probs: Tensor) -> Drafted:
        """The draft that each row's token is compared with: it went in as the next row's."""
        depth = torch.arange(self.num_rows, device=slots.device)
        there = depth + 1 < self.counts[:, None]
        following = self.token_ids.view(self.num_seqs, -1).roll(-1, 1)
        num_drafts = draft_probs.shape[1]
        number = depth.clamp(max=num_drafts - 1).repeat(self.num_seqs)
        ids = torch.where(there, following, 0).reshape(-1)
        return Drafted(
            ids, draft_probs.flatten(0, 1), slots * num_drafts + number, there.reshape(-1)
        )

    def _ahead(self) -> Tensor:
        """[T, num_rows - 1] int64, the drafts before each row's own token and behind the first,
        whose token the state knows; -1 for none."""
        drafts = self.token_ids.view(self.num_seqs, 1, -1)[:, :, 1:]
        depth = torch.arange(self.num_rows, device=drafts.device)
        known = depth[1:] <= depth[:, None]
        return torch.where(known, drafts, -1).reshape(len(self.token_ids), -1)


def fill(sent: Tensor, rows: Sequence[StepRow], shape: tuple[int, int], no_slot: int) -> None:
    """Write what a step sends for `rows`, in order, into a host tensor; the rest are fill rows.

    sent: [StepTensors.num_sent(*shape)] int64. no_slot: where sampling state is of nobody.
    """
    num_seqs, num_rows = shape
    num_tokens = num_seqs * num_rows
    values = sent.numpy()
    values[:] = 0
    parts = values[: 5 * num_tokens].reshape(5, num_seqs, num_rows)
    slots, counts, wanted = values[5 * num_tokens :].reshape(3, num_seqs)
    parts[1] = wanted[:] = -1
    slots[:] = no_slot
    for i, row in enumerate(rows):
        num = row.num_tokens
        end = row.start + num
        parts[0, i, :num] = -1 if row.token_ids is None else row.token_ids
        parts[1, i, :num] = range(row.start, end)
        parts[2, i, :num], parts[3, i, :num], parts[4, i, :num] = row.start, end, row.slot
        slots[i], counts[i], wanted[i] = row.slot, num, row.num_to_draft
