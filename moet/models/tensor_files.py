"""Folders of safetensors shards: which tensor lies where, and its bytes on demand.

Every header is checked before any tensor is read. Knows no model."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moet.errors import CheckpointError

logger = logging.getLogger(__name__)

INDEX_NAME = "model.safetensors.index.json"
TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I32": torch.int32,
    "I64": torch.int64,
    "I8": torch.int8,
    "U8": torch.uint8,
}
_MAX_HEADER_BYTES = 100_000_000
_SAMPLES_PER_FILE = 16
_SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies; offset and num_bytes in bytes from the start of the file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def some_of(names: Iterable[object], limit: int = 5) -> str:
    """The first few of many names, and how many more there are, for an error message."""
    listed = [str(name) for name in names]
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + more


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Parse and check one file's header: dtypes, sizes, no gap or overlap, the exact file size.

    Raises CheckpointError naming the file and what is wrong with it.
    """
    size = path.stat().st_size
    raw = read_header_bytes(path)
    try:
        header = json.loads(raw)
    except ValueError as error:
        raise CheckpointError(f"{path}: the header is not JSON ({error}); fetch it again") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is a {type(header).__name__}, not an object")
    header.pop("__metadata__", None)
    start = 8 + len(raw)
    entries = {name: _entry(path, name, value, start) for name, value in header.items()}
    end, last = start, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: item[1].offset):
        if entry.offset != end:
            fault = "overlaps" if entry.offset < end else "leaves a gap after"
            raise CheckpointError(f"{path}: {name} {fault} {last}; the file is damaged")
        end, last = entry.offset + entry.num_bytes, name
    if size != end:
        cause = "the download is incomplete" if size < end else "the file is damaged"
        raise CheckpointError(
            f"{path} has {size} bytes but its header describes {end}; {cause}, fetch it again"
        )
    return entries


def read_header_bytes(path: Path) -> bytes:
    """The JSON header of a safetensors file, unparsed."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(
                f"{path} has {size} bytes, too few for its header of {length} bytes; "
                "the download is incomplete or this is not a safetensors file"
            )
        return file.read(length)


def _entry(path: Path, name: str, value: Any, start: int) -> TensorEntry:
    try:
        dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        valid = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        valid = False
    if not valid:
        raise CheckpointError(f"{path}: the header entry of {name} is malformed: {value!r}")
    if dtype not in TORCH_DTYPES:
        raise CheckpointError(f"{path}: {name} has dtype {dtype}; known are {sorted(TORCH_DTYPES)}")
    expected = prod(shape) * TORCH_DTYPES[dtype].itemsize
    if end - begin != expected:
        raise CheckpointError(
            f"{path}: {name} is {dtype} {list(shape)}, {expected} bytes, "
            f"but its place in the file has {end - begin}"
        )
    return TensorEntry(path, dtype, shape, start + begin, expected)


class TensorFiles:
    """All tensors of a folder by name. Reads one tensor at a time and keeps none of it."""

    def __init__(self, folder: Path, entries: Mapping[str, TensorEntry]) -> None:
        self.folder = folder
        self.entries = entries
        self.paths = sorted({entry.path for entry in entries.values()})

    @classmethod
    def open(cls, folder: Path) -> TensorFiles:
        """Find the shards by their index, or the only file, and check every header.

        Raises CheckpointError naming missing shards, missing or doubled tensors, damaged files.
        """
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder; give the folder of a checkpoint")
        weight_map = _read_index(folder)
        if weight_map is None:
            return cls(folder, read_header(_only_file(folder)))
        shards = sorted(set(weight_map.values()))
        missing = [shard for shard in shards if not (folder / shard).is_file()]
        if missing:
            raise CheckpointError(
                f"{folder} lacks {len(missing)} of the {len(shards)} files in its index: "
                f"{some_of(missing)}; the download is incomplete, fetch them again"
            )
        extra = sorted({path.name for path in folder.glob("*.safetensors")} - set(shards))
        if extra:
            logger.warning("files not in the index are ignored: %s", some_of(extra))
        entries: dict[str, TensorEntry] = {}
        for shard in shards:
            found = read_header(folder / shard)
            strays = sorted(name for name in found if weight_map.get(name) != shard)
            if strays:
                raise CheckpointError(
                    f"{folder / shard} holds tensors that the index does not place there: "
                    f"{some_of(strays)}; index and shards are of different versions"
                )
            entries |= found
        absent = [f"{name} ({shard})" for name, shard in weight_map.items() if name not in entries]
        if absent:
            raise CheckpointError(
                f"{folder}: the index names {len(absent)} tensors that their files do not hold: "
                f"{some_of(absent)}; index and shards are of different versions"
            )
        return cls(folder, entries)

    def names(self) -> Iterator[str]:
        """Tensor names, in no particular order."""
        return iter(self.entries)

    def load(self, name: str) -> Tensor:
        """Read one tensor with its dtype as stored. Raises CheckpointError if there is no such."""
        entry = self.entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.folder} has no tensor {name}")
        flat = torch.empty(entry.num_bytes, dtype=torch.uint8)
        try:
            with entry.path.open("rb", buffering=0) as file:
                read_into(file.fileno(), flat, entry.offset, entry.path)
        except OSError as error:
            raise CheckpointError(f"cannot read {name} from {entry.path}: {error}") from error
        return flat.view(TORCH_DTYPES[entry.dtype]).view(entry.shape)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor that is there."""
        return self.entries[name].shape

    def load_part(self, name: str, dim: int, first: int, last: int) -> Tensor:
        """Read first:last of dimension 0 or 1 of a tensor that is there, and not the rest of it."""
        entry = self.entries[name]
        width = entry.num_bytes // entry.shape[0]
        if dim == 0:
            flat = torch.empty((last - first) * width, dtype=torch.uint8)
            with entry.path.open("rb", buffering=0) as file:
                read_into(file.fileno(), flat, entry.offset + first * width, entry.path)
            part = flat.view(last - first, width)
        else:
            size = entry.offset + entry.num_bytes
            mapped = torch.from_file(str(entry.path), shared=False, size=size, dtype=torch.uint8)
            item = width // entry.shape[1]
            rows = mapped[entry.offset :].view(entry.shape[0], width)
            part = rows[:, first * item : last * item].clone()
        shape = list(entry.shape)
        shape[dim] = last - first
        return part.view(TORCH_DTYPES[entry.dtype]).view(shape)

    def identity(self) -> str:
        """A hash over names, shapes and places of all tensors and samples of every file's bytes."""
        digest = hashlib.sha256()
        for path in self.paths:
            digest.update(path.name.encode() + b"\0" + read_header_bytes(path))
            size = path.stat().st_size
            with path.open("rb") as file:
                for sample in range(_SAMPLES_PER_FILE):
                    file.seek(size * sample // _SAMPLES_PER_FILE)
                    digest.update(file.read(_SAMPLE_BYTES))
        return digest.hexdigest()


def read_into(descriptor: int, flat: Tensor, offset: int, path: Path) -> None:
    """Fill flat, a contiguous uint8 tensor, from the file at offset; short files are an error."""
    view = flat.numpy().data
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if count == 0:
            raise CheckpointError(f"{path} ended at byte {offset + done}; it changed while open")
        done += count


def _read_index(folder: Path) -> dict[str, str] | None:
    path = folder / INDEX_NAME
    if not path.is_file():
        return None
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        plain = all(isinstance(v, str) and Path(v).name == v for v in weight_map.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a shard index: {error!r}; fetch it again") from None
    if not plain or not weight_map:
        raise CheckpointError(f"{path}: weight_map must map tensor names to files of this folder")
    return dict(weight_map)


def _only_file(folder: Path) -> Path:
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files[0]
    if not files:
        raise CheckpointError(f"{folder} holds no .safetensors file; is it a checkpoint folder?")
    raise CheckpointError(
        f"{folder} has {len(files)} .safetensors files but no {INDEX_NAME}; "
        "the download is incomplete, fetch the index"
    )
