"""A dummy model on a GPU with state for many sequences, and steps of it in any company."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from moet.config import ModelSettings
from moet.kernels.device_gemm import Device
from moet.models.base import ExpertProvider
from moet.models.deepseek_v4 import DeepseekV4
from moet.models.dummy import DummyOptions
from moet.models.synthetic import MODEL_NAME
from moet.models.synthetic_design import Size
from moet.runtime.chunk_runner import ChunkRunner
from moet.runtime.chunks import Chunk
from moet.runtime.device_sampler import Kind
from moet.runtime.dummy import dummy_model, preset_config
from moet.runtime.graph_runner import GraphRunner
from moet.runtime.queues import Capture, CpuQueue, CudaQueue, Queue
from moet.runtime.sampler import SamplerState
from moet.runtime.step_tensors import StepRow, StepTensors, fill
from moet.types import SamplingParams

NUM_DRAFTS = 2
GREEDY = SamplingParams(temperature=0.0)


def dummy(size: Size, device: Device) -> tuple[DeepseekV4, ExpertProvider]:
    """A model with all its weights resident, and room for drafts in its rings."""
    raw = preset_config(MODEL_NAME, size)
    settings = ModelSettings(arch=device.arch, rounding="deployed", precision="w2")
    made = dummy_model(
        raw, settings, device, num_spec_tokens=NUM_DRAFTS, options=DummyOptions(skew=0.5)
    )
    return cast(DeepseekV4, made.model), made.experts


def prompt(slot: int, num_tokens: int, vocab_size: int) -> list[int]:
    """Tokens that differ between sequences."""
    return [(37 * i + 101 * slot + 11) % (vocab_size - 2) + 2 for i in range(num_tokens)]


@dataclass
class Steps:
    """num_seqs sequences of `pages_each` pages, on one queue. Pages are dealt out in an order that
    no two sequences share."""

    model: DeepseekV4
    experts: ExpertProvider
    device: Device
    num_seqs: int
    pages_each: int
    queue: Queue = field(init=False)

    def __post_init__(self) -> None:
        where = self.device.torch_device
        self.queue = CpuQueue() if where.type == "cpu" else CudaQueue(where)
        spec = self.model.kv_cache_spec()
        self.page_size = spec.page_size
        num_pages = self.num_seqs * self.pages_each
        sizes = {"paged": num_pages, "ring": self.num_seqs}
        self.kv = {
            g.name: torch.full(
                (len(g.layers), sizes[g.kind], g.page_bytes), 0x7F, dtype=torch.uint8, device=where
            )
            for g in spec.groups
        }
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(1))
        self.table = order.view(self.num_seqs, self.pages_each).to(where)
        self.sampler = SamplerState(self.num_seqs, self.model.vocab_size, where)
        self.chunks = ChunkRunner(
            self.model,
            self.experts,
            self.kv,
            self.sampler.tensors(),
            self.table,
            page_size=self.page_size,
            max_short=1 + NUM_DRAFTS,
            queue=self.queue,
            fault=self.device.error,
            arch=self.device.arch,
        )

    def admit(self, params: Sequence[SamplingParams] | SamplingParams = GREEDY) -> None:
        """Give every slot a sequence."""
        for slot in range(self.num_seqs):
            one = params if isinstance(params, SamplingParams) else params[slot % len(params)]
            self.sampler.admit(slot, one, [1], [], [], seed=100 + slot)
        self.queue.settle()

    def graphs(self, capture: Capture) -> GraphRunner:
        return GraphRunner(
            self.model,
            self.experts,
            self.kv,
            self.sampler.tensors(),
            self.table,
            page_size=self.page_size,
            buckets=(1, 4, self.num_seqs),
            rows_per_seq=(1, 1 + NUM_DRAFTS),
            queue=self.queue,
            capture=capture,
            fault=self.device.error,
            arch=self.device.arch,
        )

    def prefill(self, slot: int, tokens: Sequence[int], sizes: Sequence[int]) -> int:
        """Run a prompt in chunks of these sizes, the last one repeated; its first token."""
        start = made = 0
        for step in range(len(tokens)):
            part = tokens[start : start + sizes[min(step, len(sizes) - 1)]]
            output = self.chunks.launch([Chunk(slot, start, part, Kind.GREEDY)]).result()
            assert output.fault == 0
            made = output.tokens[0][0]
            start += len(part)
            if start >= len(tokens):
                break
        return made

    def logits(
        self, rows: Sequence[StepRow], shape: tuple[int, int], num_pages: int | None = None
    ) -> Tensor:
        """Logits of a step in a bucket, [num_seqs, num_rows, vocab_size], launched piece by piece.

        num_pages: of the page table that the step is handed; None: all.
        """
        self.queue.settle()
        sent = torch.zeros(StepTensors.num_sent(*shape), dtype=torch.int64)
        fill(sent, rows, shape, self.num_seqs)
        with self.queue.working(), torch.inference_mode():
            step = StepTensors(  # here, or its zeros could come after what is sent
                *shape, self.device.torch_device, no_slot=self.num_seqs, arch=self.device.arch
            )
            step.sent.copy_(sent)
            given = step.rows(self.table[:, :num_pages], self.page_size)
            tokens = step.tokens(self.sampler.tensors())
            output = self.model.compute(tokens, given, None, self.kv, self.experts)
            found = output.logits.view(*shape, -1).cpu()
        assert int(self.device.error) == 0
        return found

    def kept(self) -> dict[str, Tensor]:
        """A copy of all state, taken when what is queued is done."""
        self.queue.settle()
        kept = {name: tensor.clone() for name, tensor in self.kv.items()}
        self.queue.settle()
        return kept

    def restore(self, kept: dict[str, Tensor]) -> None:
        for name, tensor in kept.items():
            self.kv[name].copy_(tensor)
        self.queue.settle()
