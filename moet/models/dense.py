"""Dense tensors of a checkpoint in the dtype that a pack wants, with what the change cost."""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt
from typing import Protocol

import torch
from torch import Tensor

from moet.errors import CheckpointError
from moet.models.formats import decode_e8m0, dequantize_fp8_block, quantize_fp8_block

SCALE_SUFFIX = "_scale_inv"  # of fp8 weights with fp32 factors; as released, they multiply


class _Source(Protocol):
    def names(self) -> Iterator[str]: ...

    def load(self, name: str) -> Tensor: ...


class DenseReader:
    """Reads tensors as stored, or linears as fp8 block-128 made of bf16 or the other way round."""

    def __init__(self, source: _Source) -> None:
        self._source = source
        self._names = frozenset(source.names())

    def load(self, name: str, dtype: str) -> tuple[Tensor, float | None]:
        """The tensor in `dtype` (spelled as in safetensors), and its relative error if it changed.

        An fp8 scale that the checkpoint lacks is the one that its weight gets. Error:
        rms(new - stored) / rms(stored); it is given with the weight.
        """
        if name not in self._names:
            weight = self._source.load(name.removesuffix(SCALE_SUFFIX))
            return decode_e8m0(quantize_fp8_block(weight)[1]), None
        stored = self._source.load(name)
        if dtype == "F8_E4M3" and stored.dtype == torch.bfloat16:
            codes, exponents = quantize_fp8_block(stored)
            return codes, _error(dequantize_fp8_block(codes, decode_e8m0(exponents)), stored)
        if dtype == "BF16" and stored.dtype == torch.float8_e4m3fn:
            exact = dequantize_fp8_block(stored, self._source.load(name + SCALE_SUFFIX))
            rounded = exact.bfloat16()
            return rounded, _error(rounded, exact)
        if _SPELLING.get(stored.dtype, dtype) != dtype:
            raise CheckpointError(f"{name} is {stored.dtype} and cannot be stored as {dtype}")
        return stored, None


_SPELLING = {torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3", torch.float32: "F32"}


def _error(new: Tensor, stored: Tensor) -> float:
    energy = stored.double().square().sum().item()
    return sqrt((new.double() - stored.double()).square().sum().item() / energy) if energy else 0.0
