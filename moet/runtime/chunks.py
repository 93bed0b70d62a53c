"""Chunks: consecutive tokens of several sequences in one pass, and where their rows lie. Knows no
model and no sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moet.kernels.rows import Rows
from moet.runtime.device_sampler import Kind
from moet.runtime.queues import Queue, to_queue

ALIGNED = 2  # numbers of 8 bytes: kernels are made anew for tensors that begin elsewhere


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Tokens of one sequence from position `start` on. Its last row samples, if it makes a token;
    kind and masks are that row's.

    next_token: the one behind the last row, if it is known. num_to_draft: tokens to propose behind
    the one that is made; -1: the draft block does not see these rows. Where nothing comes behind
    the last row, that joins its own token, as before a page border: nobody reads it.
    """

    slot: int
    start: int
    token_ids: Sequence[int]
    kind: Kind | None = None  # None: no token is made
    masks: Tensor | None = None
    next_token: int | None = None
    num_to_draft: int = -1
    told: bool = False  # log-probabilities are wanted

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Placed:
    """Where chunks go. page_table: [num_slots, pages] int64 on the queue's device. max_short: rows
    of a sequence that its rings hold beside what these rows need."""

    queue: Queue
    page_table: Tensor
    page_size: int
    max_short: int

    def rows(self, chunks: Sequence[Chunk]) -> tuple[Tensor, Rows]:
        """Tokens of chunks in order, [T] int64, and the model's rows for them."""
        sizes = [len(chunk.token_ids) for chunk in chunks]
        num_rows = sum(sizes)
        values = np.empty((5, -(-num_rows // ALIGNED) * ALIGNED), dtype=np.int64)
        first = 0
        for chunk, size in zip(chunks, sizes, strict=True):
            part = values[:, first : first + size]
            part[0], part[1] = chunk.token_ids, np.arange(chunk.start, chunk.end)
            part[2], part[3], part[4] = chunk.start, chunk.end, chunk.slot
            first += size
        token_ids, positions, starts, ends, slots = self.send(values)[:, :num_rows].unbind(0)
        num_pages = -(-max(chunk.end for chunk in chunks) // self.page_size)
        rows = Rows(
            positions=positions,
            starts=starts,
            ends=ends,
            seq_slots=slots,
            page_rows=slots,
            page_table=self.page_table[:, : self.width(num_pages)],
            page_size=self.page_size,
            short=max(sizes) <= self.max_short,
        )
        return token_ids, rows

    def width(self, num_pages: int) -> int:
        """Columns of the page table that a pass over so many pages sees: kernels are made for each
        width, so these are few."""
        return min(1 << (num_pages - 1).bit_length(), self.page_table.shape[1])

    def widths(self) -> list[int]:
        """All that `width` may say, ascending."""
        most = self.page_table.shape[1]
        return sorted({self.width(1 << n) for n in range(most.bit_length() + 1)})

    def send(self, values: NDArray[np.int64]) -> Tensor:
        """Numbers to the device, without waiting for it."""
        return to_queue(torch.from_numpy(values), self.queue)


def last_rows(chunks: Sequence[Chunk], wanted: Sequence[Chunk]) -> NDArray[np.int64]:
    """Places of the last rows of some of the chunks."""
    ends = np.cumsum([len(chunk.token_ids) for chunk in chunks], dtype=np.int64)
    chosen = [end - 1 for end, chunk in zip(ends, chunks, strict=True) if chunk in wanted]
    return np.array(chosen, dtype=np.int64)


def places(chunks: Sequence[Chunk], wanted: Sequence[Chunk]) -> NDArray[np.int64]:
    """Places of all rows of some of the chunks."""
    chosen = [np.full(len(chunk.token_ids), chunk in wanted) for chunk in chunks]
    return np.flatnonzero(np.concatenate(chosen)).astype(np.int64)
