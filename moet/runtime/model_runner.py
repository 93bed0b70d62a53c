"""Carries out a Batch, eagerly: copies, forward pass, sampling. Decides nothing about requests."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor

from moet.models.base import DraftingModel, ExpertProvider, ForwardInput, Model, ModelOutput
from moet.runtime.batch import (
    Admit,
    Batch,
    BringPages,
    BringSnapshot,
    Command,
    Keep,
    Release,
    Restore,
    Row,
    SetPages,
    StepResult,
    SwapIn,
    SwapOut,
    int64_tensor,
)
from moet.runtime.drafter import Drafter, Settled
from moet.runtime.exhausted import failed_step
from moet.runtime.experts.precision import PrecisePasses, PrecisionSet, Target, position_of
from moet.runtime.kv_cache import KVCache
from moet.runtime.passes import Passes
from moet.runtime.sampler import SamplerState, prompt_logprobs

logger = logging.getLogger(__name__)


class ModelRunner:
    """One model with its state. `run` is called for one batch at a time, in order.

    draft_model: the same model, if it was built for drafts. precisions: who computes which row;
    None: experts do.
    """

    def __init__(
        self,
        model: Model,
        experts: ExpertProvider,
        kv: KVCache,
        sampler: SamplerState,
        *,
        num_seq_slots: int,
        max_pages_per_seq: int,
        draft_model: DraftingModel | None = None,
        precisions: PrecisionSet | None = None,
        target: Target | None = None,
    ) -> None:
        """target: runs the model on a step's input; None: its `forward`."""
        self.model = model
        self.experts = experts
        self.kv = kv
        self.sampler = sampler
        self.on_fault: Callable[[str], None] = lambda fault: None  # told at once, and may raise
        self._admitted: set[int] = set()
        device = sampler.last_token.device
        self.page_table = torch.full((num_seq_slots, max_pages_per_seq), -1, device=device)
        self._passes = Passes(
            kv,
            last_token=sampler.last_token,
            page_table=self.page_table,
            vocab_size=model.vocab_size,
        )
        self._precise = PrecisePasses(
            self._passes, target or self._target, precisions or PrecisionSet.single(experts)
        )
        self._drafter = (
            None if draft_model is None else Drafter(draft_model, experts, self._passes, sampler)
        )

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepResult:
        """Carry out a batch. A fault of one row's set-up is that row's; one of the step is all's.

        Never raises for a fault of the work: it is in StepResult.errors, for every row it hit.
        """
        started = perf_counter()
        result = StepResult()
        self.commands(batch.commands)
        indices = self.sound_rows(batch.rows, result)
        if indices:
            self.run_rows(batch.rows, indices, result)
        result.device_s = perf_counter() - started
        return result

    def sound_rows(self, rows: list[Row], result: StepResult) -> list[int]:
        """The places of rows that may run; the others' faults go into the result."""
        for i, row in enumerate(rows):
            if row.seq.fault is not None:
                result.errors[i] = row.seq.fault
        return [i for i in range(len(rows)) if i not in result.errors]

    def run_rows(self, rows: list[Row], indices: list[int], result: StepResult) -> None:
        """Carry out some of a batch's rows, at least one."""
        try:
            self._forward(rows, indices, result)
        except Exception as error:
            fail(result, indices, error)

    def commands(self, commands: list[Command]) -> None:
        """Carry out what a batch begins with, in order."""
        for command in commands:
            try:
                self._command(command)
            except Exception as error:  # one sequence's trouble must not lose the others' copies
                logger.exception("a command of a step failed")
                if isinstance(command, Keep | BringPages | BringSnapshot):
                    raise  # the books would speak of bytes that are not there, to anybody
                if not isinstance(command, Release | SetPages):
                    command.seq.fault = f"set-up failed: {type(error).__name__}: {error}"
                    self.on_fault(command.seq.fault)

    def _command(self, command: Command) -> None:
        match command:
            case SetPages(slot, first, pages):
                if first == 0:
                    self.page_table[slot] = -1
                places = int64_tensor(pages, self.page_table.device)
                self.page_table[slot, first : first + len(pages)] = places
            case Admit(seq, slot, num_tokens):
                request = seq.request
                output = seq.token_ids[seq.prompt_len : num_tokens]
                self.sampler.admit(
                    slot,
                    request.params,
                    request.prompt_token_ids,
                    output,
                    request.eos_token_ids,
                    seq.seed,
                )
                self._admitted.add(slot)
            case Release(slot):
                if slot in self._admitted:  # or else that failed
                    self._admitted.remove(slot)
                    self.sampler.release(slot)
            case SwapOut(_, slot, pages, page_blocks, ring_blocks):
                self.kv.pages_to_host(pages, page_blocks)
                self.kv.rings_to_host(slot, ring_blocks)
            case SwapIn(_, slot, pages, page_blocks, ring_blocks):
                self.kv.pages_from_host(pages, page_blocks)
                self.kv.rings_from_host(slot, ring_blocks)
            case Keep(_, None, int(snapshot), blocks, _):
                self.kv.snapshot_to_host(snapshot, blocks)
            case Keep(_, int(page), _, blocks, _):
                self.kv.pages_to_host([page], blocks)
            case BringPages(_, pages, blocks):
                self.kv.pages_from_host(pages, blocks)
            case BringSnapshot(_, snapshot, blocks):
                self.kv.snapshot_from_host(snapshot, blocks)
            case Restore(_, slot, snapshot):
                self.kv.restore_snapshot(slot, snapshot)

    def _forward(self, rows: list[Row], indices: list[int], result: StepResult) -> None:
        active = rows if len(indices) == len(rows) else [rows[i] for i in indices]
        output = self._precise.run(active)
        unserved = dict(self._precise.unserved)
        at = 0  # of this row's logits
        places: dict[int, int] = {}  # place in `active` -> first row of logits to sample from
        for i, row in enumerate(active):
            if row.slot in unserved:
                result.errors[indices[i]] = unserved[row.slot]
            if row.first_logprob >= 0:
                end = at + len(row.targets)
                self._prompt_logprobs(row, indices[i], output.logits[at:end], result)
                at = end
            if row.sample:
                places[i] = at
                at += row.num_samples
        self._sample(active, indices, places, output, result)
        result.num_splits = self._precise.num_splits
        if self._drafter is None:
            self.save_snapshots(active)
        else:
            self._draft(self._drafter, active, indices, output.hidden_states, result)

    def _target(self, inputs: ForwardInput, experts: ExpertProvider) -> ModelOutput:
        return self.model.forward(inputs, self.kv.tensors, experts)

    def save_snapshots(self, rows: list[Row]) -> None:
        """Keep the rings of the sequences that are to be resumed from behind these rows."""
        for row in rows:
            if row.snapshot is not None:
                self.kv.save_snapshot(row.slot, row.snapshot)

    def _draft(
        self,
        drafter: Drafter,
        rows: list[Row],
        indices: list[int],
        hidden_states: Tensor,
        result: StepResult,
    ) -> None:
        """Bring the draft block up to date, save what is to be resumed from, and propose."""
        settled: list[Settled] = []
        owners: list[int] = []
        first = 0
        for row, index in zip(rows, indices, strict=True):
            one = None if index in result.errors else _settled(row, first, result.tokens.get(index))
            first += row.num_tokens
            if one is not None:
                settled.append(one)
                owners.append(index)
        extended = drafter.extend(settled, hidden_states)
        self.save_snapshots(rows)  # before drafts of drafts are written over the oldest rows
        for index, proposals in zip(owners, drafter.propose(settled, extended), strict=True):
            if proposals:
                result.proposals[index] = proposals

    def _prompt_logprobs(self, row: Row, index: int, logits: Tensor, result: StepResult) -> None:
        if self.sampler.not_numbers(logits).any():
            result.errors[index] = NAN_MESSAGE
            result.num_corrupted += 1
            return
        top_n = row.seq.request.params.prompt_logprobs
        assert top_n is not None
        logits = self.sampler.without_padding(logits)
        result.prompt_logprobs[index] = prompt_logprobs(logits, row.targets, top_n)

    def _sample(
        self,
        active: list[Row],
        indices: list[int],
        places: dict[int, int],
        output: ModelOutput,
        result: StepResult,
    ) -> None:
        """Sample, for each row of `places` and then behind each draft of it that holds.

        One depth of all rows at a time, so that the sampler's state is that of the tokens that are
        there, and never has to be taken back. A row that is computed again is its sequence's last.
        """
        depth, logits = 0, output.logits
        going = list(places)
        while going:
            wanted = [places[i] + depth for i in going]
            taken = logits if len(wanted) == len(logits) else logits[wanted]
            again = self._precise.uncertain(
                [active[i] for i in going], depth, taken, self.sampler.without_padding
            )
            if again:
                replaced = [going[n] for n in again]
                new = self._again(active, indices, replaced, depth, output.hidden_states, result)
                taken = taken.clone()
                taken[again] = new
                again = replaced
            bad = self.sampler.not_numbers(taken).nonzero()[:, 0].tolist()
            if bad and depth == 0:
                taken = taken.clone()
                taken[bad] = 0.0
                for place in bad:
                    result.errors[indices[going[place]]] = NAN_MESSAGE
                    result.num_corrupted += 1
            elif bad:  # the next step meets it again, as its first row, if it comes to that
                stay = [place for place in range(len(going)) if place not in set(bad)]
                going, taken = [going[place] for place in stay], taken[stay]
            sampled = set(going)
            going = self._sample_depth(active, indices, going, depth, taken, result)
            for i in sampled.intersection(again):
                active[i].seq.gated.add(position_of(active[i], depth))
            going = [i for i in going if i not in set(again)]
            depth += 1

    def _again(
        self,
        active: list[Row],
        indices: list[int],
        places: list[int],
        depth: int,
        hidden_states: Tensor,
        result: StepResult,
    ) -> Tensor:
        """Compute one position of each of `places` anew; its hidden state replaces the old one.

        Returns logits [len(places), vocab_size].
        """
        output = self._precise.again([active[i] for i in places], depth)
        offsets = [0]
        for row in active:
            offsets.append(offsets[-1] + row.num_tokens)
        at = [offsets[i] + position_of(active[i], depth) - active[i].start for i in places]
        hidden_states[int64_tensor(at, hidden_states.device)] = output.hidden_states
        for i in places:
            message = self._precise.unserved.get(active[i].slot)
            if message is not None:
                result.errors[indices[i]] = message
        return output.logits

    def _sample_depth(
        self,
        active: list[Row],
        indices: list[int],
        going: list[int],
        depth: int,
        logits: Tensor,
        result: StepResult,
    ) -> list[int]:
        """One token for each of `going`; returns those whose draft it is."""
        if not going:
            return []
        rows = [active[i] for i in going]
        slots = int64_tensor([row.slot for row in rows], logits.device)
        first = [row.end - row.num_samples for row in rows]
        positions = int64_tensor([start + depth for start in first], logits.device)
        masks = {n: row.masks[depth] for n, row in enumerate(rows) if row.masks is not None}
        proposals = {
            n: row.proposals[depth] for n, row in enumerate(rows) if depth < row.num_drafts
        }
        drawn = self.sampler.sample(logits, slots, positions, masks, proposals)
        held = []
        for n, token_id in enumerate(drawn.token_ids.tolist()):
            index = indices[going[n]]
            result.tokens.setdefault(index, []).append(token_id)
            logprobs = drawn.logprobs[n]
            if logprobs is not None:
                result.logprobs.setdefault(index, []).append(logprobs)
            if n in proposals and proposals[n].token_id == token_id:
                held.append(going[n])
        return held


def _settled(row: Row, first: int, tokens: list[int] | None) -> Settled | None:
    """What the draft block has to see of a row; None if it does not draft."""
    if row.start >= row.seq.prompt_len and row.seq.num_spec_tokens == 0:
        return None
    if row.num_drafts:
        assert tokens is not None
        return Settled(row.settled(len(tokens)), first, tokens)
    known = row.token_ids or []  # of one row that few know it by, nothing
    if tokens is None:  # if nothing comes behind it, its full pages are still the cache's
        tokens = [known[-1] if row.next_token is None else row.next_token]
    return Settled(row, first, [*known[1:], *tokens])


def fail(result: StepResult, indices: list[int], error: Exception) -> None:
    """The step's sequences end; the engine goes on."""
    logger.error("a step of %d sequences failed", len(indices), exc_info=error)
    message = f"the step failed: {type(error).__name__}: {error}"
    if isinstance(error, torch.OutOfMemoryError):
        traceback.clear_frames(error.__traceback__)  # which hold all that the step had made
        message = failed_step(error)
    result.errors.update(dict.fromkeys(indices, message))
    result.failed = True


NAN_MESSAGE = "the model's logits are not numbers; the request cannot go on"
