"""Random contents for tensors of every checkpoint dtype, from a seed and the tensor's name.

Matrices get a standard deviation of one over the root of their inputs, so that a unit vector stays
one. Random 16-bit words index tables of normal quantiles, in the target format already, so that
even a full-size checkpoint is written at disk speed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import cache
from math import gcd, log2, prod, sqrt
from statistics import NormalDist

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moet.models.formats import (
    E8M0_BIAS,
    decode_e8m0,
    encode_e2m1,
    encode_e4m3,
)
from moet.models.tensor_spec import TensorSpec

_CHUNK_ELEMENTS = 1 << 22
_E4M3_SIGMA = 100.0  # 448 is 4.5 deviations away
_E2M1_SIGMA = 2.6  # the largest of 32 is about 6
_HASH_TABLE = "tid2eid"
_NVFP4_SCALE = 192.0  # typical e4m3 block scale; the global scale undoes it
_SCALE_ENDS = (".scale", ".weight_scale_inv", ".weight_scale", ".weight_scale_2", ".input_scale")
# Deviation of tensors that are not plain matrices, by the end of the name.
_SIGMAS = {
    "embed.weight": 1.0,
    "embed_tokens.weight": 1.0,
    "e_score_correction_bias": 0.1,
    "markov_w1.weight": 1.0,
    "attn_sink": 1.0,
    ".ape": 1.0,
    "gate.bias": 0.1,
    "_base": 0.5,
}


def tensor_bytes(
    spec: TensorSpec, seed: int, part: Mapping[str, TensorSpec]
) -> Iterator[memoryview]:
    """The bytes of one tensor in pieces of a few MB; `part` has the tensors it belongs with."""
    key = hashlib.sha256(f"{seed}/{spec.name}".encode()).digest()
    words = np.random.PCG64(int.from_bytes(key[:16], "little"))
    if spec.name.endswith(_HASH_TABLE):
        gate = part[spec.name.removesuffix(_HASH_TABLE) + "weight"]
        yield _hash_table(spec, words, num_experts=gate.shape[0]).data
        return
    table = element_table(spec, part)
    total = prod(spec.shape)
    for start in range(0, total, _CHUNK_ELEMENTS):
        count = min(_CHUNK_ELEMENTS, total - start)
        yield table[_random_u16(words, count)].data.cast("B")


def element_table(spec: TensorSpec, part: Mapping[str, TensorSpec]) -> NDArray[np.generic]:
    """Elements of which a tensor's are drawn, all as likely: [65536] of the dtype's width."""
    weight = _weight_of(spec, part)
    if weight is None:
        return _table(spec)
    return _nvfp4_table(spec, weight) if weight.dtype == "U8" else _scale_table(spec, weight)


def _weight_of(spec: TensorSpec, part: Mapping[str, TensorSpec]) -> TensorSpec | None:
    """The weight that a scale tensor belongs to."""
    for end in _SCALE_ENDS:
        if spec.name.endswith(end):
            return part.get(spec.name.removesuffix(end) + ".weight")
    return None


def _random_u16(words: np.random.PCG64, count: int) -> NDArray[np.uint16]:
    return np.asarray(words.random_raw(-(-count // 4)), np.uint64).view(np.uint16)[:count]


@cache
def _normal_quantiles(count: int) -> Tensor:
    normal = NormalDist()
    return torch.tensor([normal.inv_cdf((i + 0.5) / count) for i in range(count)])


def _table(spec: TensorSpec) -> NDArray[np.generic]:
    """65,536 equally likely elements of this tensor: [65536] of the dtype's width."""
    if spec.dtype in ("I8", "U8"):
        return _fp4_pairs()
    normal = _normal_quantiles(1 << 16)
    if spec.dtype == "F8_E4M3":
        return _as_numpy(encode_e4m3(normal * _E4M3_SIGMA))
    if spec.name.endswith(("norm.weight", "_scale")):
        values = 1 + 0.1 * normal
    else:
        sigmas = [sigma for end, sigma in _SIGMAS.items() if spec.name.endswith(end)]
        values = normal * (sigmas[0] if sigmas else 1 / sqrt(spec.shape[-1]))
    return _as_numpy(values.to(torch.bfloat16 if spec.dtype == "BF16" else torch.float32))


def _as_numpy(values: Tensor) -> NDArray[np.generic]:
    same_width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[values.element_size()]
    return values.view(same_width).numpy()


@cache
def _fp4_pairs() -> NDArray[np.generic]:
    codes = encode_e2m1(_normal_quantiles(256) * _E2M1_SIGMA)
    return _as_numpy((codes[:, None] << 4 | codes[None, :]).flatten())


def _scale_table(spec: TensorSpec, weight: TensorSpec) -> NDArray[np.generic]:
    """Block scales: the exponent that gives the weight its deviation, one less for a quarter."""
    is_fp4 = weight.dtype == "I8"
    inputs = weight.shape[-1] * (2 if is_fp4 else 1)
    sigma = _E2M1_SIGMA if is_fp4 else _E4M3_SIGMA
    byte = torch.full((1 << 16,), round(log2(1 / sqrt(inputs) / sigma)) + E8M0_BIAS)
    byte[: 1 << 14] -= 1
    raw = byte.to(torch.uint8)
    return _as_numpy(decode_e8m0(raw) if spec.dtype == "F32" else raw)


def _nvfp4_table(spec: TensorSpec, weight: TensorSpec) -> NDArray[np.generic]:
    """NVFP4 scales; the global one is full, three quarters or half, as gate and up may differ."""
    normal = _normal_quantiles(1 << 16)
    if spec.dtype == "F8_E4M3":
        return _as_numpy(encode_e4m3(_NVFP4_SCALE * (1 + 0.15 * normal)))
    if spec.name.endswith(".input_scale"):
        return _as_numpy(torch.full((1 << 16,), 4 / (6 * 448.0)))
    inputs = 2 * weight.shape[-1]
    values = torch.full((1 << 16,), 1 / sqrt(inputs) / _E2M1_SIGMA / _NVFP4_SCALE)
    values[: 1 << 14] *= 0.75
    values[1 << 14 : 1 << 15] *= 0.5
    return _as_numpy(values)


def _hash_table(spec: TensorSpec, words: np.random.PCG64, *, num_experts: int) -> NDArray[np.int64]:
    """[vocab_size, top_k]: distinct experts in every row, a random start and a coprime stride."""
    rows, top_k = spec.shape
    strides = np.array([n for n in range(1, num_experts + 1) if gcd(n, num_experts) == 1], np.int64)
    start = _random_u16(words, rows).astype(np.int64)[:, None]
    stride = strides[_random_u16(words, rows) % len(strides)][:, None]
    places = start + stride * np.arange(top_k, dtype=np.int64)
    return np.remainder(places, num_experts, dtype=np.int64)
