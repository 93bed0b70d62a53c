"""What a bench of several parts finds, and where it goes: a part may fail without the others, and
the file is written after each."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Literal

import torch

from moet.bench.results import Row, report, write


@dataclass
class Bench:
    """What was found so far, and where it goes."""

    out: Path
    command: str
    commit: str
    more: dict[str, object]
    rows: list[Row] = field(default_factory=list)
    faults: dict[str, str] = field(default_factory=dict)

    def add(
        self,
        case: str,
        value: float,
        unit: str,
        *,
        better: Literal["lower", "higher"] = "lower",
        floor: float | None = None,
        target: float | None = None,
        note: str = "",
    ) -> None:
        value = round(value, 4)
        self.keep(
            Row(
                case=case,
                value=value,
                unit=unit,
                better=better,
                floor=floor,
                target=target,
                note=note,
            )
        )

    def keep(self, row: Row) -> None:
        """Tell of a row and have it in the file."""
        self.rows.append(row)
        goal = "" if row.target is None else f"  target {row.target:g}"
        print(f"{row.case:<58} {row.value:>12.4f} {row.unit:<9}{goal}  {row.note}", flush=True)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part that may fail without the others."""
        began_s = perf_counter()
        print(f"--- {name}", flush=True)
        try:
            yield
        except Exception as error:
            self.fail(name, error)
        print(f"    {name}: {perf_counter() - began_s:.1f} s", flush=True)
        gc.collect()
        self.write()

    def fail(self, name: str, error: Exception) -> None:
        """Tell of a part that failed; called while its error is handled."""
        self.faults[name] = f"{type(error).__name__}: {error}"
        print(f"FAILED {name}\n{traceback.format_exc(limit=-6)}", flush=True)

    def hardware(self) -> str:
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"

    def write(self) -> None:
        content = report(self.command, self.rows, hardware=self.hardware(), more=self.more)
        content["commit"] = self.commit or content["commit"]
        content["faults"] = self.faults
        write(self.out, content)
