"""Carries out a Batch, eagerly: copies, forward pass, sampling. Decides nothing about requests."""

from __future__ import annotations

import logging
import math
from time import perf_counter

import torch
from torch import Tensor

from moet.errors import CapacityError
from moet.models.base import ExpertProvider, Model
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
    forward_input,
    int64_tensor,
)
from moet.runtime.kv_cache import KVCache
from moet.runtime.sampler import SamplerState, prompt_logprobs

logger = logging.getLogger(__name__)


class ModelRunner:
    """One model with its state. `run` is called for one batch at a time, in order."""

    def __init__(
        self,
        model: Model,
        experts: ExpertProvider,
        kv: KVCache,
        sampler: SamplerState,
        *,
        num_seq_slots: int,
        max_pages_per_seq: int,
    ) -> None:
        self.model = model
        self.experts = experts
        self.kv = kv
        self.sampler = sampler
        self._admitted: set[int] = set()
        self.page_table = torch.full((num_seq_slots, max_pages_per_seq), -1, dtype=torch.int64)

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepResult:
        """Carry out a batch. A fault of one row's set-up is that row's; one of the step is all's.

        Never raises for a fault of the work: it is in StepResult.errors, for every row it hit.
        """
        started = perf_counter()
        result = StepResult()
        self._commands(batch.commands)
        rows = batch.rows
        for i, row in enumerate(rows):
            if row.seq.fault is not None:
                result.errors[i] = row.seq.fault
        indices = [i for i in range(len(rows)) if i not in result.errors]
        if indices:
            try:
                self._forward(rows, indices, result)
            except Exception as error:  # the step's sequences end; the engine goes on
                logger.exception("a step of %d sequences failed", len(indices))
                message = f"the step failed: {type(error).__name__}: {error}"
                result.errors.update(dict.fromkeys(indices, message))
                result.failed = True
        result.device_s = perf_counter() - started
        return result

    def _commands(self, commands: list[Command]) -> None:
        for command in commands:
            try:
                self._command(command)
            except Exception as error:  # one sequence's trouble must not lose the others' copies
                logger.exception("a command of a step failed")
                if isinstance(command, Keep):
                    raise  # the books would speak of bytes that are not there
                if not isinstance(command, Release | SetPages):
                    command.seq.fault = f"set-up failed: {type(error).__name__}: {error}"

    def _command(self, command: Command) -> None:
        match command:
            case SetPages(slot, first, pages):
                if first == 0:
                    self.page_table[slot] = -1
                self.page_table[slot, first : first + len(pages)] = torch.tensor(pages)
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
        unserved: dict[int, str] = {}
        logits = self._logits(active, unserved, result)
        at = 0  # of this row's logits
        sampled: list[int] = []  # places in `active`
        places: list[int] = []  # their rows of logits
        for i, row in enumerate(active):
            if row.slot in unserved:
                result.errors[indices[i]] = unserved[row.slot]
            if row.snapshot is not None:
                self.kv.save_snapshot(row.slot, row.snapshot)
            if row.first_logprob >= 0:
                end = at + len(row.targets)
                self._prompt_logprobs(row, indices[i], logits[at:end], result)
                at = end
            if row.sample:
                sampled.append(i)
                places.append(at)
                at += 1
        if sampled:
            if len(places) < len(logits):
                logits = logits[places]
            self._sample(active, indices, sampled, logits, result)

    def _logits(self, rows: list[Row], unserved: dict[int, str], result: StepResult) -> Tensor:
        """Logits of the rows that want them, in order: [n, vocab_size].

        If the experts of the rows are not resident together, the pass is made in halves, down to
        one row; for slots put into `unserved`, with the reason, even that failed. A pass that
        failed has spoilt the rings of longer rows, which are put back; one row may run again.
        """
        chunks = [row.slot for row in rows if row.num_tokens > 1]
        rings = self.kv.copy_rings(chunks)
        inputs = forward_input(
            rows,
            last_token=self.sampler.last_token,
            page_table=self.page_table,
            page_size=self.kv.spec.page_size,
        )
        try:
            return self.model.forward(inputs, self.kv.tensors, self.experts).logits
        except CapacityError as error:
            message = f"the experts of a single token do not fit: {error}"
        self.kv.put_rings(chunks, rings)
        if len(rows) == 1 and rows[0].num_tokens == 1:
            unserved[rows[0].slot] = message
            return self._no_logits(rows)
        result.num_splits += 1
        if len(rows) > 1:
            middle = len(rows) // 2
            first, second = rows[:middle], rows[middle:]
        else:
            first, second = ([half] for half in rows[0].halves())
        before = self._logits(first, unserved, result)
        if len(rows) == 1 and rows[0].slot in unserved:
            after = self._no_logits(second)
        else:
            after = self._logits(second, unserved, result)
        return torch.cat([before, after])

    def _no_logits(self, rows: list[Row]) -> Tensor:
        num_wanted = sum(len(row.targets) + row.sample for row in rows)
        return torch.zeros(
            (num_wanted, self.model.vocab_size), device=self.sampler.last_token.device
        )

    def _prompt_logprobs(self, row: Row, index: int, logits: Tensor, result: StepResult) -> None:
        if not_a_number(logits).any():
            result.errors[index] = NAN_MESSAGE
            result.num_corrupted += 1
            return
        top_n = row.seq.request.params.prompt_logprobs
        assert top_n is not None
        result.prompt_logprobs[index] = prompt_logprobs(logits, row.targets, top_n)

    def _sample(
        self,
        active: list[Row],
        indices: list[int],
        sampled: list[int],
        logits: Tensor,
        result: StepResult,
    ) -> None:
        if math.isnan(logits.sum().item()):  # some row, most likely
            bad = not_a_number(logits)
            logits = logits.masked_fill(bad[:, None], 0.0)
            for place in bad.nonzero()[:, 0].tolist():
                result.errors[indices[sampled[place]]] = NAN_MESSAGE
                result.num_corrupted += 1
        slots = int64_tensor([active[i].slot for i in sampled], logits.device)
        positions = int64_tensor([active[i].end - 1 for i in sampled], logits.device)
        masks = {
            place: mask for place, i in enumerate(sampled) if (mask := active[i].mask) is not None
        }
        drawn = self.sampler.sample(logits, slots, positions, masks)
        for place, token_id in enumerate(drawn.token_ids.tolist()):
            index = indices[sampled[place]]
            result.tokens[index] = token_id
            logprobs = drawn.logprobs[place]
            if logprobs is not None:
                result.logprobs[index] = logprobs


NAN_MESSAGE = "the model's logits are not numbers; the request cannot go on"


def not_a_number(logits: Tensor) -> Tensor:
    """Which rows hold a NaN (or both infinities). logits: [n, vocab_size]; returns [n] bool."""
    return logits.sum(-1).isnan()
