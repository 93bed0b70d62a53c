"""Ranks of a group as threads of one process: the arithmetic of `-tp` and `-pp` alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue
from typing import TypeVar

import torch
from torch import Tensor

from moet.kernels.comm import added
from moet.kernels.gemm import tree_sum
from moet.kernels.mixture import Mixture
from moet.kernels.moe import ExpertTable
from moet.models.base import ExpertProvider
from moet.models.sharding import ColumnShare, Shard

T = TypeVar("T")


class Board:
    """Where the ranks of a stage lay their tensors side by side."""

    def __init__(self, size: int) -> None:
        self.places: list[Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=60)

    def all(self, rank: int, x: Tensor) -> list[Tensor]:
        self.places[rank] = x
        self.barrier.wait()
        everything = list(self.places)
        self.barrier.wait()
        return everything


class ThreadComm:
    """A Comm between threads."""

    def __init__(self, rank: int, board: Board, inbox: SimpleQueue[Tensor], stages: Board) -> None:
        self.rank, self.board, self.inbox, self.stages = rank, board, inbox, stages
        self.next: SimpleQueue[Tensor] | None = None
        self.stage = 0

    def sum(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return tree_sum(self.board.all(self.rank, x)).to(dtype or x.dtype)

    def sum_on_read(self, x: Tensor | Mixture, dtype: torch.dtype | None = None) -> Tensor:
        return self.sum(added(x), dtype)

    def gather(self, x: Tensor) -> Tensor:
        return torch.cat(self.board.all(self.rank, x), 1)

    def receive(self, like: Tensor) -> Tensor:
        x = self.inbox.get(timeout=60)
        assert x.shape == like.shape
        assert x.dtype == like.dtype
        return x

    def send(self, x: Tensor) -> None:
        assert self.next is not None
        self.next.put(x.clone())

    def from_last(self, x: Tensor) -> Tensor:
        every = self.stages.all(self.stage, x)
        assert all(each.shape == x.shape for each in every)
        return every[-1]


class WholeExperts:
    """Another provider's whole experts, of which a rank uses its columns."""

    def __init__(self, provider: ExpertProvider, shard: Shard, inter: int) -> None:
        self.provider = provider
        self.span = shard.part(inter)

    def resolve(self, layer_idx: int, expert_ids: Tensor) -> ExpertTable:
        table = self.provider.resolve(layer_idx, expert_ids)
        return replace(table, format=ColumnShare(table.format, *self.span))


def shards(size: int, num_stages: int = 1) -> list[Shard]:
    """The shards of a group, stage by stage."""
    columns = [Board(num_stages) for _ in range(size)]
    found: list[Shard] = []
    before: list[ThreadComm] = []
    for stage in range(num_stages):
        board = Board(size)
        comms = [ThreadComm(rank, board, SimpleQueue(), columns[rank]) for rank in range(size)]
        for comm, source in zip(comms, before, strict=False):
            source.next = comm.inbox
        for rank, comm in enumerate(comms):
            comm.stage = stage
            found.append(Shard(rank, size, stage, num_stages, comm))
        before = comms
    return found


def on_every(group: list[Shard], work: Callable[[Shard], T]) -> list[T]:
    """The results of one function on every rank at once."""
    with ThreadPoolExecutor(len(group)) as pool:
        return [future.result(timeout=120) for future in [pool.submit(work, s) for s in group]]
