"""Which products and sums are rounded: kernels that share a row's bits must agree on it."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

from triton import language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from moet.kernels import triton_common  # noqa: E402
from moet.kernels.triton_common import Kernel, load_rotation, rotate_pairs  # noqa: E402


@triton.jit
def turn(x, cos, sin, out, DIM: tl.constexpr, EARLY: tl.constexpr):
    """EARLY: angles are there long before the values."""
    d = tl.arange(0, DIM)
    if EARLY:
        c, s = load_rotation(cos, sin, 0, DIM, DIM)
    value = tl.load(x + d)
    value = value / (tl.sum(value, 0) + 1.0)
    if not EARLY:
        c, s = load_rotation(cos, sin, 0, DIM, DIM)
    tl.store(out + d, tl.reshape(rotate_pairs(tl.reshape(value, [1, DIM]), c, -s), [DIM]))


def fused(early: bool, *, allowed: bool) -> list[str]:
    """Multiplications and additions in one, which the compiler makes of others if it is allowed."""
    types = dict.fromkeys(("x", "cos", "sin", "out"), "*fp32")
    types |= {"DIM": "constexpr", "EARLY": "constexpr"}
    source = ASTSource(turn, types, {(4,): 64, (5,): early}, {})
    options = {"num_warps": 1, "enable_fp_fusion": allowed}
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    return re.findall(r"fma\.rn\.f32", ptx)


@pytest.mark.parametrize("early", [False, True])
def test_the_compiler_chooses_no_rounding(early: bool) -> None:
    assert len(fused(early, allowed=False)) == 2  # of the pair of each of 32 threads
    assert len(fused(early, allowed=True)) == 2


def launched() -> list[tuple[str, object]]:
    """What the modules of Triton kernels launch, by name."""
    found = []
    for path in sorted(Path(triton_common.__file__).parent.glob("triton_*.py")):
        module = import_module(f"moet.kernels.{path.stem}")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                assert isinstance(node.func.value, ast.Name)
                name = node.func.value.id
                found.append((f"{path.stem}.{name}", getattr(module, name)))
    return found


def test_no_kernel_leaves_its_roundings_to_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, kernel in launched():
        assert isinstance(kernel, Kernel), f"{name} is launched as triton.jit made it"
    options: dict[str, object] = {}
    monkeypatch.setattr(triton.JITFunction, "run", lambda self, **given: options.update(given))
    Kernel(turn.fn, ())[1,]()
    assert options["enable_fp_fusion"] is False
