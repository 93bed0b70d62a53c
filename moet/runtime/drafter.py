"""Proposes the next few tokens of each sequence with the model's draft block, and keeps the state
of that block, which lies in the sequence's own pages and rings.

Draft row i joins the target's hidden state at position i with token i+1 and speaks of token i+2.
After a step the block runs over every row that holds, with true hidden states and true tokens
(`extend`): what it wrote for drafts is overwritten. From the last row on it then feeds itself
(`propose`): its own hidden state, its own draft, one position further.

The row before a page border joins its own token instead of the next one, which belongs to the next
page: a page's bytes are a function of the page's tokens and those before, as the prefix cache says.
Nothing is proposed from there, one step in a page. Prompts are always extended; what a sequence
generates only if it drafts. A failed draft pass costs drafts, never the step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moet.models.base import DraftingModel, ExpertProvider, ForwardInput, KVTensors, ModelOutput
from moet.runtime.batch import Row, int64_tensor
from moet.runtime.passes import Passes
from moet.runtime.sampler import Proposal, SamplerState


@dataclass(frozen=True, slots=True)
class Settled:
    """Rows of a sequence that hold, and their tokens one further on: known and of equal number.

    first: place of the first row among the step's hidden states.
    """

    row: Row
    first: int
    next_token_ids: list[int]


class Drafter:
    """A draft block at work. Holds no state of sequences."""

    def __init__(
        self,
        model: DraftingModel,
        experts: ExpertProvider,
        passes: Passes,
        sampler: SamplerState,
    ) -> None:
        self.model = model
        self.experts = experts
        self.passes = passes
        self.sampler = sampler
        self.page_size = passes.kv.spec.page_size

    def extend(self, settled: list[Settled], hidden_states: Tensor) -> ModelOutput | None:
        """Run the draft block over rows of a step.

        hidden_states: [num_tokens of the step, ...] of the target. Returns what `propose` goes on
        from; None if there are no rows.
        """
        if not settled:
            return None
        places: list[int] = []
        rows: list[Row] = []
        for one in settled:
            places += range(one.first, one.first + one.row.num_tokens)
            rows.append(self._draft_row(one))
        return self._run(rows, hidden_states[int64_tensor(places, hidden_states.device)])

    def propose(
        self, settled: list[Settled], extended: ModelOutput | None
    ) -> list[tuple[Proposal, ...]]:
        """Drafts of each sequence, as many as its row asks for."""
        made: list[tuple[Proposal, ...]] = [() for _ in settled]
        if extended is None:
            return made
        rows = [one.row for one in settled]
        ends = torch.tensor([row.num_tokens for row in rows]).cumsum(0) - 1
        failed = set(self.passes.unserved)
        # Rows with logits in `extended`, in order; those that failed have them, of zeros.
        going = [i for i, row in enumerate(rows) if self._proposes(row)]
        logits, hidden_states = extended.logits, extended.hidden_states[ends[going]]
        length = 0
        while True:
            length += 1
            bad = self.sampler.not_numbers(logits).tolist()  # nothing can be drawn from these
            stay = [n for n, i in enumerate(going) if rows[i].slot not in failed and not bad[n]]
            going = [going[n] for n in stay]
            if not going:
                return made
            at = int64_tensor(stay, logits.device)
            logits, hidden_states = logits[at], hidden_states[at]
            slots = int64_tensor([rows[i].slot for i in going], logits.device)
            # The row of the target that will verify this is one behind the draft row.
            positions = int64_tensor([rows[i].end - 1 + length for i in going], logits.device)
            for i, proposal in zip(
                going, self.sampler.propose(logits, slots, positions), strict=True
            ):
                made[i] += (proposal,)
            stay = [n for n, i in enumerate(going) if rows[i].num_to_draft > length]
            going = [going[n] for n in stay]
            if not going:
                return made
            hidden_states = hidden_states[int64_tensor(stay, logits.device)]
            chained = [self._chained(rows[i], length, made[i][-1].token_id) for i in going]
            output = self._run(chained, hidden_states)
            logits, hidden_states = output.logits, output.hidden_states
            failed = set(self.passes.unserved)

    def _proposes(self, row: Row) -> bool:
        return row.num_to_draft > 0 and row.end % self.page_size != 0

    def _draft_row(self, one: Settled) -> Row:
        row, token_ids = one.row, list(one.next_token_ids)
        assert len(token_ids) == row.num_tokens
        for place in range(-(row.start + 1) % self.page_size, row.num_tokens, self.page_size):
            assert row.token_ids is not None
            token_ids[place] = row.token_ids[place]
        return _plain(row, row.start, token_ids, sample=self._proposes(row))

    def _chained(self, row: Row, length: int, token_id: int) -> Row:
        return _plain(row, row.end - 1 + length, [token_id], sample=True)

    def _run(self, rows: list[Row], hidden_states: Tensor) -> ModelOutput:
        kv: KVTensors = self.passes.kv.tensors

        def call(inputs: ForwardInput, part: slice) -> ModelOutput:
            return self.model.draft(inputs, hidden_states[part], kv, self.experts)

        return self.passes.run(rows, call)


def _plain(row: Row, start: int, token_ids: list[int], *, sample: bool) -> Row:
    """Rows of the same sequence that are given by their tokens."""
    return replace(
        row,
        start=start,
        num_tokens=len(token_ids),
        token_ids=token_ids,
        sample=sample,
        first_logprob=-1,
        targets=[],
        proposals=(),
        masks=None,
        next_token=None,
    )
