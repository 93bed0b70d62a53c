"""How well the demo models answer, at each precision of experts and KV: bench/results/quality.json.

    python -m bench.quality deepseek-v4=moet/demo/deepseek-v4 glm=moet/demo/glm

Greedy answers to held-out questions through moet's own engine: exact sums, needles by
distance, tool calls token for token, JSON against its schema; perplexity of the wanted answers; how
many drafts hold, by place. A quarter of a variant's parts is a process with one thread, `--jobs` of
them at a time, and figures are written as they come. `--only` measures some variants, `--missing`
what is not there yet, and `--deadline-s` stops in time; what is not measured stays as it was and is
listed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import queue
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any, TypeAlias

from bench.quality_codebook import ASYMMETRIC, SYMMETRIC
from bench.quality_measure import PARTS, SHOWN, Amount, Finding, Variant, measure
from bench.quality_report import Models, judged, plot, table
from bench.train_demo.tokenizer import Family
from moet.bench import results
from moet.config import ExpertConfig, Precision

RESULTS = Path(__file__).parent / "results" / "quality.json"
WRITE_EVERY_S = 10.0
GROUPS = (
    ("answers", "strict"),
    ("needle 8000", "needle 500"),
    ("text", "sums"),
    ("needle 2000", "needle 4000", "needle 1000"),
)
"""What one process measures, what says most first."""


def _gate(tau: float, prefill: Precision | None = None) -> Variant:
    name = f"gate {tau:g}" + (f", prefill {prefill}" if prefill else "")
    experts = ExpertConfig(policy="gate", tau=tau, prefill_precision=prefill or "w2")
    return Variant(name, precision="w2", experts=experts)


SHARED = (
    Variant("official"),
    Variant("w2 mse", precision="w2"),
    _gate(0.95, prefill="fp4"),
    Variant("w2 inherit", precision="w2", scale_rule="inherit"),
    Variant("fp4", precision="w2", experts=ExpertConfig(policy="fp4")),
    Variant("levels -3 -1 0.5 4", levels=ASYMMETRIC),
    Variant("levels -4 -1 1 4", levels=SYMMETRIC),
    Variant("official, kv bf16", kv_dtype="bf16"),
    _gate(0.95),
    _gate(0.8),
    _gate(0.6),
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
class Job:
    """What one process does."""

    family: Family
    folder: Path
    variant: Variant
    parts: tuple[str, ...]
    amount: Amount

    def __str__(self) -> str:
        return f"{self.family}, {self.variant.name}, {' + '.join(self.parts)}"


Findings: TypeAlias = "Queue[tuple[Job, Finding | None]]"


def _work(job: Job, out: Findings) -> None:
    """Hand on every finding of a job, then None."""
    import torch

    torch.set_num_threads(1)
    try:
        for finding in measure(job.family, job.folder, job.variant, job.parts, job.amount):
            out.put((job, finding))
    except Exception:  # the other jobs go on
        print(f"{job}:\n{traceback.format_exc()}", flush=True)
    out.put((job, None))


def run(
    jobs: list[Job],
    models: Models,
    *,
    at_a_time: int,
    deadline_s: float,
    write: Callable[[], None],
) -> None:
    """Do the jobs and put what they find into `models`; ends those that run past the deadline.

    write: called every few seconds, so that what was found is not lost with this process.
    """
    context = mp.get_context("spawn")
    found: Findings = context.Queue()
    written = time.monotonic()
    end = written + deadline_s
    waiting = list(reversed(jobs))
    running: dict[Job, SpawnProcess] = {}
    while (waiting or running) and time.monotonic() < end:
        while waiting and len(running) < at_a_time:
            job = waiting.pop()
            running[job] = context.Process(target=_work, args=(job, found), daemon=True)
            running[job].start()
        try:
            job, finding = found.get(timeout=1.0)
        except queue.Empty:
            for job in [job for job, process in running.items() if process.exitcode]:
                print(f"{job}: died", flush=True)
                del running[job]
            continue
        if finding is None:
            running.pop(job, None)
        else:
            _keep(models, job, finding)
        if time.monotonic() - written > WRITE_EVERY_S:
            write()
            written = time.monotonic()
    for process in running.values():
        process.terminate()
    for job in [*running, *waiting]:
        print(f"not finished: {job}", flush=True)
    write()


def _keep(models: Models, job: Job, finding: Finding) -> None:
    row = models.setdefault(job.family, {}).setdefault(job.variant.name, {})
    place = row.setdefault(finding.section, {}) if finding.section else row
    place[finding.name] = finding.value


def _is_done(models: Models, family: Family, variant: Variant, part: str) -> bool:
    """Whether the table has all that a part would find."""
    row = models.get(family, {}).get(variant.name, {})
    if part == "text":
        shown = {"samples", "speed"} if variant.name == SHOWN else set()
        return {"perplexity", "drafts", *shown} <= row.keys()
    if PARTS[part]:
        return set(PARTS[part]) <= _in(row, "tasks").keys()
    return part.split()[1] in _in(row, "needle")


def missing(models: Models, families: Iterable[Family], longest: int) -> list[str]:
    """What the table does not have."""
    gaps = []
    for family in families:
        for variant in VARIANTS[family]:
            row = models.get(family, {}).get(variant.name, {})
            names = [task for tasks in PARTS.values() for task in tasks]
            gaps += [f"{family}, {variant.name}, {n}" for n in names if n not in _in(row, "tasks")]
            lengths = [part.split()[1] for part in PARTS if part.startswith("needle")]
            gaps += [
                f"{family}, {variant.name}, needle {n}"
                for n in lengths
                if int(n) <= longest and n not in _in(row, "needle")
            ]
            whole = ("perplexity", "drafts")
            gaps += [f"{family}, {variant.name}, {n}" for n in whole if n not in row]
    return gaps


def in_order(models: Models) -> Models:
    """The same without variants that are no longer asked, the others as they stand here."""
    return {
        family: {v.name: models[family][v.name] for v in asked if v.name in models[family]}
        for family, asked in VARIANTS.items()
        if family in models
    }


def _in(row: dict[str, Any], section: str) -> dict[str, Any]:
    return row.get(section) or {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help="deepseek-v4=FOLDER and glm=FOLDER")
    parser.add_argument("--questions", type=int, default=64, help="per task")
    parser.add_argument("--texts", type=int, default=4, help="with 16 needles each, per length")
    parser.add_argument("--longest", type=int, default=8000, help="tokens of the longest needles")
    parser.add_argument("--only", default="", help="names of variants, separated by semicolons")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--deadline-s", type=float, default=float("inf"))
    parser.add_argument("--missing", action="store_true", help="only what --out does not hold")
    parser.add_argument("--fresh", action="store_true", help="forget what was measured before")
    parser.add_argument("--plot", action="store_true", help="only draw what --out holds")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    old = json.loads(args.out.read_text()) if args.out.exists() and not args.fresh else {}
    models = in_order(old.get("models", {}))
    if args.plot:
        plot(models, args.out.parent)
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    folders: dict[Any, Path] = {}
    for given in args.models:
        family, _, folder = given.partition("=")
        folders[family] = Path(folder)
    amount = Amount(args.questions, args.texts, args.longest)
    wanted = [name.strip() for name in args.only.split(";") if name.strip()]
    jobs = []
    for family, folder in folders.items():
        for variant in VARIANTS[family]:
            for group in GROUPS:
                parts = [
                    part
                    for part in group
                    if not part.startswith("needle") or int(part.split()[1]) <= args.longest
                    if not (args.missing and _is_done(models, family, variant, part))
                ]
                if parts and (not wanted or variant.name in wanted):
                    jobs.append(Job(family, folder, variant, tuple(parts), amount))
    began = time.monotonic()
    # The variants that say most begin first.
    jobs.sort(key=lambda job: SHARED.index(job.variant) if job.variant in SHARED else len(SHARED))
    command = (
        f"python -m bench.quality --questions {amount.questions} --texts {amount.texts} "
        f"--longest {amount.longest} " + " ".join(args.models)
    )
    hardware = f"{results.this_machine()}, {args.jobs} processes of one thread"

    def write() -> None:
        more: dict[str, Any] = {"not measured": missing(models, folders, args.longest)}
        more["models"] = in_order(models)
        rows = judged(more["models"])
        report = results.report(command, rows, hardware=hardware, more=more)
        results.write(args.out, report)

    run(jobs, models, at_a_time=args.jobs, deadline_s=args.deadline_s, write=write)
    print(table(models))
    gaps = missing(models, folders, args.longest)
    print(f"{len(gaps)} figures missing; {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
