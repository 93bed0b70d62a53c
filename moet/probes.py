"""Small measurements for `moet doctor`: memory, links, kernels and peers of this machine.

Each answers with plain values and never raises for what a machine lacks. A probe that may hang runs
in a process of its own and is killed when its time is up.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from moet.errors import KernelError
from moet.kernels.cubin import ARCH_OF_CAPABILITY, Kernels, folder, verified
from moet.kernels.stream_gemm import StreamLinear, Workspace

PROBE_BYTES = 256 << 20
ROUNDS = 3
PEER_TIMEOUT_S = 20.0
MAX_RELATIVE_ERROR = 2**-8  # bf16 keeps 8 significant bits
DRIVER_FILE = Path("/proc/driver/nvidia/version")


def ram_copy_gb_per_s(num_bytes: int = PROBE_BYTES) -> float:
    """Bytes read and written by the best of a few copies, on the threads that torch has."""
    source = torch.zeros(num_bytes, dtype=torch.uint8)
    target = torch.ones_like(source)
    return round(2 * num_bytes / _best_s(lambda: target.copy_(source)) / 1e9, 1)


def pinned_memory(num_bytes: int) -> str:
    """Whether so much host memory can be pinned: "ok", or the reason."""
    if not torch.cuda.is_available():
        return "no GPU"
    try:
        torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "ok"


def driver_version(path: Path = DRIVER_FILE) -> str | None:
    """The NVIDIA kernel driver's version; None without one."""
    try:
        words = path.read_text().split()
    except OSError:
        return None
    return next((word for word in words if word[0].isdigit() and "." in word), None)


def link_gb_per_s(device: torch.device) -> dict[str, float]:
    """Copies between pinned host memory and a GPU, each way."""
    host = torch.empty(PROBE_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(PROBE_BYTES, dtype=torch.uint8, device=device)

    def timed(target: torch.Tensor, source: torch.Tensor) -> float:
        def copy() -> None:
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize(device)

        return round(PROBE_BYTES / _best_s(copy) / 1e9, 1)

    return {"to_device": timed(there, host), "from_device": timed(host, there)}


def kernel_self_test(device: torch.device) -> str:
    """A known product through the prebuilt kernels of a GPU: "ok", or what is wrong."""
    try:
        kernels = Kernels(device)
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(256, 4096, generator=generator).bfloat16()
        x = torch.randn(3, 4096, generator=generator).bfloat16()
        error = torch.zeros(1, dtype=torch.int32, device=device)
        space = Workspace.allocate(str(device), 64 * 16 * 256, 32768)
        linear = StreamLinear.bf16(weight).to(str(device))
        found = linear(kernels, x.to(device), None, error=error, workspace=space).double().cpu()
    except KernelError as problem:
        return str(problem)
    expected = x.double() @ weight.double().T
    relative = float((found - expected).norm() / expected.norm())
    if int(error) or not relative < MAX_RELATIVE_ERROR:
        return f"a known product is off by {relative:.2g}; the limit is {MAX_RELATIVE_ERROR:.2g}"
    return "ok"


def cubin_problems(root: Path | None = None) -> list[str]:
    """What is wrong with the prebuilt kernels on disk, by file, without their folder's path."""
    root = root or folder()
    problems = []
    for arch in sorted(set(ARCH_OF_CAPABILITY.values())):
        names = sorted(path.stem for path in (root / arch).glob("*.cubin"))
        if not names:
            problems.append(f"there are no kernels for {arch}; reinstall")
        for name in names:
            try:
                verified(name, arch, root)
            except KernelError as error:
                problems.append(str(error).replace(f"{root}/", ""))
    return problems


def peer_access(num_gpus: int, timeout_s: float = PEER_TIMEOUT_S) -> dict[str, str]:
    """For each pair of GPUs: whether a copy between them arrives, "wrong", or "hangs"."""
    return {
        f"{first}-{second}": outcome_of(
            [sys.executable, "-m", "moet.peer_probe", str(first), str(second)], timeout_s
        )
        for first in range(num_gpus)
        for second in range(first + 1, num_gpus)
    }


def outcome_of(command: Sequence[str], timeout_s: float) -> str:
    """The last line that a command prints; "hangs" if it does not end in time."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return f"hangs: no answer within {timeout_s:g} s"
    lines = done.stdout.strip().splitlines()
    return lines[-1] if lines and done.returncode == 0 else f"failed: exit code {done.returncode}"


def _best_s(work: Callable[[], Any]) -> float:
    times = []
    for _ in range(ROUNDS):
        began = perf_counter()
        work()
        times.append(perf_counter() - began)
    return min(times)
