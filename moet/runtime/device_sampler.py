"""Sampling inside a step: tensor operations of fixed shape that leave every decision on the device.

The rules, their order and their results are the sampler's (runtime/sampler.py); here each is
applied to every row, with a value that changes nothing where a slot does not use it, so that a
captured step samples whatever its sequences ask for. The kind of a step says which rules may
matter; a kind that allows more gives the same tokens. Knows nothing of sequences on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from moet.kernels.sampling import Purpose, SamplingOps
from moet.runtime.grammar import WORD_BITS
from moet.runtime.sampling_params import MAX_LOGPROBS
from moet.runtime.slot_tensors import SlotTensors
from moet.types import SamplingParams, TokenLogprobs


class Kind(IntEnum):
    """What the rows of a step ask for at most."""

    GREEDY = 0  # the largest logit
    PLAIN = 1  # also temperature and min_p
    RANKED = 2  # also top_k and top_p, which need an order
    FULL = 3  # also what depends on the tokens so far and on masks


def kind_of(params: SamplingParams, *, masked: bool) -> Kind:
    """The least kind that a sequence with these parameters may be sampled with."""
    penalised = (
        params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or params.repetition_penalty != 1.0
    )
    changed = bool(params.logit_bias or params.allowed_token_ids or params.min_tokens or penalised)
    if masked or changed or params.thinking is not None:
        return Kind.FULL
    if params.temperature == 0:
        return Kind.GREEDY
    return Kind.RANKED if params.top_k > 0 or params.top_p < 1.0 else Kind.PLAIN


@dataclass(frozen=True, slots=True)
class Drawn:
    """token_ids: [n] int64. is_bad: [n] bool, the row's logits are not numbers."""

    token_ids: Tensor
    is_bad: Tensor


@dataclass(frozen=True, slots=True)
class Drafted:
    """Drafts of n rows' tokens: token_ids [n] int64; the distributions that drafts were drawn from,
    probs [m, num_token_ids] fp32, and the places of these rows' among them [n] int64; and which
    rows have a draft, there [n] bool."""

    token_ids: Tensor
    probs: Tensor
    places: Tensor
    there: Tensor


REFERENCE = SamplingOps.bind("reference")


def choose(
    state: SlotTensors,
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    masks: Tensor | None,
    kind: Kind,
    drafted: Drafted | None = None,
    ahead: Tensor | None = None,
    ops: SamplingOps = REFERENCE,
) -> Drawn:
    """The next token of each row; the state stays as it is.

    logits: [n, vocab_size] fp32. slots: [n] int64. positions: [n] int64, of the rows that made the
    logits. masks: [n, words] int32 as in runtime/grammar.py, read for Kind.FULL only. drafted: what
    acceptance.verify judges where the temperature is above 0; read for kinds above GREEDY. ahead:
    [n, any] int64, tokens that come between what a slot has taken and its row, -1 for none; read
    for Kind.FULL only.
    """
    logits = logits[:, : state.num_token_ids]
    if kind == Kind.GREEDY:
        best, token_ids = logits.max(-1)  # documented to take the first of equals
        return Drawn(token_ids, ~(best < torch.inf))
    scores = logits
    if kind == Kind.FULL:
        scores = _adjust(state, logits, slots, positions, masks, ahead)
    weights, token_ids, is_bad = _weights(state, scores, slots, kind, ops)
    if kind == Kind.FULL:  # adjusting may hide what is no number
        is_bad = ~(logits.amax(-1) < torch.inf)
    seeds = state.seed[slots]
    if drafted is None:
        drawn = ops.draw_weights(weights, seeds, positions)
    else:
        drawn = ops.verify_weights(
            weights,
            drafted.probs,
            drafted.places,
            drafted.token_ids,
            drafted.there,
            seeds,
            positions,
        )
    token_ids = torch.where(state.temperature[slots] > 0, drawn, token_ids)
    if kind == Kind.FULL:
        thinking, left = _thinking(state, slots, ahead)
        must_end = thinking & (left <= 0)
        token_ids = torch.where(must_end, state.think_ids[slots, 1], token_ids)
    return Drawn(token_ids, is_bad)


def remember(state: SlotTensors, slots: Tensor, token_ids: Tensor, kind: Kind) -> None:
    """Write the tokens that slots have taken: [n] int64 each, distinct but for the last slot."""
    state.last_token.index_copy_(0, slots, token_ids)
    if kind != Kind.FULL:
        return
    width = state.output_counts.shape[1]
    counts = state.output_counts.view(-1)
    counts.scatter_add_(0, slots * width + token_ids, state.is_counted[slots].to(counts.dtype))
    thinking, left = _thinking(state, slots, token_ids[:, None])
    state.thinking_left.index_copy_(0, slots, left)
    state.is_thinking.index_copy_(0, slots, thinking)


def _thinking(state: SlotTensors, slots: Tensor, tokens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Whether slots think, and how many tokens they may go on: [n] each, behind tokens [n, any]."""
    thinking, left, ids = state.is_thinking[slots], state.thinking_left[slots], None
    for token_ids in () if tokens is None else tokens.unbind(1):
        ids = state.think_ids[slots] if ids is None else ids
        there = token_ids >= 0
        starts = there & (token_ids == ids[:, 0])
        ends = there & (token_ids[:, None] == ids[:, 1:]).any(-1)
        left = left - (there & thinking & ~starts & ~ends).to(torch.int64)
        thinking = (thinking & ~ends) | starts
    return thinking, left


def _adjust(
    state: SlotTensors,
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    masks: Tensor | None,
    ahead: Tensor | None,
) -> Tensor:
    """Steps 1-3 of the sampler's rules."""
    num = logits.shape[1]
    counts = state.output_counts[slots][:, :num]
    if ahead is not None:
        more = ((ahead >= 0) & state.is_counted[slots][:, None]).to(counts.dtype)
        counts = counts.scatter_add(1, ahead.clamp(min=0), more)
    repetition = state.repetition[slots][:, None]
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    scores = torch.where(state.in_prompt[slots][:, :num] | (counts > 0), scaled, logits)
    scores = scores - counts * state.frequency[slots][:, None]
    scores = scores - (counts > 0) * state.presence[slots][:, None]
    scores = scores + state.bias[slots][:, :num]
    if masks is not None:
        may_come = _bits(masks, num)
        scores = _first_open(_only(scores, may_come), _only(logits, may_come))
    early = (positions < state.may_end_from[slots])[:, None]
    closed = state.ends[slots][:, :num] & early
    return _first_open(scores.masked_fill(closed, -torch.inf), scores)


def propose(
    state: SlotTensors,
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    kind: Kind,
    ops: SamplingOps = REFERENCE,
) -> tuple[Tensor, Tensor, Tensor]:
    """Drafts as SamplerState.propose draws them; the state stays as it is.

    logits: [n, vocab_size] fp32, of a draft model. kind: PLAIN, or RANKED for all that asks for
    more. Returns token_ids [n] int64, whether the logits are numbers [n] bool, and the
    distributions [n, num_token_ids] fp32 (of rows at temperature 0 they mean nothing).
    """
    scores = logits[:, : state.num_token_ids]
    if kind != Kind.PLAIN:
        scores = scores + state.bias[slots][:, : state.num_token_ids]
    weights, best, is_bad = _weights(state, scores, slots, kind, ops)
    drawn = ops.draw_weights(weights, state.seed[slots], positions, purpose=Purpose.DRAFT)
    return torch.where(state.temperature[slots] > 0, drawn, best), ~is_bad, weights


def _weights(
    state: SlotTensors, scores: Tensor, slots: Tensor, kind: Kind, ops: SamplingOps
) -> tuple[Tensor, Tensor, Tensor]:
    """Steps 5-8: weights by token id, [n, num_token_ids]. A row takes one of the two ways by its
    own parameters alone. And, as `weigh` has them, the likeliest tokens and which rows are bad."""
    temperature, min_p = state.temperature[slots], state.min_p[slots]
    if kind == Kind.PLAIN:
        return ops.weigh(scores, temperature, min_p)
    weights, token_ids, is_bad = ops.weigh(scores, temperature, torch.zeros_like(min_p))
    ids = scores.sort(dim=-1, descending=True, stable=True).indices
    top_k, top_p = state.top_k[slots], state.top_p[slots]
    needed = (top_k < state.bias.shape[1]) | (top_p < 1.0)
    weights = ops.rank_weights(weights, ids, top_k, top_p, min_p, needed)
    return weights, token_ids, is_bad


def _only(scores: Tensor, may_come: Tensor) -> Tensor:
    return scores.masked_fill(~may_come, -torch.inf)


def _first_open(scores: Tensor, other: Tensor) -> Tensor:
    """Rows in which something is possible, or else those of the other."""
    return torch.where(scores.amax(-1, keepdim=True) > -torch.inf, scores, other)


def _bits(masks: Tensor, num: int) -> Tensor:
    """[n, num] bool of masks [n, words] int32."""
    bits = torch.arange(WORD_BITS, dtype=torch.int32, device=masks.device)
    return ((masks[:, :, None] >> bits) & 1).bool().flatten(1)[:, :num]


REPORT_WIDTH = 2 + 2 * MAX_LOGPROBS
"""Columns of a row's report: rank, own log-probability, then ids and log-probabilities by rank."""


def report(state: SlotTensors, logits: Tensor, token_ids: Tensor) -> Tensor:
    """Log-probabilities of the raw logits around the chosen tokens: [n, REPORT_WIDTH] int64.

    fp32 values are kept as their bits. Ids of a vocabulary with fewer tokens end in -1.
    """
    logprobs = logits[:, : state.num_token_ids].log_softmax(-1)
    chosen = logprobs.gather(-1, token_ids[:, None])
    rank = 1 + (logprobs > chosen).sum(-1, keepdim=True)
    num = logprobs.shape[-1]
    bits = logprobs.view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    ids = torch.arange(num, device=logits.device)
    top = min(MAX_LOGPROBS, num)
    best = (ordered * 2**32 + (num - 1 - ids)).topk(top).values  # ties go to the lower id
    best_ids = num - 1 - (best & (2**32 - 1))
    values = logprobs.gather(-1, best_ids)
    out = torch.full((len(logits), REPORT_WIDTH), -1, device=logits.device)
    out[:, 0:1], out[:, 1:2] = rank, chosen.contiguous().view(torch.int32).long()
    out[:, 2 : 2 + top] = best_ids
    out[:, 2 + MAX_LOGPROBS : 2 + MAX_LOGPROBS + top] = values.view(torch.int32).long()
    return out


def read_report(row: Tensor, token_id: int, top_n: int) -> TokenLogprobs:
    """What a request sees of a row of `report`, on the host: the token, then top_n likely ones."""
    values = row.to(torch.int32).view(torch.float32)
    ids = row[2 : 2 + min(top_n, MAX_LOGPROBS)].tolist()
    ids = [each for each in ids if each >= 0]
    likely = values[2 + MAX_LOGPROBS : 2 + MAX_LOGPROBS + len(ids)].tolist()
    return TokenLogprobs(
        token_ids=[token_id, *ids], logprobs=[float(values[1]), *likely], rank=int(row[0])
    )
