"""Batches from worker processes, so that making text never holds up the accelerator."""

from __future__ import annotations

import multiprocessing as mp
import os
import time
from multiprocessing.queues import Queue
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench.train_demo.corpus import (
    CONTEXT_WEIGHT,
    READ,
    READ_WEIGHT,
    TOKEN_MASK,
    WANTED,
    Renderer,
    rows,
)
from bench.train_demo.tokenizer import Family

ROWS_PER_MESSAGE = 8
AHEAD_BYTES = 48 << 20  # of rows waiting, at most


def _work(
    family: Family,
    folder: Path,
    length: int,
    seed: int,
    long_share: float,
    out: Queue[np.ndarray],
) -> None:
    os.nice(19)  # whoever measures beside comes first
    os.environ["RAYON_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    source = rows(Renderer(family, folder), length, seed, long_share=long_share)
    while True:
        out.put(np.stack([next(source) for _ in range(ROWS_PER_MESSAGE)]))


class Feed:
    """Rows of one length from `num_workers` processes; ends with the parent."""

    def __init__(
        self,
        family: Family,
        folder: Path,
        length: int,
        *,
        num_workers: int,
        seed: int,
        long_share: float = 0.0,
    ) -> None:
        context = mp.get_context("spawn")
        self.waited_s = 0.0
        # Much is made ahead while the accelerator's code compiles.
        self.queue: Queue[np.ndarray] = context.Queue(maxsize=AHEAD_BYTES // (16 * length))
        self.workers = [
            context.Process(
                target=_work,
                args=(family, folder, length, seed + idx, long_share, self.queue),
                daemon=True,
            )
            for idx in range(num_workers)
        ]
        for worker in self.workers:
            worker.start()

    def batch(self, num_rows: int) -> np.ndarray:
        """[num_rows, length] uint16; num_rows is a multiple of ROWS_PER_MESSAGE."""
        began = time.monotonic()
        parts = [self.queue.get() for _ in range(num_rows // ROWS_PER_MESSAGE)]
        self.waited_s += time.monotonic() - began
        return np.concatenate(parts)

    def close(self) -> None:
        for worker in self.workers:
            worker.terminate()


def split(marked: np.ndarray, pad: int, device: str) -> tuple[Tensor, Tensor]:
    """Token ids int64 and weights fp32, both [rows, length], of marked rows."""
    raw = torch.from_numpy(marked.astype(np.int32)).to(device, non_blocking=True)
    ids = (raw & TOKEN_MASK).long()
    weights = torch.where(raw >= WANTED, 1.0, CONTEXT_WEIGHT)
    weights = weights.masked_fill(raw >= WANTED | READ, READ_WEIGHT)
    return ids, weights.masked_fill(raw == pad, 0.0)
