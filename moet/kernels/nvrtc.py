"""Compile csrc/ with NVRTC, in this process: for machines without a toolkit. A developer's option.

Gives the kernels of nvcc, though not its very bytes; the cubins that moet ships are nvcc's. Needs
cuda-bindings, and the packages of NVRTC and of the CUDA headers. No driver and no GPU.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moet.errors import CubinError

CSRC = Path(__file__).parent / "csrc"
SMS = {"sm90a": 90, "sm120a": 120}
REMEDY = "pip install cuda-bindings nvidia-cuda-nvrtc nvidia-cuda-runtime"
# What csrc/ takes from the C++ library, which NVRTC does not bring.
CSTDINT = b"""
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
"""


def _bindings() -> Any:
    try:
        from cuda.bindings import nvrtc  # type: ignore[import-untyped,unused-ignore]
    except ImportError as missing:
        raise CubinError(f"NVRTC is not there ({missing}): {REMEDY}") from missing
    return nvrtc


def _checked(result: tuple[Any, ...], what: str) -> Any:
    if int(result[0]) != 0:
        raise CubinError(f"{what}: NVRTC reports {result[0]}")
    return result[1] if len(result) > 1 else None


def version() -> str:
    """Of the library, e.g. 13.0."""
    nvrtc = _bindings()
    found = nvrtc.nvrtcVersion()
    _checked(found[:1], "version")
    return f"{found[1]}.{found[2]}"


def headers() -> Path:
    """The folder with cuda_bf16.h, from the package of the CUDA runtime. Raises CubinError."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        for path in Path(root).glob("*/include/cuda_bf16.h"):
            return path.parent
    raise CubinError(f"cuda_bf16.h is in no package: {REMEDY}")


def compile_source(name: str, arch: str, target: Path, *, defines: Sequence[str] = ()) -> None:
    """Compile csrc/NAME.cu to target. Raises CubinError with the compiler's words."""
    nvrtc, sm = _bindings(), SMS[arch]
    options = ["-std=c++17", "--fmad=true", "-diag-suppress=177", f"-DMOET_SM={sm}"]
    options += [f"--gpu-architecture=sm_{sm}a", f"-I{CSRC}", f"-I{headers()}"]
    options += [f"-D{define}" for define in defines]
    source = (CSRC / f"{name}.cu").read_bytes()
    made = nvrtc.nvrtcCreateProgram(source, f"{name}.cu".encode(), 1, [CSTDINT], [b"cstdint"])
    program = _checked(made, name)
    encoded = [option.encode() for option in options]
    if int(nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)[0]) != 0:
        log = bytearray(_checked(nvrtc.nvrtcGetProgramLogSize(program), name))
        _checked(nvrtc.nvrtcGetProgramLog(program, log), name)
        raise CubinError(f"{name}.cu for {arch}: {bytes(log).decode(errors='replace').strip()}")
    cubin = bytearray(_checked(nvrtc.nvrtcGetCUBINSize(program), name))
    _checked(nvrtc.nvrtcGetCUBIN(program, cubin), name)
    target.write_bytes(bytes(cubin))
