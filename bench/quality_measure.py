"""One figure after the other about one variant of a demo model, through moet's own engine on the
CPU. Knows neither tables nor targets."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from bench.quality_codebook import write_codebook
from bench.quality_tasks import (
    NEEDLE_WORDS,
    STORY,
    STRICT,
    TASKS,
    Question,
    follows_schema,
    held_out,
    is_right,
    needle_text,
    said,
)
from bench.train_demo.corpus import Renderer
from bench.train_demo.tokenizer import Family
from moet.config import (
    CacheConfig,
    ExpertConfig,
    KVDtype,
    ModelSettings,
    Precision,
    SchedulerConfig,
)
from moet.models.checkpoint import Checkpoint
from moet.models.convert import convert
from moet.models.convert_plan import ConvertOptions
from moet.models.release import DenseDtype
from moet.models.w2 import ScaleRule
from moet.runtime.engine import Engine
from moet.runtime.output import Completion
from moet.server.chat.messages import ToolChoice
from moet.server.chat_format import chat_format
from moet.server.structured import answer_grammar
from moet.types import GrammarSpec, SamplingParams

NUM_DRAFTS = 4
SAMPLE_TOKENS = 160
CODES_PER_TEXT = 16
SHOWN = "official"  # the variant whose answers and speed are kept
Section = Literal["tasks", "needle", ""]


@dataclass(frozen=True, slots=True)
class Variant:
    """One row of the table. levels: of the experts, if the checkpoint is to have only a few."""

    name: str
    precision: Precision = "fp4"
    kv_dtype: KVDtype = "fp8"
    scale_rule: ScaleRule = "mse"
    dense_dtype: DenseDtype = "keep"
    levels: tuple[float, ...] | None = None
    experts: ExpertConfig = ExpertConfig()  # noqa: RUF009, frozen


@dataclass(frozen=True, slots=True)
class Amount:
    """How much is asked."""

    questions: int  # per task
    texts: int  # per length, each with CODES_PER_TEXT needles
    longest: int  # tokens


@dataclass(frozen=True, slots=True)
class Finding:
    """A figure. section: the part of the variant's row it belongs to, "" for the row itself."""

    section: Section
    name: str
    value: Any


PARTS: dict[str, tuple[str, ...]] = {
    "answers": ("question", "tool_call", "tool_result", "json"),
    "sums": ("sum", "problem"),
    "text": (),
    "strict": (STRICT,),
    **{f"needle {length}": () for length in NEEDLE_WORDS},
}
"""What can be measured by itself: tasks by name, or what the name says."""


def measure(
    family: Family, folder: Path, variant: Variant, parts: Sequence[str], amount: Amount
) -> Iterator[Finding]:
    """The figures of some parts of a variant, each as soon as it is known."""
    renderer = Renderer(family, folder)
    with tempfile.TemporaryDirectory() as packs:
        if variant.levels is not None:
            few = Path(packs) / "few"
            yield Finding("", "errors", write_codebook(folder, few, variant.levels))
            folder = few
        pack = Path(packs) / "pack"
        options = ConvertOptions(scale_rule=variant.scale_rule, dense_dtype=variant.dense_dtype)
        convert(Checkpoint.open(folder), pack, options)
        with _engine(pack, variant, num_drafts=0) as engine:
            for part in parts:
                yield from _part(engine, renderer, variant, part, amount)
        if "text" in parts:
            with _engine(pack, variant, num_drafts=NUM_DRAFTS) as engine:
                yield Finding("", "drafts", drafts(engine, some_of_each(renderer)))


def _part(
    engine: Engine, renderer: Renderer, variant: Variant, part: str, amount: Amount
) -> Iterator[Finding]:
    if part == "text":
        told = list(held_out(STORY, renderer, amount.questions, seed=3))
        yield Finding("", "perplexity", perplexity(engine, told))
        if variant.name == SHOWN:
            yield from _shown(engine, renderer, told[0])
    elif PARTS[part]:
        for task in PARTS[part]:
            generate, strict = TASKS["tool_call" if task == STRICT else task], task == STRICT
            questions = list(held_out(generate, renderer, amount.questions, seed=1))
            yield Finding("tasks", task, ask(engine, renderer, questions, strict=strict))
        if variant.experts.policy == "gate":
            gate = engine.tune_experts()
            again = gate.num_gated_rows / max(gate.num_gate_rows, 1)
            yield Finding("", "computed_again", again)
    else:
        yield from _needles(engine, renderer, int(part.split()[1]), amount.texts)


def _engine(pack: Path, variant: Variant, num_drafts: int) -> Engine:
    return Engine(
        str(pack),
        settings=ModelSettings(precision=variant.precision),
        cache=CacheConfig(kv_dtype=variant.kv_dtype),
        experts=variant.experts,
        scheduler=SchedulerConfig(max_num_seqs=32, num_spec_tokens=num_drafts, adaptive_spec=False),
    )


def _shown(engine: Engine, renderer: Renderer, told: Question) -> Iterator[Finding]:
    """Samples for people, and the speed."""
    firsts = [next(held_out(task, renderer, 1, seed=1)) for task in (STORY, *TASKS.values())]
    yield Finding("", "samples", samples(engine, firsts))
    yield Finding("", "speed", speed(engine, told))


def some_of_each(renderer: Renderer) -> list[Question]:
    """Four questions of each kind."""
    tasks = (STORY, *TASKS.values())
    return [question for task in tasks for question in held_out(task, renderer, 4, seed=3)]


def _needles(engine: Engine, renderer: Renderer, length: int, texts: int) -> Iterator[Finding]:
    """Needles at every depth of some texts; the questions of a text share its pages."""
    totals = {"right": 0.0, "questions": 0.0}
    for seed in range(texts):
        questions = needle_text(renderer, NEEDLE_WORDS[length], CODES_PER_TEXT, seed=2 + seed)
        shared = _shared([question.rendered.prompt for question in questions])
        engine.generate([shared], SamplingParams(temperature=0.0, max_tokens=1))
        found = ask(engine, renderer, questions)
        totals["right"] += found["right"] * len(questions)
        totals["questions"] += len(questions)
        share = totals["right"] / totals["questions"]
        yield Finding("needle", str(length), {"right": share, "questions": totals["questions"]})


def _shared(prompts: list[list[int]]) -> list[int]:
    """What all prompts begin with."""
    columns = zip(*prompts, strict=False)
    return [ids[0] for ids in itertools.takewhile(lambda ids: len(set(ids)) == 1, columns)]


def ask(
    engine: Engine, renderer: Renderer, questions: list[Question], *, strict: bool = False
) -> dict[str, float]:
    """Shares of right answers, and for JSON also of valid ones.

    strict: calls are held to the declared tools, as where a client says "strict" of each.
    """
    ends = engine.text.tokenizer.eos_token_ids
    longest = max(len(question.rendered.completion) for question in questions)
    params = SamplingParams(temperature=0.0, max_tokens=longest + 32)
    grammars = _grammars(engine, questions) if strict else [None] * len(questions)

    async def answers() -> list[Completion]:
        pairs = zip(questions, grammars, strict=True)
        asked = [engine.agenerate(q.rendered.prompt, params, grammar=g) for q, g in pairs]
        return await asyncio.gather(*asked)

    done = asyncio.run(answers())
    right = valid = 0
    for question, completion in zip(questions, done, strict=True):
        answer = said(renderer.tokenizer, completion.choices[0].token_ids, ends)
        wanted = said(renderer.tokenizer, question.rendered.completion, ends)
        right += is_right(question, answer, wanted)
        valid += question.sample.task == "json" and follows_schema(question.sample, answer)
    found = {"right": right / len(questions), "questions": float(len(questions))}
    if questions[0].sample.task == "json":
        found["valid"] = valid / len(questions)
    return found


def _grammars(engine: Engine, questions: list[Question]) -> list[GrammarSpec | None]:
    """As the server makes them for tools that are strict."""
    writer = chat_format(engine.text).calls
    found = []
    for question in questions:
        tools = [replace(tool, strict=True) for tool in question.sample.tools]
        found.append(answer_grammar(None, tools, ToolChoice(), writer, only_one=False)[0])
    return found


def perplexity(engine: Engine, questions: list[Question]) -> float:
    """Of the wanted answers, given their prompts."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    total, count = 0.0, 0
    prompts = [question.rendered.prompt + question.rendered.completion for question in questions]
    for question, done in zip(questions, engine.generate(prompts, params), strict=True):
        entries = (done.prompt_logprobs or [])[len(question.rendered.prompt) :]
        total += sum(entry.logprobs[0] for entry in entries if entry is not None)
        count += len(entries)
    return math.exp(-total / count)


def samples(engine: Engine, questions: list[Question]) -> list[dict[str, str]]:
    """Whole answers for people to read, with their markup."""
    params = SamplingParams(temperature=0.0, max_tokens=SAMPLE_TOKENS)
    prompts = [question.rendered.prompt for question in questions]
    decode = engine.text.tokenizer.decode
    return [
        {
            "question": question.sample.messages[-2].content,
            "answer": decode(done.choices[0].token_ids, skip_special=False),
        }
        for question, done in zip(questions, engine.generate(prompts, params), strict=True)
    ]


def speed(engine: Engine, question: Question) -> dict[str, float]:
    """Of one stream, the best of three: tokens per second on a machine of this load, and the
    processor time of a token, which others' load hardly changes."""
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    best = best_cpu = math.inf
    for _ in range(3):
        began, cpu_began, num_tokens = 0.0, 0.0, 0
        for output in engine.stream(question.rendered.prompt, params):
            if not num_tokens:
                began, cpu_began = time.perf_counter(), time.process_time()
            num_tokens += len(output.token_ids)
        best = min(best, (time.perf_counter() - began) / (num_tokens - 1))
        best_cpu = min(best_cpu, (time.process_time() - cpu_began) / (num_tokens - 1))
    load = os.getloadavg()[0]
    return {"tokens_per_s": 1 / best, "cpu_ms_per_token": 1000 * best_cpu, "load": load}


def drafts(engine: Engine, questions: list[Question]) -> dict[str, Any]:
    """How many drafts held, by place among a step's, and the tokens of a step."""
    before = engine.stats()
    params = SamplingParams(temperature=0.0, max_tokens=96)
    engine.generate([question.rendered.prompt for question in questions], params)
    after = engine.stats()
    num_steps = after.num_drafts - before.num_drafts
    held = [0] * NUM_DRAFTS
    for stats, sign in ((after, 1), (before, -1)):
        for position, number in enumerate(stats.num_accepted_by_position):
            held[position] += sign * number
    return {
        "steps": num_steps,
        "held": [number / num_steps for number in held],
        "tokens_per_step": 1 + sum(held) / num_steps,
    }
