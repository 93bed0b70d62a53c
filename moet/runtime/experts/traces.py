"""Traces of routed experts: recorded ones as files, and synthetic ones with a stated skew.

A trace file is JSON lines: a header {"num_experts": N, "layers": [...]}, then one [layer, [ids]] a
layer's turn, layers by number among the header's. Knows no policy.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import IO

from torch import Tensor

from moet.errors import ConfigError
from moet.kernels.moe import ExpertTable
from moet.models.base import ExpertProvider
from moet.runtime.experts.policy import Call


@dataclass(frozen=True, slots=True)
class Skew:
    """Routing in which `share` of a layer's experts get `mass` of the choices, by a power law.

    Every layer has its own order of experts. After `steady_steps` steps a tenth of the experts of
    each layer change places, as when a conversation takes another turn; 0: never.
    """

    share: float
    mass: float
    steady_steps: int = 0

    def weights(self, num_experts: int) -> list[float]:
        """Chance of the first, second, ... expert in a layer's order; sums to 1."""
        low, high = 0.0, 20.0
        for _ in range(60):
            exponent = (low + high) / 2
            masses = [(1 + rank) ** -exponent for rank in range(num_experts)]
            reached = sum(masses[: round(self.share * num_experts)]) / sum(masses)
            low, high = (exponent, high) if reached < self.mass else (low, exponent)
        total = sum(masses)
        return [mass / total for mass in masses]


def synthetic(
    skew: Skew,
    *,
    num_layers: int,
    num_experts: int,
    top_k: int,
    num_steps: int,
    num_tokens: int = 1,
    seed: int = 0,
) -> Iterator[Call]:
    """Steps of num_tokens rows, layer by layer; a row's experts are distinct."""
    draw = random.Random(seed)
    cumulated = list(accumulate(skew.weights(num_experts)))
    orders = [draw.sample(range(num_experts), num_experts) for _ in range(num_layers)]
    for step in range(num_steps):
        if skew.steady_steps and step and step % skew.steady_steps == 0:
            for order in orders:
                _change_places(order, draw)
        for layer, order in enumerate(orders):
            asked: list[int] = []
            for _ in range(num_tokens):
                row: set[int] = set()
                while len(row) < top_k:
                    row.add(draw.choices(order, cum_weights=cumulated)[0])
                asked += sorted(row)
            yield layer, asked


def _change_places(order: list[int], draw: random.Random) -> None:
    places = draw.sample(range(len(order)), max(2, len(order) // 10))
    experts = [order[place] for place in places]
    draw.shuffle(experts)
    for place, expert in zip(places, experts, strict=True):
        order[place] = expert


def create_trace(path: Path) -> IO[str]:
    """A new trace file, or ConfigError."""
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--expert-trace {path}: {error.strerror}") from None


class RecordedExperts:
    """An ExpertProvider that passes everything on and writes what was asked for to a trace file."""

    def __init__(
        self, provider: ExpertProvider, path: Path, *, layers: Sequence[int], num_experts: int
    ) -> None:
        self._provider = provider
        self._number = {layer_idx: n for n, layer_idx in enumerate(layers)}
        self._file = create_trace(path)
        header = {"num_experts": num_experts, "layers": list(layers)}
        self._file.write(json.dumps(header) + "\n")

    def resolve(self, layer_idx: int, expert_ids: Tensor) -> ExpertTable:
        """As the provider's."""
        asked = [expert for expert in expert_ids.flatten().tolist() if expert >= 0]
        self._file.write(json.dumps([self._number[layer_idx], asked]) + "\n")
        return self._provider.resolve(layer_idx, expert_ids)

    def close(self) -> None:
        """Finish the file."""
        self._file.close()


@dataclass(frozen=True, slots=True)
class Trace:
    """A recorded trace, in memory."""

    num_experts: int
    num_layers: int
    calls: list[Call]


def read_trace(path: Path) -> Trace:
    """Read a trace file. Raises ConfigError naming the line that is none."""
    calls: list[Call] = []
    number = 1
    try:
        with path.open(encoding="utf-8") as file:
            header = json.loads(next(file))
            num_experts, num_layers = int(header["num_experts"]), len(header["layers"])
            for line in file:
                number += 1
                calls.append(_call(json.loads(line), num_layers, num_experts))
    except OSError as error:
        raise ConfigError(f"--trace {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, StopIteration) as error:
        raise ConfigError(f"--trace {path}, line {number}: {error!r}; record it again") from None
    return Trace(num_experts, num_layers, calls)


def _call(value: object, num_layers: int, num_experts: int) -> Call:
    if not isinstance(value, list) or len(value) != 2 or not isinstance(value[1], list):
        raise ValueError(f"not [layer, [ids]]: {value!r}")
    layer, experts = value
    _require_below(num_layers, [layer], "layers")
    _require_below(num_experts, experts, "experts")
    return layer, experts


def _require_below(limit: int, numbers: Iterable[object], what: str) -> None:
    for number in numbers:
        if not isinstance(number, int) or not 0 <= number < limit:
            raise ValueError(f"{number!r} among {limit} {what}")
