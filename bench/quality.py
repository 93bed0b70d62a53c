"""How well the demo models answer, at each precision of experts and KV: bench/results/quality.json.

    python -m bench.quality deepseek-v4=moet/demo/deepseek-v4 glm=moet/demo/glm

Greedy answers to held-out questions through moet's own engine: exact sums, needles by
distance, tool calls token for token, JSON against its schema; perplexity of the wanted answers; how
many drafts hold, by place. `--only` measures some variants and keeps the others as they were.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.quality_codebook import ASYMMETRIC, SYMMETRIC, write_codebook
from bench.quality_tasks import (
    NEEDLE_WORDS,
    STORY,
    TASKS,
    Question,
    follows_schema,
    held_out,
    is_right,
    needles,
    said,
)
from bench.train_demo.corpus import Renderer
from bench.train_demo.tokenizer import Family
from moet.bench import results
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
from moet.types import SamplingParams

RESULTS = Path(__file__).parent / "results" / "quality.json"
NUM_DRAFTS = 4
SAMPLE_TOKENS = 160
OFFICIAL_TARGETS = {"sum": 0.9, "problem": 0.9, "tool_call": 0.95, "needle": 0.95}
FIRST_DRAFT_TARGET = 0.7
KEPT = {"w2": 0.9, "fp4": 0.99, "gate": 0.99}  # of what the official precision reaches


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


def _gate(tau: float, prefill: Precision | None = None) -> Variant:
    name = f"gate {tau:g}" + (f", prefill {prefill}" if prefill else "")
    experts = ExpertConfig(policy="gate", tau=tau, prefill_precision=prefill)
    return Variant(name, precision="w2", experts=experts)


SHARED = (
    Variant("official"),
    Variant("w2 inherit", precision="w2", scale_rule="inherit"),
    Variant("w2 mse", precision="w2"),
    Variant("levels -4 -1 1 4", levels=SYMMETRIC),
    Variant("levels -3 -1 0.5 4", levels=ASYMMETRIC),
    Variant("official, kv bf16", kv_dtype="bf16"),
    _gate(0.4),
    _gate(0.6),
    _gate(0.8),
    _gate(0.6, prefill="fp4"),
    Variant("fp4", precision="w2", experts=ExpertConfig(policy="fp4")),
)
VARIANTS: dict[Family, tuple[Variant, ...]] = {
    "deepseek-v4": SHARED,
    "glm": (
        *SHARED,
        Variant("official, kv nvfp4", kv_dtype="nvfp4"),
        Variant("official, dense fp8", dense_dtype="fp8"),
    ),
}


@dataclass(frozen=True, slots=True)
class Amount:
    """How much is asked."""

    questions: int  # per task
    needles: int  # per length
    longest: int  # tokens


def ask(engine: Engine, renderer: Renderer, questions: list[Question]) -> dict[str, float]:
    """Shares of right answers, and for JSON also of valid ones."""
    ends = engine.text.tokenizer.eos_token_ids
    longest = max(len(question.rendered.completion) for question in questions)
    params = SamplingParams(temperature=0.0, max_tokens=longest + 32)
    done = engine.generate([list(question.rendered.prompt) for question in questions], params)
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


def measure(
    folder: Path, renderer: Renderer, variant: Variant, packs: Path, amount: Amount
) -> dict[str, Any]:
    """One variant: every task at one precision."""
    row: dict[str, Any] = {"tasks": {}, "needle": {}}
    if variant.levels is not None:
        source, folder = folder, packs / f"{folder.name}-{len(list(packs.iterdir()))}"
        row["errors"] = write_codebook(source, folder, variant.levels)
    pack = packs / f"{folder.name}-{variant.scale_rule}-{variant.dense_dtype}"
    options = ConvertOptions(scale_rule=variant.scale_rule, dense_dtype=variant.dense_dtype)
    convert(Checkpoint.open(folder), pack, options)

    def engine(num_drafts: int) -> Engine:
        return Engine(
            str(pack),
            settings=ModelSettings(precision=variant.precision),
            cache=CacheConfig(kv_dtype=variant.kv_dtype),
            experts=variant.experts,
            scheduler=SchedulerConfig(
                max_num_seqs=16, num_spec_tokens=num_drafts, adaptive_spec=False
            ),
        )

    asked = {
        task: list(held_out(generate, renderer, amount.questions, seed=1))
        for task, generate in TASKS.items()
    }
    told = list(held_out(STORY, renderer, amount.questions, seed=3))
    firsts = [told[0], *(questions[0] for questions in asked.values())]
    with engine(0) as plain:
        for task, questions in asked.items():
            row["tasks"][task] = ask(plain, renderer, questions)
            print(f"  {task}: {row['tasks'][task]}", flush=True)
        for length, num_words in NEEDLE_WORDS.items():
            if length <= amount.longest and amount.needles:
                questions = list(needles(renderer, num_words, amount.needles, seed=2))
                row["needle"][str(length)] = ask(plain, renderer, questions)
                print(f"  needle {length}: {row['needle'][str(length)]}", flush=True)
        row["perplexity"] = perplexity(plain, told)
        row["samples"] = samples(plain, firsts)
        row["speed"] = speed(plain, told[0])
        if variant.experts.policy == "gate":
            gate = plain.tune_experts()
            row["computed_again"] = gate.num_gated_rows / gate.num_gate_rows
    with engine(NUM_DRAFTS) as drafting:
        some = [q for questions in (told, *asked.values()) for q in questions[:4]]
        row["drafts"] = drafts(drafting, some)
    shown = {name: row[name] for name in ("perplexity", "speed", "drafts")}
    print(f"  {shown}", flush=True)
    return row


def judged(models: dict[str, dict[str, Any]]) -> list[results.Row]:
    """Every figure as one row, with what it should be."""
    rows = []
    for family, variants in models.items():
        official = _shares(variants.get("official", {}))
        for name, measured in variants.items():
            shares = _shares(measured)
            for case, value in shares.items():
                target = _target(name, case, official)
                rows.append(_row(f"{family}, {name}, {case}", value, "share", target))
            rows.append(
                _row(f"{family}, {name}, perplexity", measured["perplexity"], "", None, "lower")
            )
            if name == "official":
                told = measured["speed"]
                note = (
                    f"CPU, one stream, load {told['load']:.1f}, "
                    f"{told['cpu_ms_per_token']:.1f} ms of processor time a token"
                )
                case = f"{family}, {name}, decoding"
                rows.append(_row(case, told["tokens_per_s"], "tokens/s", 20.0, note=note))
            if "computed_again" in measured:
                case, again = f"{family}, {name}, computed again", measured["computed_again"]
                rows.append(_row(case, again, "share of rows", None, "lower"))
    return rows


def _shares(measured: dict[str, Any]) -> dict[str, float]:
    if not measured:
        return {}
    shares = {task: found["right"] for task, found in measured["tasks"].items()}
    shares["json valid"] = measured["tasks"]["json"]["valid"]
    shares |= {f"needle {n}": found["right"] for n, found in measured["needle"].items()}
    held = measured["drafts"]["held"]
    return shares | {f"draft {position + 1}": share for position, share in enumerate(held)}


def _target(variant: str, case: str, official: dict[str, float]) -> float | None:
    kind = case.split()[0]
    if variant == "official":
        return FIRST_DRAFT_TARGET if case == "draft 1" else OFFICIAL_TARGETS.get(kind)
    kept = KEPT.get(variant.split()[0])
    return None if kept is None or case not in official else kept * official[case]


def _row(
    case: str, value: float, unit: str, target: float | None, better: Any = "higher", note: str = ""
) -> results.Row:
    return results.Row(
        case=case, value=round(value, 4), unit=unit, better=better, target=target, note=note
    )


def plot(models: dict[str, dict[str, Any]], folder: Path) -> None:
    """One picture per model beside the JSON: tasks, needles by distance, drafts by place."""
    from matplotlib import pyplot

    for family, variants in models.items():
        figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(17, 4.5))
        width = 0.8 / max(len(variants), 1)
        tasks = list(TASKS)
        for idx, (name, row) in enumerate(variants.items()):
            shares = [row["tasks"][task]["right"] for task in tasks]
            left.bar([x + idx * width for x in range(len(tasks))], shares, width, label=name)
            lengths = [int(length) for length in row["needle"]]
            middle.plot(lengths, [each["right"] for each in row["needle"].values()], marker="o")
            held = row["drafts"]["held"]
            right.plot(range(1, len(held) + 1), held, marker="o")
        left.set_xticks([x + 0.4 for x in range(len(tasks))], tasks, rotation=20)
        left.set_ylabel("share of right answers")
        middle.set_xlabel("tokens of text")
        middle.set_ylabel("share of needles found")
        right.set_xticks(range(1, NUM_DRAFTS + 1))
        right.set_xlabel("place among a step's drafts")
        right.set_ylabel("share of steps in which it held")
        for axis in (left, middle, right):
            axis.set_ylim(0, 1.05)
        left.legend(fontsize=7)
        figure.suptitle(f"{family} demo model, greedy answers to held-out questions")
        figure.tight_layout()
        figure.savefig(folder / f"quality-{family}.png", dpi=110)
        pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", help="deepseek-v4=FOLDER and glm=FOLDER")
    parser.add_argument("--questions", type=int, default=64, help="per task")
    parser.add_argument("--needles", type=int, default=20, help="per length")
    parser.add_argument("--longest", type=int, default=8000, help="tokens of the longest needles")
    parser.add_argument("--only", default="", help="names of variants, separated by semicolons")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    amount = Amount(args.questions, args.needles, args.longest)
    kept = json.loads(args.out.read_text())["models"] if args.out.exists() else {}
    wanted = [name.strip() for name in args.only.split(";") if name.strip()]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as packs:
        for given in args.models:
            family, _, folder = given.partition("=")
            renderer = Renderer(family, Path(folder))
            for variant in VARIANTS[family]:
                if wanted and variant.name not in wanted:
                    continue
                print(f"{family}: {variant.name}", flush=True)
                row = measure(Path(folder), renderer, variant, Path(packs), amount)
                kept.setdefault(family, {})[variant.name] = row
                command = (
                    f"python -m bench.quality --questions {amount.questions} "
                    f"--needles {amount.needles} --longest {amount.longest} "
                    + " ".join(args.models)
                )
                report = results.report(
                    command,
                    judged(kept),
                    hardware=results.this_machine(),
                    more={"models": kept},
                )
                results.write(args.out, report)
    plot(kept, args.out.parent)


if __name__ == "__main__":
    main()
