"""Parameters plus a bound op: what every model is made of. Knows dtypes as checkpoints store them,
and no model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moet.config import ModelSettings
from moet.errors import CheckpointError
from moet.kernels.gemm import linear, linear_fp8, linear_fp32, streamed
from moet.kernels.norm import rms_norm
from moet.models.base import TensorSource
from moet.models.formats import dequantize_fp8_block


class Weights:
    """Reads tensors of a source under a name prefix and checks their shapes."""

    def __init__(self, source: TensorSource, settings: ModelSettings, prefix: str = "") -> None:
        self.source = source
        self.settings = settings
        self.prefix = prefix
        self.device = torch.device("cpu" if settings.arch == "reference" else "cuda")
        self._names = frozenset(source.names())

    def under(self, prefix: str) -> Weights:
        """The same source seen from a longer prefix."""
        inner = object.__new__(Weights)
        inner.source, inner.settings, inner._names = self.source, self.settings, self._names
        inner.device, inner.prefix = self.device, self.prefix + prefix
        return inner

    def has(self, name: str) -> bool:
        return self.prefix + name in self._names

    def tensor(self, name: str, *shape: int) -> Tensor:
        """The stored tensor, on the device of the ops.

        Raises CheckpointError if it is absent or has another shape.
        """
        full = self.prefix + name
        if full not in self._names:
            raise CheckpointError(f"the checkpoint has no {full}; its shape should be {shape}")
        value = self.source.load(full)
        if tuple(value.shape) != shape:
            raise CheckpointError(f"{full} is {tuple(value.shape)}; config.json makes it {shape}")
        return value.to(self.device)

    def fp32(self, name: str, *shape: int) -> Tensor:
        """An unquantised tensor as fp32."""
        return self.tensor(name, *shape).float().contiguous()

    def matrix(self, name: str, num_out: int, num_in: int) -> tuple[Tensor, bool]:
        """`name`.weight in fp32, exact, and whether it is stored in fp8 with a scale beside.

        The scale is `name`.scale or `name`.weight_scale_inv, one factor per 128 x 128 weights.
        """
        weight = self.tensor(f"{name}.weight", num_out, num_in)
        if weight.dtype != torch.float8_e4m3fn:
            return streamed(weight.float()), False
        for scale_name in (f"{name}.scale", f"{name}.weight_scale_inv"):
            if self.has(scale_name):
                scale = self.source.load(self.prefix + scale_name).to(self.device)
                return streamed(dequantize_fp8_block(weight, scale)), True
        raise CheckpointError(f"{self.prefix}{name}.weight is fp8 but there is no scale beside it")

    def linear(self, name: str, num_out: int, num_in: int) -> Linear:
        """A layer whose arithmetic follows from how its weight is stored."""
        weight, quantised = self.matrix(name, num_out, num_in)
        return Linear(weight, settings=self.settings, quantised=quantised)

    def norm(self, name: str, dim: int, *, eps: float) -> RMSNorm:
        return RMSNorm(self.fp32(f"{name}.weight", dim), eps=eps, arch=self.settings.arch)


class Linear:
    """x @ weight.T in the dtype of x; activations of an fp8 weight are rounded to fp8 if deployed.

    weight: [num_out, num_in] fp32.
    """

    def __init__(self, weight: Tensor, *, settings: ModelSettings, quantised: bool) -> None:
        self.weight = weight
        self.settings = settings
        self.quantised = quantised
        num_out, num_in = weight.shape
        chosen = linear_fp8 if quantised and settings.rounding == "deployed" else linear
        self._op = chosen.bind(arch=settings.arch, num_out=num_out, num_in=num_in)

    def __call__(self, x: Tensor) -> Tensor:
        return self._op(x, self.weight)

    @classmethod
    def stacked(cls, parts: Sequence[Linear]) -> Linear:
        """Layers of one input as one layer, their outputs side by side.

        Raises CheckpointError if some are quantised and others are not.
        """
        first = parts[0]
        if any(part.quantised != first.quantised for part in parts):
            shapes = [tuple(part.weight.shape) for part in parts]
            raise CheckpointError(f"of the matrices {shapes} some are fp8 and some are not")
        weight = streamed(torch.cat([part.weight for part in parts]))
        return cls(weight, settings=first.settings, quantised=first.quantised)


class RMSNorm:
    """weight: [dim] fp32, or None."""

    def __init__(self, weight: Tensor | None, *, eps: float, arch: str) -> None:
        self.weight = weight
        self.eps = eps
        self._op = rms_norm.bind(arch=arch)

    def __call__(self, x: Tensor) -> Tensor:
        return self._op(x, self.weight, eps=self.eps)


class Embedding:
    """Rows of a table, in the dtype of the residual stream. weight: [vocab_size, dim]."""

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self.weight = weight.to(dtype).contiguous()

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self.weight[token_ids]


class LMHead:
    """Hidden states to fp32 logits. weight: [vocab_size, dim] fp32."""

    def __init__(self, weight: Tensor, *, arch: str) -> None:
        self.weight = streamed(weight)
        self._op = linear_fp32.bind(arch=arch)

    def __call__(self, x: Tensor) -> Tensor:
        return self._op(x, self.weight)
