"""Writes safetensors files of known size, and turns a full disk into a clear error."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from moet.errors import CheckpointError
from moet.models.tensor_files import TensorEntry
from moet.models.tensor_spec import TensorSpec

_ALIGNMENT_BYTES = 8
Buffer = bytes | memoryview


def plan_file(path: Path, specs: Sequence[TensorSpec]) -> tuple[bytes, Mapping[str, TensorEntry]]:
    """The first bytes of a safetensors file (length and header), and where each tensor will lie."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for spec in specs:
        offsets = [begin, begin + spec.num_bytes]
        header[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": offsets}
        begin += spec.num_bytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % _ALIGNMENT_BYTES)
    entries = {}
    offset = 8 + len(raw)
    for spec in specs:
        entries[spec.name] = TensorEntry(path, spec.dtype, spec.shape, offset, spec.num_bytes)
        offset += spec.num_bytes
    return len(raw).to_bytes(8, "little") + raw, entries


def write_file(path: Path, specs: Sequence[TensorSpec], pieces: Iterable[Buffer]) -> None:
    """Write one file from the bytes of its tensors, in order; it appears complete or not at all."""
    head, entries = plan_file(path, specs)
    partial = path.with_name(path.name + ".partial")
    try:
        with explained_errors(path), partial.open("wb") as file:
            file.write(head)
            for piece in pieces:
                file.write(piece)
            size = file.tell()
            file.flush()
            os.fsync(file.fileno())
        expected = len(head) + sum(entry.num_bytes for entry in entries.values())
        assert size == expected, f"{path}: wrote {size} bytes of {expected}"
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, value: object) -> None:
    """Write JSON with sorted keys; the file appears complete or not at all."""
    partial = path.with_name(path.name + ".partial")
    with explained_errors(path):
        partial.write_text(
            json.dumps(value, indent=1, ensure_ascii=False, sort_keys=True) + "\n", "utf-8"
        )
        with partial.open("rb") as file:
            os.fsync(file.fileno())
    partial.replace(path)


def check_free_space(folder: Path, num_bytes: int) -> None:
    """Refuse before the work starts if the file system of `folder` cannot take num_bytes."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < num_bytes:
        raise CheckpointError(
            f"{folder} needs {num_bytes:,} bytes but {free:,} are free; "
            "free space or choose another disk"
        )


@contextmanager
def explained_errors(path: Path) -> Iterator[None]:
    """Turn what the operating system says while writing `path` into a CheckpointError."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        cause = "the disk is full; free space and run it again" if full else str(error)
        raise CheckpointError(f"cannot write {path}: {cause}") from error
