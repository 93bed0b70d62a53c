"""Checkpoint -> pack: streaming, in bounded memory, resumable after a kill at any point.

Work happens in a folder beside the pack, in units whose completion a journal records after their
bytes are safe on disk; the finished folder is renamed into place. Equal inputs and options give
equal bytes, however often the work was interrupted."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from moet.errors import CheckpointError
from moet.kernels.layout import LAYOUT_VERSION
from moet.models.convert_plan import ConvertOptions, ConvertSource, PackLayout, Unit, plan_pack
from moet.models.dense import DenseReader
from moet.models.expert_encoder import MatrixReport, encode_expert
from moet.models.pack import (
    CHECKSUMS_NAME,
    DENSE_NAME,
    FORMAT_VERSION,
    MANIFEST_NAME,
    Pack,
    PackManifest,
    bases_name,
    digest_of,
    is_pack,
    rows_name,
)
from moet.models.progress import ProgressCallback, ProgressMeter
from moet.models.tensor_writer import check_free_space, explained_errors, write_json

logger = logging.getLogger(__name__)

REPORT_NAME = "report.json"
_JOURNAL_NAME = "journal.jsonl"
_REQUIRED_TEXTS = ("config.json", "tokenizer.json")
_OPTIONAL_TEXTS = ("tokenizer_config.json", "generation_config.json", "chat_template.jinja")
_SIGNIFICANT_DIGITS = 6  # of figures in the report, so that they do not depend on thread counts


class _Entry(msgspec.Struct, frozen=True):
    """A journal line: a finished unit, the digests of its pieces by file, its reports."""

    unit: int
    digests: dict[str, list[str]]
    reports: dict[str, dict[str, Any]]


def convert(
    source: ConvertSource,
    pack: str | Path,
    options: ConvertOptions,
    progress: ProgressCallback | None = None,
) -> Pack:
    """Make the pack, or finish one that was interrupted, or return the one that is there.

    Raises CheckpointError if the folder is occupied by something else, another conversion runs,
    the disk is or becomes full (what is done stays for the next run), or a tensor does not suit.
    """
    folder = Path(pack)
    identity = source.identity()
    if is_pack(folder):
        return _existing(folder, identity, options)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists and is not a pack; choose a new folder")
    for name in _REQUIRED_TEXTS:
        if not (source.folder / name).is_file():
            raise CheckpointError(
                f"{source.folder} has no {name}; a pack serves alone and needs it, fetch it"
            )
    staging = folder.with_name(folder.name + ".partial")
    layout = plan_pack(source, options)
    check_free_space(folder, sum(layout.sizes().values()) - _allocated(staging))
    with explained_errors(staging), _locked(staging):
        if not is_pack(staging):
            job = _Job(source, layout, options, staging, identity)
            job.run(progress)
            job.finish()
        (staging / _JOURNAL_NAME).unlink(missing_ok=True)
        staging.replace(folder)
        _sync(folder.parent)
    return Pack.open(folder, source=identity)


def _existing(folder: Path, identity: str, options: ConvertOptions) -> Pack:
    found = Pack.open(folder, source=identity)
    wanted = (options.scale_rule, options.tiers, options.dense_dtype)
    made = found.manifest
    if (made.scale_rule, made.tiers, made.dense_dtype) != wanted:
        raise CheckpointError(
            f"{folder} was made with scale rule {made.scale_rule}, dense dtype {made.dense_dtype} "
            f"and tiers {', '.join(made.tiers)}; remove it or choose another folder"
        )
    return found


class _Job:
    """One run of a conversion in its staging folder."""

    def __init__(
        self,
        source: ConvertSource,
        layout: PackLayout,
        options: ConvertOptions,
        staging: Path,
        identity: str,
    ) -> None:
        self.source = source
        self.layout = layout
        self.options = options
        self.staging = staging
        self.identity = identity
        self.dense = DenseReader(source)
        self.entries: dict[int, _Entry] = {}

    def run(self, progress: ProgressCallback | None) -> None:
        """Do the units that the journal does not have."""
        self._resume()
        layout = self.layout
        total = sum(layout.unit_bytes(unit) for unit in layout.units)
        done = sum(layout.unit_bytes(layout.units[number]) for number in self.entries)
        meter = ProgressMeter(total, progress, resumed_bytes=done)
        with self._files() as files, (self.staging / _JOURNAL_NAME).open("ab") as journal:
            for number, unit in enumerate(layout.units):
                if number in self.entries:
                    continue
                digests, reports = self._do(unit, files, meter)
                for descriptor in files.values():
                    os.fsync(descriptor)
                self.entries[number] = _Entry(number, digests, reports)
                journal.write(msgspec.json.encode(self.entries[number]) + b"\n")
                journal.flush()
                os.fsync(journal.fileno())

    def finish(self) -> None:
        """Write what goes beside the weights; pack.json last, for it says that all is there."""
        entries = [self.entries[number] for number in range(len(self.layout.units))]
        reports = {name: report for entry in entries for name, report in entry.reports.items()}
        write_json(self.staging / REPORT_NAME, _summary(reports, self.options))
        pieces: dict[str, list[str]] = {name: [] for name in self.layout.sizes()}
        for entry in entries:
            for name, digests in entry.digests.items():
                pieces[name] += digests
        checksums: dict[str, Any] = dict(pieces)
        checksums[DENSE_NAME] = dict(zip(self.layout.dense, pieces[DENSE_NAME], strict=True))
        write_json(self.staging / CHECKSUMS_NAME, checksums)
        texts = [n for n in _REQUIRED_TEXTS + _OPTIONAL_TEXTS if (self.source.folder / n).is_file()]
        for name in texts:
            shutil.copyfile(self.source.folder / name, self.staging / name)
            _sync(self.staging / name)
        small = [*texts, CHECKSUMS_NAME, REPORT_NAME]
        sizes = {name: (self.staging / name).stat().st_size for name in small}
        experts = self.layout.experts
        manifest = PackManifest(
            format_version=FORMAT_VERSION,
            layout_version=LAYOUT_VERSION,
            source=self.identity,
            artefact=self.source.form(),
            scale_rule=self.options.scale_rule,
            tiers=self.options.tiers,
            hidden_size=experts.hidden_size,
            moe_intermediate_size=experts.moe_intermediate_size,
            num_experts=experts.num_experts,
            layers=experts.layers,
            prefixes=experts.prefixes,
            names=experts.names,
            fp4=experts.fp4,
            dense_dtype=self.options.dense_dtype,
            files=self.layout.sizes() | sizes,
            checksums_sha256=hashlib.sha256(
                (self.staging / CHECKSUMS_NAME).read_bytes()
            ).hexdigest(),
        )
        write_json(self.staging / MANIFEST_NAME, msgspec.to_builtins(manifest))
        _sync(self.staging)

    def _key(self) -> bytes:
        """The first journal line: whether earlier work is of the same source and settings."""
        key = {
            "source": self.identity,
            "versions": [FORMAT_VERSION, LAYOUT_VERSION],
            "scale_rule": self.options.scale_rule,
            "tiers": self.options.tiers,
            "dense_dtype": self.options.dense_dtype,
            "sizes": self.layout.sizes(),
        }
        return json.dumps(key, sort_keys=True).encode()

    def _resume(self) -> None:
        """Read the journal up to a torn line; start afresh if it belongs to other work."""
        path = self.staging / _JOURNAL_NAME
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        if lines and lines[0] != self._key() + b"\n":
            logger.warning("%s began another conversion; starting anew", self.staging)
            for stale in self.staging.iterdir():
                stale.unlink()
            lines = []
        whole = [self._key() + b"\n"]
        for line in lines[1:]:
            try:
                entry = msgspec.json.decode(line, type=_Entry)
            except msgspec.MsgspecError:
                break
            if not line.endswith(b"\n"):
                break
            self.entries[entry.unit] = entry
            whole.append(line)
        partial_path = path.with_name(path.name + ".new")
        partial_path.write_bytes(b"".join(whole))
        _sync(partial_path)
        partial_path.replace(path)

    @contextmanager
    def _files(self) -> Iterator[dict[str, int]]:
        """The big files, at their full size, open for writing at any place."""
        files: dict[str, int] = {}
        try:
            for name, size in self.layout.sizes().items():
                files[name] = os.open(self.staging / name, os.O_RDWR | os.O_CREAT, 0o644)
                os.ftruncate(files[name], size)
            _write_at(files[DENSE_NAME], memoryview(self.layout.dense_head), 0)
            yield files
        finally:
            for descriptor in files.values():
                os.close(descriptor)

    def _do(
        self, unit: Unit, files: Mapping[str, int], meter: ProgressMeter
    ) -> tuple[dict[str, list[str]], dict[str, dict[str, Any]]]:
        digests: dict[str, list[str]] = {}
        reports: dict[str, dict[str, Any]] = {}
        for name in unit.dense:
            entry = self.layout.dense[name]
            tensor, error = self.dense.load(name, entry.dtype)
            if error is not None:
                reports[name] = {"dense_rel_rms": _significant(error)}
            flat = tensor.contiguous().view(-1).view(torch.uint8)
            _write_at(files[DENSE_NAME], flat.numpy().data, entry.offset)
            digests.setdefault(DENSE_NAME, []).append(digest_of(flat))
            meter.advance(entry.num_bytes, name)
        with ThreadPoolExecutor(self.options.num_workers) as pool:
            work: Callable[[int], _RowResult] = partial(self._expert, files=files)
            for result in pool.map(work, unit.rows):
                for name, digest in result.digests.items():
                    digests.setdefault(name, []).append(digest)
                reports |= result.reports
                meter.advance(result.num_bytes, result.name)
        return digests, reports

    def _expert(self, row: int, files: Mapping[str, int]) -> _RowResult:
        names = self.layout.experts.matrices(row)
        encoded = encode_expert(
            self.source.load,
            names,
            self.layout.formats,
            self.options.scale_rule,
            fp4=self.layout.experts.fp4,
            fp8_scale=self.layout.experts.fp8_scale,
        )
        pieces = {rows_name(tier): data for tier, data in encoded.rows.items()}
        bases = {bases_name(tier): data.reshape(-1) for tier, data in encoded.bases.items()}
        pieces |= {name: data for name, data in bases.items() if data.numel()}
        for name, flat in pieces.items():
            _write_at(files[name], flat.numpy().data, row * flat.numel())
        return _RowResult(
            names[0].rpartition(".")[0],
            sum(flat.numel() for flat in pieces.values()),
            {name: digest_of(flat) for name, flat in pieces.items()},
            {name: _rounded(report) for name, report in encoded.reports.items()},
        )


@dataclass(frozen=True, slots=True)
class _RowResult:
    name: str
    num_bytes: int
    digests: dict[str, str]
    reports: dict[str, dict[str, Any]]


def _write_at(descriptor: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)


def _rounded(report: MatrixReport) -> dict[str, Any]:
    flat = asdict(report.w2) | {"fp4_rel_rms": report.fp4_rel_rms}
    return {
        key: _significant(value) if isinstance(value, float) else value
        for key, value in flat.items()
    }


def _significant(value: float) -> float:
    return float(f"{value:.{_SIGNIFICANT_DIGITS}g}")


def _summary(reports: Mapping[str, Mapping[str, Any]], options: ConvertOptions) -> dict[str, Any]:
    """report.json: the worst tensors first, then every expert matrix and changed dense tensor."""
    dense = {name: report for name, report in reports.items() if "dense_rel_rms" in report}
    experts = {name: report for name, report in reports.items() if name not in dense}
    worst_bias = max(experts, key=lambda name: abs(experts[name]["bias"]))
    worst_rms = max(experts, key=lambda name: experts[name]["rel_rms"])
    return {
        "scale_rule": options.scale_rule,
        "dense_dtype": options.dense_dtype,
        "worst_bias": {"tensor": worst_bias, "bias": experts[worst_bias]["bias"]},
        "worst_rel_rms": {"tensor": worst_rms, "rel_rms": experts[worst_rms]["rel_rms"]},
        "mean_rel_rms": sum(report["rel_rms"] for report in experts.values()) / len(experts),
        "worst_dense_rel_rms": max((r["dense_rel_rms"] for r in dense.values()), default=0.0),
        "tensors": experts,
        "dense": dense,
    }


def _allocated(staging: Path) -> int:
    """Bytes that an earlier run already took from the disk."""
    if not staging.is_dir():
        return 0
    return sum(path.stat().st_blocks * 512 for path in staging.iterdir())


@contextmanager
def _locked(staging: Path) -> Iterator[None]:
    """One conversion at a time; the lock goes with the process."""
    staging.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(staging, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"another process is writing {staging}; wait for it or choose another folder"
            ) from None
        yield
    finally:
        os.close(descriptor)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
