"""Which expert rows were worth having, kept from one start to the next. A hint, never needed."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

logger = logging.getLogger(__name__)


def read_heat(path: Path, num_rows: int) -> list[int]:
    """Rows by heat, hottest first; none if there is no file or it is of another model."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        rows = [row for row in content["rows"] if isinstance(row, int) and 0 <= row < num_rows]
        known = content["num_rows"] == num_rows
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s is no heat file (%r); starting cold", path, error)
        return []
    if not known:
        logger.warning("%s is of a model with other experts; starting cold", path)
        return []
    return list(dict.fromkeys(rows))


def write_heat(path: Path, rows: Sequence[int], num_rows: int) -> None:
    """Replace the file as a whole. A disk that refuses costs the hint and is logged."""
    content = json.dumps({"num_rows": num_rows, "rows": list(rows)})
    partial = path.with_name(f"{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(content, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        logger.warning("%s was not written (%s); the next start will be cold", path, error)
