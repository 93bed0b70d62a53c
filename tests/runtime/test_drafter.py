"""What the draft block is asked: which rows, with which tokens and hidden states, in what order."""

from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from moet.errors import CapacityError
from moet.models.base import ForwardInput, KVCacheSpec, KVGroup, KVTensors, ModelOutput
from moet.runtime.batch import Row
from moet.runtime.drafter import Drafter, Settled
from moet.runtime.kv_cache import KVCache
from moet.runtime.passes import Passes
from moet.runtime.sampler import SamplerState
from moet.types import SamplingParams

PAGE, VOCAB, NUM_SLOTS = 4, 50, 3
SPEC = KVCacheSpec(PAGE, (KVGroup("rows", "paged", (0,), PAGE, 8),))

Asked = list[tuple[int, int, int, float]]  # slot, position, token id, hidden state


@dataclass
class Block:
    """Drafts twice the token of a row, plus one; hidden states grow by 100 with each pass."""

    max_rows: int = 100
    nan_token: int | None = None
    passes: list[Asked] = field(default_factory=list)

    def draft(
        self, inputs: ForwardInput, hidden_states: Tensor, kv: KVTensors, experts: object
    ) -> ModelOutput:
        if len(inputs.token_ids) > self.max_rows:
            raise CapacityError("too many rows")
        asked: Asked = []
        for i, (first, last) in enumerate(pairwise(inputs.cu_seqlens_q)):
            slot = int(inputs.seq_slots[i])
            asked += [
                (slot, int(inputs.positions[n]), int(inputs.token_ids[n]), float(hidden_states[n]))
                for n in range(first, last)
            ]
        self.passes.append(asked)
        drafts = (inputs.token_ids[inputs.logits_indices] * 2 + 1) % VOCAB
        logits = torch.nn.functional.one_hot(drafts, VOCAB).float()
        if self.nan_token is not None:
            logits[inputs.token_ids[inputs.logits_indices] == self.nan_token] = torch.nan
        return ModelOutput(logits, hidden_states + 100)


def _drafter(block: Block) -> Drafter:
    sampler = SamplerState(NUM_SLOTS, VOCAB)
    for slot in range(NUM_SLOTS):
        sampler.admit(slot, SamplingParams(temperature=0.0), [1], [], [], 0)
    kv = KVCache(SPEC, num_pages=30, num_seq_slots=NUM_SLOTS, num_host_blocks=0, num_snapshots=0)
    passes = Passes(
        kv,
        last_token=sampler.last_token,
        page_table=torch.arange(30).view(NUM_SLOTS, 10),
        vocab_size=VOCAB,
    )
    return Drafter(block, SimpleNamespace(), passes, sampler)  # type: ignore[arg-type]


def _settled(
    slot: int, start: int, token_ids: list[int], following: int, *, first: int = 0, drafts: int = 0
) -> Settled:
    row = Row(
        SimpleNamespace(),  # type: ignore[arg-type]
        slot,
        0,
        start,
        len(token_ids),
        token_ids,
        drafts > 0,
        num_to_draft=drafts,
    )
    return Settled(row, first, [*token_ids[1:], following])


def _run(block: Block, settled: list[Settled], num_rows: int) -> list[list[int]]:
    drafter = _drafter(block)
    hidden = torch.arange(num_rows, dtype=torch.float32)[:, None]
    made = drafter.propose(settled, drafter.extend(settled, hidden))
    return [[proposal.token_id for proposal in proposals] for proposals in made]


def test_extends_over_all_rows_then_feeds_itself() -> None:
    block = Block()
    made = _run(block, [_settled(1, 4, [3, 5, 6], 7, drafts=3)], 3)
    assert made == [[15, 31, 13]]
    assert block.passes == [
        [(1, 4, 5, 0.0), (1, 5, 6, 1.0), (1, 6, 7, 2.0)],  # each with the token behind it
        [(1, 7, 15, 102.0)],  # its own draft and hidden state, one position on
        [(1, 8, 31, 202.0)],
    ]


def test_sequences_draft_as_many_as_each_asks_for() -> None:
    block = Block()
    settled = [
        _settled(0, 0, [1, 2], 3, first=0),  # a prompt's chunk
        _settled(1, 4, [8], 9, first=4, drafts=1),
        _settled(2, 9, [4], 5, first=5, drafts=2),
    ]
    assert _run(block, settled, 6) == [[], [19], [11, 23]]
    assert [len(asked) for asked in block.passes] == [4, 1]
    assert [hidden for *_, hidden in block.passes[0]] == [0.0, 1.0, 4.0, 5.0]
    assert block.passes[1] == [(2, 10, 11, 105.0)]


def test_the_row_before_a_page_border_joins_its_own_token() -> None:
    block = Block()
    _run(block, [_settled(0, 2, [20, 21, 22, 23, 24, 25], 26, drafts=1)], 6)
    tokens = {position: token_id for _, position, token_id, _ in block.passes[0]}
    assert tokens == {2: 21, 3: 21, 4: 23, 5: 24, 6: 25, 7: 25}


def test_from_a_page_border_nothing_is_proposed() -> None:
    block = Block()
    assert _run(block, [_settled(0, 6, [5, 6], 7, drafts=3)], 2) == [[]]
    assert len(block.passes) == 1


@pytest.mark.parametrize("max_rows", [1, 2, 3])
def test_passes_are_made_in_parts_where_experts_do_not_fit(max_rows: int) -> None:
    settled = [
        _settled(0, 0, [1, 2, 3, 4, 5], 6, drafts=2),
        _settled(1, 4, [7], 8, first=5, drafts=2),
    ]
    assert _run(Block(max_rows=max_rows), settled, 6) == _run(Block(), settled, 6)


def test_without_room_for_a_row_there_are_no_drafts() -> None:
    assert _run(Block(max_rows=0), [_settled(0, 0, [1, 2], 3, drafts=2)], 2) == [[]]


def test_logits_that_are_not_numbers_end_the_drafts_of_their_sequence_alone() -> None:
    settled = [
        _settled(0, 0, [1], 3, first=0, drafts=3),
        _settled(1, 0, [1], 15, first=1, drafts=3),  # its second draft row has token 31
        _settled(2, 0, [1], 31, first=2, drafts=3),
    ]
    assert _run(Block(nan_token=31), settled, 3) == [[7, 15, 31], [31], []]


def test_no_rows_no_pass() -> None:
    block = Block()
    assert _run(block, [], 0) == []
    assert block.passes == []
