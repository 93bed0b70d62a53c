"""ModelRunner and Batch: what a model is handed, row by row."""

import pytest
import torch

from moet.runtime.batch import BringPages, BringSnapshot, Row, SwapIn, forward_input
from moet.runtime.core import EngineCore
from moet.runtime.experts.precision import PrecisionSet
from moet.runtime.model_runner import ModelRunner
from moet.runtime.sequence import Sequence
from moet.types import FinishReason, Request, SamplingParams
from tests.fakes import (
    FakeModel,
    NoExperts,
    drain,
    expected_greedy,
    make_core,
    request,
    tokens_of,
)
from tests.runtime.device_fakes import StepFakeModel, placed_core


def _seq(prompt: list[int]) -> Sequence:
    return Sequence(
        request=Request(request_id="a", prompt_token_ids=prompt, params=SamplingParams()),
        arrival=0,
        seed=0,
        max_len=100,
        root=b"",
        stop_ids=frozenset(),
        token_ids=list(prompt),
    )


def test_forward_input_of_a_mixed_step() -> None:
    seq = _seq([5, 6, 7, 8, 9])
    rows = [
        Row(seq, 2, 0, 9, 1, None, True),
        Row(seq, 0, 0, 1, 3, [6, 7, 8], False, 2, [8, 9]),
        Row(seq, 1, 0, 4, 1, [9], True),
    ]
    table = torch.arange(12).reshape(3, 4)
    last_token = torch.tensor([50, 51, 52])
    inputs = forward_input(rows, last_token=last_token, page_table=table, page_size=4)
    assert inputs.token_ids.tolist() == [52, 6, 7, 8, 9]
    assert inputs.positions.tolist() == [9, 1, 2, 3, 4]
    assert inputs.cu_seqlens_q == (0, 1, 4, 5)
    assert inputs.seq_slots.tolist() == [2, 0, 1]
    assert inputs.page_table.tolist() == [[8, 9, 10], [0, 1, 2], [4, 5, 6]]
    assert inputs.seq_lens == (10, 4, 5)
    assert inputs.logits_indices.tolist() == [0, 2, 3, 4]
    tensors = (inputs.token_ids, inputs.positions, inputs.seq_slots, inputs.page_table)
    assert all(t.dtype == torch.int64 for t in (*tensors, inputs.logits_indices))


def test_forward_input_of_a_pure_decode_step_reads_the_device() -> None:
    seq = _seq([1])
    rows = [Row(seq, 1, 0, 3, 1, None, True), Row(seq, 0, 0, 8, 1, None, True)]
    inputs = forward_input(
        rows,
        last_token=torch.tensor([7, 8]),
        page_table=torch.zeros(2, 4, dtype=torch.int64),
        page_size=4,
    )
    assert inputs.token_ids.tolist() == [8, 7]
    assert inputs.logits_indices.tolist() == [0, 1]


def test_a_chunk_without_logits_asks_for_none() -> None:
    inputs = forward_input(
        [Row(_seq([1, 2, 3]), 0, 0, 0, 2, [1, 2], False)],
        last_token=torch.zeros(1, dtype=torch.int64),
        page_table=torch.zeros(1, 4, dtype=torch.int64),
        page_size=4,
    )
    assert inputs.logits_indices.shape == (0,)
    assert inputs.logits_indices.dtype == torch.int64


def test_unused_places_of_the_page_table_are_empty() -> None:
    model = FakeModel()
    core = make_core(model, max_num_seqs=2, prefix_cache="off")
    core.submit(request("long", [1] * 40, max_tokens=1))  # leaves its pages in a row of the table
    drain(core)
    core.submit(request("short", [2] * 3, max_tokens=2))
    core.submit(request("mate", [3] * 20, max_tokens=2))
    drain(core)
    mixed = [inputs for inputs in model.inputs if len(inputs.seq_lens) == 2]
    assert mixed
    for inputs in mixed:
        for row, seq_len in zip(inputs.page_table.tolist(), inputs.seq_lens, strict=True):
            used = -(-seq_len // 4)
            assert all(page >= 0 for page in row[:used])
            assert set(row[used + 1 :]) <= {-1}  # one page may be there ahead of its tokens


def test_slots_of_a_step_are_distinct_and_in_range() -> None:
    model = FakeModel()
    core = make_core(model, max_num_seqs=3)
    for n in range(7):
        core.submit(request(str(n), [n, n], max_tokens=1 + n))
    drain(core)
    for inputs in model.inputs:
        slots = inputs.seq_slots.tolist()
        assert len(set(slots)) == len(slots)
        assert set(slots) <= {0, 1, 2}


def test_cached_state_that_does_not_come_is_not_one_sequences_trouble() -> None:
    """Others may have been told to start from it already; what is moved is a sequence's own."""
    runner, seq, nowhere = make_core()._runner, _seq([1, 2, 3]), [10**6]
    assert isinstance(runner, ModelRunner)
    for command in (BringPages(seq, [0], nowhere), BringSnapshot(seq, 0, nowhere)):
        with pytest.raises(IndexError):
            runner.commands([command])
    assert seq.fault is None
    runner.commands([SwapIn(seq, 0, [0], nowhere, nowhere)])
    assert "set-up failed" in str(seq.fault)


def test_who_computes_a_row_again_remembers_it() -> None:
    """Ranks that only carry batches out have to repeat it in a replay, too."""
    precisions = PrecisionSet("gate", {"w2": NoExperts(), "fp4": NoExperts()}, tau=1.0)
    core = placed_core(StepFakeModel(), None, precisions=precisions)
    core.submit(request("a", [1, 2, 3]))
    core.step()
    batch = core._scheduler.schedule()
    assert batch is not None
    core.run(batch)  # and nobody is told
    assert core._scheduler.sequences["a"].gated == {3}


def _greedy(name: str, prompt: list[int], **params: object) -> Request:
    return request(name, prompt, prompt_logprobs=0, logprobs=0, max_tokens=6, **params)


SPLIT = [_greedy("a", [1, 2, 3] * 7), _greedy("b", [9] * 6), _greedy("c", [4, 5])]


def _run_split(limit: int, overlap: bool) -> tuple[dict[str, object], EngineCore, FakeModel]:
    """With experts for at most `limit` rows at a time, found out halfway through a pass."""
    model = FakeModel(page_size=16, room=lambda rows: rows <= limit)
    core = make_core(model, max_num_batched_tokens=40, overlap=overlap)
    for one in SPLIT:
        core.submit(one)
    events = drain(core)
    answers = {
        name: (
            tokens_of(of),
            [e.logprobs for e in of],
            of[0].prompt_logprobs,
            of[-1].finish_reason,
        )
        for name, of in events.items()
    }
    core.shutdown()
    return answers, core, model


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("limit", [1, 2, 5, 12])
def test_a_step_whose_experts_do_not_fit_is_made_in_parts(limit: int, overlap: bool) -> None:
    whole, core, _ = _run_split(1000, overlap)
    assert core.stats().num_split_steps == 0
    parts, core, model = _run_split(limit, overlap)
    assert parts == whole
    stats = core.stats()
    assert stats.num_split_steps > 0
    assert (stats.num_failed_steps, stats.finished["length"]) == (0, 3)
    assert model.num_refused > 0


def test_only_the_request_whose_row_cannot_run_fails() -> None:
    """The token 63 needs more experts than there are slots, whoever else is in the step."""
    model = FakeModel(room=lambda rows: rows <= 4, unroomy_token=63)
    core = make_core(model, prefix_cache="off")
    core.submit(request("bad", [1, 2, 3, 4, 5, 63, 7, 8, 9]))
    core.submit(request("good", [2] * 9))
    events = drain(core)
    assert events["bad"][-1].finish_reason is FinishReason.ERROR
    assert "experts of a single token do not fit: no room" in str(events["bad"][-1].error)
    assert tokens_of(events["good"]) == expected_greedy([2] * 9, 8, model)
    assert core.stats().num_failed_steps == 0
    core.submit(request("next", [2] * 5))
    assert tokens_of(drain(core)["next"]) == expected_greedy([2] * 5, 8, model)
