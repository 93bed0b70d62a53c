"""Logits and sampling parameters to token ids. Knows nothing of sequences, pages or text.

The parameters of a row act in this order, each on the result of the one before:

1. repetition_penalty (prompt and output tokens), then frequency_penalty and presence_penalty
   (output tokens);
2. logit_bias is added; tokens outside allowed_token_ids are removed; then those that the row's
   mask forbids (if that leaves nothing, the mask alone holds);
3. while fewer than min_tokens are generated, the tokens that would end the sequence are removed
   (unless nothing else is allowed);
4. temperature 0 takes the largest logit, the lowest id among equals, and is done;
5. logits are divided by temperature;
6. top_k keeps the k largest, the lower id among equals;
7. top_p keeps the fewest of these, largest first, that hold at least that share of their mass;
8. min_p keeps tokens of at least that share of the largest probability;
9. one token is drawn in proportion to what is left, lower ids first, by a number that is a
   function of (seed, position) alone; with a proposal, acceptance.py decides by what is left
   whether it holds;
10. a sequence that has used up its thinking budget takes the end of thinking instead.

Before all of that, and for log-probabilities too, the ids beyond the tokenizer's are taken out: a
model's vocabulary may be padded, and the rows of the padding are untrained.

Reported log-probabilities are those of the raw logits, before step 1. A row's result does not
depend on the other rows, bit for bit: the parameters of a row alone choose the operations that it
goes through, and each of them works row by row in a fixed order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moet.runtime.acceptance import Purpose, counter_uniform, draw, verify
from moet.runtime.grammar import allowed
from moet.runtime.sampling_params import MAX_THINK_ENDS
from moet.runtime.slot_tensors import SlotTensors
from moet.types import SamplingParams, ThinkingBudget, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Sampled:
    """token_ids: [n] int64. logprobs: one entry per row, None where none were asked for."""

    token_ids: Tensor
    logprobs: list[TokenLogprobs | None]


@dataclass(frozen=True, slots=True)
class Proposal:
    """A drafted token and the distribution that it was drawn from: [vocab_size] fp32, or None if it
    was not drawn but the likeliest (of a sequence at temperature 0)."""

    token_id: int
    probs: Tensor | None


class SamplerState:
    """What sampling needs to know of each sequence slot, as tensors beside the logits.

    `last_token` [num_slots + 1] int64 is the newest token of each slot: the next step may read it
    before the host knows it. Counts are kept only for slots whose parameters need them. There is
    one slot more than sequences may take, which rows that only fill a step write to.
    """

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
        *,
        num_token_ids: int | None = None,
    ) -> None:
        """vocab_size: of the logits. num_token_ids: those below may come; None: all of them."""

        def per_slot(dtype: torch.dtype) -> Tensor:
            return torch.zeros(num_slots + 1, dtype=dtype, device=device)

        def per_token(dtype: torch.dtype) -> Tensor:  # zero pages cost nothing until written
            return torch.zeros(num_slots + 1, vocab_size, dtype=dtype, device=device)

        self.vocab_size = vocab_size
        self._num_token_ids = vocab_size if num_token_ids is None else num_token_ids
        self.last_token = per_slot(torch.int64)
        self._params: list[SamplingParams | None] = [None] * num_slots
        self._seed = per_slot(torch.int64)
        self._temperature = per_slot(torch.float32)
        self._top_k = per_slot(torch.int64)
        self._top_p = per_slot(torch.float64)
        self._min_p = per_slot(torch.float32)
        self._presence = per_slot(torch.float32)
        self._frequency = per_slot(torch.float32)
        self._repetition = per_slot(torch.float32) + 1
        self._is_counted = per_slot(torch.bool)
        self._may_end_from = per_slot(torch.int64)  # first position whose row may end the sequence
        self._is_thinking = per_slot(torch.bool)
        self._thinking_left = per_slot(torch.int64)  # tokens
        self._think_ids = torch.full((num_slots + 1, 2 + MAX_THINK_ENDS), -1, device=device)
        self._output_counts = per_token(torch.int32)
        self._in_prompt = per_token(torch.bool)
        self._bias = per_token(torch.float32)
        self._ends = per_token(torch.bool)

    def admit(
        self,
        slot: int,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        eos_token_ids: Sequence[int],
        seed: int,
    ) -> None:
        """Put a sequence into a free slot; output_token_ids are what a resumed one has generated.

        params must have passed validate_params. seed is an int64.
        """
        assert self._params[slot] is None, f"slot {slot} is taken"
        self._params[slot] = params
        self._seed[slot] = seed
        self._temperature[slot] = params.temperature
        self._top_k[slot] = params.top_k if params.top_k > 0 else self.vocab_size
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self.last_token[slot] = (list(output_token_ids) or list(prompt_token_ids) or [0])[-1]
        if _has_penalty(params):
            self._presence[slot] = params.presence_penalty
            self._frequency[slot] = params.frequency_penalty
            self._repetition[slot] = params.repetition_penalty
            self._is_counted[slot] = True
            self._in_prompt[slot, self._ids(prompt_token_ids)] = True
            outputs = self._ids(output_token_ids)
            ones = torch.ones_like(outputs, dtype=torch.int32)
            self._output_counts[slot].index_put_((outputs,), ones, accumulate=True)
        if _has_bias(params):
            if params.allowed_token_ids:
                self._bias[slot] = float("-inf")
                self._bias[slot, self._ids(params.allowed_token_ids)] = 0.0
            for token_id, bias in params.logit_bias.items():
                self._bias[slot, token_id] += bias
        if params.min_tokens > 0:
            self._may_end_from[slot] = len(prompt_token_ids) + params.min_tokens - 1
            ends = set(params.stop_token_ids)
            if not params.ignore_eos:
                ends |= set(eos_token_ids)
            if not params.allowed_token_ids or set(params.allowed_token_ids) - ends:
                self._ends[slot, self._ids(sorted(ends))] = True
        if params.thinking is not None:
            self._begin_thinking(slot, params.thinking, output_token_ids)

    def release(self, slot: int) -> None:
        """Free a slot and forget its sequence."""
        params = self._params[slot]
        assert params is not None, f"slot {slot} is free"
        if _has_penalty(params):
            self._output_counts[slot] = 0
            self._in_prompt[slot] = False
            self._is_counted[slot] = False
            self._presence[slot] = self._frequency[slot] = 0.0
            self._repetition[slot] = 1.0
        if _has_bias(params):
            self._bias[slot] = 0.0
        if params.min_tokens > 0:
            self._ends[slot] = False
        if params.thinking is not None:
            self._think_ids[slot] = -1
            self._is_thinking[slot] = False
        self._params[slot] = None

    def tensors(self) -> SlotTensors:
        """The state itself, for steps that sample without a host decision."""
        return SlotTensors(
            num_slots=len(self._params),
            num_token_ids=self._num_token_ids,
            last_token=self.last_token,
            seed=self._seed,
            temperature=self._temperature,
            top_k=self._top_k,
            top_p=self._top_p,
            min_p=self._min_p,
            presence=self._presence,
            frequency=self._frequency,
            repetition=self._repetition,
            is_counted=self._is_counted,
            output_counts=self._output_counts,
            in_prompt=self._in_prompt,
            bias=self._bias,
            ends=self._ends,
            may_end_from=self._may_end_from,
            is_thinking=self._is_thinking,
            thinking_left=self._thinking_left,
            think_ids=self._think_ids,
        )

    def sample(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        masks: Mapping[int, Tensor] | None = None,
        proposals: Mapping[int, Proposal] | None = None,
    ) -> Sampled:
        """Draw the next token of each row and remember it for the slot.

        logits: [n, vocab_size] fp32, unchanged. slots: [n] int64, admitted and distinct.
        positions: [n] int64, the position of the token whose row made the logits. masks: rows that
        only some tokens may follow, with their bits as in runtime/grammar.py: [words] int32.
        proposals: rows that a draft was made for; it holds if it is the row's token.
        """
        logits = self.without_padding(logits)
        slot_list = slots.tolist()
        rows = [self._row_params(slot) for slot in slot_list]
        scores = self._adjust(logits, slot_list, positions, rows, masks or {})
        token_ids = scores.argmax(-1)  # documented to take the first of equals
        plain = [i for i, p in enumerate(rows) if p.temperature > 0 and not _needs_sort(p)]
        ranked = [i for i, p in enumerate(rows) if p.temperature > 0 and _needs_sort(p)]
        if plain or ranked:
            uniform = counter_uniform(self._seed[slots], positions)
        if plain:
            at = torch.tensor(plain, device=logits.device)
            probs = self._probs(scores[at], slots[at])
            if any(rows[i].min_p > 0 for i in plain):
                probs = self._floor(probs, slots[at])
            token_ids[at] = draw(probs, uniform[at])
        if ranked:
            at = torch.tensor(ranked, device=logits.device)
            ids = scores[at].sort(dim=-1, descending=True, stable=True).indices
            probs = self._probs(scores[at], slots[at]).gather(-1, ids)
            probs = _truncate(probs, self._top_k[slots[at]], self._top_p[slots[at]])
            kept = self._floor(probs, slots[at])
            token_ids[at] = draw(torch.zeros_like(kept).scatter(-1, ids, kept), uniform[at])
        drafted = [i for i in proposals or {} if rows[i].temperature > 0]
        if proposals and drafted:
            at = torch.tensor(drafted, device=logits.device)
            token_ids[at] = self._verify(
                scores[at], slots[at], positions[at], [proposals[i] for i in drafted]
            )
        limited = [i for i, params in enumerate(rows) if params.thinking is not None]
        if limited:
            at = torch.tensor(limited, device=logits.device)
            token_ids[at] = self._limit_thinking(token_ids[at], slots[at])
        self.last_token[slots] = token_ids
        self._count(slots, token_ids, rows)
        return Sampled(token_ids, _report(logits, token_ids, [p.logprobs for p in rows]))

    def propose(self, logits: Tensor, slots: Tensor, positions: Tensor) -> list[Proposal]:
        """Draw a draft of each row; what is known of the slots does not change.

        logits: [n, vocab_size] fp32, of a draft model. slots, positions: [n] int64, as for sample.
        A draft follows the slot's parameters, but not what depends on the tokens before it
        (penalties, masks, min_tokens): those act when it is verified.
        """
        logits = self.without_padding(logits)
        rows = [self._row_params(slot) for slot in slots.tolist()]
        biased = [i for i, params in enumerate(rows) if _has_bias(params)]
        if biased:
            at = torch.tensor(biased, device=logits.device)
            logits = logits.index_add(0, at, self._bias[slots[at]])
        best = logits.argmax(-1).tolist()
        made = [Proposal(token_id, None) for token_id in best]
        sampled = [i for i, params in enumerate(rows) if params.temperature > 0]
        if sampled:
            at = torch.tensor(sampled, device=logits.device)
            probs = self._distribution(logits[at], slots[at])
            uniform = counter_uniform(self._seed[slots[at]], positions[at], Purpose.DRAFT)
            for place, token_id in enumerate(draw(probs, uniform).tolist()):
                made[sampled[place]] = Proposal(token_id, probs[place])
        return made

    def without_padding(self, logits: Tensor) -> Tensor:
        """The logits, a copy if the vocabulary is padded: then the padding's are -inf."""
        if self._num_token_ids >= self.vocab_size:
            return logits
        logits = logits.clone()
        logits[:, self._num_token_ids :] = float("-inf")
        return logits

    def not_numbers(self, logits: Tensor) -> Tensor:
        """Which rows hold a NaN or infinity among the ids that may come: [n] bool, as in steps on
        a device. logits: [n, vocab_size]; minus infinity forbids a token and is no fault."""
        return ~(logits[:, : self._num_token_ids].amax(-1) < float("inf"))

    def check(self) -> None:
        """Raise AssertionError if a free slot still holds counts, bias or end tokens."""
        free = [slot for slot, params in enumerate(self._params) if params is None]
        for tensor in (self._output_counts, self._in_prompt, self._bias, self._ends):
            assert not tensor[free].any(), "a released slot was not cleared"

    def _ids(self, token_ids: Sequence[int]) -> Tensor:
        return torch.tensor(list(token_ids), dtype=torch.int64, device=self.last_token.device)

    def _row_params(self, slot: int) -> SamplingParams:
        params = self._params[slot]
        assert params is not None, f"slot {slot} has no sequence"
        return params

    def _begin_thinking(
        self, slot: int, budget: ThinkingBudget, output_token_ids: Sequence[int]
    ) -> None:
        ends = (budget.end_token_id, *budget.other_end_token_ids)
        assert len(ends) <= 1 + MAX_THINK_ENDS
        self._think_ids[slot] = -1
        self._think_ids[slot, : 1 + len(ends)] = self._ids((budget.start_token_id, *ends))
        thinking, left = budget.starts_open, budget.max_tokens
        for token_id in output_token_ids:
            if token_id in ends:
                thinking = False
            elif token_id == budget.start_token_id:
                thinking = True
            elif thinking:
                left -= 1
        self._is_thinking[slot] = thinking
        self._thinking_left[slot] = left

    def _limit_thinking(self, token_ids: Tensor, slots: Tensor) -> Tensor:
        """Step 10 for rows with a budget, and its books. token_ids, slots: [m] int64."""
        ids, thinking, left = self._think_ids[slots], self._is_thinking[slots], self._thinking_left
        token_ids = torch.where(thinking & (left[slots] <= 0), ids[:, 1], token_ids)
        starts = token_ids == ids[:, 0]
        ends = (token_ids[:, None] == ids[:, 1:]).any(-1)
        left[slots] -= (thinking & ~starts & ~ends).to(torch.int64)
        self._is_thinking[slots] = (thinking & ~ends) | starts
        return token_ids

    def _adjust(
        self,
        logits: Tensor,
        slots: list[int],
        positions: Tensor,
        rows: list[SamplingParams],
        masks: Mapping[int, Tensor],
    ) -> Tensor:
        """Steps 1-3; a copy if any row needs one."""
        touched = [
            i
            for i, p in enumerate(rows)
            if _has_penalty(p) or _has_bias(p) or p.min_tokens or i in masks
        ]
        if not touched:
            return logits
        scores = logits.clone()
        for i in touched:
            params, row, slot = rows[i], scores[i], slots[i]
            if _has_penalty(params):
                counts = self._output_counts[slot]
                seen = self._in_prompt[slot] | (counts > 0)
                repetition = self._repetition[slot]
                scaled = torch.where(row > 0, row / repetition, row * repetition)
                row = torch.where(seen, scaled, row)
                row = row - counts * self._frequency[slot] - (counts > 0) * self._presence[slot]
            if _has_bias(params):
                row = row + self._bias[slot]
            if i in masks:
                may_come = allowed(masks[i].to(row.device), row.shape[-1])
                held = row.masked_fill(~may_come, float("-inf"))
                if params.allowed_token_ids:
                    held = _first_open(held, logits[i].masked_fill(~may_come, float("-inf")))
                row = held
            if params.min_tokens:
                early = positions[i] < self._may_end_from[slot]
                open_row = row.masked_fill(self._ends[slot] & early, float("-inf"))
                row = open_row if i not in masks else _first_open(open_row, row)
            scores[i] = row
        return scores

    def _probs(self, scores: Tensor, slots: Tensor) -> Tensor:
        """Step 5: [m, vocab_size] fp32."""
        top = scores.max(-1, keepdim=True).values  # taken off first: small temperatures stay finite
        return ((scores - top) / self._temperature[slots][:, None]).softmax(-1)

    def _distribution(self, scores: Tensor, slots: Tensor) -> Tensor:
        """Steps 5-8 of rows at a temperature above 0, by token id: [m, vocab_size] fp32."""
        probs = torch.empty_like(scores)
        for i, slot in enumerate(slots.tolist()):  # row by row, each by its own parameters alone
            row, at, params = scores[i : i + 1], slots[i : i + 1], self._row_params(slot)
            if _needs_sort(params):
                ids = row.sort(dim=-1, descending=True, stable=True).indices
                ordered = self._probs(row, at).gather(-1, ids)
                kept = _truncate(ordered, self._top_k[at], self._top_p[at])
                probs[i] = torch.zeros_like(row).scatter(-1, ids, self._floor(kept, at))[0]
            else:
                probs[i] = self._floor(self._probs(row, at), at)[0]
        return probs

    def _verify(
        self, scores: Tensor, slots: Tensor, positions: Tensor, proposals: list[Proposal]
    ) -> Tensor:
        """Tokens of rows with a draft, at a temperature above 0: [m] int64."""
        seeds, drawn_from = self._seed[slots], []
        for proposal in proposals:
            assert proposal.probs is not None, "a draft at a temperature above 0 is drawn"
            drawn_from.append(proposal.probs)
        return verify(
            self._distribution(scores, slots),
            torch.stack(drawn_from),
            self._ids([proposal.token_id for proposal in proposals]),
            counter_uniform(seeds, positions, Purpose.ACCEPT),
            counter_uniform(seeds, positions, Purpose.RESIDUAL),
        )

    def _floor(self, probs: Tensor, slots: Tensor) -> Tensor:
        """Step 8, which needs no normalised row."""
        floor = self._min_p[slots][:, None] * probs.max(-1, keepdim=True).values
        return torch.where(probs >= floor, probs, 0.0)

    def _count(self, slots: Tensor, token_ids: Tensor, rows: list[SamplingParams]) -> None:
        counted = [i for i, params in enumerate(rows) if _has_penalty(params)]
        if counted:
            at = torch.tensor(counted, device=slots.device)
            self._output_counts[slots[at], token_ids[at]] += 1


def prompt_logprobs(
    logits: Tensor, next_token_ids: Sequence[int], top_n: int
) -> list[TokenLogprobs]:
    """Log-probabilities of prompt tokens.

    logits: [n, vocab_size] fp32, the rows before the tokens. next_token_ids: the n tokens that
    follow them. top_n: alternatives beside the token itself.
    """
    return [
        _token_logprobs(row, int(token_id), top_n)
        for row, token_id in zip(logits, next_token_ids, strict=True)
    ]


def _truncate(probs: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Steps 6 and 7 on rows in descending order. probs: [m, vocab_size]; top_k, top_p: [m]."""
    rank = torch.arange(probs.shape[-1], device=probs.device)
    probs = torch.where(rank < top_k[:, None], probs, 0.0)
    upto = probs.cumsum(-1, dtype=torch.float64)
    before = upto - probs
    keep = (before < top_p[:, None] * upto[:, -1:]) | (top_p[:, None] >= 1.0)
    return torch.where(keep, probs, 0.0)


def _first_open(row: Tensor, other: Tensor) -> Tensor:
    """The row, unless nothing is possible in it: then the other. No wait for the device."""
    return torch.where(row.max() > float("-inf"), row, other)


def _report(
    logits: Tensor, token_ids: Tensor, wanted: list[int | None]
) -> list[TokenLogprobs | None]:
    return [
        None if top_n is None else _token_logprobs(logits[i], int(token_ids[i]), top_n)
        for i, top_n in enumerate(wanted)
    ]


def _token_logprobs(logits: Tensor, token_id: int, top_n: int) -> TokenLogprobs:
    """The token itself, then the top_n most likely ones (it may be among them), ties by id."""
    logprobs = logits.log_softmax(-1)
    chosen = logprobs[token_id]
    rank = 1 + int((logprobs > chosen).sum())
    ids, values = [token_id], [float(chosen)]
    if top_n > 0:
        top_n = min(top_n, logprobs.shape[-1])
        threshold = logprobs.topk(top_n).values[-1]
        candidates = (logprobs >= threshold).nonzero()[:, 0]
        best, order = logprobs[candidates].sort(descending=True, stable=True)
        ids += candidates[order[:top_n]].tolist()
        values += best[:top_n].tolist()
    return TokenLogprobs(token_ids=ids, logprobs=values, rank=rank)


def _has_penalty(params: SamplingParams) -> bool:
    return (
        params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or params.repetition_penalty != 1.0
    )


def _has_bias(params: SamplingParams) -> bool:
    return bool(params.logit_bias or params.allowed_token_ids)


def _needs_sort(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0
