"""Parameters plus a bound op: what every model is made of. Knows dtypes as checkpoints store them,
and no model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moet.config import ModelSettings
from moet.errors import CheckpointError, UnsupportedError
from moet.kernels.comm import RankPart
from moet.kernels.device_gemm import Device, PackedGroups, PackedMatrix
from moet.kernels.gemm import (
    Groups,
    Matrix,
    grouped_linear,
    grouped_linear_fp8,
    linear,
    linear_fp8,
    linear_fp8_fp32,
    linear_fp32,
    linear_share,
    linear_share_fp8,
    streamed,
)
from moet.kernels.layout import scale_values
from moet.kernels.norm import rms_norm
from moet.kernels.quant import Activations
from moet.models.base import TensorSource
from moet.models.formats import dequantize_fp8_block, quantize_fp8_block
from moet.models.sharding import WHOLE, Shard, ShardedSource

ROUNDED_ROWS = 1024  # of a weight that is rounded at once, in float64; whole blocks of scales


class Weights:
    """Reads tensors of a source under a name prefix and checks their shapes.

    gpu: where the weights go; None for the reference, which keeps them in the memory of the host.
    """

    def __init__(
        self,
        source: TensorSource,
        settings: ModelSettings,
        prefix: str = "",
        gpu: Device | None = None,
    ) -> None:
        assert (gpu is None) == (settings.arch == "reference")
        self.source = source
        self.settings = settings
        self.prefix = prefix
        self.gpu = gpu
        self.device = torch.device("cpu") if gpu is None else gpu.torch_device
        self._names = frozenset(source.names())

    def under(self, prefix: str) -> Weights:
        """The same source seen from a longer prefix."""
        inner = object.__new__(Weights)
        inner.source, inner.settings, inner._names = self.source, self.settings, self._names
        inner.gpu, inner.device, inner.prefix = self.gpu, self.device, self.prefix + prefix
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
        weight, scale = self._stored(name, num_out, num_in)
        if scale is None:
            return streamed(weight.float()), False
        return streamed(dequantize_fp8_block(weight, scale)), True

    def _stored(self, name: str, num_out: int, num_in: int) -> tuple[Tensor, Tensor | None]:
        """`name`.weight, and its scales if it is fp8."""
        weight = self.tensor(f"{name}.weight", num_out, num_in)
        if weight.dtype != torch.float8_e4m3fn:
            return weight, None
        for scale_name in (f"{name}.scale", f"{name}.weight_scale_inv"):
            if self.has(scale_name):
                return weight, self.source.load(self.prefix + scale_name).to(self.device)
        raise CheckpointError(f"{self.prefix}{name}.weight is fp8 but there is no scale beside it")

    def stored(self, name: str, num_out: int, num_in: int) -> tuple[Tensor, Tensor | None]:
        """`name`.weight as it is stored, and the factors of its 128 x 128 blocks, fp32, if it is
        fp8."""
        weight, scale = self._stored(name, num_out, num_in)
        return weight, None if scale is None else _scale_values(scale)

    def operand(self, name: str, num_out: int, num_in: int) -> tuple[Matrix, bool]:
        """As matrix, but packed as it is stored, fp8 or bf16, if there is a GPU."""
        if self.gpu is None:
            return self.matrix(name, num_out, num_in)
        weight, scale = self._stored(name, num_out, num_in)
        if scale is None:
            return PackedMatrix.pack(weight.bfloat16(), None, self.gpu), False
        return PackedMatrix.pack(weight, _scale_values(scale), self.gpu), True

    def groups(self, name: str, count: int, num_out: int, num_in: int) -> tuple[Groups, bool]:
        """`name`.weight as `count` matrices [num_out, num_in] of inputs of their own, and whether
        it is stored in fp8. Raises UnsupportedError for what no kernel takes."""
        if self.gpu is None:
            weight, quantised = self.matrix(name, count * num_out, num_in)
            return streamed(weight.reshape(count, num_out, num_in)), quantised
        stored, scale = self._stored(name, count * num_out, num_in)
        if scale is None or num_out % 128:
            raise UnsupportedError(
                f"{self.prefix}{name}.weight is {stored.dtype}, {num_out} rows a group; on a GPU "
                "groups are fp8 and a multiple of 128 rows"
            )
        blocks = _scale_values(scale).view(count, num_out // 128, -1)
        return PackedGroups.pack(stored.view(count, num_out, num_in), blocks, self.gpu), True

    def linear(self, name: str, num_out: int, num_in: int) -> Linear:
        """A layer whose arithmetic follows from how its weight is stored."""
        weight, quantised = self.operand(name, num_out, num_in)
        return Linear(weight, settings=self.settings, quantised=quantised)

    def shard_of(self, name: str) -> Shard:
        """The rank whose part of `name`.weight the source gives; WHOLE if it gives all of it."""
        if isinstance(self.source, ShardedSource):
            return self.source.shard_of(f"{self.prefix}{name}.weight")
        return WHOLE

    def input_linear(self, name: str, num_out: int, num_in: int) -> InputLinear:
        """As linear, for a weight whose inputs are divided between ranks. num_in: of this one."""
        weight, quantised = self.operand(name, num_out, num_in)
        return InputLinear(
            weight, settings=self.settings, quantised=quantised, shard=self.shard_of(name)
        )

    def norm(self, name: str, dim: int, *, eps: float) -> RMSNorm:
        return RMSNorm(self.fp32(f"{name}.weight", dim), eps=eps, arch=self.settings.arch)


def _scale_values(scale: Tensor) -> Tensor:
    """Block scales as fp32 factors, whether stored as e8m0 or fp32."""
    return scale if scale.dtype == torch.float32 else scale_values(scale.view(torch.uint8))


class Linear:
    """x @ weight.T in the dtype of x; activations of an fp8 weight are rounded to fp8 if deployed.

    weight: [num_out, num_in] fp32, or packed for a GPU.
    """

    def __init__(self, weight: Matrix, *, settings: ModelSettings, quantised: bool) -> None:
        self.weight = weight
        self.settings = settings
        self.quantised = quantised
        num_out, num_in = weight.shape
        chosen = linear_fp8 if quantised and settings.rounding == "deployed" else linear
        self._op = chosen.bind(arch=settings.arch, num_out=num_out, num_in=num_in)

    def __call__(self, x: Tensor | Activations) -> Tensor:
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
        weight = joined([part.weight for part in parts])
        return cls(weight, settings=first.settings, quantised=first.quantised)


def joined(parts: Sequence[Matrix]) -> Matrix:
    """Matrices of one input as one, their outputs side by side."""
    packed = [part for part in parts if not isinstance(part, Tensor)]
    if packed:
        assert len(packed) == len(parts)
        return PackedMatrix.joined(packed)
    return streamed(torch.cat([part for part in parts if isinstance(part, Tensor)]))


class InputLinear:
    """A Linear whose inputs the ranks of a group share, each with its columns of the weight.

    weight: [num_out, num_in of this rank] fp32, or packed for a GPU.
    """

    def __init__(
        self,
        weight: Matrix,
        *,
        settings: ModelSettings,
        quantised: bool,
        shard: Shard,
    ) -> None:
        self.weight = weight
        self.shard = shard
        self.quantised = quantised
        num_out, num_in = weight.shape
        self.num_slices = shard.slices(num_in * shard.size)
        fp8 = quantised and settings.rounding == "deployed"
        facts = {"num_out": num_out, "num_in": num_in}
        self._share = (linear_share_fp8 if fp8 else linear_share).bind(arch=settings.arch, **facts)
        # A GPU's kernel knows all slices of a rank, so that alone it need not add them.
        alone = settings.arch != "reference" and shard.size == 1
        whole = linear_fp8 if fp8 else linear
        self._whole = whole.bind(arch=settings.arch, **facts) if alone else None

    def partial(self, x: Tensor | Activations) -> Tensor:
        """This rank's part of the product, to be summed over the ranks; fp32 on the CPU."""
        return self._share(x, self.weight, num_slices=self.num_slices)

    def __call__(self, x: Tensor | Activations) -> Tensor:
        """The whole product, in the dtype of x."""
        if self._whole is not None:
            return self._whole(x, self.weight)
        return self.shard.comm.sum(self.partial(x), x.dtype)

    def on_read(self, x: Tensor | Activations) -> Tensor | RankPart:
        """The whole product, or this rank's part for an op that sums."""
        if self._whole is not None:
            return self._whole(x, self.weight)
        return self.shard.comm.sum_on_read(self.partial(x), x.dtype)


class GroupedLinear:
    """Each group of inputs through its own matrix; fp8 weights round as in Linear.

    weight: [count, num_out, num_in] fp32, or packed for a GPU.
    """

    def __init__(self, weights: Weights, name: str, count: int, num_out: int, num_in: int) -> None:
        self.weight, quantised = weights.groups(name, count, num_out, num_in)
        arch, fp8 = weights.settings.arch, quantised and weights.settings.rounding == "deployed"
        self._op = grouped_linear_fp8.bind(arch=arch) if fp8 else grouped_linear.bind(arch=arch)

    def __call__(self, x: Tensor | Activations) -> Tensor:
        """x: [n, count, num_in], or its rows [n * count, num_in]. Returns [n, count, num_out]."""
        return self._op(x, self.weight)


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
    """Hidden states to fp32 logits. weight: [vocab_size, dim] fp32, or a rank's rows of it.

    quantised: activations are rounded to e4m3, as the weight was.
    """

    def __init__(
        self, weight: Matrix, *, arch: str, shard: Shard = WHOLE, quantised: bool = False
    ) -> None:
        self.weight = streamed(weight) if isinstance(weight, Tensor) else weight
        self.shard = shard
        self._op = (linear_fp8_fp32 if quantised else linear_fp32).bind(arch=arch)

    @classmethod
    def load(cls, weights: Weights, name: str, vocab_size: int, dim: int) -> LMHead:
        """`name`.weight, or the rank's rows of it."""
        shard = weights.shard_of(name)
        weight, _ = weights.operand(name, vocab_size // shard.size, dim)
        return cls(weight, arch=weights.settings.arch, shard=shard)

    @classmethod
    def guessing(cls, weights: Weights, name: str, vocab_size: int, dim: int) -> LMHead:
        """As load, rounded to fp8: half the bytes, for a GPU's drafts. Needs weights.gpu."""
        assert weights.gpu is not None
        shard = weights.shard_of(name)
        weight, scale = weights.stored(name, vocab_size // shard.size, dim)
        if scale is None:
            parts = [quantize_fp8_block(part) for part in torch.split(weight, ROUNDED_ROWS)]
            weight = torch.cat([codes for codes, _ in parts])
            scale = _scale_values(torch.cat([exponents for _, exponents in parts]))
        matrix = PackedMatrix.pack(weight, scale, weights.gpu)
        return cls(matrix, arch=weights.settings.arch, shard=shard, quantised=True)

    def __call__(self, x: Tensor | Activations) -> Tensor:
        """Returns [n, vocab_size] on every rank."""
        return self.shard.comm.gather(self._op(x, self.weight))
