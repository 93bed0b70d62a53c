"""Result files: what was measured, where, on what commit, by which command; one row a case."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from moet import __version__


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One figure. floor: what physics allows; target: what was promised; or None."""

    case: str
    value: float
    unit: str
    better: Literal["lower", "higher"]
    floor: float | None = None
    target: float | None = None
    note: str = ""


def report(
    command: str, rows: Sequence[Row], *, hardware: str, more: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A result file's content. more: fields beside the rows."""
    return {
        "hardware": hardware,
        "commit": _commit(),
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        **(more or {}),
        "rows": [msgspec.to_builtins(row) for row in rows],
    }


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write a result file, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def this_machine() -> str:
    """The processor by name, its threads in use, and torch's version."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = info.read_text(encoding="utf-8").splitlines()
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        name = models[0] if models else name
    return f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def _commit() -> str:
    """Of the source tree that this runs from, or the version of an installed package."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parent,
        )
    except (OSError, subprocess.CalledProcessError):
        return __version__
    return done.stdout.strip()
