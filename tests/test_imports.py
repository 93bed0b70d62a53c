"""Imports go one way: server -> runtime -> models -> kernels -> {errors, types, config, log}."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "moet"
BASE = {"errors", "types", "config", "log"}
ALLOWED = {
    "kernels": BASE | {"kernels"},
    "models": BASE | {"kernels", "models"},
    "runtime": BASE | {"kernels", "models", "runtime"},
    "server": BASE | {"kernels", "models", "runtime", "server"},
}


def imported_parts(path: Path) -> set[str]:
    """The parts of moet that a file imports, at any depth of nesting."""
    parts = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        parts |= {name.split(".")[1] for name in names if name.startswith("moet.")}
    return parts


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_imports_point_down(package: str) -> None:
    for path in (PACKAGE / package).rglob("*.py"):
        extra = imported_parts(path) - ALLOWED[package] - {"__version__"}
        assert not extra, f"{path.relative_to(PACKAGE)} imports {sorted(extra)}"


@pytest.mark.parametrize("module", sorted(BASE))
def test_base_modules_import_no_package(module: str) -> None:
    assert imported_parts(PACKAGE / f"{module}.py") <= BASE


def test_environment_is_read_in_config_only() -> None:
    for path in PACKAGE.rglob("*.py"):
        if path.name != "config.py":
            text = path.read_text()
            assert "os.environ" not in text, path
            assert "getenv" not in text, path
