"""One pass of a model over the rows of a step, in parts where the experts of all rows do not fit
together or one of them cannot be read. Knows nothing of what the logits are for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moet.errors import CapacityError, ExpertReadError
from moet.models.base import ForwardInput, ModelOutput
from moet.runtime.batch import Row, forward_input
from moet.runtime.kv_cache import KVCache

Call = Callable[[ForwardInput, slice], ModelOutput]
"""Runs a model on an input whose tokens are this slice of those of the whole pass."""


class Passes:
    """Runs passes; `unserved` has the slots that the last one failed for, with the reason."""

    def __init__(
        self, kv: KVCache, *, last_token: Tensor, page_table: Tensor, vocab_size: int
    ) -> None:
        self.kv = kv
        self.last_token = last_token
        self.page_table = page_table
        self.vocab_size = vocab_size
        self.unserved: dict[int, str] = {}
        self.num_splits = 0

    def run(self, rows: list[Row], call: Call) -> ModelOutput:
        """Run `call` over the rows (at least one). For slots in `unserved` the output is zero.

        If the experts of the rows are not to be had together, the pass is made in halves, down to
        one row. A pass that failed has spoilt the rings of longer rows, which are put back; one row
        may run again.
        """
        self.unserved, self.num_splits = {}, 0
        parts = self._run(rows, call, 0)
        if len(parts) == 1 and parts[0][1] is not None:
            return parts[0][1]
        known = [output for _, output in parts if output is not None]
        logits, hidden = [], []
        for part, output in parts:
            if output is not None:
                logits.append(output.logits)
                hidden.append(output.hidden_states)
                continue
            num_tokens = sum(row.num_tokens for row in part)
            shape = known[0].hidden_states.shape[1:] if known else (1,)
            dtype = known[0].hidden_states.dtype if known else torch.float32
            device = self.last_token.device
            logits.append(torch.zeros((_num_logits(part), self.vocab_size), device=device))
            hidden.append(torch.zeros((num_tokens, *shape), dtype=dtype, device=device))
        return ModelOutput(torch.cat(logits), torch.cat(hidden))

    def _run(
        self, rows: list[Row], call: Call, first: int
    ) -> list[tuple[Sequence[Row], ModelOutput | None]]:
        chunks = [row.slot for row in rows if row.num_tokens > 1]
        rings = self.kv.copy_rings(chunks)
        inputs = forward_input(
            rows,
            last_token=self.last_token,
            page_table=self.page_table,
            page_size=self.kv.spec.page_size,
        )
        num_tokens = inputs.cu_seqlens_q[-1]
        try:
            return [(rows, call(inputs, slice(first, first + num_tokens)))]
        except CapacityError as error:
            message = f"the experts of a single token do not fit: {error}"
        except ExpertReadError as error:  # halves find the tokens that need that expert
            message = str(error)
        self.kv.put_rings(chunks, rings)
        if len(rows) == 1 and rows[0].num_tokens == 1:
            self.unserved[rows[0].slot] = message
            return [(rows, None)]
        self.num_splits += 1
        if len(rows) > 1:
            middle = len(rows) // 2
            front, back = rows[:middle], rows[middle:]
        else:
            front, back = ([half] for half in rows[0].halves())
        before = self._run(front, call, first)
        if len(rows) == 1 and rows[0].slot in self.unserved:
            return [*before, (back, None)]
        return before + self._run(back, call, first + sum(row.num_tokens for row in front))


def _num_logits(rows: Sequence[Row]) -> int:
    return sum(len(row.targets) + row.num_samples for row in rows)
