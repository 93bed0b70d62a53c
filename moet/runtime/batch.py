"""Batch: what one step does, decided by the scheduler and carried out by a runner.

A batch is made on the host before the results of the step in flight are known, and carried out in
order after it. It therefore holds values, not references to things the scheduler goes on changing;
a decode row whose token is still being sampled says so, and takes it from the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from moet.models.base import ForwardInput
from moet.runtime.sampler import Proposal
from moet.runtime.sequence import Sequence
from moet.types import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Admit:
    """A sequence takes its slot: its sampling state is set up."""

    seq: Sequence
    slot: int
    num_tokens: int  # of seq.token_ids, known when the batch was made


@dataclass(frozen=True, slots=True)
class Release:
    """A slot's sampling state is cleared."""

    slot: int


@dataclass(frozen=True, slots=True)
class SetPages:
    """Page-table row `slot` holds `pages` from place `first` on."""

    slot: int
    first: int
    pages: list[int]


@dataclass(frozen=True, slots=True)
class SwapOut:
    """Pages and rings of a preempted sequence go to host blocks."""

    seq: Sequence
    slot: int
    pages: list[int]
    page_blocks: list[int]
    ring_blocks: list[int]


@dataclass(frozen=True, slots=True)
class SwapIn:
    """Pages and rings come back from host blocks."""

    seq: Sequence
    slot: int
    pages: list[int]
    page_blocks: list[int]
    ring_blocks: list[int]


@dataclass(frozen=True, slots=True)
class Restore:
    """A slot's resumable rings are set from a snapshot of the prefix cache."""

    seq: Sequence
    slot: int
    snapshot: int


@dataclass(frozen=True, slots=True)
class Keep:
    """A cached page, or a snapshot, is copied into host blocks; `save`: to be written to disk."""

    name: str
    page: int | None
    snapshot: int | None
    blocks: list[int]
    save: bool


@dataclass(frozen=True, slots=True)
class BringPages:
    """Cached pages come back from one host block each."""

    seq: Sequence
    pages: list[int]
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class BringSnapshot:
    """A snapshot comes back from host blocks."""

    seq: Sequence
    snapshot: int
    blocks: list[int]


Command = (
    Admit | Release | SetPages | SwapOut | SwapIn | Restore | Keep | BringPages | BringSnapshot
)


@dataclass(slots=True)  # never changed, but freezing costs more than all else in making one
class Row:
    """Consecutive rows of one sequence: positions start..start+num_tokens-1.

    token_ids None: one row, whose token is the slot's newest on the device. `sample`: the last row
    makes a token. Rows from first_logprob (-1: none) to the end of the prompt report prompt
    log-probabilities of the tokens in `targets`. `snapshot`: save the rings under this id after
    the step. `epoch`: of the sequence when the batch was made.

    The last num_drafts of token_ids are drafts, made of `proposals`; then every row makes a token
    as long as the drafts before it hold. `masks`: what a sequence with a grammar may sample, one
    per row that makes a token, as in runtime/grammar.py. `next_token`: the one behind the last row,
    if it is known. `num_to_draft`: tokens to be proposed for the sequence's next step.
    `num_samples`: how many of the last rows may make a token.
    """

    seq: Sequence
    slot: int
    epoch: int
    start: int
    num_tokens: int
    token_ids: list[int] | None
    sample: bool
    first_logprob: int = -1
    targets: list[int] = field(default_factory=list)
    snapshot: int | None = None
    proposals: tuple[Proposal, ...] = ()
    masks: Tensor | None = None
    next_token: int | None = None
    num_to_draft: int = 0
    end: int = field(init=False)
    num_drafts: int = field(init=False)
    num_samples: int = field(init=False)

    def __post_init__(self) -> None:
        self.end = self.start + self.num_tokens
        self.num_drafts = len(self.proposals)
        self.num_samples = 1 + self.num_drafts if self.sample else 0

    def settled(self, num_tokens: int) -> Row:
        """The rows of a drafted row that hold, once that is known."""
        assert self.token_ids is not None
        return replace(
            self, num_tokens=num_tokens, token_ids=self.token_ids[:num_tokens], proposals=()
        )

    def halves(self) -> tuple[Row, Row]:
        """The same rows (at least two) in two parts."""
        return self.split(self.start + self.num_tokens // 2)

    def split(self, middle: int) -> tuple[Row, Row]:
        """The rows up to a position and the rest; what follows the last one stays with it."""
        assert self.token_ids is not None
        num_tokens = middle - self.start
        drafted = self.num_drafts > 0  # then every row of both parts makes a token
        num_targets = max(0, middle - self.first_logprob) if self.first_logprob >= 0 else 0
        front, back = self.targets[:num_targets], self.targets[num_targets:]
        first = replace(
            self,
            num_tokens=num_tokens,
            token_ids=self.token_ids[:num_tokens],
            sample=drafted,
            first_logprob=self.first_logprob if front else -1,
            targets=front,
            snapshot=None,
            proposals=self.proposals[: num_tokens - 1] if drafted else (),
        )
        second = replace(
            self,
            start=middle,
            num_tokens=self.num_tokens - num_tokens,
            token_ids=self.token_ids[num_tokens:],
            first_logprob=max(self.first_logprob, middle) if back else -1,
            targets=back,
            proposals=self.proposals[num_tokens:],
        )
        return first, second


@dataclass(slots=True)
class Batch:
    """Commands first, in order, then one forward pass over the rows (which may be none).

    The first num_decoding rows are those of sequences that decode.

    A pass over prompts may be divided into parts that several steps carry, beside others' rows: the
    first of these batches names its rows in `begins`, each says how many parts it carries, and the
    one that ends it has them among its rows. One that ends it without a part gives it up: nobody
    waits for it any more.
    """

    commands: list[Command]
    rows: list[Row]
    num_decoding: int = 0
    begins: list[Row] = field(default_factory=list)
    num_parts: int = 0
    num_rows_passing: int = 0  # of the pass that num_parts are of
    ends_pass: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @property
    def num_prefill_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows[self.num_decoding :])


@dataclass(slots=True)
class StepResult:
    """What a step made, by row of the batch.

    tokens: row index -> new token ids of the rows that sample, with drafts one more than held.
    proposals: row index -> drafts behind these. errors: row index -> why the row's sequence cannot
    go on (its entry in tokens, if any, means nothing).
    """

    tokens: dict[int, list[int]] = field(default_factory=dict)
    proposals: dict[int, tuple[Proposal, ...]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    num_corrupted: int = 0  # rows among the errors whose logits were not numbers
    num_splits: int = 0  # forward passes made in halves, as their experts did not fit together
    failed: bool = False  # the step itself
    device_s: float = 0.0


def forward_input(
    rows: list[Row], *, last_token: Tensor, page_table: Tensor, page_size: int
) -> ForwardInput:
    """Build the model's input for the rows of a step (at least one).

    last_token: [num_slots] int64, newest token of each slot. page_table: [num_slots, max_pages]
    int64, by slot; its columns are cut to what the longest row needs.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    offsets = [0]
    wanted: list[int] = []
    from_device: list[int] = []
    for row in rows:
        offset = offsets[-1]
        if row.token_ids is None:
            from_device.append(offset)
            token_ids.append(0)
            positions.append(row.start)
        else:
            token_ids += row.token_ids
            positions += range(row.start, row.start + row.num_tokens)
        if row.first_logprob >= 0:
            first = offset + row.first_logprob - row.start
            wanted += range(first, first + len(row.targets))
        offsets.append(offset + row.num_tokens)
        wanted += range(offsets[-1] - row.num_samples, offsets[-1])
    device = last_token.device
    seq_slots = int64_tensor([row.slot for row in rows], device)
    if len(from_device) == len(token_ids):
        tokens = last_token.index_select(0, seq_slots)
    else:
        tokens = int64_tensor(token_ids, device)
        if from_device:
            slots = int64_tensor([row.slot for row in rows if row.token_ids is None], device)
            tokens[int64_tensor(from_device, device)] = last_token.index_select(0, slots)
    seq_lens = tuple([row.start + row.num_tokens for row in rows])
    num_pages = -(-max(seq_lens) // page_size)
    return ForwardInput(
        token_ids=tokens,
        positions=int64_tensor(positions, device),
        cu_seqlens_q=tuple(offsets),
        seq_slots=seq_slots,
        page_table=page_table[:, :num_pages].index_select(0, seq_slots),
        seq_lens=seq_lens,
        logits_indices=int64_tensor(wanted, device),
    )


def int64_tensor(values: list[int], device: torch.device) -> Tensor:
    """[n] int64; through numpy, which takes a third of torch.tensor's time for short lists.

    A device is sent them without waiting for what it is doing.
    """
    tensor = torch.from_numpy(np.array(values, dtype=np.int64))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
