"""A DeepSeek-V4-Flash checkpoint folder: which release it is, every tensor accounted for.

Files and bytes are tensor_files' affair; what the tensors mean is the model's."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from moet.errors import CheckpointError
from moet.models.deepseek_v4_config import DeepseekV4Config
from moet.models.deepseek_v4_tensors import (
    ARTEFACTS,
    Artefact,
    Draft,
    expert_map,
    tensor_inventory,
)
from moet.models.expert_map import ExpertMap
from moet.models.tensor_files import TensorEntry, TensorFiles, some_of
from moet.models.tensor_spec import TensorSpec

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


class Checkpoint:
    """An opened checkpoint: `config`, `artefact`, and tensors by their official names."""

    def __init__(self, files: TensorFiles, config: DeepseekV4Config, artefact: Artefact) -> None:
        self.files = files
        self.folder = files.folder
        self.config = config
        self.artefact = artefact

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Check config, index, all headers and the inventory, before any weight is read.

        Raises ConfigError for config.json, CheckpointError for files and tensors.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder; give the folder of a checkpoint")
        config = DeepseekV4Config.from_file(folder / "config.json")
        files = TensorFiles.open(folder)
        artefact = detect_artefact(config, files.entries)
        check_inventory(folder, files.entries, tensor_inventory(config, artefact))
        return cls(files, config, artefact)

    def names(self) -> Iterator[str]:
        """Tensor names, in no particular order."""
        return self.files.names()

    def load(self, name: str) -> Tensor:
        """Read one tensor with its dtype as stored."""
        return self.files.load(name)

    def specs(self) -> list[TensorSpec]:
        """Every tensor with dtype and shape, in the order of the forward pass."""
        return tensor_inventory(self.config, self.artefact)

    @property
    def experts(self) -> ExpertMap:
        """Names and numbering of the routed experts."""
        return expert_map(self.config, self.artefact)

    def identity(self) -> str:
        """A hash that tells this source from others: config, headers, samples of the bytes."""
        config = (self.folder / "config.json").read_bytes()
        return hashlib.sha256(config + self.files.identity().encode()).hexdigest()

    def form(self) -> str:
        """Name of the published form."""
        return self.artefact.name

    def describe(self) -> str:
        """Which release this is and what moet will do with it, in a few sentences."""
        experts = "FP4 (MXFP4)" if self.artefact.expert_dtype == "I8" else "FP8 block-128"
        draft = {
            "mtp": "The MTP draft block is available.",
            "dspark": "The backbone runs; its DSpark draft stages are kept but not used yet.",
            "none": "It has no draft block; speculation is off.",
        }[self.artefact.draft]
        return f"DeepSeek-V4-Flash, form {self.artefact.name}: {experts} experts. {draft}"


def detect_artefact(config: DeepseekV4Config, entries: Mapping[str, TensorEntry]) -> Artefact:
    """Tell the published forms apart by dtypes and keys; what config.json claims is not trusted."""
    weight = _entry(entries, "layers.0.ffn.experts.0.w1.weight")
    scale = _entry(entries, "layers.0.attn.wkv.scale")
    if weight.dtype not in ("I8", "F8_E4M3"):
        raise CheckpointError(f"routed experts are {weight.dtype}; known are I8 (FP4) and F8_E4M3")
    if scale.dtype not in ("F8_E8M0", "F32"):
        raise CheckpointError(f"fp8 scales are {scale.dtype}; known are F8_E8M0 and F32")
    has_stages = "mtp.0.main_proj.weight" in entries
    if has_stages != config.has_dspark and any(name.startswith("mtp.") for name in entries):
        raise CheckpointError(
            f"config.json {'has' if config.has_dspark else 'lacks'} dspark_block_size but "
            f"mtp.0.main_proj.weight is {'present' if has_stages else 'absent'}; "
            "config and shards are of different releases"
        )
    draft: Draft = "dspark" if has_stages else "mtp" if "mtp.0.e_proj.weight" in entries else "none"
    for known in ARTEFACTS.values():
        traits = (known.expert_dtype, known.scale_dtype, known.draft)
        if traits == (weight.dtype, scale.dtype, draft):
            return known
    name = f"repack ({weight.dtype} experts, {scale.dtype} scales, draft {draft})"
    return Artefact(
        name,
        "I8" if weight.dtype == "I8" else "F8_E4M3",
        "F32" if scale.dtype == "F32" else "F8_E8M0",
        draft,
    )


def check_inventory(
    folder: Path, entries: Mapping[str, TensorEntry], inventory: Sequence[TensorSpec]
) -> None:
    """Account for every key: none missing, none unexpected, each with its dtype and shape."""
    expected = {spec.name: spec for spec in inventory}
    missing = [name for name in expected if name not in entries]
    unexpected = sorted(name for name in entries if name not in expected)
    wrong = [
        f"{name} is {entry.dtype} {list(entry.shape)}, not {spec.dtype} {list(spec.shape)}"
        for name, spec in expected.items()
        if (entry := entries.get(name)) and (entry.dtype, entry.shape) != (spec.dtype, spec.shape)
    ]
    faults = [
        f"{len(found)} {kind}: {some_of(found)}"
        for kind, found in (
            ("missing tensors", missing),
            ("unexpected tensors", unexpected),
            ("tensors of the wrong kind", wrong),
        )
        if found
    ]
    if faults:
        raise CheckpointError(f"{folder} does not match its config.json: {'; '.join(faults)}")


def _entry(entries: Mapping[str, TensorEntry], name: str) -> TensorEntry:
    if name not in entries:
        raise CheckpointError(
            f"there is no tensor {name}; a checkpoint with the official names is needed"
        )
    return entries[name]
