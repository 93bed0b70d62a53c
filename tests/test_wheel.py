"""What is installed from a wheel: the package, and the prebuilt kernels inside it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from moet.kernels import cubin

ROOT = Path(__file__).parents[1]
PARTS = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of a copy of the tree, unpacked."""
    tree = tmp_path_factory.mktemp("tree")
    for part in PARTS:
        shutil.copy(ROOT / part, tree)
    for folder in ("moet", "cubins"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
    done = subprocess.run(
        [*command, "-w", str(tree / "out"), str(tree)], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (made,) = (tree / "out").glob("moet-*.whl")
    with zipfile.ZipFile(made) as archive:
        archive.extractall(tree / "installed")
    return tree / "installed"


def test_the_wheel_has_every_cubin_and_its_manifest(wheel: Path) -> None:
    inside = wheel / "moet" / "cubins"
    there = {str(path.relative_to(inside)) for path in inside.rglob("*") if path.is_file()}
    kept = {str(path) for path in there if not Path(path).name.startswith(".")}
    assert there == kept
    assert {"MANIFEST.json", "sm90a/prefill_gemm.cubin", "sm120a/stream_gemm.cubin"} <= there
    for path in (ROOT / "cubins").rglob("*.cubin"):
        assert (inside / path.relative_to(ROOT / "cubins")).read_bytes() == path.read_bytes()


def test_an_installed_package_finds_its_own_cubins(wheel: Path) -> None:
    code = (
        "from moet.kernels import cubin; print(cubin.folder());"
        "print(len(cubin.verified('bandwidth', 'sm90a')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=wheel, check=False, capture_output=True, text=True
    )
    folder, size = done.stdout.split()
    assert Path(folder) == wheel / "moet" / "cubins"
    assert int(size) == len(cubin.verified("bandwidth", "sm90a"))


def test_the_wheel_has_the_demo_models(wheel: Path) -> None:
    source = ROOT / "moet" / "demo"
    files = [path.relative_to(source) for path in source.rglob("*") if path.is_file()]
    assert sum(path.name == "model.safetensors" for path in files) == 2
    for path in files:
        assert (wheel / "moet" / "demo" / path).read_bytes() == (source / path).read_bytes()
