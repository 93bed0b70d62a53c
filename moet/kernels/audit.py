"""Re-check cubins/ against its sources and manifest: `python -m moet.kernels.audit`.

Disassembles every cubin. Fails on a stale source, a changed cubin, a spill, a missing or unwanted
instruction, fewer CTAs per SM than a kernel declares, or registers taken that it has not. Needs no
GPU and no compiler.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moet.errors import CubinError
from moet.kernels import build, issue_slots
from moet.kernels.tools import instructions, listing, resources, without_labels

REGISTERS_PER_SM = 65536
# What carries the matrix work of a GEMM kernel, by architecture: for 8-bit operands, for bf16.
REQUIRED = {"sm90a": ("QGMMA", "HGMMA"), "sm120a": ("QMMA.SF", "HMMA")}
FORBIDDEN = ("LDL", "STL", "F2FP.F16.E4M3.UNPACK_B")


def required(arch: str, kernel: str) -> str | None:
    """The instruction that a GEMM kernel must have; None for other kernels."""
    if not kernel.startswith(("stream_", "prefill_", "moe_")):
        return None
    return REQUIRED[arch][kernel.split("_")[1] == "bf16"]


def early_leaves(lines: Sequence[str]) -> int:
    """Arrivals at barriers of stages before which, since the last branch, shared memory was read.

    Such loads may be served after the arrival, when the copy engine has already overwritten what
    they read; behind a branch nothing is computed with that comes before it.
    """
    count, reading = 0, False
    for line in lines:
        op = re.sub(r"^@!?U?P\w+\s+", "", line)
        if op.startswith("BRA"):
            reading = False
        elif op.startswith("LDS") and not line.startswith("@!PT"):
            reading = True
        elif op.startswith("SYNCS.ARRIVE") and ".A1T0" in op:
            count += reading
    return count


def registers_missing(registers: int, threads: int, ops: Sequence[str]) -> int:
    """By how many registers a thread of each warpgroup, one of which gives registers and all others
    take them, want more than the kernel has: the last to ask would wait for ever. 0: none."""
    found = {"DEALLOC": registers, "TRY_ALLOC": registers}
    for op in ops:
        if "USETMAXREG" in op:
            found["TRY_ALLOC" if "TRY_ALLOC" in op else "DEALLOC"] = int(op.split()[-1], 16)
    groups = threads // 128
    wanted = found["DEALLOC"] + (groups - 1) * found["TRY_ALLOC"]
    return max(0, wanted - groups * registers)


def check_kernel(
    arch: str, kernel: str, facts: dict[str, Any], use: dict[str, int], ops: list[str]
) -> list[str]:
    """What is wrong with one kernel; facts are the manifest's, use and ops the disassembler's."""
    problems = []
    if use["REG"] != facts["registers"] or use["SHARED"] != facts["shared_bytes"]:
        problems.append(f"uses {use}, manifest says {facts}")
    if use["STACK"] or use["LOCAL"]:
        problems.append(f"spills: {use['STACK']} bytes of stack, {use['LOCAL']} local")
    registers = -(-use["REG"] // 8) * 8 * facts["threads"]
    ctas = REGISTERS_PER_SM // registers
    if ctas < facts["ctas_per_sm"]:
        problems.append(
            f"{use['REG']} registers allow {ctas} CTAs, {facts['ctas_per_sm']} declared"
        )
    missing = registers_missing(use["REG"], facts["threads"], ops)
    if missing:
        problems.append(f"its warpgroups want {missing} registers more than it has, and would hang")
    needed = required(arch, kernel)
    if needed and not any(op.startswith(needed) for op in ops):
        problems.append(f"has no {needed}")
    bad = Counter(name for op in ops for name in FORBIDDEN if op.startswith(name))
    problems += [f"has {count} {name}" for name, count in bad.items()]
    return [f"{arch} {kernel}: {problem}" for problem in problems]


def check_cubin(arch: str, name: str, cubin: Path, facts: dict[str, Any]) -> list[str]:
    """What is wrong with one cubin."""
    if facts["source_sha256"] != build.source_hash(name):
        return [f"{arch}/{name}: csrc/{name}.cu or a header changed; python -m moet.kernels.build"]
    if not cubin.exists():
        return [f"{cubin} is absent; python -m moet.kernels.build"]
    if hashlib.sha256(cubin.read_bytes()).hexdigest() != facts["cubin_sha256"]:
        return [f"{cubin} is not the file of the manifest; python -m moet.kernels.build"]
    if facts["flags"] != build.flags(arch):
        return [f"{arch}/{name}: built with {facts['flags']}; python -m moet.kernels.build"]
    use, lines = resources(cubin), listing(cubin)
    if set(use) != set(facts["kernels"]):
        return [f"{arch}/{name}: kernels {sorted(set(use) ^ set(facts['kernels']))} differ"]
    problems: list[str] = []
    for kernel, kernel_facts in facts["kernels"].items():
        ops = without_labels(lines[kernel])
        problems += check_kernel(arch, kernel, kernel_facts, use[kernel], ops)
        early = early_leaves(lines[kernel]) if kernel.startswith("prefill_") else 0
        if early:
            problems.append(f"{arch} {kernel}: {early} stages are left while loads may be waiting")
    return problems


def audit(cubins: Path) -> list[str]:
    """Everything that is wrong under a folder of cubins; an empty list means none.

    Raises CubinError if the manifest or a tool is missing.
    """
    path = cubins / "MANIFEST.json"
    if not path.exists():
        raise CubinError(f"{path} is absent; python -m moet.kernels.build")
    manifest = json.loads(path.read_text())
    expected = {f"{arch}/{name}" for arch in build.ARCHS for name in build.sources()}
    problems = [f"{key}: not in the manifest" for key in expected - set(manifest["cubins"])]
    problems += [f"{key}: has no source" for key in set(manifest["cubins"]) - expected]
    if manifest["compiler"] != f"nvcc {build.COMPILER}":
        problems.append(f"built by {manifest['compiler']}, not nvcc {build.COMPILER}")
    for key in sorted(expected & set(manifest["cubins"])):
        arch, name = key.split("/")
        problems += check_cubin(arch, name, cubins / f"{key}.cubin", manifest["cubins"][key])
    return problems


def matrix_census(cubin: Path) -> dict[str, tuple[int, int]]:
    """GEMM kernel -> (matrix instructions, instructions between the first and the last of them)."""
    found = {}
    for kernel, ops in instructions(cubin).items():
        matrix = [
            i for i, op in enumerate(ops) if op.startswith(("QGMMA", "HGMMA", "QMMA", "HMMA"))
        ]
        if required("sm90a", kernel) and matrix:
            found[kernel] = (len(matrix), matrix[-1] - matrix[0] + 1)
    return found


def slots(cubins: Path) -> list[dict[str, Any]]:
    """Issue slots of sm_120a's GEMM kernels beside those of hand-written SASS; see issue_slots.py.

    Raises CubinError for a kernel that is not there or has no loop that multiplies.
    """
    manifest = json.loads((cubins / "MANIFEST.json").read_text())["cubins"]
    kernels: dict[str, tuple[dict[str, int], list[str]]] = {}
    for key, facts in manifest.items():
        if key.startswith("sm120a/"):
            lines = listing(cubins / f"{key}.cubin")
            kernels |= {name: (facts["kernels"][name], found) for name, found in lines.items()}
    rows = []
    for case in issue_slots.CASES:
        if case.kernel not in kernels:
            raise CubinError(f"sm120a has no kernel {case.kernel}; issue_slots.CASES names it")
        facts, lines_of = kernels[case.kernel]
        loop = issue_slots.hottest_loop(lines_of, case.kind)
        if loop is None:
            raise CubinError(f"{case.kernel} has no loop with {case.kind} instructions")
        rows.append(issue_slots.row(case, loop, facts))
    return rows


def main() -> None:
    """Print what is wrong and exit 1, or print the census of the matrix loops."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--census", action="store_true", help="instructions per matrix instruction")
    args = parser.parse_args()
    problems = audit(build.CUBINS)
    for problem in problems:
        print(problem)
    if problems:
        raise SystemExit(1)
    for arch in build.ARCHS if args.census else ():
        for cubin in sorted((build.CUBINS / arch).glob("*.cubin")):
            for kernel, (matrix, span) in matrix_census(cubin).items():
                print(f"{arch} {kernel}: {span} / {matrix} = {span / matrix:.1f}")
    print("cubins match their sources")


if __name__ == "__main__":
    main()
