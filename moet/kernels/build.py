"""Compile csrc/ into cubins/ and record how: `python -m moet.kernels.build [--arch ARCH]`.

A developer's tool; nothing here runs when a model does. Needs nvcc of exactly COMPILER.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
from pathlib import Path
from typing import Any

from moet.errors import CubinError
from moet.kernels.tools import find_tool, resources

CSRC = Path(__file__).parent / "csrc"
CUBINS = Path(__file__).parents[2] / "cubins"
COMPILER = "13.0.88"
ARCHS = {"sm90a": 90, "sm120a": 120}
FLAGS = ("-std=c++17", "-O3", "--fmad=true", "-diag-suppress=177")


def sources() -> list[str]:
    """Names of the kernel sources, without suffix."""
    return sorted(path.stem for path in CSRC.glob("*.cu"))


def source_files(name: str) -> list[str]:
    """csrc/NAME.cu and everything that it includes from csrc, CPU emulation excepted."""
    files, queue = [], [f"{name}.cu"]
    while queue:
        file = queue.pop(0)
        if file in files or file.startswith("emulation"):
            continue
        files.append(file)
        queue += re.findall(r'^\s*#include "([^"]+)"', (CSRC / file).read_text(), re.MULTILINE)
    return files


def source_hash(name: str) -> str:
    """Of the source files of a cubin, names and contents."""
    digest = hashlib.sha256()
    for file in source_files(name):
        digest.update(f"{file}\0{(CSRC / file).read_text()}\0".encode())
    return digest.hexdigest()


def flags(arch: str) -> list[str]:
    """Compiler flags of an architecture."""
    sm = ARCHS[arch]
    target = f"-gencode=arch=compute_{sm}a,code=sm_{sm}a"
    return [*FLAGS, f"-DMOET_SM={sm}", target, "-cubin"]


def compiler_version(nvcc: str) -> str:
    """The version nvcc states, e.g. 13.0.88."""
    text = subprocess.run([nvcc, "--version"], check=True, capture_output=True, text=True).stdout
    found = re.search(r"V(\d+\.\d+\.\d+)", text)
    return found.group(1) if found else "unknown"


def compile_source(name: str, arch: str, target: Path) -> None:
    """Compile csrc/NAME.cu to target. Raises CubinError with the compiler's words, or its version.

    Runs inside csrc with relative names, so that the result does not depend on where that is.
    """
    nvcc = find_tool("nvcc")
    version = compiler_version(nvcc)
    if version != COMPILER:
        raise CubinError(f"nvcc is {version}; cubins are built with {COMPILER}: install that one")
    command = [nvcc, *flags(arch), "-o", str(target.resolve()), f"{name}.cu"]
    done = subprocess.run(command, cwd=CSRC, capture_output=True, text=True, check=False)
    if done.returncode != 0 or "warning" in done.stderr:
        raise CubinError(f"{name}.cu for {arch}: {done.stderr.strip()}")


def threads_and_ctas(name: str) -> dict[str, tuple[int, int]]:
    """Threads and declared CTAs per SM of each kernel of a source, from the lines that name it."""
    everything = "".join((CSRC / file).read_text() for file in source_files(name))
    constants = dict(re.findall(r"constexpr int (\w*THREADS) = (\d+);", everything))
    text = (CSRC / f"{name}.cu").read_text()
    found: dict[str, tuple[int, int]] = {}
    for threads, ctas, kernel in re.findall(r"^KERNEL\((\w+), (\d+)\) (\w+)\(", text, re.MULTILINE):
        found[kernel] = (int(constants.get(threads, threads)), int(ctas))
    for kernel, ctas in re.findall(r"^STREAM\((\w+), .*, (\d+)\)$", text, re.MULTILINE):
        found[kernel] = (int(constants["THREADS"]), int(ctas))
    for kernel in re.findall(r"^PREFILL\((\w+), .*\)$", text, re.MULTILINE):
        found[kernel] = (int(constants["THREADS"]), 1)
    return found


def entry(name: str, arch: str, cubin: Path) -> dict[str, Any]:
    """What the manifest says of one cubin."""
    declared, kernels = threads_and_ctas(name), {}
    for kernel, use in sorted(resources(cubin).items()):
        threads, ctas = declared[kernel]
        kernels[kernel] = {
            "registers": use["REG"],
            "stack_bytes": use["STACK"],
            "local_bytes": use["LOCAL"],
            "shared_bytes": use["SHARED"],
            "threads": threads,
            "ctas_per_sm": ctas,
        }
    return {
        "source": f"{name}.cu",
        "source_sha256": source_hash(name),
        "cubin_sha256": hashlib.sha256(cubin.read_bytes()).hexdigest(),
        "flags": flags(arch),
        "kernels": kernels,
    }


def main() -> None:
    """Build every source for every architecture, then write the manifest."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", choices=sorted(ARCHS), action="append")
    parser.add_argument("--source", choices=sources(), action="append")
    args = parser.parse_args()
    manifest_path = CUBINS / "MANIFEST.json"
    manifest: dict[str, Any] = {"compiler": f"nvcc {COMPILER}", "cubins": {}}
    if manifest_path.exists():
        manifest["cubins"] = json.loads(manifest_path.read_text())["cubins"]
    for arch in args.arch or sorted(ARCHS):
        (CUBINS / arch).mkdir(parents=True, exist_ok=True)
        for name in args.source or sources():
            cubin = CUBINS / arch / f"{name}.cubin"
            compile_source(name, arch, cubin)
            manifest["cubins"][f"{arch}/{name}"] = entry(name, arch, cubin)
            print(f"{arch}/{name}.cubin {cubin.stat().st_size} bytes")
    manifest_path.write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
