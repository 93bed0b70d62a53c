"""What drafts were drawn from goes where their sequence goes, and no further."""

from __future__ import annotations

import torch

from moet.runtime.batch import Admit, Release
from moet.runtime.drawn_drafts import DrawnDrafts
from moet.runtime.sampler import Proposal
from moet.runtime.sequence import Sequence, Status
from tests.fakes import request


def sequence(arrival: int, temperature: float = 1.0) -> Sequence:
    return Sequence(
        request=request(str(arrival), [1, 2], temperature=temperature),
        arrival=arrival,
        seed=0,
        max_len=9,
        root=b"",
        stop_ids=frozenset(),
        token_ids=[1, 2],
        num_spec_tokens=2,
    )


def test_a_sequence_takes_its_distributions_to_another_slot() -> None:
    drafts = DrawnDrafts(torch.zeros(4, 2, 3))
    moved, greedy, other = sequence(0), sequence(1, temperature=0.0), sequence(2)
    drafts.follow([Admit(moved, 0, 2), Admit(greedy, 1, 2)])
    drafts.bring(0, [Proposal(1, torch.tensor([0.1, 0.9, 0.0, 0.0])), Proposal(2, None)])
    drafts.follow([Release(0), Release(1), Admit(other, 0, 2)])
    drafts.probs[0] = 7.0  # the next one's
    drafts.follow([Admit(greedy, 1, 2), Admit(moved, 2, 2)])
    assert torch.equal(drafts.probs[2, 0], torch.tensor([0.1, 0.9, 0.0]))
    assert not drafts.probs[1].any()


def test_nothing_is_kept_of_a_sequence_that_has_ended() -> None:
    drafts = DrawnDrafts(torch.zeros(3, 1, 3))
    ended, aborted = sequence(0), sequence(1)
    drafts.follow([Admit(ended, 0, 2), Admit(aborted, 1, 2)])
    ended.status = Status.FINISHED
    drafts.follow([Release(0), Release(1)])
    assert len(drafts._away) == 1
    aborted.status = Status.FINISHED  # while it waits for a slot
    drafts.follow([])
    assert not drafts._away
