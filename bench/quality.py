"""How well the demo models answer, at each precision of experts and KV: bench/results/quality.json.

    python -m bench.quality deepseek-v4=moet/demo/deepseek-v4 glm=moet/demo/glm

Greedy answers to held-out questions through moet's own engine: exact sums, needles by
distance, tool calls token for token, JSON against its schema; perplexity of the wanted answers.
`--only` reruns some rows and keeps the others.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.train_demo.corpus import Rendered, Renderer
from bench.train_demo.data import facts, records, retrieval, stories, sums, tools
from bench.train_demo.data.sample import Generator, Sample, draw
from bench.train_demo.tokenizer import Family
from moet.config import CacheConfig, KVDtype, ModelSettings, Precision, SchedulerConfig
from moet.models.checkpoint import Checkpoint
from moet.models.convert import convert
from moet.models.convert_plan import ConvertOptions
from moet.models.release import DenseDtype
from moet.models.w2 import ScaleRule
from moet.runtime.engine import Engine
from moet.runtime.tokenizer import Tokenizer
from moet.types import SamplingParams

RESULTS = Path(__file__).parent / "results" / "quality.json"
TASKS: dict[str, Generator] = {
    "sum": sums.bare,
    "problem": sums.problem,
    "question": facts.question,
    "tool_call": tools.call,
    "tool_result": tools.result,
    "json": records.record,
}
NEEDLE_WORDS = {500: 380, 1000: 780, 2000: 1560, 4000: 3150, 8000: 6300}  # tokens: words
_JSON_KINDS: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
}


@dataclass(frozen=True, slots=True)
class Variant:
    """One row of the table."""

    name: str
    precision: Precision = "fp4"
    kv_dtype: KVDtype = "fp8"
    scale_rule: ScaleRule = "mse"
    dense_dtype: DenseDtype = "keep"


VARIANTS: dict[Family, tuple[Variant, ...]] = {
    "deepseek-v4": (
        Variant("official"),
        Variant("w2 inherit", precision="w2", scale_rule="inherit"),
        Variant("w2 mse", precision="w2"),
        Variant("official, kv bf16", kv_dtype="bf16"),
    ),
    "glm": (
        Variant("official"),
        Variant("w2 inherit", precision="w2", scale_rule="inherit"),
        Variant("w2 mse", precision="w2"),
        Variant("official, kv bf16", kv_dtype="bf16"),
        Variant("official, kv nvfp4", kv_dtype="nvfp4"),
        Variant("official, dense fp8", dense_dtype="fp8"),
    ),
}


@dataclass(frozen=True, slots=True)
class Question:
    """A held-out sample as a server would ask it."""

    sample: Sample
    rendered: Rendered
    thinking: bool


def held_out(generate: Generator, renderer: Renderer, count: int, seed: int) -> Iterator[Question]:
    """Distinct held-out questions; sums think, others every other time."""
    rng = random.Random(seed)
    seen: set[str] = set()
    while len(seen) < count:
        sample = draw(generate, rng, held_out=True)
        if sample.key in seen:
            continue
        thinking = sample.task in ("sum", "problem") or len(seen) % 2 == 0
        if sample.think is not None and sample.think != thinking:
            continue
        seen.add(sample.key)
        yield Question(sample, renderer.render(sample, thinking), thinking)


def needles(renderer: Renderer, num_words: int, count: int, seed: int) -> Iterator[Question]:
    """Needles at evenly spread depths of a text of num_words words."""
    rng, found = random.Random(seed), 0
    while found < count:
        sample = retrieval.needle(rng, num_words, depth=(found + 0.5) / count)
        if sample.held_out:
            found += 1
            yield Question(sample, renderer.render(sample, thinking=False), False)


def said(tokenizer: Tokenizer, token_ids: list[int], ends: tuple[int, ...]) -> str:
    """The visible answer with its markup: what comes after the reasoning, before the end token."""
    kept = [token_id for token_id in token_ids if token_id not in ends]
    return tokenizer.decode(kept, skip_special=False).rpartition("</think>")[2]


def is_right(question: Question, answer: str, wanted: str) -> bool:
    """Calls must be the wanted ones to the letter; other answers must contain what was asked."""
    sample = question.sample
    if sample.task == "tool_call":
        return answer.strip() == wanted.strip()
    if sample.task == "json":
        return bool(_parsed(answer) == json.loads(sample.expect))
    return sample.expect in answer


def follows_schema(sample: Sample, answer: str) -> bool:
    """Whether an answer is an object with the keys and types of the sample's schema."""
    value = _parsed(answer)
    wanted = json.loads(sample.expect)
    properties = (sample.schema or {}).get("properties") or {}
    if not isinstance(value, dict) or set(value) != set(wanted):
        return False
    return all(isinstance(value[k], _JSON_KINDS[part["type"]]) for k, part in properties.items())


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


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
    for question in questions:
        rendered = question.rendered
        request = engine.requests(rendered.prompt + rendered.completion, params)
        total += sum(_prompt_logprobs(engine, request)[len(rendered.prompt) :])
        count += len(rendered.completion)
    return math.exp(-total / count)


def _prompt_logprobs(engine: Engine, requests: list[Any]) -> list[float]:
    """Log-probability of each token of the prompt; 0 for the first."""
    found: list[float] = []
    prompt = requests[0].prompt_token_ids
    for output in engine.stream(prompt, requests[0].params):
        if output.prompt_logprobs is not None:
            found = [entry.logprobs[0] if entry else 0.0 for entry in output.prompt_logprobs]
    return found


def measure(
    folder: Path, renderer: Renderer, variant: Variant, packs: Path, args: argparse.Namespace
) -> dict[str, Any]:
    """One row: every task at one precision."""
    pack = packs / f"{folder.name}-{variant.scale_rule}-{variant.dense_dtype}"
    options = ConvertOptions(scale_rule=variant.scale_rule, dense_dtype=variant.dense_dtype)
    convert(Checkpoint.open(folder), pack, options)
    engine = Engine(
        str(pack),
        settings=ModelSettings(precision=variant.precision),
        cache=CacheConfig(kv_dtype=variant.kv_dtype),
        scheduler=SchedulerConfig(max_num_seqs=16),
    )
    row: dict[str, Any] = {"tasks": {}, "needle": {}}
    with engine:
        for task, generate in TASKS.items():
            questions = list(held_out(generate, renderer, args.questions, seed=1))
            row["tasks"][task] = ask(engine, renderer, questions)
            print(f"  {task}: {row['tasks'][task]}", flush=True)
        for length, num_words in NEEDLE_WORDS.items():
            if length <= args.longest:
                questions = list(needles(renderer, num_words, args.needles, seed=2))
                row["needle"][str(length)] = ask(engine, renderer, questions)
                print(f"  needle {length}: {row['needle'][str(length)]}", flush=True)
        told = list(held_out(stories.story, renderer, args.questions, seed=3))
        row["perplexity"] = perplexity(engine, told)
        asked = told[0]
        sampled = engine.generate(
            [asked.rendered.prompt], SamplingParams(temperature=0.0, max_tokens=200)
        )
        text = renderer.tokenizer.decode(sampled[0].choices[0].token_ids, skip_special=False)
        row["sample"] = {"prompt": asked.sample.messages[-2].content, "answer": text}
    return row


def plot(results: dict[str, Any], folder: Path) -> None:
    """One picture per model beside the JSON: tasks by variant, and needles by distance."""
    from matplotlib import pyplot

    for family, rows in results.items():
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 4.5))
        width = 0.8 / max(len(rows), 1)
        for idx, (name, row) in enumerate(rows.items()):
            shares = [row["tasks"][task]["right"] for task in row["tasks"]]
            left.bar([x + idx * width for x in range(len(shares))], shares, width, label=name)
            lengths = [int(length) for length in row["needle"]]
            found = [entry["right"] for entry in row["needle"].values()]
            right.plot(lengths, found, marker="o", label=name)
        first = next(iter(rows.values()))
        left.set_xticks(range(len(first["tasks"])), list(first["tasks"]), rotation=20)
        left.set_ylabel("share of right answers")
        right.set_xlabel("tokens of text")
        right.set_ylabel("share of needles found")
        for axis in (left, right):
            axis.set_ylim(0, 1.05)
        left.legend(fontsize=8)
        figure.suptitle(f"{family} demo model")
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
    results: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
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
                row = measure(Path(folder), renderer, variant, Path(packs), args)
                results.setdefault(family, {})[variant.name] = row
                args.out.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    plot(results, args.out.parent)


if __name__ == "__main__":
    main()
