"""Models that come with the package, or that are released, get every op that a GPU needs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import moet
from moet.config import ModelSettings
from moet.errors import UnsupportedError
from moet.kernels.device_gemm import Device, PackedMatrix
from moet.kernels.registry import GPU_ARCHS
from moet.models.checkpoint import Checkpoint
from moet.models.deepseek_v4 import DeepseekV4
from moet.models.deepseek_v4_config import DeepseekV4Config
from moet.models.layers import Weights

DEMO = Path(moet.__file__).parent / "demo" / "deepseek-v4"


class NoLauncher:
    """Of a GPU that nothing is launched on."""

    num_sms, max_shared_bytes = 132, 232448


def gpu(arch: str) -> Device:
    return Device.around(NoLauncher(), arch, "cpu")  # type: ignore[arg-type]


@pytest.mark.parametrize("arch", GPU_ARCHS)
def test_the_demo_is_built_for_a_gpu_with_its_weights_as_stored(arch: str) -> None:
    checkpoint = Checkpoint.open(DEMO)
    config = checkpoint.config
    assert isinstance(config, DeepseekV4Config)
    settings = ModelSettings(arch=arch)
    model = DeepseekV4.load(config, checkpoint, settings, "fp8", 2, gpu=gpu(arch))
    assert model.device is not None
    matrices = [model.layers[2].attn.queries.weight, model.head.lm_head.weight]
    assert all(isinstance(matrix, PackedMatrix) for matrix in matrices)
    codecs = [matrix.stored.codec for matrix in matrices if isinstance(matrix, PackedMatrix)]
    assert codecs == ["fp8", "bf16"]
    assert model.mtp is not None
    rounded, exact = model.mtp.head.lm_head.weight, checkpoint.load("head.weight")
    assert isinstance(rounded, PackedMatrix)
    assert rounded.stored.codec == "fp8"
    assert rounded.stored.scale is not None
    largest = exact.float().abs().max()
    assert largest / 448 <= rounded.stored.scale.max() < largest / 224


class OneWeight:
    """A source of one fp8 matrix of 192 rows with its scales."""

    def names(self) -> list[str]:
        return ["w.weight", "w.scale"]

    def load(self, name: str) -> Tensor:
        if name == "w.scale":
            return torch.ones(2, 1)
        return torch.zeros(192, 128).to(torch.float8_e4m3fn)


def test_groups_that_end_inside_a_block_of_scales_are_refused() -> None:
    weights = Weights(OneWeight(), ModelSettings(arch="sm90a"), gpu=gpu("sm90a"))
    with pytest.raises(UnsupportedError, match="96 rows a group"):
        weights.groups("w", 2, 96, 128)
