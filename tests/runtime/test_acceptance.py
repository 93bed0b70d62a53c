"""Drafts change no distribution, and at temperature 0 no token: by the rule alone and through the
sampler with every parameter."""

import pytest
import torch
from torch import Tensor

from moet.runtime.acceptance import Purpose, counter_uniform, draw, verify
from moet.runtime.sampler import Proposal, SamplerState
from moet.types import SamplingParams

NUM_DRAWS = 10_000
VOCAB = 12


def _uniform(purpose: Purpose, position: int = 0) -> Tensor:
    seeds = torch.arange(NUM_DRAWS)
    return counter_uniform(seeds, torch.full_like(seeds, position), purpose)


def _chi_square(token_ids: Tensor, probs: Tensor) -> float:
    """Of the counts against probs, over the tokens that may come; others must not have."""
    counts = torch.bincount(token_ids, minlength=len(probs)).double()
    expected = probs.double() / probs.double().sum() * len(token_ids)
    assert counts[expected == 0].sum() == 0
    possible = expected > 0
    return float(((counts - expected)[possible] ** 2 / expected[possible]).sum())


# 99.99 % point of chi-square with 11 degrees of freedom; fixed seeds, so it holds or never does.
LIMIT = 37.4

P = torch.tensor([0.3, 0.0, 0.2, 0.05, 0.1, 0.05, 0.0, 0.1, 0.1, 0.04, 0.03, 0.03])
Q = {
    "equal": P,
    "flat": torch.ones(VOCAB),
    "elsewhere": torch.tensor([0.0, 4.0, 0.0, 0.5, 1.0, 1.0, 2.0, 0.1, 0.1, 0.1, 0.1, 0.1]),
    "one token": torch.eye(VOCAB)[2],
    "impossible": torch.eye(VOCAB)[1],
}


@pytest.mark.parametrize("name", list(Q))
def test_tokens_have_the_targets_distribution_whatever_was_proposed(name: str) -> None:
    p, q = P.expand(NUM_DRAWS, -1), Q[name].expand(NUM_DRAWS, -1)
    drafts = draw(q, _uniform(Purpose.DRAFT))
    tokens = verify(p, q, drafts, _uniform(Purpose.ACCEPT), _uniform(Purpose.RESIDUAL))
    assert _chi_square(tokens, P) < LIMIT
    overlap = float(torch.minimum(P, Q[name] / Q[name].sum()).sum())  # what no rule can exceed
    assert float((tokens == drafts).double().mean()) == pytest.approx(overlap, abs=0.02)


def test_scale_of_the_weights_means_nothing() -> None:
    p, q = P.expand(NUM_DRAWS, -1), Q["flat"].expand(NUM_DRAWS, -1)
    drafts = draw(q, _uniform(Purpose.DRAFT))
    numbers = _uniform(Purpose.ACCEPT), _uniform(Purpose.RESIDUAL)
    assert torch.equal(verify(p, q, drafts, *numbers), verify(p * 4, q / 8, drafts, *numbers))


def test_purposes_and_positions_have_unrelated_numbers() -> None:
    columns = [_uniform(purpose, position) for purpose in Purpose for position in (0, 1, 2)]
    related = torch.corrcoef(torch.stack(columns)) - torch.eye(len(columns), dtype=torch.float64)
    assert related.abs().max() < 4 / NUM_DRAWS**0.5


# Through the sampler

LOGITS = torch.tensor([2.0, 1.8, 1.5, 1.0, 0.8, 0.5, 0.3, 0.0, -0.2, -0.5, -1.0, -2.0])
DRAFT_LOGITS = torch.tensor([1.0, 2.5, 0.0, 1.0, 2.0, 0.5, 1.3, 1.0, 0.2, 0.5, 1.0, 0.0])
PARAMS = {
    "plain": SamplingParams(temperature=1.0),
    "temperature": SamplingParams(temperature=0.6),
    "min_p": SamplingParams(temperature=1.0, min_p=0.2),
    "logit_bias": SamplingParams(temperature=1.0, logit_bias={1: -100.0, 9: 3.0}),
    "top_k": SamplingParams(temperature=1.2, top_k=5),
    "top_p": SamplingParams(temperature=1.0, top_p=0.8),
    "allowed": SamplingParams(temperature=1.0, allowed_token_ids=(1, 4, 9)),
    "penalties": SamplingParams(
        temperature=1.0, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.3
    ),
    "min_tokens": SamplingParams(temperature=1.0, min_tokens=9, stop_token_ids=(0, 4)),
}
NUM_SLOTS = 1_500
POSITION = 3  # of the rows


def _state(params: SamplingParams) -> SamplerState:
    state = SamplerState(NUM_SLOTS, VOCAB)
    for slot in range(NUM_SLOTS):
        state.admit(slot, params, [1, 2], [4, 4], [], seed=slot)
    return state


def _rows(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    slots = torch.arange(NUM_SLOTS)
    return logits.expand(NUM_SLOTS, -1), slots, torch.full_like(slots, POSITION)


@pytest.mark.bug("S17")
@pytest.mark.bug("S18")
@pytest.mark.parametrize("name", list(PARAMS))
def test_every_parameter_acts_on_verified_rows(name: str) -> None:
    state = _state(PARAMS[name])
    drafts = state.propose(*_rows(DRAFT_LOGITS))
    drawn = state.sample(*_rows(LOGITS), proposals=dict(enumerate(drafts)))
    one = _state(PARAMS[name])
    slots, positions = torch.tensor([0]), torch.tensor([POSITION])
    row = one._adjust(LOGITS[None], [0], positions, [PARAMS[name]], {})
    exact = one._distribution(row, slots)[0]
    assert _chi_square(drawn.token_ids, exact) < LIMIT
    held = sum(d.token_id == t for d, t in zip(drafts, drawn.token_ids.tolist(), strict=True))
    assert held > NUM_SLOTS // 10  # sampled drafts do hold


def test_a_mask_acts_on_verified_rows() -> None:
    state = _state(PARAMS["plain"])
    mask = torch.tensor([0b0000_1001_0010], dtype=torch.int32)
    drafts = state.propose(*_rows(DRAFT_LOGITS))
    drawn = state.sample(
        *_rows(LOGITS),
        masks=dict.fromkeys(range(NUM_SLOTS), mask),
        proposals=dict(enumerate(drafts)),
    )
    exact = torch.zeros(VOCAB).index_copy(0, torch.tensor([1, 4, 7]), LOGITS[[1, 4, 7]].exp())
    assert _chi_square(drawn.token_ids, exact) < LIMIT


def test_drafts_are_sampled_not_the_likeliest() -> None:
    drafts = _state(PARAMS["plain"]).propose(*_rows(DRAFT_LOGITS))
    token_ids = torch.tensor([draft.token_id for draft in drafts])
    assert _chi_square(token_ids, DRAFT_LOGITS.softmax(-1)) < LIMIT


def test_at_temperature_0_a_draft_changes_nothing() -> None:
    params = SamplingParams(temperature=0.0, logprobs=2, presence_penalty=0.5, min_tokens=3)
    for draft in range(VOCAB):
        states = [SamplerState(1, VOCAB) for _ in range(2)]
        for state in states:
            state.admit(0, params, [1], [0], [2], seed=0)
        row = LOGITS[None], torch.tensor([0]), torch.tensor([1])
        plain = states[0].sample(*row)
        drafted = states[1].sample(*row, proposals={0: Proposal(draft, None)})
        assert torch.equal(plain.token_ids, drafted.token_ids)
        assert plain.logprobs == drafted.logprobs
        assert torch.equal(states[0]._output_counts, states[1]._output_counts)


def test_a_proposal_leaves_the_state_alone() -> None:
    state = _state(PARAMS["penalties"])
    counts, last = state._output_counts.clone(), state.last_token.clone()
    state.propose(*_rows(DRAFT_LOGITS))
    assert torch.equal(state._output_counts, counts)
    assert torch.equal(state.last_token, last)


def test_a_row_is_verified_alike_in_any_batch() -> None:
    slots = torch.arange(6)
    logits = torch.stack([LOGITS.roll(i) for i in range(6)])
    drafting = torch.stack([DRAFT_LOGITS.roll(i) for i in range(6)])
    positions = torch.arange(6) + 3

    def run(picked: list[int]) -> list[int]:
        state = SamplerState(6, VOCAB)
        for slot, name in enumerate(["plain", "top_k", "min_p", "top_p", "penalties", "allowed"]):
            state.admit(slot, PARAMS[name], [1], [4], [], seed=slot + 40)
        at = torch.tensor(picked)
        drafts = state.propose(drafting[at], slots[at], positions[at])
        drawn = state.sample(logits[at], slots[at], positions[at], None, dict(enumerate(drafts)))
        return drawn.token_ids.tolist()

    together = run([0, 1, 2, 3, 4, 5])
    assert [run([i])[0] for i in range(6)] == together
    assert run([5, 2, 0]) == [together[5], together[2], together[0]]
