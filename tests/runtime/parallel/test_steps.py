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
    commands = [SetPages(2, 0, [4, 5]), Admit(seq, 2, 4), SwapOut(seq, 1, [1], [2], [3])]
    found = StepReader().read(encode(Batch(commands, [row], 1)))
    assert found.commands[0] == commands[0]
    admit, swap = found.commands[1:]
    assert isinstance(admit, Admit)
    assert isinstance(swap, SwapOut)
    assert (admit.slot, admit.num_tokens, swap.page_blocks) == (2, 4, [2])
    for name in ("token_ids", "arrival", "seed", "prompt_len", "num_spec_tokens"):
        assert getattr(admit.seq, name) == getattr(seq, name)
    for name in ("prompt_token_ids", "params", "eos_token_ids"):
        assert getattr(admit.seq.request, name) == getattr(seq.request, name)
    assert swap.seq is admit.seq
    (got,) = found.rows
    assert got.seq is admit.seq
    for field in fields(Row):
        if field.name not in ("seq", "masks", "proposals"):
            assert getattr(got, field.name) == getattr(row, field.name), field.name
    assert torch.equal(got.masks, row.masks)
    assert [p.token_id for p in got.proposals] == [8, 7]
    assert torch.equal(got.proposals[0].probs, row.proposals[0].probs)
    assert got.proposals[1].probs is None


def test_a_sequence_is_one_until_it_has_finished() -> None:
    """Wherever it goes meanwhile, and whoever gets its slot in the same batch."""
    writer, reader = StepWriter(), StepReader()
    first, second = arrived(0), arrived(1)
    old = only_sequence(reader.read(writer.write(Batch([Admit(first, 0, 3)], []))))
    first.status = Status.FINISHED
    row = Row(second, 0, 0, 0, 3, [1, 2, 3], True)
    found = reader.read(writer.write(Batch([Release(0), Admit(second, 0, 3)], [row])))
    placed = only_sequence(found)
    assert found.rows[0].seq is placed
    assert (old.status, placed.status) == (Status.FINISHED, Status.WAITING)
    placed.fault = "its disk is gone"  # as on rank 0, which has one object, too
    second.token_ids += [8, 7]
    moved = reader.read(writer.write(Batch([Release(0), Admit(second, 1, 5)], [row])))
    assert moved.rows[0].seq is only_sequence(moved) is placed
    assert (placed.status, placed.token_ids) == (Status.WAITING, [1, 2, 3, 9, 8])
    reader.read(writer.write(Batch([Release(1)], [])))
    assert placed.status is Status.WAITING
    second.status = Status.FINISHED  # without a slot
    reader.read(writer.write(Batch([], [])))
    assert placed.status is Status.FINISHED
    assert reader._sequences == reader._passing == writer._away == writer._placed == {}


def test_rows_of_a_divided_pass_outlive_their_sequence() -> None:
    """Another request may have its id by then, and asks for other things."""
    writer, reader = StepWriter(), StepReader()
    old, new = sequence("a"), replace(sequence("a"), arrival=6, num_spec_tokens=0)
    row = Row(old, 0, 0, 0, 3, [1, 2, 3], True)
    begins = Batch([Admit(old, 0, 3)], [], begins=[row], num_parts=1)
    begun = reader.read(writer.write(begins)).begins[0]
    old.status = Status.FINISHED
    newer = Row(new, 0, 0, 0, 3, [1, 2, 3], True)
    batch = Batch([Release(0), Admit(new, 0, 3)], [newer, row], num_parts=1, ends_pass=True)
    found = reader.read(writer.write(batch)).rows
    assert found[1].seq is begun.seq
    assert found[0].seq.num_spec_tokens == 0
    assert (found[0].seq.arrival, begun.seq.num_spec_tokens) == (6, 2)
    assert not reader._passing


def test_texts_stay_behind() -> None:
    """Those of a request may be no Unicode, and a number larger than 64 bits."""
    seq = sequence()
    seq.request = msgspec.structs.replace(
        seq.request, request_id="\ud800", cache_salt="\udfff", priority=2**70
    )
    assert only_sequence(StepReader().read(encode(Batch([Admit(seq, 0, 3)], [])))).arrival == 5


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
