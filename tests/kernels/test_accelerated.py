"""The Triton ops in the interpreter, which a process has to ask for before it imports Triton; and
what the compiler makes of them for both architectures."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
SHARED_BYTES = {90: 227 << 10, 120: 99 << 10}
# Bytes of a row's sums that chunks keep in local memory, and of a long window's tokens.
SPILLED = {"attend": 624, "attend_latents": 704, "prepare": 128, "close_windows": 128}


def run(*args: str, interpret: bool) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment["TRITON_INTERPRET"] = "1" if interpret else "0"
    done = subprocess.run(
        [sys.executable, "-m", *args], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.timeout(900)  # the interpreter takes a minute of a free core
def test_ops_agree_with_their_references_in_the_interpreter() -> None:
    out = run("pytest", "tests/kernels/accelerated", interpret=True)
    assert " passed" in out


@pytest.mark.timeout(900)
@pytest.mark.parametrize("capability", [pytest.param(90, marks=pytest.mark.deep), 120])
def test_kernels_compile_and_fit(capability: int) -> None:
    out = run(
        "tests.kernels.accelerated.compiling", f"--target={capability}", "--brief", interpret=False
    )
    kernels = [json.loads(line) for line in out.splitlines()]
    assert {k["kernel"] for k in kernels} >= {"attend", "attend_latents", "score_pages"}
    for kernel in kernels:
        assert kernel["shared_bytes"] <= SHARED_BYTES[capability], kernel
        assert kernel["stack"] <= SPILLED.get(kernel["kernel"], 0), kernel
