"""Each answer's tokens as the model made them, one file an answer. Only written if asked for.

For reports of lost or mangled tool calls: what the parser was given. Prompts are not written.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import msgspec

from moet.errors import ConfigError
from moet.runtime.output import Output

logger = logging.getLogger(__name__)

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
MAX_NAME = 150


class RawChoice(msgspec.Struct, kw_only=True):
    """One sample: text has control tokens spelled out, as `moet parse` reads them."""

    index: int
    text: str = ""
    token_ids: list[int] = msgspec.field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None


class RawRecord:
    """What one answer has said so far."""

    def __init__(self, answer_id: str, model: str) -> None:
        self.answer_id = answer_id
        self.model = model
        self.choices: dict[int, RawChoice] = {}

    def add(self, output: Output) -> None:
        """Append an increment."""
        choice = self.choices.setdefault(output.index, RawChoice(index=output.index))
        choice.text += "".join(piece.text for piece in output.pieces)
        choice.token_ids += output.token_ids
        choice.error = output.error
        choice.stop_reason = output.stop_reason
        if output.finish_reason is not None:
            choice.finish_reason = output.finish_reason.value

    def body(self) -> dict[str, Any]:
        """The file's content; finish_reason null means that the client left or the time was up."""
        choices = [self.choices[index] for index in sorted(self.choices)]
        return {"id": self.answer_id, "model": self.model, "choices": choices}


class RawLog:
    """A folder of records."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError if the folder cannot be made."""
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ConfigError(f"--log-raw-output {folder}: {error.strerror}") from None

    def record(self, answer_id: str, model: str) -> RawRecord:
        """A new record; `write` it when it is complete."""
        return RawRecord(answer_id, model)

    def write(self, record: RawRecord) -> None:
        """Write a record. A full disk is logged and costs the record, not the answer."""
        name = _UNSAFE.sub("_", record.answer_id)[:MAX_NAME].lstrip(".")
        try:
            (self.folder / f"{name}.json").write_bytes(msgspec.json.encode(record.body()))
        except OSError as error:
            logger.warning("a raw output could not be written: %s", error.strerror)
