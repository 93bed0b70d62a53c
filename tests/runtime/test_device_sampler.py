"""Sampling inside a step: the same tokens, state and reports as the sampler on the host."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moet.kernels.sampling import Purpose, counter_uniform
from moet.runtime import acceptance
from moet.runtime.device_sampler import (
    Kind,
    choose,
    kind_of,
    read_report,
    remember,
    report,
)
from moet.runtime.grammar import num_words
from moet.runtime.sampler import SamplerState
from moet.types import SamplingParams, ThinkingBudget

VOCAB, USED, NUM_SLOTS = 70, 67, 6
INT64 = st.integers(-(2**63), 2**63 - 1)

GREEDY = SamplingParams(temperature=0.0)
PLAIN = SamplingParams(temperature=0.7, min_p=0.05)
RANKED = SamplingParams(temperature=1.3, top_k=9, top_p=0.8)
FULL = [
    SamplingParams(temperature=1.0, presence_penalty=0.5, frequency_penalty=0.3),
    SamplingParams(temperature=0.0, repetition_penalty=1.4, logit_bias={3: 4.0, 9: -50.0}),
    SamplingParams(temperature=0.9, allowed_token_ids=(1, 2, 3, 5, 8, 13), top_p=0.9),
    SamplingParams(temperature=0.0, min_tokens=4, stop_token_ids=(4, 5), logprobs=3),
    SamplingParams(
        temperature=1.0,
        thinking=ThinkingBudget(start_token_id=60, end_token_id=61, max_tokens=2, starts_open=True),
    ),
]
ALL = [GREEDY, PLAIN, RANKED, *FULL]


@given(seeds=st.lists(INT64, min_size=1, max_size=5), positions=st.integers(0, 2**40))
def test_the_numbers_are_those_of_the_host(seeds: list[int], positions: int) -> None:
    seed = torch.tensor(seeds)
    position = positions + torch.arange(len(seeds))
    for purpose in Purpose:
        want = acceptance.counter_uniform(seed, position, purpose)
        assert torch.equal(counter_uniform(seed, position, purpose), want)


def test_kinds_follow_from_the_parameters() -> None:
    assert [kind_of(params, masked=False) for params in (GREEDY, PLAIN, RANKED)] == [0, 1, 2]
    assert {kind_of(params, masked=False) for params in FULL} == {Kind.FULL}
    assert kind_of(GREEDY, masked=True) == Kind.FULL
    assert kind_of(SamplingParams(temperature=0.0, logprobs=0), masked=False) == Kind.GREEDY
    assert kind_of(SamplingParams(temperature=0.0, top_k=4), masked=False) == Kind.GREEDY


def admitted(chosen: list[SamplingParams]) -> SamplerState:
    state = SamplerState(NUM_SLOTS, VOCAB, num_token_ids=USED)
    for slot, params in enumerate(chosen):
        state.admit(slot, params, [1, 7, 60], [4, 9][: slot % 3], [4], seed=1000 + slot)
    return state


def masks_for(rows: list[int], num_rows: int, seed: int) -> dict[int, Tensor]:
    made = torch.Generator().manual_seed(seed)
    words = (num_rows, num_words(VOCAB))
    bits = torch.randint(-(2**31), 2**31, words, generator=made, dtype=torch.int64)
    return {row: bits[row].to(torch.int32) for row in rows}


@settings(deadline=None, max_examples=40)
@given(
    chosen=st.lists(st.sampled_from(ALL), min_size=1, max_size=NUM_SLOTS),
    seed=st.integers(0, 1000),
    masked=st.booleans(),
)
def test_tokens_and_state_are_those_of_the_host(
    chosen: list[SamplingParams], seed: int, masked: bool
) -> None:
    host, device = admitted(chosen), admitted(chosen)
    tensors = device.tensors()
    kind = max(kind_of(params, masked=masked) for params in chosen)
    slots = torch.randperm(len(chosen), generator=torch.Generator().manual_seed(seed))
    for step in range(4):
        draw = torch.Generator().manual_seed(seed + step)
        logits = 3 * torch.randn(len(chosen), VOCAB, generator=draw)
        positions = torch.full((len(chosen),), 3 + step)
        given = masks_for([0], len(chosen), seed + step) if masked else {}
        everything = torch.full((len(chosen), num_words(VOCAB)), -1, dtype=torch.int32)
        for row, mask in given.items():
            everything[row] = mask
        want = host.sample(logits, slots, positions, given)
        got = choose(tensors, logits, slots, positions, everything, kind)
        assert got.token_ids.tolist() == want.token_ids.tolist()
        assert not got.is_bad.any()
        remember(tensors, slots, got.token_ids, kind)
        assert torch.equal(device.last_token, host.last_token)
        assert torch.equal(device._output_counts, host._output_counts)
        for slot, params in enumerate(chosen):
            if params.thinking is not None:
                assert device._is_thinking[slot] == host._is_thinking[slot]
                assert device._thinking_left[slot] == host._thinking_left[slot]


@pytest.mark.parametrize("params", ALL)
def test_a_kind_that_allows_more_gives_the_same_token(params: SamplingParams) -> None:
    tensors = admitted([params]).tensors()
    logits = 2 * torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3))
    slots, positions = torch.zeros(1, dtype=torch.int64), torch.tensor([9])
    least = kind_of(params, masked=False)
    tokens = {
        int(choose(tensors, logits, slots, positions, None, kind).token_ids[0])
        for kind in Kind
        if kind >= least
    }
    assert len(tokens) == 1


def test_a_released_slot_changes_nothing_for_the_next_sequence() -> None:
    used = admitted(FULL)
    for slot in range(len(FULL)):
        used.release(slot)
        used.admit(slot, PLAIN, [1, 7, 60], [], [4], seed=5)
    fresh = SamplerState(NUM_SLOTS, VOCAB, num_token_ids=USED)
    for slot in range(len(FULL)):
        fresh.admit(slot, PLAIN, [1, 7, 60], [], [4], seed=5)
    logits = torch.randn(len(FULL), VOCAB, generator=torch.Generator().manual_seed(1))
    slots, positions = torch.arange(len(FULL)), torch.arange(len(FULL))
    got, want = (
        choose(state.tensors(), logits, slots, positions, None, Kind.FULL).token_ids
        for state in (used, fresh)
    )
    assert torch.equal(got, want)


@pytest.mark.parametrize("kind", list(Kind))
def test_rows_that_are_no_numbers_are_told(kind: Kind) -> None:
    logits = torch.randn(3, VOCAB)
    logits[1, 5] = torch.nan
    logits[2, 68] = torch.nan  # of the padding, which is never read
    tensors = admitted([GREEDY, PLAIN, RANKED]).tensors()
    got = choose(tensors, logits, torch.arange(3), torch.arange(3), None, kind)
    assert got.is_bad.tolist() == [False, True, False]
    assert (got.token_ids < USED).all()


@pytest.mark.parametrize("top_n", [0, 3, 20])
def test_reports_are_those_of_the_host(top_n: int) -> None:
    params = SamplingParams(temperature=0.0, logprobs=top_n)
    host = admitted([params, params])
    tensors = admitted([params, params]).tensors()
    logits = torch.randn(2, VOCAB)
    logits[0, :30] = 0.5  # ties
    want = host.sample(logits, torch.arange(2), torch.arange(2))
    rows = report(tensors, logits, want.token_ids)
    for row, token_id, expected in zip(rows, want.token_ids.tolist(), want.logprobs, strict=True):
        assert read_report(row, token_id, top_n) == expected
