"""Several GPUs: ranks and runs agree bit for bit, stages change no bit, and one rank ends all.
Where there is but one, ranks share it. What a rank logs is shown with a failure, and so is where
answers differ."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import psutil
import pytest
import torch

from moet import Engine, SamplingParams, log
from moet.config import CacheConfig, SchedulerConfig, TargetConfig
from moet.errors import MoetError
from moet.models.synthetic import MODEL_NAME, plan_checkpoint
from moet.models.synthetic_design import Size
from moet.models.synthetic_glm import MODEL_NAME as GLM
from moet.runtime.dummy import first_layers

PROMPTS = [
    "a", "several words of a prompt " * 12, "x" * 700,
    "b", "two words", "3, 5, 7, 11", "The end of it", "Why?",
]  # fmt: skip
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, logprobs=0, ignore_eos=True)
NUM_LAYERS = 5
SOON_S = 60.0
SILENT_S = 300.0  # of a rank that compiles beside other work; no test waits for this limit to pass
NEAR = 0.1  # of log-probabilities; what an unlike model says differs by three times that

Answers = list[tuple[list[int], list[float]]]

SHARED = torch.cuda.device_count() < 2

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def folder_of(model: str, size: Size, made: Path, **sizes: int) -> Path:
    """A model of few layers whose experts two GPUs can share."""
    for name, content in plan_checkpoint(size, model=model).texts.items():
        if name == "config.json":
            layers = min(NUM_LAYERS, content["num_hidden_layers"])
            content = {**first_layers(content, layers), "moe_intermediate_size": 2048, **sizes}
        (made / name).write_text(json.dumps(content))
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(MODEL_NAME, "small", tmp_path_factory.mktemp("model"))


def engine(
    folder: Path, *, drafts: int = 0, tensor: int = 1, pipeline: int = 1, seqs: int = 1
) -> Engine:
    log.set_up()  # also of the processes that it starts
    return Engine(
        str(folder),
        target=TargetConfig(
            device="cuda",
            weights="dummy",
            dummy_skew=0.5,
            enforce_eager=SHARED and pipeline > 1,
            share_gpus=SHARED,
        ),
        scheduler=SchedulerConfig(max_num_seqs=seqs, max_model_len=2048, num_spec_tokens=drafts),
        cache=CacheConfig(budget_bytes=256 << 20),
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        hang_timeout_s=SILENT_S,
        own_process=True,
    )


def answers(engine: Engine, prompts: Sequence[str] = PROMPTS) -> Answers:
    found = []
    for completion in engine.generate(prompts, GREEDY):
        (choice,) = completion.choices
        assert choice.logprobs is not None
        found.append((choice.token_ids, [each.logprobs[0] for each in choice.logprobs]))
    return found


@pytest.fixture(scope="module")
def alone(folder: Path) -> Answers:
    """What one GPU answers."""
    with engine(folder) as made:
        return answers(made)


def answered_twice(folder: Path, prompts: Sequence[str] = PROMPTS) -> list[Answers]:
    """What two tensor ranks, which compare what they sample, answer; the second time from the
    prefix cache."""
    with engine(folder, tensor=2) as made:
        return [answers(made, prompts), answers(made, prompts)]


@pytest.fixture(scope="module")
def of_ranks(folder: Path) -> list[Answers]:
    return answered_twice(folder)


def require_equal(found: Answers, expected: Answers) -> None:
    """Tokens and log-probabilities, bit for bit."""
    lines = []
    for n, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        pairs = list(zip(zip(*mine, strict=True), zip(*theirs, strict=True), strict=True))
        off = [i for i, (a, b) in enumerate(pairs) if a != b]
        if off:
            a, b = pairs[off[0]]
            lines.append(f"prompt {n}: {len(off)} of {len(pairs)} tokens, first {off[0]}: {a}, {b}")
    assert not lines, "\n".join(["answers differ", *lines])


def require_alike(found: Answers, alone: Answers) -> None:
    """That ranks answer much as one GPU does.

    Ranks round at other places, before their sum, and random weights have near ties, of tokens and
    of experts. As far as the first token that differs both have had the same context, so their best
    tokens are about as likely, but for a row that a tie sent to another expert.
    """
    lines, off, num_same = [], list[float](), 0
    for n, ((mine, likely), (whole, as_likely)) in enumerate(zip(found, alone, strict=True)):
        differ = [i for i, pair in enumerate(zip(mine, whole, strict=True)) if len(set(pair)) > 1]
        same = min(differ, default=len(mine))
        here = [abs(a - b) for a, b in zip(likely, as_likely, strict=True)][: same + 1]
        told = " ".join(f"{x:.3f}" for x in here)
        lines.append(f"prompt {n}: {same} tokens alike, off by {told}")
        num_same += same > 0
        off += here
    told = "\n".join(lines)
    print(told)
    assert median(off) < NEAR, told
    assert 4 * num_same >= len(lines), told  # an unlike model has one of thousands alike


def test_two_tensor_ranks(of_ranks: list[Answers], alone: Answers) -> None:
    require_equal(of_ranks[1], of_ranks[0])
    require_alike(of_ranks[0], alone)


def test_drafts_change_no_token_of_two_tensor_ranks(folder: Path, of_ranks: list[Answers]) -> None:
    with engine(folder, tensor=2, drafts=2, seqs=2) as made:
        found = [tokens for tokens, _ in answers(made)]
    plain = [tokens for tokens, _ in of_ranks[0]]
    assert found == plain


def test_two_stages_give_the_bits_of_one_and_end_with_a_rank(folder: Path, alone: Answers) -> None:
    made = engine(folder, pipeline=2)
    try:
        require_equal(answers(made), alone)
        stream = made.stream("a", SamplingParams(max_tokens=1500, ignore_eos=True))
        next(stream)
        (rank,) = [
            each.pid
            for each in psutil.Process().children(recursive=True)
            if "moet.runtime.parallel.follower" in " ".join(each.cmdline())
        ]
        began = time.monotonic()
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(MoetError, match="rank 1"):
            for _ in stream:
                pass
        assert time.monotonic() - began < SOON_S
    finally:
        made.close()
    assert not psutil.pid_exists(rank)


def test_two_tensor_ranks_of_glm(tmp_path: Path) -> None:
    heads = {"qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "qk_head_dim": 128, "v_head_dim": 128}
    folder = folder_of(GLM, "small", tmp_path, **heads)
    with engine(folder) as made:
        alone = answers(made)
    first, second = answered_twice(folder)
    require_equal(second, first)
    require_alike(first, alone)


@pytest.mark.parametrize("model", [MODEL_NAME, GLM])
def test_two_tensor_ranks_of_released_widths(model: str, tmp_path: Path) -> None:
    """Whose prompts and steps run the very kernels that whole models do."""
    folder = folder_of(model, "full", tmp_path)
    prompts = [*PROMPTS, "several words of a prompt, " * 100]
    with engine(folder) as made:
        alone = answers(made, prompts)
    first, second = answered_twice(folder, prompts)
    require_equal(second, first)
    require_alike(first, alone)
