"""A model with its state and nothing around it: the same decode step over and over."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from moet.config import KVDtype, ModelSettings
from moet.errors import ConfigError
from moet.kernels.registry import Watch, watching
from moet.models import load_model
from moet.models.base import ExpertProvider, ForwardInput, KVTensors, Model
from moet.models.moe import UnpackedExperts
from moet.models.pack import Pack
from moet.runtime.experts.store import ResidentExpertStore
from moet.runtime.loader import open_pack

PREFILL_TOKENS = 512  # of one sequence in a step, while the rig is filled


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """num_seqs sequences of `context` tokens, num_rows new tokens of each in a step."""

    num_seqs: int
    num_rows: int
    context: int

    def __post_init__(self) -> None:
        for flag, value in (
            ("--batch", self.num_seqs),
            ("--rows", self.num_rows),
            ("--context", self.context),
        ):
            if value < 1:
                raise ConfigError(f"{flag} is {value}; it must be at least 1")


def load(
    pack: Pack, settings: ModelSettings, kv_dtype: KVDtype, watch: Watch | None = None
) -> tuple[Model, ExpertProvider]:
    """A pack's model and its experts, all in memory. watch: put before every op of the model."""

    def built() -> Model:
        return load_model(pack.config, pack, settings, kv_dtype)

    if watch is None:
        model = built()
    else:
        with watching(watch):
            model = built()
    return model, ResidentExpertStore(pack, settings.precision)


def pack_of(model: str) -> Pack:
    """The pack of a model by name, made if there is none."""
    return open_pack(model, lambda stage, done: None)


class StepRig:
    """Sequences that were prefilled with random tokens, and one step that can be repeated.

    A step writes the state of the same positions each time, so that every one does the same work;
    with one row its result repeats too (more rows overwrite what rings still need).
    unpacked: experts in fp32, unpacked once, as the engine has them where memory allows.
    """

    def __init__(
        self, model: Model, experts: ExpertProvider, shape: Shape, *, unpacked: bool = True
    ) -> None:
        total = shape.context + shape.num_rows
        if total > model.max_position_embeddings:
            raise ConfigError(
                f"--context {shape.context} and --rows {shape.num_rows} end at {total}; the "
                f"model's positions end at {model.max_position_embeddings}"
            )
        spec = model.kv_cache_spec()
        self.shape, self.model = shape, model
        self.experts: ExpertProvider = UnpackedExperts(experts) if unpacked else experts
        self._pages_each = -(-total // spec.page_size)
        sizes = {"paged": shape.num_seqs * self._pages_each, "ring": shape.num_seqs}
        self.kv: KVTensors = {
            group.name: torch.zeros(
                len(group.layers), sizes[group.kind], group.page_bytes, dtype=torch.uint8
            )
            for group in spec.groups
        }
        draw = random.Random(0)
        self._tokens = [
            [draw.randrange(model.vocab_size) for _ in range(total)] for _ in range(shape.num_seqs)
        ]
        self._fill()
        every = range(shape.num_seqs)
        self._inputs = self._input(every, shape.context, total, logits=True)

    def step(self) -> Tensor:
        """Run the step. Returns logits [num_seqs * num_rows, vocab_size] fp32."""
        with torch.inference_mode():
            return self.model.forward(self._inputs, self.kv, self.experts).logits

    def _fill(self) -> None:
        with torch.inference_mode():
            for seq in range(self.shape.num_seqs):
                for start in range(0, self.shape.context, PREFILL_TOKENS):
                    end = min(start + PREFILL_TOKENS, self.shape.context)
                    inputs = self._input([seq], start, end, logits=False)
                    self.model.forward(inputs, self.kv, self.experts)

    def _input(
        self, seqs: range | list[int], start: int, end: int, *, logits: bool
    ) -> ForwardInput:
        """Positions start..end-1 of each of the sequences."""
        width = end - start
        positions = torch.arange(start, end).repeat(len(seqs))
        pages = torch.arange(self.shape.num_seqs * self._pages_each).view(-1, self._pages_each)
        num_rows = width * len(seqs)
        return ForwardInput(
            token_ids=torch.tensor([t for seq in seqs for t in self._tokens[seq][start:end]]),
            positions=positions,
            cu_seqlens_q=tuple(range(0, num_rows + 1, width)),
            seq_slots=torch.tensor(list(seqs)),
            page_table=pages[list(seqs)],
            seq_lens=(end,) * len(seqs),
            logits_indices=torch.arange(num_rows if logits else 0),
        )
