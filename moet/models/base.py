"""What the runtime and a model agree on: the input of a step, the state a model keeps, the experts
it reads. Nothing here knows a particular model, a request or a memory budget."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from moet.errors import ConfigError
from moet.kernels.moe import ExpertTable

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class ForwardInput:
    """One step: `num_tokens` rows of `num_seqs` sequences, each sequence's rows adjacent.

    token_ids, positions: [num_tokens] int64; positions are absolute and ascend by one per sequence.
    cu_seqlens_q: num_seqs + 1 row offsets; sequence i owns rows cu_seqlens_q[i]:cu_seqlens_q[i+1].
    seq_slots: [num_seqs] int64, each sequence's place in the ring groups.
    page_table: [num_seqs, max_pages] int64; page n of sequence i holds its tokens
        n*page_size..(n+1)*page_size-1; unused places are -1.
    seq_lens: tokens of each sequence after this step.
    logits_indices: [num_logits] int64, the rows whose logits are wanted, ascending.
    """

    token_ids: Tensor
    positions: Tensor
    cu_seqlens_q: tuple[int, ...]
    seq_slots: Tensor
    page_table: Tensor
    seq_lens: tuple[int, ...]
    logits_indices: Tensor


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """logits: [num_logits, vocab_size] fp32. hidden_states: [num_tokens, ...], for a drafter."""

    logits: Tensor
    hidden_states: Tensor


@dataclass(frozen=True, slots=True)
class KVGroup:
    """State of one kind, kept by some of the layers, as raw bytes.

    kind "paged": grows with the sequence; page p of the pool holds the `entries_per_page` entries
    that belong to the tokens of that page. kind "ring": fixed size per sequence; a sequence slot
    holds `entries_per_page` entries and position p's entry is entry p % entries_per_page, so a
    ring's bytes mean the same in any slot. `resume` (ring): whether these bytes are needed to go on
    from a page border. How an entry is encoded is the model's affair; `page_bytes` is all the
    runtime sees. `held`: the layers that this process keeps, if it is a stage of a pipeline.
    """

    name: str
    kind: Literal["paged", "ring"]
    layers: tuple[int, ...]
    entries_per_page: int
    page_bytes: int
    resume: bool = False
    held: tuple[int, ...] | None = None  # None: all

    @property
    def held_layers(self) -> tuple[int, ...]:
        return self.layers if self.held is None else self.held

    @property
    def held_bytes(self) -> int:
        """Bytes of a page, or of a sequence slot, over the layers that are kept here."""
        return self.page_bytes * len(self.held_layers)


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """All state of a model. `page_size` is in tokens and a multiple of every compression ratio.

    max_short: rows of a sequence in one decode step that every ring has room for; None: any number.
    """

    page_size: int
    groups: tuple[KVGroup, ...]
    max_short: int | None = None

    def require_room(self, num_rows: int) -> None:
        """Raise ConfigError if a step of so many rows of a sequence writes over what it reads."""
        if self.max_short is not None and num_rows > self.max_short:
            raise ConfigError(
                f"steps are to have {num_rows} rows of a sequence, but the model's rings have room "
                f"for {self.max_short}; load it for {num_rows - 1} draft tokens (--spec-tokens)"
            )

    @property
    def bytes_per_page(self) -> int:
        """Bytes that one page of the pool takes over all layers."""
        return sum(g.page_bytes * len(g.layers) for g in self.groups if g.kind == "paged")

    @property
    def bytes_per_seq(self) -> int:
        """Bytes that one sequence slot takes over all layers."""
        return sum(g.page_bytes * len(g.layers) for g in self.groups if g.kind == "ring")


KVTensors = Mapping[str, Tensor]
"""Group name -> uint8 [len(held_layers), num_pages or num_seq_slots, page_bytes]."""


class TensorSource(Protocol):
    """Named weights with their dtypes as stored: a checkpoint, a pack, or tensors in memory."""

    def names(self) -> Iterable[str]: ...

    def load(self, name: str) -> Tensor: ...


class ExpertProvider(Protocol):
    """Where a layer's routed experts are. The runtime implements it; the model only asks."""

    def resolve(self, layer_idx: int, expert_ids: Tensor) -> ExpertTable:
        """Make the experts in expert_ids ([num_tokens, top_k] int64) readable and say where.

        The returned table is valid until the next call. Raises CapacityError if they cannot all
        be resident at once.
        """
        ...


@runtime_checkable
class ResidentProvider(ExpertProvider, Protocol):
    """A provider that has every expert on the device for good, so that no step need ask for one."""

    def resident(self, layer_idx: int, num_rows: int = 1) -> ExpertTable:
        """The table of a layer for a step of num_rows rows, as long as that step."""
        ...


class Model(Protocol):
    """Tensors to logits. Stateless between calls: all state is in the KV tensors it is handed."""

    vocab_size: int
    max_position_embeddings: int

    def kv_cache_spec(self) -> KVCacheSpec: ...

    def forward(self, inputs: ForwardInput, kv: KVTensors, experts: ExpertProvider) -> ModelOutput:
        """Run one step and write its state into kv.

        The result of a row depends only on its own sequence's tokens up to that row, bit for bit
        on the reference ops: not on other rows, on chunk borders, or on page and slot numbers.
        """
        ...


class DraftingModel(Model, Protocol):
    """A model that was built for drafts."""

    def draft(
        self, inputs: ForwardInput, hidden_states: Tensor, kv: KVTensors, experts: ExpertProvider
    ) -> ModelOutput:
        """Run the draft block on rows whose hidden states are known, and write its state into kv.

        inputs.token_ids are those at positions + 1. hidden_states: [num_tokens, ...] at positions,
        of `forward` or of a previous draft. Logits are those of the token at positions + 2.
        """
        ...


def finished(parts: Generator[None, None, Made]) -> Made:
    """What work makes that stops between its parts, carried out to its end."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            made: Made = end.value
            return made
