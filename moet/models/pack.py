"""The converted form of a checkpoint: what a pack folder holds, how it is verified and read.

pack.json says which source, versions and settings it came from; dense.safetensors holds every
tensor that is not a routed expert, as in the checkpoint; experts.<tier> holds one row per routed
expert at a fixed stride, experts.<tier>.base the row bases that sm_90a counts exponents from.
Knows nothing of how a pack is made."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from moet.errors import CheckpointError
from moet.kernels.layout import LAYOUT_VERSION, ExpertRows
from moet.models.expert_encoder import Tier, row_formats
from moet.models.expert_map import ExpertMap, Fp4Format
from moet.models.release import DenseDtype
from moet.models.tensor_files import TensorFiles, read_header, read_into, some_of
from moet.models.w2 import ScaleRule

FORMAT_VERSION = 1
MANIFEST_NAME, CHECKSUMS_NAME, DENSE_NAME = "pack.json", "checksums.json", "dense.safetensors"
_REMEDY = "convert the checkpoint again into a new folder"


class PackManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """pack.json. `files` gives sizes in bytes; `source` is the identity of the checkpoint."""

    format_version: int
    layout_version: int
    source: str
    artefact: str
    scale_rule: ScaleRule
    tiers: tuple[Tier, ...]
    hidden_size: int
    moe_intermediate_size: int
    num_experts: int
    layers: tuple[int, ...]
    prefixes: tuple[str, ...]
    names: tuple[str, str, str]
    fp4: Fp4Format
    dense_dtype: DenseDtype
    files: dict[str, int]
    checksums_sha256: str

    def experts(self) -> ExpertMap:
        """Numbering and names of the routed experts."""
        return ExpertMap(
            self.hidden_size,
            self.moe_intermediate_size,
            self.num_experts,
            self.layers,
            self.prefixes,
            self.names,
            fp4=self.fp4,
        )


def rows_name(tier: Tier) -> str:
    """File that holds a tier's expert rows."""
    return f"experts.{tier}"


def bases_name(tier: Tier) -> str:
    """File that holds the row bases of a tier."""
    return f"experts.{tier}.base"


def is_pack(folder: Path) -> bool:
    """Whether a folder claims to be a finished pack."""
    return (folder / MANIFEST_NAME).is_file()


class Pack:
    """An opened pack. Dense tensors by their official names, expert rows by tier."""

    def __init__(self, folder: Path, manifest: PackManifest, dense: TensorFiles) -> None:
        self.folder = folder
        self.manifest = manifest
        self.experts = manifest.experts()
        self.formats: Mapping[Tier, ExpertRows] = {
            tier: form
            for tier, form in row_formats(
                manifest.hidden_size, manifest.moe_intermediate_size, manifest.fp4
            ).items()
            if tier in manifest.tiers
        }
        self._dense = dense
        self._maps: dict[str, Tensor] = {}

    @classmethod
    def open(cls, path: str | Path, *, source: str | None = None) -> Pack:
        """Check versions, source identity, sizes and headers; the big files are not read.

        source: the identity that the pack must have come from. Raises CheckpointError naming what
        differs.
        """
        folder = Path(path)
        manifest = _read_manifest(folder)
        if source is not None and manifest.source != source:
            raise CheckpointError(
                f"{folder} was made from checkpoint {manifest.source[:12]}, not from "
                f"{source[:12]}; {_REMEDY}"
            )
        _check_sizes(folder, manifest)
        if _sha256((folder / CHECKSUMS_NAME).read_bytes()) != manifest.checksums_sha256:
            raise CheckpointError(f"{folder / CHECKSUMS_NAME} is damaged; {_REMEDY}")
        dense = TensorFiles(folder, read_header(folder / DENSE_NAME))
        return cls(folder, manifest, dense)

    @property
    def config(self) -> dict[str, Any]:
        """The parsed config.json of the checkpoint."""
        value: dict[str, Any] = json.loads((self.folder / "config.json").read_text("utf-8"))
        return value

    def names(self) -> Iterator[str]:
        """Names of the dense tensors."""
        return self._dense.names()

    def load(self, name: str) -> Tensor:
        """Read one dense tensor with its dtype as stored."""
        return self._dense.load(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a dense tensor that is there."""
        return self._dense.shape(name)

    def load_part(self, name: str, dim: int, first: int, last: int) -> Tensor:
        """Read first:last of a dimension of a dense tensor, and not the rest of it."""
        return self._dense.load_part(name, dim, first, last)

    def format(self, tier: Tier) -> ExpertRows:
        """Row layout of a tier. Raises CheckpointError if the pack was made without it."""
        if tier not in self.formats:
            raise CheckpointError(
                f"{self.folder} has no {tier} experts, only {', '.join(self.formats)}; {_REMEDY}"
            )
        return self.formats[tier]

    def expert_row(self, tier: Tier, layer_idx: int, expert_id: int) -> Tensor:
        """[row_bytes] uint8, mapped from the file: it costs no memory until it is read."""
        return self._rows(tier)[self.experts.row(layer_idx, expert_id)]

    def row_base(self, tier: Tier, layer_idx: int, expert_id: int) -> Tensor:
        """[num_sub_rows, rows] uint8, the exponents that sm_90a counts from; mapped.

        Rows are 0 for formats without exponents (NVFP4).
        """
        form, row = self.format(tier), self.experts.row(layer_idx, expert_id)
        if bases_name(tier) not in self.manifest.files:
            return torch.empty(form.num_sub_rows, 0, dtype=torch.uint8)
        flat = self._map(bases_name(tier)).view(self.experts.num_rows, form.num_sub_rows, -1)
        return flat[row]

    def row_place(self, tier: Tier, layer_idx: int, expert_id: int) -> tuple[Path, int]:
        """File and offset in bytes of an expert's row, for readers of their own."""
        row = self.experts.row(layer_idx, expert_id)
        return self.folder / rows_name(tier), row * self.format(tier).row_bytes

    def row_digests(self, tier: Tier) -> Sequence[str]:
        """sha256 of each expert's row, in hexadecimal digits, in the order of the file."""
        digests: list[str] = self._checksums()[rows_name(tier)]
        return digests

    def read_layer(self, tier: Tier, layer_idx: int, out: Tensor) -> None:
        """Read a layer's rows into out, [num_experts, row_bytes] uint8, contiguous."""
        path, offset = self.row_place(tier, layer_idx, 0)
        with path.open("rb", buffering=0) as file:
            read_into(file.fileno(), out.view(-1), offset, path)

    def verify(self, progress: Callable[[int], None] | None = None) -> None:
        """Read everything and compare checksums. progress gets the bytes of each piece.

        Raises CheckpointError naming the tensors or experts that are damaged.
        """
        damaged = [
            name
            for name, digest, data in self._pieces(self._checksums())
            if digest != _done(data, progress)
        ]
        if damaged:
            raise CheckpointError(
                f"{self.folder}: checksums differ for {some_of(damaged)}; {_REMEDY}"
            )

    def _checksums(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads((self.folder / CHECKSUMS_NAME).read_text("utf-8"))
        return value

    def _pieces(self, checksums: Mapping[str, Any]) -> Iterator[tuple[str, str, Tensor]]:
        for name, digest in checksums[DENSE_NAME].items():
            yield name, digest, self.load(name).view(-1).view(torch.uint8)
        for tier in self.manifest.tiers:
            for file, label in ((rows_name(tier), "row"), (bases_name(tier), "base")):
                if file not in checksums:
                    continue
                rows = self._map(file).view(self.experts.num_rows, -1)
                for row, digest in enumerate(checksums[file]):
                    gate = self.experts.matrices(row)[0].rpartition(".")[0]
                    yield f"{gate} ({tier} {label})", digest, rows[row]

    def _rows(self, tier: Tier) -> Tensor:
        row_bytes = self.format(tier).row_bytes
        return self._map(rows_name(tier)).view(-1, row_bytes)

    def _map(self, name: str) -> Tensor:
        if name not in self._maps:
            self._maps[name] = torch.from_file(
                str(self.folder / name),
                shared=False,
                size=self.manifest.files[name],
                dtype=torch.uint8,
            )
        return self._maps[name]


def digest_of(data: Tensor) -> str:
    """sha256 of the bytes of a contiguous uint8 tensor."""
    return hashlib.sha256(data.numpy().data).hexdigest()


def _done(data: Tensor, progress: Callable[[int], None] | None) -> str:
    digest = digest_of(data)
    if progress is not None:
        progress(data.numel())
    return digest


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _read_manifest(folder: Path) -> PackManifest:
    path = folder / MANIFEST_NAME
    try:
        raw = json.loads(path.read_text("utf-8"))
        version, layout = raw["format_version"], raw["layout_version"]
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} has no {MANIFEST_NAME}; it is not a finished pack"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}; {_REMEDY}") from error
    for what, found, known in (
        ("format", version, FORMAT_VERSION),
        ("layout", layout, LAYOUT_VERSION),
    ):
        if found != known:
            raise CheckpointError(
                f"{path} has {what} version {found}, this moet reads {known}; {_REMEDY}"
            )
    try:
        return msgspec.convert(raw, PackManifest)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path} is damaged: {error}; {_REMEDY}") from error


def _check_sizes(folder: Path, manifest: PackManifest) -> None:
    for name, size in manifest.files.items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            have = "is missing" if found is None else f"has {found} bytes"
            raise CheckpointError(f"{path} {have}, {MANIFEST_NAME} says {size}; {_REMEDY}")
