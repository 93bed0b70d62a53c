"""Ranks of a test: this process and forks of it, which share memory that was asked to be shared."""

from __future__ import annotations

import os
from collections.abc import Callable


def in_ranks(num_ranks: int, work: Callable[[int], None]) -> None:
    """Run work(rank) on each; rank 0 is this process. Returns when all have ended."""
    children = []
    for rank in range(1, num_ranks):
        child = os.fork()
        if child == 0:
            try:
                work(rank)
            finally:
                os._exit(0)
        children.append(child)
    work(0)
    for child in children:
        os.waitpid(child, 0)
