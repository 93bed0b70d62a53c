"""Compile csrc/ into cubins/ and record how: `python -m moet.kernels.build [SOURCE...]`.

A developer's tool; nothing here runs when a model does. Needs nvcc of exactly COMPILER. Several
may build different sources at the same time: each merges its entries into the manifest.

--define MOET_DEBUG builds the flavour in which a kernel that finds an error also traps, for
compute-sanitizer and cuda-gdb (--debug for short); other names give flavours to compare. --nvrtc
compiles in this process, without a toolkit. None touches cubins/: they write folders of their own,
which `cubin.Kernels(device, root)` takes.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from moet.errors import CubinError
from moet.kernels import nvrtc
from moet.kernels.tools import find_tool, resources

CSRC = Path(__file__).parent / "csrc"
CUBINS = Path(__file__).parents[2] / "cubins"
COMPILER = "13.0.88"
ARCHS = {"sm90a": 90, "sm120a": 120}
FLAGS = ("-std=c++17", "-O3", "--fmad=true", "-diag-suppress=177")
VARIANTS = CUBINS.parent / "build"  # of the debug and NVRTC flavours


class Compile(Protocol):
    """Compiles csrc/NAME.cu for an architecture into a file. Raises CubinError."""

    def __call__(
        self, name: str, arch: str, target: Path, *, defines: Sequence[str] = ()
    ) -> None: ...


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


def flags(arch: str, *, defines: Sequence[str] = ()) -> list[str]:
    """Compiler flags of an architecture."""
    sm = ARCHS[arch]
    target = f"-gencode=arch=compute_{sm}a,code=sm_{sm}a"
    return [*FLAGS, f"-DMOET_SM={sm}", *(f"-D{name}" for name in defines), target, "-cubin"]


def compiler_version(nvcc: str) -> str:
    """The version nvcc states, e.g. 13.0.88."""
    text = subprocess.run([nvcc, "--version"], check=True, capture_output=True, text=True).stdout
    found = re.search(r"V(\d+\.\d+\.\d+)", text)
    return found.group(1) if found else "unknown"


def compile_source(name: str, arch: str, target: Path, *, defines: Sequence[str] = ()) -> None:
    """Compile csrc/NAME.cu to target. Raises CubinError with the compiler's words, or its version.

    Runs inside csrc with relative names, so that the result does not depend on where that is.
    """
    nvcc = find_tool("nvcc")
    version = compiler_version(nvcc)
    if version != COMPILER:
        raise CubinError(f"nvcc is {version}; cubins are built with {COMPILER}: install that one")
    command = [nvcc, *flags(arch, defines=defines), "-o", str(target.resolve()), f"{name}.cu"]
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
        found[kernel] = (int(constants["PREFILL_THREADS"]), 1)
    return found


def entry(name: str, arch: str, cubin: Path, *, defines: Sequence[str] = ()) -> dict[str, Any]:
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
        "flags": flags(arch, defines=defines),
        "kernels": kernels,
    }


def record(root: Path, entries: dict[str, Any], compiler: str = f"nvcc {COMPILER}") -> None:
    """Merge entries into the manifest of a folder, and drop those whose source is gone.

    Holds a lock while it reads and writes, so that builds side by side lose nothing.
    """
    path = root / "MANIFEST.json"
    with (root / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        cubins = json.loads(path.read_text())["cubins"] if path.exists() else {}
        known = sources()
        cubins = {key: facts for key, facts in cubins.items() if key.split("/")[1] in known}
        manifest = {"compiler": compiler, "cubins": cubins | entries}
        whole = root / f".manifest.{os.getpid()}"
        whole.write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
        whole.replace(path)


def build(
    name: str,
    arch: str,
    root: Path,
    *,
    defines: Sequence[str] = (),
    compile: Compile = compile_source,
) -> dict[str, Any]:
    """Compile one source to root/ARCH/NAME.cubin. Returns its manifest entry.

    Raises CubinError if a source file changed while the compiler ran.
    """
    (root / arch).mkdir(parents=True, exist_ok=True)
    before, target = source_hash(name), root / arch / f"{name}.cubin"
    fresh = target.with_suffix(f".{os.getpid()}")
    try:
        compile(name, arch, fresh, defines=defines)
        made = entry(name, arch, fresh, defines=defines)
        if made["source_sha256"] != before:
            raise CubinError(f"{name}.cu or a header changed while it was compiled: build it again")
        fresh.replace(target)
    finally:
        fresh.unlink(missing_ok=True)
    return made


def main() -> None:
    """Build the named sources, or all, and update the manifest after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", nargs="*", help=f"of {', '.join(sources())}; all by default")
    parser.add_argument("--arch", choices=sorted(ARCHS), action="append")
    parser.add_argument("--debug", action="store_true", help="into build/cubins-debug")
    parser.add_argument("--define", metavar="NAME", action="append", default=[], help="likewise")
    parser.add_argument("--nvrtc", action="store_true", help="into build/cubins-nvrtc")
    args = parser.parse_args()
    unknown = sorted(set(args.source) - set(sources()))
    if unknown:
        parser.error(f"no csrc/{unknown[0]}.cu; there are {', '.join(sources())}")
    defines = ["MOET_DEBUG"] * args.debug + args.define
    names = [name.removeprefix("MOET_").lower().replace("_", "-") for name in defines]
    flavour = names + ["nvrtc"] * args.nvrtc
    root = VARIANTS / "-".join(["cubins", *flavour]) if flavour else CUBINS
    compile, compiler = compile_source, f"nvcc {COMPILER}"
    if args.nvrtc:
        compile, compiler = nvrtc.compile_source, f"nvrtc {nvrtc.version()}"
    for name in args.source or sources():
        for arch in args.arch or sorted(ARCHS):
            made = build(name, arch, root, defines=defines, compile=compile)
            record(root, {f"{arch}/{name}": made}, compiler)
            print(f"{arch}/{name}.cubin {(root / arch / f'{name}.cubin').stat().st_size} bytes")


if __name__ == "__main__":
    main()
