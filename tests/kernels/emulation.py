"""Runs the CUDA sources on the CPU: the same kernel bodies, built with g++ against emulation.h."""

from __future__ import annotations

import ctypes
import subprocess
from dataclasses import dataclass
from pathlib import Path

CSRC = Path(__file__).parents[2] / "moet" / "kernels" / "csrc"


SHARED_BYTES = {90: 232448, 120: 101376}  # that a CTA may have


@dataclass(frozen=True)
class Emulator:
    """A Launcher over emulated kernels, built for one architecture's matrix units."""

    libraries: tuple[ctypes.CDLL, ...]
    sm: int
    num_sms: int

    @property
    def max_shared_bytes(self) -> int:
        return SHARED_BYTES[self.sm]

    def launch(
        self,
        name: str,
        *,
        grid: int | tuple[int, int],
        threads: int,
        shared_bytes: int,
        args: ctypes.Structure,
    ) -> None:
        assert shared_bytes <= self.max_shared_bytes
        symbol = f"emulate_{name}"
        run = next(getattr(lib, symbol) for lib in self.libraries if hasattr(lib, symbol))
        x, y = grid if isinstance(grid, tuple) else (grid, 1)
        assert run(ctypes.byref(args), x, y, shared_bytes) == 0, f"{name} did not finish"


def build(sources: tuple[str, ...], sm: int, folder: Path, *, num_sms: int) -> Emulator:
    """Compile csrc/*.cu for the emulated matrix units of sm (90 or 120)."""
    libraries = []
    for source in sources:
        library = folder / f"{source}_{sm}.so"
        flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-DMOET_EMULATE", f"-DMOET_SM={sm}"]
        command = ["g++", *flags, "-x", "c++", "-o", str(library), str(CSRC / f"{source}.cu")]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        libraries.append(ctypes.CDLL(str(library)))
    return Emulator(tuple(libraries), sm, num_sms)
