"""What a model of either kind is to the runtime: its layers of this process, run as a whole or in
parts between which steps of other sequences may run. Knows no layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence

import torch
from torch import Tensor

from moet.kernels.device_gemm import Device
from moet.kernels.rows import Rows
from moet.models.base import ExpertProvider, ForwardInput, KVTensors, ModelOutput, finished
from moet.models.sharding import Shard


class ModelStage(ABC):
    """The layers of this process, whose part of the model `shard` tells.

    dtype: of the states that stages hand on. device: where the weights are; None: in host memory.
    """

    vocab_size: int
    layers: Sequence[object]
    shard: Shard
    dtype: torch.dtype
    device: Device | None

    @property
    def num_parts(self) -> int:
        """Of compute_parts: a layer each. Stages wait for one another, and so have but one."""
        return len(self.layers) if self.shard.num_stages == 1 else 1

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu") if self.device is None else self.device.torch_device

    @abstractmethod
    def rows(self, inputs: ForwardInput) -> Rows:
        """A step's rows as the ops take them, on the device."""

    def forward(self, inputs: ForwardInput, kv: KVTensors, experts: ExpertProvider) -> ModelOutput:
        """As Model.forward."""
        with torch.inference_mode():
            rows, (token_ids, indices) = self.rows(inputs), self._placed(inputs)
            output = self.compute(token_ids, rows, indices, kv, experts)
        return ModelOutput(output.logits.clone(), output.hidden_states)  # may be changed in place

    def draft(
        self, inputs: ForwardInput, hidden_states: Tensor, kv: KVTensors, experts: ExpertProvider
    ) -> ModelOutput:
        """As DraftingModel.draft. Needs num_spec_tokens > 0 at load."""
        with torch.inference_mode():
            rows, (token_ids, indices) = self.rows(inputs), self._placed(inputs)
            output = self.compute_draft(token_ids, rows, indices, hidden_states, kv, experts)
        return ModelOutput(output.logits.clone(), output.hidden_states)

    def compute(
        self,
        token_ids: Tensor,
        rows: Rows,
        logits_indices: Tensor | None,
        kv: KVTensors,
        experts: ExpertProvider,
    ) -> ModelOutput:
        """A step on tensors alone: with rows.short on a GPU no decision is the host's, so that it
        can be captured. token_ids: [n] int64. logits_indices: as in ForwardInput; None: all rows.
        """
        return finished(self.compute_parts(token_ids, rows, logits_indices, kv, experts))

    @abstractmethod
    def compute_parts(
        self,
        token_ids: Tensor,
        rows: Rows,
        logits_indices: Tensor | None,
        kv: KVTensors,
        experts: ExpertProvider,
    ) -> Generator[None, None, ModelOutput]:
        """`compute`, which stops between its parts: steps of other sequences may run there."""

    @abstractmethod
    def compute_draft(
        self,
        token_ids: Tensor,
        rows: Rows,
        logits_indices: Tensor | None,
        hidden_states: Tensor,
        kv: KVTensors,
        experts: ExpertProvider,
    ) -> ModelOutput:
        """`draft` as `compute` is `forward`."""

    def _placed(self, inputs: ForwardInput) -> tuple[Tensor, Tensor]:
        """Token ids and the rows whose logits are wanted, on the device."""
        device = self.torch_device
        return inputs.token_ids.to(device), inputs.logits_indices.to(device)

    def _received(self, *shape: int) -> Tensor:
        """The states of this shape that the stage before hands on."""
        like = torch.empty(shape, dtype=self.dtype, device=self.torch_device)
        return self.shard.comm.receive(like)

    def _logits(
        self, head: Callable[[Tensor], Tensor] | None, hidden_states: Tensor, indices: Tensor | None
    ) -> Tensor:
        """Those of the last stage, on every stage; other stages have no head.

        hidden_states: of all rows; indices: the rows whose logits are wanted; None: all.
        """
        wanted = hidden_states if indices is None else hidden_states[indices]
        if head is None:
            shape = len(wanted), self.vocab_size
            logits = torch.empty(shape, dtype=torch.float32, device=self.torch_device)
        else:
            logits = head(wanted)
        return self.shard.comm.from_last(logits)
