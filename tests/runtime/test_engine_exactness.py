"""An engine's tokens do not depend on where its core runs, on its loop, or on a restart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from moet.config import SchedulerConfig
from moet.models.checkpoint import Checkpoint
from moet.models.convert import convert
from moet.models.convert_plan import ConvertOptions
from moet.models.synthetic import write_checkpoint
from moet.runtime.engine import Engine
from moet.types import SamplingParams

PROMPTS = ["one", "a longer prompt"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)
SEEDED = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=4, seed=3)

Answers = list[list[int]]


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as a pack."""
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder / "checkpoint", size="tiny")
    convert(Checkpoint.open(folder / "checkpoint"), folder / "pack", ConvertOptions())
    return folder / "pack"


def answers(engine: Engine) -> Answers:
    """Tokens of greedy requests side by side, and of seeded samples of one prompt."""
    completions = engine.generate(PROMPTS, GREEDY) + engine.generate(PROMPTS[0], SEEDED, n=2)
    return [choice.token_ids for completion in completions for choice in completion.choices]


@pytest.fixture(scope="module")
def expected(pack: Path) -> Iterator[Answers]:
    """The answers of the plain loop in this process."""
    with Engine(str(pack), scheduler=SchedulerConfig(overlap=False)) as engine:
        yield answers(engine)


@pytest.mark.parametrize(("own_process", "overlap"), [(False, True), (True, False)])
def test_process_loop_and_restart_do_not_show(
    pack: Path, expected: Answers, own_process: bool, overlap: bool
) -> None:
    scheduler = SchedulerConfig(overlap=overlap)
    with Engine(str(pack), scheduler=scheduler, own_process=own_process) as engine:
        assert answers(engine) == expected
        assert engine.stats().num_used_pages == 0
