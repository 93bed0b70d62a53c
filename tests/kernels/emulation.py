"""Runs the CUDA sources on the CPU: the same kernel bodies, built with g++ against emulation.h."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "moet" / "kernels" / "csrc"
LIBRARIES = ROOT / "build" / "emulation"

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
        cluster: int = 1,
    ) -> None:
        assert shared_bytes <= self.max_shared_bytes
        symbol = f"emulate_{name}"
        run = next(getattr(lib, symbol) for lib in self.libraries if hasattr(lib, symbol))
        x, y = grid if isinstance(grid, tuple) else (grid, 1)
        assert run(ctypes.byref(args), x, y, shared_bytes) == 0, f"{name} did not finish"


def build(sources: tuple[str, ...], sm: int, *, num_sms: int) -> Emulator:
    """csrc/*.cu for the emulated matrix units of sm (90 or 120), each compiled once for all tests.

    Libraries stay in build/emulation, named by what they were made of; processes wait for each
    other.
    """
    libraries = tuple(ctypes.CDLL(str(_library(source, sm))) for source in sources)
    return Emulator(libraries, sm, num_sms)


def _library(source: str, sm: int) -> Path:
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-DMOET_EMULATE", f"-DMOET_SM={sm}"]
    digest = hashlib.sha256(" ".join(flags).encode())
    for path in sorted(CSRC.iterdir()):
        digest.update(path.read_bytes())
    LIBRARIES.mkdir(parents=True, exist_ok=True)
    library = LIBRARIES / f"{source}_{sm}_{digest.hexdigest()[:16]}.so"
    with open(LIBRARIES / f"{source}_{sm}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if library.exists():
            return library
        for stale in LIBRARIES.glob(f"{source}_{sm}_*.so"):
            stale.unlink()
        unfinished = library.with_suffix(".tmp")
        command = ["g++", *flags, "-x", "c++", "-o", str(unfinished), str(CSRC / f"{source}.cu")]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        unfinished.rename(library)
    return library


if __name__ == "__main__":  # all ahead of the tests, by any Python and without packages
    for name in sorted(path.stem for path in CSRC.glob("*.cu") if path.stem != "bandwidth"):
        for architecture in SHARED_BYTES:
            _library(name, architecture)
