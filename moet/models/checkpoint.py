"""A checkpoint folder: whose it is, every tensor accounted for.

Files and bytes are tensor_files' affair; the form of a model's releases is the model's."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from moet.errors import CheckpointError, ConfigError
from moet.models.config_json import read_config
from moet.models.deepseek_v4_config import DeepseekV4Config
from moet.models.deepseek_v4_release import DeepseekV4Release
from moet.models.expert_map import ExpertMap
from moet.models.glm_moe_dsa_config import GlmMoeDsaConfig
from moet.models.glm_moe_dsa_release import GlmMoeDsaRelease
from moet.models.release import DenseDtype, Release
from moet.models.tensor_files import TensorEntry, TensorFiles, some_of
from moet.models.tensor_spec import TensorSpec

# By model_type: how to check config.json, and how to tell the published forms apart.
_MODELS: Mapping[str, tuple[Callable[..., Any], Callable[..., Release]]] = {
    "deepseek_v4": (DeepseekV4Config.from_dict, DeepseekV4Release.detect),
    "glm_moe_dsa": (GlmMoeDsaConfig.from_dict, GlmMoeDsaRelease.detect),
}


class Checkpoint:
    """An opened checkpoint: its `release`, and tensors by their official names."""

    def __init__(self, files: TensorFiles, release: Release) -> None:
        self.files = files
        self.folder = files.folder
        self.release = release

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Check config, index, all headers and the inventory, before any weight is read.

        Raises ConfigError for config.json, CheckpointError for files and tensors.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder; give the folder of a checkpoint")
        raw = read_config(folder / "config.json")
        model_type = str(raw.get("model_type"))
        if model_type not in _MODELS:
            known = ", ".join(_MODELS)
            raise ConfigError(f"config.json: model_type is {model_type!r}; moet runs {known}")
        read, detect = _MODELS[model_type]
        config = read(raw)
        files = TensorFiles.open(folder)
        release = detect(config, files.entries)
        check_inventory(folder, files.entries, release)
        return cls(files, release)

    def names(self) -> Iterator[str]:
        """Tensor names, in no particular order."""
        return self.files.names()

    def load(self, name: str) -> Tensor:
        """Read one tensor with its dtype as stored."""
        return self.files.load(name)

    @property
    def config(self) -> Any:
        """The model's own config value."""
        return self.release.config

    @property
    def experts(self) -> ExpertMap:
        """Names and numbering of the routed experts."""
        return self.release.experts

    def dense_specs(self, dtype: DenseDtype) -> Sequence[TensorSpec]:
        """What a pack holds beside routed experts."""
        return self.release.dense_specs(dtype)

    def identity(self) -> str:
        """A hash that tells this source from others: config, headers, samples of the bytes."""
        config = (self.folder / "config.json").read_bytes()
        return hashlib.sha256(config + self.files.identity().encode()).hexdigest()

    def form(self) -> str:
        """Name of the published form."""
        return self.release.form

    def describe(self) -> str:
        """Which release this is and what moet will do with it, in a few sentences."""
        return self.release.describe()


def check_inventory(folder: Path, entries: Mapping[str, TensorEntry], release: Release) -> None:
    """Account for every key: none missing, none unexpected, each with its dtype and shape."""
    expected = {spec.name: spec for spec in release.specs()}
    missing = [name for name in expected if name not in entries]
    unexpected = sorted(
        name for name in entries if name not in expected and name not in release.optional
    )
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
