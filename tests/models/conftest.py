"""Checkpoints that tests of this folder read; tests that damage one take `checkpoint_copy`."""

import shutil
from pathlib import Path

import pytest

from moet.models.checkpoint import Checkpoint
from moet.models.convert import convert
from moet.models.convert_plan import ConvertOptions
from moet.models.synthetic import write_checkpoint


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `tiny` preview checkpoint, read-only."""
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    write_checkpoint(folder, size="tiny")
    return folder


@pytest.fixture
def checkpoint_copy(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of it that may be damaged."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))


@pytest.fixture(scope="session")
def tiny_pack(tiny_checkpoint: Path) -> Path:
    """The pack of `tiny_checkpoint`, read-only."""
    folder = tiny_checkpoint.parent / "pack"
    convert(Checkpoint.open(tiny_checkpoint), folder, ConvertOptions(num_workers=1))
    return folder
