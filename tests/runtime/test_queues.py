"""Captures on a stand-in for CUDA: which pool a graph gets."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moet.runtime.queues import CudaGraphs


class Graph:
    pools: list[int] = []  # noqa: RUF012  (of all graphs, in the order of their captures)

    def capture_begin(self, *, pool: int, capture_error_mode: str) -> None:
        self.pools.append(pool)

    def capture_end(self) -> None: ...

    def replay(self) -> None: ...


def test_a_pool_is_shared_until_no_graph_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    handles = count()
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(Graph, "pools", [])
    stream = SimpleNamespace(synchronize=lambda: None)
    queue: Any = SimpleNamespace(working=nullcontext, stream=stream)
    capture = CudaGraphs(queue)
    first, second = capture(lambda: None), capture(lambda: None)
    del first
    third = capture(lambda: None)
    del second, third
    again = [capture(lambda: None) for _ in range(2)]
    assert len(again) == 2
    pools = Graph.pools
    assert pools[0] == pools[1] == pools[2]
    assert pools[3] == pools[4] != pools[2]
