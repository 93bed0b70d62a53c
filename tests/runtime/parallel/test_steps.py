"""What travels to the other ranks is the batch, and nothing else."""

from __future__ import annotations

from dataclasses import fields, replace

import msgspec
import pytest
import torch

from moet.runtime.batch import Admit, Batch, Release, Row, SetPages, StepResult, SwapOut
from moet.runtime.parallel.steps import StepReader, StepWriter, digest
from moet.runtime.sampler import Proposal
from moet.runtime.sequence import Sequence, Status
from moet.types import Request, SamplingParams


def sequence(request_id: str = "a", output: tuple[int, ...] = (9,)) -> Sequence:
    request = Request(
        request_id=request_id,
        prompt_token_ids=[1, 2, 3],
        params=SamplingParams(temperature=0.5, top_k=4, prompt_logprobs=1),
        eos_token_ids=(0,),
    )
    return Sequence(
        request=request,
        arrival=5,
        seed=2**62,
        max_len=100,
        root=b"root",
        stop_ids=frozenset([0]),
        token_ids=[1, 2, 3, *output],
        num_spec_tokens=2,
    )


def arrived(number: int) -> Sequence:
    return replace(sequence(f"r{number}"), arrival=number)


def only_sequence(batch: Batch) -> Sequence:
    """That of the only Admit."""
    (seq,) = [command.seq for command in batch.commands if isinstance(command, Admit)]
    return seq


def encode(batch: Batch) -> bytes:
    return StepWriter().write(batch)


def test_a_batch_arrives_as_it_was() -> None:
    seq = sequence()
    row = Row(
        seq,
        slot=2,
        epoch=1,
        start=3,
        num_tokens=3,
        token_ids=[9, 8, 7],
        sample=True,
        targets=[4],
        first_logprob=3,
        proposals=(Proposal(8, torch.rand(5)), Proposal(7, None)),
        masks=torch.tensor([[1, -1]], dtype=torch.int32),
        num_to_draft=2,
        snapshot=6,
    )
    commands = [SetPages(2, 0, [4, 5]), Admit(seq, 2, 4), SwapOut(sequence("b"), 1, [1], [2], [3])]
    found = StepReader().read(encode(Batch(commands, [row], 1)))
    assert found.commands[0] == commands[0]
    admit, swap = found.commands[1:]
    assert isinstance(admit, Admit)
    assert isinstance(swap, SwapOut)
    assert (admit.slot, admit.num_tokens, swap.page_blocks) == (2, 4, [2])
    for name in ("token_ids", "arrival", "seed", "prompt_len", "num_spec_tokens", "request"):
        assert getattr(admit.seq, name) == getattr(seq, name)
    (got,) = found.rows
    assert got.seq is admit.seq
    for field in fields(Row):
        if field.name not in ("seq", "masks", "proposals"):
            assert getattr(got, field.name) == getattr(row, field.name), field.name
    assert torch.equal(got.masks, row.masks)
    assert [p.token_id for p in got.proposals] == [8, 7]
    assert torch.equal(got.proposals[0].probs, row.proposals[0].probs)
    assert got.proposals[1].probs is None


def test_sequences_live_as_long_as_their_slot() -> None:
    writer, reader = StepWriter(), StepReader()
    for n in range(50):
        seq = sequence(f"r{n}")
        row = Row(seq, 0, 0, 0, 3, [1, 2, 3], True)
        found = reader.read(writer.write(Batch([Admit(seq, 0, 3)], [row]))).rows[0].seq
        if n % 2:  # others leave for a while
            seq.status = Status.FINISHED
        reader.read(writer.write(Batch([Release(0)], [])))
        assert (found.status is Status.FINISHED) == (n % 2 == 1)
    assert len(reader._sequences) == 0


def test_who_gets_the_slot_of_one_that_finished_is_not_finished() -> None:
    """Nor is one that moves to another slot in the batch that takes its own."""
    writer, reader = StepWriter(), StepReader()
    first, second = arrived(0), arrived(1)
    old = only_sequence(reader.read(writer.write(Batch([Admit(first, 0, 3)], []))))
    first.status = Status.FINISHED
    row = Row(second, 0, 0, 0, 3, [1, 2, 3], True)
    found = reader.read(writer.write(Batch([Release(0), Admit(second, 0, 3)], [row])))
    placed = only_sequence(found)
    assert found.rows[0].seq is placed
    assert (old.status, placed.status) == (Status.FINISHED, Status.WAITING)
    moved = reader.read(writer.write(Batch([Release(0), Admit(second, 1, 3)], [row])))
    assert only_sequence(moved).status is placed.status is Status.WAITING
    assert moved.rows[0].seq is only_sequence(moved)
    assert list(reader._sequences.values()) == [only_sequence(moved)]


def test_one_that_finishes_without_a_slot_is_let_go_of() -> None:
    writer, reader = StepWriter(), StepReader()
    seq = arrived(0)
    found = only_sequence(reader.read(writer.write(Batch([Admit(seq, 0, 3)], []))))
    reader.read(writer.write(Batch([Release(0)], [])))
    assert found.status is Status.WAITING
    seq.status = Status.FINISHED
    reader.read(writer.write(Batch([], [])))
    assert found.status is Status.FINISHED
    assert not reader._sequences
    for owners in (writer._owners, reader._owners):
        assert not owners._away
        assert not owners._placed


def test_output_that_was_sampled_since_is_not_sent() -> None:
    """Admit says how many tokens were known when the batch was made."""
    seq = sequence(output=(9, 8, 7))
    admit = StepReader().read(encode(Batch([Admit(seq, 0, 4)], []))).commands[0]
    assert isinstance(admit, Admit)
    assert admit.seq.token_ids == [1, 2, 3, 9]


def test_only_batches_come_out() -> None:
    data = msgspec.msgpack.encode({"d": ["Popen", {"args": "true"}]})
    with pytest.raises(KeyError):
        StepReader()._made(msgspec.msgpack.decode(data))
    with pytest.raises(AssertionError):
        encode(Batch([object()], []))  # type: ignore[list-item]


def test_digests_differ_by_what_ranks_must_agree_on() -> None:
    base = StepResult(tokens={0: [1], 1: [2, 3]}, proposals={0: (Proposal(4, None),)})
    same = StepResult(tokens={1: [2, 3], 0: [1]}, proposals={0: (Proposal(4, None),)}, device_s=9)
    assert digest(base) == digest(same)
    assert len(digest(base)) == 16
    for other in (
        StepResult(tokens={0: [1], 1: [2, 4]}, proposals=base.proposals),
        StepResult(tokens=base.tokens, proposals={0: (Proposal(5, None),)}),
        StepResult(tokens=base.tokens, proposals=base.proposals, errors={1: "x"}),
    ):
        assert digest(other) != digest(base)
