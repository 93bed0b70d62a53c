"""What a draft block does with chunks: it reads every row that something comes behind, and proposes
behind those that make a token, through the captured pieces of steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from moet.kernels.rows import Rows
from moet.runtime.chunks import Chunk, Placed, last_rows, places
from moet.runtime.device_sampler import Kind
from moet.runtime.draft_graphs import DraftGraphs
from moet.runtime.step_drafts import DraftTensors


@dataclass(frozen=True, slots=True)
class ChunkDrafts:
    """A draft block at work on chunks. Holds no state."""

    graphs: DraftGraphs
    placed: Placed

    def extend(
        self,
        chunks: Sequence[Chunk],
        rows: Rows,
        hidden_states: Tensor,
        made: Tensor,
    ) -> list[Chunk]:
        """Bring the draft block's state up to the chunks; returns those that propose.

        made: [n] int64, tokens of the chunks that make one, in order.
        """
        seen = [chunk for chunk in chunks if chunk.num_to_draft >= 0]
        if not seen:
            return []
        if len(seen) < len(chunks):
            _, rows = self.placed.rows(seen)
            hidden_states = hidden_states[self.placed.send(places(chunks, seen))]
        proposing = [chunk for chunk in seen if self._proposes(chunk)]
        drafter = self.graphs.drafter
        last = self.placed.send(last_rows(seen, proposing))
        output = drafter.model.compute_draft(
            self._following(chunks, seen, made),
            rows,
            last,
            hidden_states,
            drafter.kv,
            drafter.experts,
        )
        if proposing:
            tensors = self._begin(proposing)
            tensors.goes_on_from(output.logits, output.hidden_states[last])
        return proposing

    def _proposes(self, chunk: Chunk) -> bool:
        behind_page = chunk.end % self.placed.page_size == 0
        return chunk.num_to_draft > 0 and chunk.kind is not None and not behind_page

    def _following(self, chunks: Sequence[Chunk], seen: Sequence[Chunk], made: Tensor) -> Tensor:
        """[T] int64, the token that each row of `seen` joins."""
        values, which, at = [], [], []
        sampled = [chunk for chunk in chunks if chunk.kind is not None]
        for chunk in seen:
            known = chunk.token_ids[-1] if chunk.next_token is None else chunk.next_token
            joined = np.array([*chunk.token_ids[1:], known], dtype=np.int64)
            own = slice(-(chunk.start + 1) % self.placed.page_size, None, self.placed.page_size)
            joined[own] = np.array(chunk.token_ids, dtype=np.int64)[own]
            values.append(joined)
            if chunk.kind is not None and chunk.end % self.placed.page_size != 0:
                which.append(sampled.index(chunk))
                at.append(sum(map(len, values)) - 1)
        token_ids = self.placed.send(np.concatenate(values))
        if not at:
            return token_ids
        ends, makers = self.placed.send(np.array([at, which], dtype=np.int64)).unbind(0)
        return token_ids.index_copy(0, ends, made[makers])

    def _begin(self, proposing: Sequence[Chunk]) -> DraftTensors:
        """Tell the pieces that propose for whom they do."""
        tensors = self.graphs.tensors(self.graphs.shapes.bucket(len(proposing)))
        given = np.zeros(tensors.given.shape, dtype=np.int64)
        given[2] = self.graphs.drafter.state.num_slots
        for n, chunk in enumerate(proposing):
            given[:, n] = chunk.end, chunk.slot, chunk.slot, chunk.num_to_draft
        tensors.given.copy_(self.placed.send(given))
        tensors.proposed[:, 0] = 0
        return tensors

    def propose(self, proposing: Sequence[Chunk]) -> Tensor:
        """Tokens behind those that `extend` returned: DraftTensors.proposed, a row for each."""
        num_tokens = max(chunk.end + chunk.num_to_draft for chunk in proposing)
        shape = self.graphs.shapes.least(len(proposing), 1, -(-num_tokens // self.placed.page_size))
        num_to_draft = max(chunk.num_to_draft for chunk in proposing)
        kind = min(max(chunk.kind or Kind.GREEDY for chunk in proposing), Kind.RANKED)
        for work in self.graphs.proposals(shape.num_seqs, shape.num_pages, num_to_draft, kind):
            work()
        return self.graphs.tensors(shape.num_seqs).proposed
