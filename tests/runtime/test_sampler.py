"""Sampling: the order of the parameters, their distributions, independence of the batch."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moet.runtime.acceptance import counter_uniform
from moet.runtime.sampler import SamplerState, prompt_logprobs
from moet.types import SamplingParams

VOCAB = 12


def one(logits, position=5, prompt=(), output=(), eos=(), seed=1, **fields):
    """Sample one row in a state of its own."""
    logits = torch.as_tensor(logits, dtype=torch.float32)[None]
    state = SamplerState(2, logits.shape[1])
    state.admit(1, SamplingParams(**fields), prompt, output, eos, seed)
    sampled = state.sample(logits, torch.tensor([1]), torch.tensor([position]))
    assert int(state.last_token[1]) == int(sampled.token_ids[0])
    state.release(1)
    state.check()
    return int(sampled.token_ids[0])


def draws(logits, num_draws=20_000, **fields):
    """Relative frequencies over many positions of one seed."""
    logits = torch.as_tensor(logits, dtype=torch.float32)
    state = SamplerState(1, logits.shape[0])
    state.admit(0, SamplingParams(**fields), (), (), (), 7)
    counts = torch.zeros(logits.shape[0])
    slots = torch.zeros(500, dtype=torch.int64)  # repeated slots are fine without penalties
    for start in range(0, num_draws, 500):
        rows = logits.expand(500, -1)
        ids = state.sample(rows, slots, torch.arange(start, start + 500)).token_ids
        counts += torch.bincount(ids, minlength=logits.shape[0])
    return counts


def chi_square(counts, probs):
    """Pearson's statistic over the tokens that may occur; the others must not."""
    expected = probs * counts.sum()
    possible = probs > 0
    assert counts[~possible].sum() == 0
    return float(((counts - expected)[possible] ** 2 / expected[possible]).sum())


LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, 0.2])
CHI_SQUARE_7_DF = 35.0  # p = 1e-5


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_softmax(temperature):
    expected = (LOGITS / temperature).softmax(-1)
    assert chi_square(draws(LOGITS, temperature=temperature), expected) < CHI_SQUARE_7_DF


def test_ranked_path_follows_softmax_too():
    counts = draws(LOGITS, top_k=len(LOGITS))
    assert chi_square(counts, LOGITS.softmax(-1)) < CHI_SQUARE_7_DF


def test_top_k_then_top_p_then_min_p():
    probs = LOGITS.softmax(-1)
    kept = torch.zeros_like(probs)
    kept[[0, 1, 2]] = probs[[0, 1, 2]]  # top_k 3: shares 0.628, 0.231, 0.140
    counts = draws(LOGITS, top_k=3)
    assert chi_square(counts, kept / kept.sum()) < CHI_SQUARE_7_DF
    kept[2] = 0  # top_p 0.8 of what top_k left
    counts = draws(LOGITS, top_k=3, top_p=0.8)
    assert chi_square(counts, kept / kept.sum()) < CHI_SQUARE_7_DF
    assert draws(LOGITS, 1000, top_k=3, top_p=0.8, min_p=0.4)[1:].sum() == 0


def test_min_p_alone():
    probs = LOGITS.softmax(-1)
    kept = torch.where(probs >= 0.2 * probs.max(), probs, 0.0)
    counts = draws(LOGITS, min_p=0.2)
    assert chi_square(counts, kept / kept.sum()) < CHI_SQUARE_7_DF


def test_min_p_is_relative_to_the_largest_whatever_top_k_left():
    assert draws(LOGITS, 2000, top_k=4, min_p=0.3)[2:].sum() == 0


def test_tiny_top_p_keeps_the_first():
    assert draws(LOGITS, 500, top_p=1e-9)[0] == 500


def test_greedy_takes_the_lowest_of_equals():
    logits = torch.zeros(VOCAB)
    logits[[4, 7, 9]] = 3.0
    assert one(logits, temperature=0.0) == 4


def test_top_k_takes_the_lowest_of_equals():
    assert {one(torch.zeros(VOCAB), position=p, top_k=2) for p in range(40)} == {0, 1}


def test_penalties_count_output_only_and_repetition_counts_both():
    logits = [3.0, 2.0, 1.0]
    assert one(logits, temperature=0.0, prompt=[0], presence_penalty=2.0) == 0
    assert one(logits, temperature=0.0, output=[0], presence_penalty=2.0) == 1
    assert one(logits, temperature=0.0, output=[0, 0], frequency_penalty=0.4) == 0
    assert one(logits, temperature=0.0, output=[0] * 3, frequency_penalty=0.4) == 1
    assert one(logits, temperature=0.0, prompt=[0], repetition_penalty=1.6) == 1
    assert one([-1.0, -1.5, -9.0], temperature=0.0, prompt=[0], repetition_penalty=1.6) == 1


def test_penalties_come_before_bias():
    # 1 / 2 + 1 = 1.5 wins over 1.2; (1 + 1) / 2 = 1.0 would lose
    logits = [1.0, 1.2]
    fields = {"temperature": 0.0, "prompt": [0], "repetition_penalty": 2.0}
    assert one(logits, logit_bias={0: 1.0}, **fields) == 0


def test_sampled_tokens_are_counted():
    state = SamplerState(1, 3)
    state.admit(0, SamplingParams(temperature=0.0, frequency_penalty=1.0), [0], [], [], 0)
    logits = torch.tensor([[2.0, 1.5, 0.0]])
    slots = torch.tensor([0])
    ids = [int(state.sample(logits, slots, torch.tensor([p])).token_ids[0]) for p in range(5)]
    assert ids == [0, 1, 0, 1, 0]  # 2 | 1, 1.5 | 1, .5 | 0, .5 | 0, -.5
    state.release(0)
    state.check()


def test_resumed_sequence_continues_as_if_it_had_never_stopped():
    params = SamplingParams(presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.3)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(20, 1, VOCAB, generator=generator)
    slot = torch.tensor([0])

    def run(state, start, stop):
        steps = range(start, stop)
        return [int(state.sample(rows[i], slot, torch.tensor([i])).token_ids[0]) for i in steps]

    state = SamplerState(1, VOCAB)
    state.admit(0, params, [1, 2], [], [], 3)
    whole = run(state, 0, 20)
    state = SamplerState(1, VOCAB)
    state.admit(0, params, [1, 2], whole[:10], [], 3)
    assert int(state.last_token[0]) == whole[9]
    assert run(state, 10, 20) == whole[10:]


def test_allowed_tokens_and_bias():
    assert one(torch.arange(VOCAB), temperature=0.0, allowed_token_ids=(3, 5)) == 5
    assert one(torch.arange(VOCAB), temperature=0.0, logit_bias={2: 100.0}) == 2
    bias = {11: -100.0}
    assert one(torch.arange(VOCAB), temperature=0.0, logit_bias=bias) == 10
    assert draws(torch.zeros(4), 1000, allowed_token_ids=(1, 3))[[0, 2]].sum() == 0


def test_min_tokens_masks_ends_until_enough_are_generated():
    logits = [0.0, 1.0, 5.0, 4.0]
    fields = {"temperature": 0.0, "prompt": [0, 0, 0], "eos": [2], "stop_token_ids": (3,)}
    # positions 2, 3 make the first and second token; the third may end
    assert [one(logits, p, min_tokens=2, **fields) for p in (2, 3, 4)] == [1, 1, 2]
    assert one(logits, 2, min_tokens=2, ignore_eos=True, **fields) == 2
    assert one(logits, 2, min_tokens=2, allowed_token_ids=(2, 3), **fields) == 2


@pytest.mark.parametrize("vocab_size", [31, 4096, 129_280])
def test_a_row_does_not_depend_on_its_batch(vocab_size):
    """T = 1, 3 and 17 agree bit for bit, in tokens and in log-probabilities."""
    kinds = [
        {},
        {"temperature": 0.0},
        {"top_k": 20, "top_p": 0.9},
        {"top_p": 0.5, "temperature": 1.7},
        {"min_p": 0.1},
        {"presence_penalty": 1.0, "repetition_penalty": 1.2},
        {"logit_bias": {3: 2.0}, "top_k": 5},
        {"allowed_token_ids": (1, 2, 3)},
    ]
    logits = torch.randn(17, vocab_size, generator=torch.Generator().manual_seed(1)) * 3
    params = [SamplingParams(logprobs=3, **kinds[i % len(kinds)]) for i in range(17)]

    def run(rows):
        state = SamplerState(17, vocab_size)
        for row in rows:
            state.admit(row, params[row], [1, 2], [3], [0], 100 + row)
        at = torch.tensor(rows)
        sampled = state.sample(logits[at].clone(), at, at + 10)
        return list(zip(sampled.token_ids.tolist(), sampled.logprobs, strict=True))

    alone = [run([row])[0] for row in range(17)]
    assert run(list(range(17))) == alone
    assert run([16, 2, 5]) == [alone[16], alone[2], alone[5]]


def test_a_seed_fixes_the_answer_whatever_the_slot():
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(2))
    ids = []
    for slot in (0, 3):
        state = SamplerState(4, VOCAB)
        state.admit(slot, SamplingParams(), [], [], [], -(2**63))
        rows = logits.expand(1, -1)
        at = torch.tensor([slot])
        ids.append([int(state.sample(rows, at, torch.tensor([p])).token_ids) for p in range(50)])
    assert ids[0] == ids[1]
    assert len(set(ids[0])) > 3


@pytest.mark.parametrize("axis", ["seed", "position"])
def test_counter_uniform_is_uniform_along_both_axes(axis):
    count = torch.arange(20_000)
    fixed = torch.full_like(count, 12345)
    x = counter_uniform(count, fixed) if axis == "seed" else counter_uniform(fixed, count)
    assert float(x.min()) >= 0.0
    assert float(x.max()) < 1.0
    cells = torch.bincount((x * 20).long(), minlength=20)
    assert chi_square(cells.float(), torch.full((20,), 0.05)) < 60.0
    pairs = (x[:-1] * 4).long() * 4 + (x[1:] * 4).long()  # neighbours are independent
    assert chi_square(torch.bincount(pairs, minlength=16).float(), torch.full((16,), 1 / 16)) < 55.0


def test_counter_uniform_known_values():
    """The numbers are part of the contract: a seeded answer survives an upgrade."""
    x = counter_uniform(torch.tensor([0, 1, -1, 2**62]), torch.tensor([0, 7, 7, 100_000]))
    golden = 0x9E3779B97F4A7C15
    mask = 2**64 - 1

    def mix(x):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    for got, seed, position in zip(x.tolist(), [0, 1, -1, 2**62], [0, 7, 7, 100_000], strict=True):
        mixed = mix(mix((seed + golden) & mask) ^ ((position * golden) & mask))
        assert got == (mixed >> 11) / 2**53


def test_logprobs_are_of_the_raw_logits():
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0]])
    state = SamplerState(1, 4)
    fields = {"temperature": 0.0, "logit_bias": {0: 50.0}, "logprobs": 3}
    state.admit(0, SamplingParams(**fields), [], [], [], 0)
    (entry,) = state.sample(logits, torch.tensor([0]), torch.tensor([0])).logprobs
    expected = logits[0].log_softmax(-1)
    assert entry.token_ids == [0, 1, 3, 2]  # the chosen one, then by rank, equals by id
    assert entry.logprobs == expected[[0, 1, 3, 2]].tolist()
    assert entry.rank == 4


def test_logprobs_zero_reports_the_chosen_token_and_none_nothing():
    state = SamplerState(2, 4)
    state.admit(0, SamplingParams(temperature=0.0, logprobs=0), [], [], [], 0)
    state.admit(1, SamplingParams(temperature=0.0), [], [], [], 0)
    logits = torch.tensor([[0.0, 1.0, 0.0, 0.0]] * 2)
    first, second = state.sample(logits, torch.tensor([0, 1]), torch.tensor([0, 0])).logprobs
    assert first is not None
    assert (first.token_ids, first.rank) == ([1], 1)
    assert second is None


def test_prompt_logprobs():
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(3))
    entries = prompt_logprobs(logits, [4, 0, 11], 2)
    for row, token_id, entry in zip(logits, [4, 0, 11], entries, strict=True):
        expected = row.log_softmax(-1)
        assert entry.token_ids == [token_id, *expected.topk(2).indices.tolist()]
        assert entry.logprobs == expected[entry.token_ids].tolist()
        assert entry.rank == 1 + int((expected > expected[token_id]).sum())


def test_a_row_of_nan_hurts_nobody_else():
    state = SamplerState(3, VOCAB)
    for slot, fields in enumerate([{}, {"top_k": 3}, {"temperature": 0.0}]):
        state.admit(slot, SamplingParams(**fields), [], [], [], 0)
    logits = torch.full((3, VOCAB), math.nan)
    logits[2] = torch.arange(VOCAB)
    sampled = state.sample(logits, torch.arange(3), torch.arange(3))
    assert int(sampled.token_ids[2]) == VOCAB - 1
    assert bool((sampled.token_ids < VOCAB).all())


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=20),
    st.floats(1e-4, 5.0),
    st.integers(0, 25),
    st.floats(1e-6, 1.0),
    st.floats(0.0, 1.0),
    st.integers(-(2**63), 2**63 - 1),
)
def test_a_drawn_token_is_always_one_that_was_kept(logits, temperature, top_k, top_p, min_p, seed):
    fields = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    token = one(logits, seed=seed, **fields)
    row = torch.tensor(logits)
    order = row.sort(descending=True, stable=True).indices.tolist()
    assert order.index(token) < (top_k or len(logits))
    gap = float(row.max() - row[token]) / temperature
    assert gap <= -math.log(max(min_p, 1e-300)) + 1e-3
    ahead = (row.double() / temperature).softmax(-1)[order[: order.index(token)]].sum()
    kept = (row.double() / temperature).softmax(-1)[order[: top_k or len(logits)]].sum()
    assert ahead <= top_p * kept + 1e-6


def test_check_finds_a_slot_that_was_not_cleared():
    state = SamplerState(2, VOCAB)
    state.admit(0, SamplingParams(frequency_penalty=1.0), [1], [2], [], 0)
    state.check()
    state._params[0] = None
    with pytest.raises(AssertionError, match="not cleared"):
        state.check()
