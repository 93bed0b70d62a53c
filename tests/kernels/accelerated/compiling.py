"""Compiles every Triton kernel that the ops launch at released shapes, for both architectures,
without a GPU: launches are caught, and their arguments become signatures.

    python -m tests.kernels.accelerated.compiling [--target 90|120] [--brief]

prints registers, spills and shared memory of each as JSON lines; brief: of one launch
of each kernel.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from moet.kernels import triton_attention, triton_index_scores, triton_mla_attention
from tests.kernels.accelerated.released import Released
from tests.kernels.accelerated.released_glm import ReleasedGlm

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float64: "*fp64",
    torch.bool: "*i1",
}
Launch = tuple[JITFunction, dict[str, Any], dict[str, int]]


def signature_of(
    fn: JITFunction, values: dict[str, Any]
) -> tuple[dict[str, str], dict[Any, Any], dict[Any, Any]]:
    """Types, constants and alignments as the launcher would find them."""
    types: dict[str, str] = {}
    constants: dict[Any, Any] = {}
    attrs: dict[Any, Any] = {}
    for i, param in enumerate(fn.params):
        value = values[param.name]
        if param.is_constexpr or (
            isinstance(value, int) and value == 1 and not param.do_not_specialize
        ):
            types[param.name] = "constexpr"
            constants[(i,)] = value
        elif isinstance(value, torch.Tensor):
            types[param.name] = TYPES[value.dtype]
            attrs[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            types[param.name] = "i32"
            if value % 16 == 0 and not param.do_not_specialize:
                attrs[(i,)] = [["tt.divisibility", 16]]
        else:
            types[param.name] = "fp32"
    return types, constants, attrs


def launches(arch: str) -> list[Launch]:
    """What the ops launch for decode steps with short and long contexts, and for a chunk."""
    caught: dict[str, Launch] = {}

    def record(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        names = [param.name for param in self.params]
        options = {k: kwargs.pop(k) for k in list(kwargs) if k not in names}
        values = dict(zip(names, args, strict=False)) | kwargs
        types, constants, _ = signature_of(self, values)
        key = repr((self.fn.__name__, types, constants, options))
        caught.setdefault(key, (self, values, options))

    original, JITFunction.run = JITFunction.run, record
    mla = triton_mla_attention
    tables = [triton_attention.HEADS_EACH, mla.HEADS_EACH, mla.HEADS_APART]
    tables.append(triton_index_scores.REGISTERS)
    kept = [dict(each) for each in tables]
    for each in tables:
        each["sm90a"] = each[arch]  # what is not on a GPU counts as sm90a
    try:
        cpu = torch.device("cpu")
        for step in (
            Released(1, 131072, cpu),
            Released(2, 4096, cpu),
            Released(600, 4096, cpu, chunk=True),
            ReleasedGlm(600, 4096, "nvfp4", cpu),  # the first is what a brief run compiles
            ReleasedGlm(1, 262144, "nvfp4", cpu),
            ReleasedGlm(600, 4096, "fp8", cpu),
            ReleasedGlm(1, 262144, "fp8", cpu),
        ):
            for call in step.ops().values():
                call()
    finally:
        JITFunction.run = original
        for each, values in zip(tables, kept, strict=True):
            each.update(values)
    return list(caught.values())


def usage(cubin: bytes) -> dict[str, int]:
    """Registers and stack bytes (spills) of a cubin."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return {name.lower(): int(re.findall(rf"{name}:(\d+)", text)[-1]) for name in ("REG", "STACK")}


def compiled(launch: Launch, capability: int) -> dict[str, Any]:
    """Compile one launch and say what it takes."""
    fn, values, options = launch
    types, constants, attrs = signature_of(fn, values)
    source = ASTSource(fn, types, constants, attrs)
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    facts = {
        name: value
        for name, value in values.items()
        if fn.params[[p.name for p in fn.params].index(name)].is_constexpr
    }
    return {
        "kernel": fn.fn.__name__,
        "capability": capability,
        **usage(kernel.asm["cubin"]),
        "shared_bytes": kernel.metadata.shared,
        "num_warps": options.get("num_warps", 4),
        "constants": facts,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=int, choices=(90, 120), action="append")
    parser.add_argument("--brief", action="store_true")
    args = parser.parse_args()
    for target in args.target or (90, 120):
        found = launches("sm90a" if target == 90 else "sm120a")
        if args.brief:
            found = list({launch[0].fn.__name__: launch for launch in reversed(found)}.values())
        for launch in found:
            print(json.dumps(compiled(launch, target)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
