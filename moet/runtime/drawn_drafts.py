"""What drafts above temperature 0 were drawn from, on the device, by sequence slot. A sequence that
is moved to another slot takes it along."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from dataclasses import replace

from torch import Tensor
from torch.nn.functional import pad

from moet.runtime.batch import Admit, Command, Release, Row
from moet.runtime.sampler import Proposal
from moet.runtime.sequence import Sequence, Status


class DrawnDrafts:
    """probs: [num_slots + 1, num_drafts, num_token_ids] fp32, that steps read and write."""

    def __init__(self, probs: Tensor) -> None:
        self.probs = probs
        self._owners: dict[int, Sequence] = {}
        self._away: dict[int, tuple[Sequence, Tensor]] = {}  # by arrival

    def follow(self, commands: Iterable[Command]) -> None:
        """Take note of who leaves a slot and who gets one, in order, before the next step."""
        for command in commands:
            match command:
                case Release(slot):
                    owner = self._owners.pop(slot, None)
                    if owner is not None and _draws(owner):
                        self._away[owner.arrival] = owner, self.probs[slot].clone()
                case Admit(seq, slot):
                    self._owners[slot] = seq
                    if seq.arrival in self._away:
                        self.probs[slot] = self._away.pop(seq.arrival)[1]
        for arrival, (seq, _) in list(self._away.items()):
            if seq.status is Status.FINISHED:
                del self._away[arrival]

    def bring(self, slot: int, proposals: Ordered[Proposal]) -> None:
        """Keep the distributions of drafts that no step has made."""
        for n, proposal in enumerate(proposals):
            if proposal.probs is not None:
                self.probs[slot, n] = proposal.probs[: self.probs.shape[-1]]

    def told(self, row: Row, vocab_size: int) -> Row:
        """The row for someone who judges drafts by their proposals: those that steps have drawn
        have their distributions, over vocab_size tokens."""
        if row.num_drafts == 0 or row.seq.request.params.temperature == 0:
            return row
        probs = pad(self.probs[row.slot], (0, vocab_size - self.probs.shape[-1]))
        known = [
            Proposal(one.token_id, probs[n] if one.probs is None else one.probs)
            for n, one in enumerate(row.proposals)
        ]
        return replace(row, proposals=tuple(known))


def _draws(seq: Sequence) -> bool:
    return seq.num_spec_tokens > 0 and seq.request.params.temperature > 0
