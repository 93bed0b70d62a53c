"""`moet bench engine`: steps and tokens per second of the engine itself, without HTTP.

One row per sequence is the engine's own loop: scheduling, forward pass, sampling. More rows are
what verifying drafts costs, the forward pass alone.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter

from rich.console import Console
from rich.table import Table

from moet.bench.results import Row
from moet.bench.rig import Shape, StepRig, load, pack_of
from moet.config import EngineConfig
from moet.errors import ConfigError, MoetError
from moet.runtime.core import EngineCore
from moet.runtime.loader import load_core
from moet.types import FinishReason, Request, SamplingParams, TokenEvent


def measure(
    config: EngineConfig,
    *,
    batches: Sequence[int],
    rows: Sequence[int],
    context: int,
    num_steps: int,
    accept: float | None,
) -> list[Row]:
    """Steps/s, and tokens/s where each step of a sequence yields one token, or `accept` of them.

    accept: mean tokens of a step with more than one row, as drafts would give.
    Raises ConfigError for an acceptance that the rows cannot yield.
    """
    if accept is not None and not 1 <= accept <= max(rows):
        raise ConfigError(f"--accept is {accept}; a step of {max(rows)} rows yields 1 to as many")
    shapes = [Shape(num_seqs=b, num_rows=r, context=context) for r in rows for b in batches]
    found: list[Row] = []
    for shape in shapes:
        if shape.num_rows == 1:
            times_s = _engine_steps(config, shape, num_steps)
        else:
            times_s = _forward_steps(config, shape, num_steps)
        found += _rows(shape, times_s, accept)
    return found


def show(rows: Sequence[Row], console: Console) -> None:
    """Print a table."""
    table = Table("case", "value", "unit", "what")
    for row in rows:
        table.add_row(row.case, f"{row.value:,.2f}", row.unit, row.note)
    console.print(table)


def _rows(shape: Shape, times_s: Sequence[float], accept: float | None) -> list[Row]:
    case = f"{shape.num_seqs} sequences, {shape.num_rows} rows each"
    median_s = statistics.median(times_s)
    loop = "engine loop" if shape.num_rows == 1 else "forward pass alone"
    note = f"{loop}, context {shape.context}, median of {len(times_s)} steps"
    yielded = 1.0 if shape.num_rows == 1 else min(accept or 1.0, shape.num_rows)
    tokens = f"{note}; {yielded:g} tokens a step" if shape.num_rows > 1 else note
    rate = 1 / median_s
    return [
        Row(case=case, value=round(rate, 3), unit="steps/s", better="higher", note=note),
        Row(
            case=case,
            value=round(rate * shape.num_seqs * yielded, 3),
            unit="tokens/s",
            better="higher",
            note=tokens,
        ),
    ]


def _engine_steps(config: EngineConfig, shape: Shape, num_steps: int) -> list[float]:
    """Times of steps in which every sequence decodes."""
    core = _core_for(config, shape, num_steps)
    try:
        draw = random.Random(0)
        vocab_size = core.info().vocab_size
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        for number in range(shape.num_seqs):
            prompt = [draw.randrange(vocab_size) for _ in range(shape.context)]
            core.submit(Request(request_id=str(number), prompt_token_ids=prompt, params=params))
        started: set[str] = set()
        while len(started) < shape.num_seqs:
            started |= {event.request_id for event in _step(core)}
        times_s = []
        for _ in range(num_steps):
            before_s = perf_counter()
            _step(core)
            times_s.append(perf_counter() - before_s)
        return times_s
    finally:
        core.shutdown()


def _core_for(config: EngineConfig, shape: Shape, num_steps: int) -> EngineCore:
    total = shape.context + 4 * num_steps + 16  # decoding goes on while others are prefilled
    scheduler = replace(
        config.scheduler,
        max_num_seqs=max(shape.num_seqs, 1),
        max_num_batched_tokens=max(config.scheduler.max_num_batched_tokens, shape.num_seqs),
    )
    config = replace(config, scheduler=scheduler)
    core = load_core(config, lambda stage, done: None)
    info = core.info()
    if info.max_model_len < total or info.num_pages * info.page_size < total * shape.num_seqs:
        core.shutdown()
        raise ConfigError(
            f"{shape.num_seqs} sequences of {total} tokens need more than the {info.num_pages} "
            f"pages of {info.page_size} that there are; raise --kv-cache-memory or lower "
            "--context, --batch or --steps"
        )
    return core


def _step(core: EngineCore) -> list[TokenEvent]:
    events = core.step()
    for event in events:
        if event.finish_reason is not None and event.finish_reason != FinishReason.ABORT:
            raise MoetError(f"a sequence ended early: {event.error or event.finish_reason}")
    return events


def _forward_steps(config: EngineConfig, shape: Shape, num_steps: int) -> list[float]:
    model, experts = load(pack_of(config.model), config.settings, config.cache.kv_dtype)
    rig = StepRig(model, experts, shape)
    rig.step()
    times_s = []
    for _ in range(num_steps):
        before_s = perf_counter()
        rig.step()
        times_s.append(perf_counter() - before_s)
    return times_s
