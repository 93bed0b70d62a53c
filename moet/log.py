"""Logging set-up, called once by the command line. Libraries only call logging.getLogger."""

from __future__ import annotations

import logging
import sys

import msgspec
from rich.logging import RichHandler


class JsonFormatter(logging.Formatter):
    """One JSON object a line, for programs that read the log."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(entry).decode()


def set_up(*, level: str = "INFO", json_lines: bool | None = None) -> None:
    """Send moet's log to stderr: readable on a terminal, JSON lines elsewhere unless told."""
    if json_lines is None:
        json_lines = not sys.stderr.isatty()
    handler: logging.Handler
    if json_lines:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(JsonFormatter())
    else:
        from rich.console import Console

        handler = RichHandler(console=Console(stderr=True), show_path=False, rich_tracebacks=False)
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s", datefmt="[%X]"))
    logging.getLogger("uvicorn").handlers[:] = [handler]  # its warnings are lines of this log
    root = logging.getLogger("moet")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False
