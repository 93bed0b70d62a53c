"""What a bug report needs to know of a machine, without names, addresses or paths of its owner."""

from __future__ import annotations

import platform
import resource
import shutil
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil
import torch

from moet import __version__, probes
from moet.config import cache_dir
from moet.kernels.cubin import ARCH_OF_CAPABILITY
from moet.kernels.gemm import matmul

PACKAGES = ("torch", "safetensors", "tokenizers", "msgspec", "pyzmq", "fastapi", "uvicorn")
PINNED_BYTES = 1 << 30
OPTIONAL_PACKAGES = ("triton", "cuda-bindings")


def report() -> dict[str, Any]:
    """Sections of plain values, and `problems`: what will keep moet from serving here."""
    sections: dict[str, Any] = {
        "moet": {"version": __version__, "python": platform.python_version()},
        "system": {
            "os": f"{platform.system()} {platform.release()}",
            "machine": platform.machine(),
            "cpu_cores": psutil.cpu_count(logical=False) or psutil.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "memory_gib": _gib(psutil.virtual_memory().total),
            "memory_available_gib": _gib(psutil.virtual_memory().available),
            "memory_copy_gb_per_s": probes.ram_copy_gb_per_s(),
            "driver": probes.driver_version(),
            "cuda": torch.version.cuda,
            "pinned_memory": probes.pinned_memory(PINNED_BYTES),
            "lockable_memory": _limit(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
            "open_files": _limit(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        },
        "packages": {name: _version(name) for name in (*PACKAGES, *OPTIONAL_PACKAGES)},
        "gpus": _gpus(),
        "peers": probes.peer_access(torch.cuda.device_count()),
        "kernels": {"damaged": probes.cubin_problems()},
        "cache": {"free_gib": _gib(_free_bytes())},
        "reference": {"rows_independent_of_batch": rows_are_independent()},
    }
    sections["problems"] = _problems(sections)
    return sections


def rows_are_independent() -> bool:
    """Whether the reference contraction gives a row the same bits in batches of 1, 3 and 17."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(17, 512, generator=generator)
    weight = torch.randn(96, 512, generator=generator)
    whole = matmul(x, weight)
    return all(
        torch.equal(matmul(x[start : start + size], weight), whole[start : start + size])
        for size in (1, 3)
        for start in (0, 5, 14)
    )


def _problems(sections: dict[str, Any]) -> list[str]:
    problems = [
        f"the package {name} is not installed; run: pip install {name}"
        for name in PACKAGES
        if sections["packages"][name] is None
    ]
    if not sections["reference"]["rows_independent_of_batch"]:
        problems.append("this CPU's matrix product depends on the batch; answers will not repeat")
    problems += sections["kernels"]["damaged"]
    for gpu in sections["gpus"]:
        if gpu["kernels"] != "ok":
            problems.append(f"{gpu['name']}: {gpu['kernels']}")
    for pair, outcome in sections["peers"].items():
        if not outcome.startswith("ok"):
            problems.append(f"GPUs {pair} cannot reach each other: {outcome}")
    if sections["system"]["pinned_memory"] not in ("ok", "no GPU"):
        limit = sections["system"]["lockable_memory"]
        problems.append(
            f"1 GiB of host memory cannot be pinned: {sections['system']['pinned_memory']}; "
            f"the limit is {limit} (ulimit -l)"
        )
    if sections["cache"]["free_gib"] < 1:
        problems.append("less than 1 GiB is free for packs; set MOET_CACHE_DIR to another disk")
    return problems


def _gpus() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    gpus = []
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        properties = torch.cuda.get_device_properties(device)
        gpus.append(
            {
                "name": properties.name,
                "arch": f"sm_{properties.major}{properties.minor}",
                "memory_gib": _gib(properties.total_memory),
                "multiprocessors": properties.multi_processor_count,
                "link_gb_per_s": probes.link_gb_per_s(device),
                "kernels": (
                    probes.kernel_self_test(device)
                    if (properties.major, properties.minor) in ARCH_OF_CAPABILITY
                    else "moet has no kernels for this architecture"
                ),
            }
        )
    return gpus


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _free_bytes() -> int:
    folder = cache_dir()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _gib(num_bytes: int) -> float:
    return round(num_bytes / 2**30, 1)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)
