"""Where the CUDA command-line tools are, what they say of a cubin. For build.py and audit.py."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from moet.errors import CubinError

REMEDIES = {
    "nvcc": "install the CUDA toolkit's compiler",
    "cuobjdump": "pip install nvidia-cuda-cuobjdump, or triton, which brings it",
    "nvdisasm": "pip install nvidia-cuda-nvdisasm, or triton, which brings it",
}


def find_tool(name: str) -> str:
    """Path of a tool: on PATH, in NVIDIA's wheels, or in triton's. Raises CubinError if absent."""
    found = shutil.which(name)
    if found:
        return found
    for package, folders in (("nvidia", ("*/bin", "bin")), ("triton", ("backends/nvidia/bin",))):
        spec = importlib.util.find_spec(package)
        for root in (spec.submodule_search_locations or []) if spec else []:
            for folder in folders:
                for path in Path(root).glob(f"{folder}/{name}"):
                    return str(path)
    raise CubinError(f"{name} is not on PATH nor in a Python package: {REMEDIES[name]}")


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CubinError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def resources(cubin: Path) -> dict[str, dict[str, int]]:
    """Kernel -> {REG, STACK, SHARED, LOCAL} as cuobjdump reports them."""
    text = _output(find_tool("cuobjdump"), "--dump-resource-usage", str(cubin))
    found = {}
    for kernel, use in re.findall(r"Function (\w+):\s*\n\s*(.*)", text):
        found[kernel] = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", use)}
    return found


def listing(cubin: Path) -> dict[str, list[str]]:
    """Kernel -> its SASS in order: instructions without addresses, and labels as `.L_x_1:`."""
    text = _output(find_tool("nvdisasm"), "-c", str(cubin))
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for line in text.splitlines():
        section = re.match(r"\.section\s+\.text\.(\w+)", line.strip())
        if section:
            current = found.setdefault(section.group(1), [])
        elif re.match(r"\.L_x_\d+:$", line.strip()):
            current.append(line.strip())
        op = re.match(r"/\*[0-9a-f]+\*/\s+((?:@!?U?P\w+\s+)?[A-Z][^;]*);", line.strip())
        if op:
            current.append(op.group(1).strip())
    return found


def without_labels(lines: Sequence[str]) -> list[str]:
    """The instructions of a kernel's listing, without predicates."""
    return [re.sub(r"^@!?U?P\w+\s+", "", line) for line in lines if not line.endswith(":")]


def instructions(cubin: Path) -> dict[str, list[str]]:
    """Kernel -> its SASS instructions in order, without addresses, predicates and labels."""
    return {kernel: without_labels(lines) for kernel, lines in listing(cubin).items()}
