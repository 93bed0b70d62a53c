"""A GPU's logits against the CPU reference in deployed rounding, on small synthetic checkpoints
and on the trained model of the package."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import moet
from moet.config import Precision
from moet.kernels.device_gemm import Device
from moet.models.checkpoint import Checkpoint
from moet.models.deepseek_v4_config import DeepseekV4Config
from moet.models.synthetic import write_checkpoint
from moet.models.synthetic_design import Size
from moet.runtime.tokenizer import Tokenizer
from tests.gpu.logits import compare, floor, teacher_forced
from tests.kernels.accelerated.pair import Confident, Pair, make_pair

CASES: list[tuple[Size, Precision]] = [("tiny", "w2"), ("tiny", "fp4"), ("small", "w2")]
DEMO = Path(moet.__file__).parent / "demo" / "deepseek-v4"
TEXT = "The engine reads weights once a step, and every request of the step shares them. " * 40


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(case))
def pair(
    request: pytest.FixtureRequest, gpu: Device, tmp_path_factory: pytest.TempPathFactory
) -> Pair:
    size, precision = request.param
    folder: Path = tmp_path_factory.mktemp("checkpoint") / size
    write_checkpoint(folder, size=size)
    source = Confident(folder)
    return make_pair(source.config, source, gpu, precision=precision)


def test_tokens_are_the_references_where_these_are_clear(
    pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    vocab = pair.config.vocab_size
    tokens = [(37 * i + 11) % (vocab - 2) + 2 for i in range(420)]
    wanted, found = teacher_forced(pair, tokens, [290, 64, 3, 1, 1, 3, 1])
    result = compare(wanted, found)
    with capsys.disabled():
        print(f"\nhidden {pair.config.hidden_size}, {result}")
    assert pair.gpu.model.device is not None
    assert int(pair.gpu.model.device.error) == 0
    assert result.cosine_median > 0.97, result
    assert result.wrong == 0, result
    assert result.clear >= 0.9 * result.positions, result


@pytest.mark.parametrize("precision", ["w2", "fp4"])
def test_the_trained_model_is_as_near_as_its_rounding_lets_it(
    gpu: Device,
    precision: Precision,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint = Checkpoint.open(DEMO)
    assert isinstance(checkpoint.config, DeepseekV4Config)
    pair = make_pair(checkpoint.config, checkpoint, gpu, precision=precision)
    tokens = Tokenizer.from_folder(DEMO).encode(TEXT)[:600]
    result = compare(*teacher_forced(pair, tokens, [400, 64, 3, 1, 1, 3, 1]))
    least = compare(*floor(pair.reference, tokens, monkeypatch))
    with capsys.disabled():
        print(f"\ntrained, {precision}: {result}\n  floor: {least}")
    assert result.error <= 1.5 * least.error, result
    assert result.own_wrong <= 1 + 0.01 * result.own_clear, result  # the floor has such, too


def test_a_step_twice_gives_the_same_bits(pair: Pair) -> None:
    tokens = [(31 * i + 7) % 400 + 2 for i in range(70)]
    runs = [teacher_forced(pair, tokens, [64, 3, 1])[1] for _ in range(2)]
    assert torch.equal(*runs)
