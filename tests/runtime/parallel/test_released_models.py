"""The released models divide as the recipes say, and the command line takes what they print."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from moet.cli import parser, with_dashes
from moet.config import ParallelConfig
from moet.errors import ConfigError
from moet.kernels.layout import W2Rows
from moet.models.pipeline_stages import check_divisible, held_layers
from moet.models.sharding import Shard
from moet.models.synthetic import plan_checkpoint
from moet.runtime.parallel.experts import sub_rows

RECIPES = Path(__file__).parents[3] / "docs" / "recipes.md"
MODELS = ("deepseek-v4-flash", "glm-5.2")


@pytest.mark.parametrize("model", MODELS)
def test_released_models_divide_by_two_and_four(model: str) -> None:
    config = plan_checkpoint("full", model=model).texts["config.json"]
    for tensor in (1, 2, 4):
        for pipeline in (1, 2, 3, 4):
            check_divisible(config, tensor, pipeline)
    layers = range(config["num_hidden_layers"] + 1)  # and the draft block
    stages = [held_layers(config, layers, Shard(0, 2, stage, 4)) for stage in range(4)]
    assert [i for stage in stages for i in stage] == list(layers)
    assert all(abs(len(stage) - len(layers) / 4) <= 5 for stage in stages)


def test_a_rank_reads_a_quarter_or_half_of_a_row() -> None:
    whole = W2Rows(4096, 2048)
    for count in (1, 2, 4):
        part = sub_rows(whole, count)
        assert part.row_bytes * 4 == whole.row_bytes * count
        assert (part.columns, part.num_sub_rows) == (whole.columns, count)


def test_recipes_are_understood() -> None:
    lines = [line for line in RECIPES.read_text().splitlines() if line.startswith("moet serve")]
    sizes = []
    for line in lines:
        args = parser().parse_args(with_dashes(shlex.split(line)[1:]))
        sizes.append(args.tensor_parallel_size)
        assert args.pipeline_parallel_size == 1
    assert set(sizes) == {1, 2, 4}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tensor": 3}, "-tp is 3; it must be 1, 2 or 4"),
        ({"pipeline": 0}, "-pp is 0; it must be at least 1"),
        ({"hang_timeout_s": 0.5}, "--hang-timeout is 0.5; it must be finite and at least 1 s"),
    ],
)
def test_wrong_numbers_are_told_of(given: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ParallelConfig(**given)  # type: ignore[arg-type]
