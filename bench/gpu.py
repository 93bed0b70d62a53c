"""What benches on a GPU share: the device, the parts that are asked for, the time of a call."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Sequence

import torch

from moet.kernels.device_gemm import Device
from moet.runtime.dummy import open_device


def open_gpu() -> Device:
    """The first GPU. Ends the program where there is none that kernels were built for."""
    device = open_device()
    if device is None:
        sys.exit("there is no GPU that kernels were built for")
    return device


def check_parts(
    parser: argparse.ArgumentParser, chosen: Collection[str], known: Sequence[str]
) -> None:
    """Ends the program, with its usage, if a part that was chosen is not known."""
    unknown = set(chosen) - set(known)
    if unknown:
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(known)}")


def milliseconds(call: Callable[[], object], *, repeats: int = 20, rounds: int = 7) -> float:
    """Median over rounds of the time of one call, `repeats` of which are captured in one graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(repeats):
            call()
    times = []
    for _ in range(rounds + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / repeats)
    return sorted(times[1:])[rounds // 2]
